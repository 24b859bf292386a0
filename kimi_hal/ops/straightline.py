"""Write the metadata check of one plan as Python source: one ``if`` an operand, attribute reads only.

Every condition is conservative: what it lets pass is right, what it stops is looked at again by
``check.problems``, which knows the rare exceptions (a zero-length dimension, a stride that is never used).
Reads are the cheapest that torch has: ``is_contiguous`` costs half of ``stride``, ``is_cpu`` less than
``device``, one ``shape`` is read an operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_hal.ops import written
from kimi_hal.ops.check import BOUNDED, WORKSPACE_ALIGN, Check, Terms, accepted_dtypes, contiguity, uneven
from kimi_hal.ops.operator import BOUNDS, Arg, Operator, Out, torch_dtype
from kimi_hal.ops.spec import Spec
from kimi_hal.ops.values import shares_elements

Refuse = Callable[[tuple[Any, ...]], None]


def function(op: Operator, spec: Spec, terms: Terms, refuse: Refuse) -> Check:
    """Compile the check; ``refuse`` gets the operands in signature order when a condition fails."""
    writer = Writer(op, spec, terms)
    source = writer.source()
    constants = {**writer.constants, "refuse": refuse, **USED}
    check: Check = written.function(f"check_{op.name}", source, f"<check of {op.name}>", constants)
    check.__doc__ = source
    return check


def several(size: Any) -> tuple[Any, ...]:
    """Return the dimensions that a letter stands for."""
    return size if isinstance(size, tuple) else (size,)


#: Functions that the text of a check calls by name.
USED: Mapping[str, Callable[..., Any]] = {
    "uneven": uneven,
    "several": several,
    "shares_elements": shares_elements,
}


@dataclass
class Writer:
    """Collects the lines of one check function and the constants that they name."""

    op: Operator
    spec: Spec
    terms: Terms
    constants: dict[str, Any] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)  # letters bound whatever the caller leaves out
    maybe: set[str] = field(default_factory=set)  # letters that an optional operand binds first

    def __post_init__(self) -> None:
        op = self.op
        self.fail = f"return refuse(({', '.join(op.signature.parameters)},))"
        self.fixed = dict(self.spec.dims())
        self.rules = op.presence(self.spec) if op.presence else {}
        self.anchor = next(n for n, a in op.args.items() if self._required(n) and not a.many)
        # A letter in a list must agree between its tensors, so it stands twice.
        words = [w for a in op.args.values() for w in f"{a.shape} {a.count}".split() * (1 + a.many)]
        words += [w for out in op.outs for w in out.shape.split()]
        bases = [w.removeprefix(">=").removeprefix("<=").partition("+")[0] for w in words]
        self.shared = {base for base in bases if bases.count(base) > 1 or base in BOUNDED}

    def source(self) -> str:
        """Return the function's text."""
        names = list(self.op.signature.parameters)
        body = list(self._body())
        head = f"def check_{self.op.name}({', '.join(f'{n}=None' for n in names)}):"
        unset = [f"{letter} = None" for letter in sorted(self.maybe)]
        return "\n".join([head, *(f"    {line}" for line in [*unset, *body])]) + "\n"

    def _body(self) -> Iterator[str]:
        yield from self._anchor_device()
        for name, arg in self.op.binding_order:
            yield from self._argument(name, arg)
        yield from self._limits()
        yield from self._outputs()
        for name, least in (("step", self.terms.step), ("workspace", self.terms.workspace)):
            if name in self.op.signature.parameters:
                yield from self._buffer(name, least)

    def _required(self, name: str) -> bool:
        return self.op.required(name, self.rules.get(name))

    def _argument(self, name: str, arg: Arg) -> Iterator[str]:
        if self.rules.get(name) is False:
            yield f"if {name} is not None: {self.fail}"
        elif arg.many:
            count = self._size(arg.count) if arg.count else ""
            wrong = f" or len({name}) != {count}" if count else ""
            yield f"if (type({name}) is not list and type({name}) is not tuple){wrong}: {self.fail}"
            yield f"for t in {name}:"
            yield from indented(self._operand(name, "t", arg, certain=False))
        elif self._required(name):
            yield from self._operand(name, name, arg, certain=True)
        else:
            yield f"if {name} is not None:"
            yield from indented(self._operand(name, name, arg, certain=False))

    def _operand(self, name: str, var: str, arg: Arg, certain: bool) -> Iterator[str]:
        cap = self.terms.tensors.get(name)
        accepted = accepted_dtypes(arg, self.spec, cap)
        tests = [] if var == self.anchor else [self._dtype(var, accepted), self._device(var)]
        if arg.ndim:
            tests.append(f"{var}.dim() != {getattr(self.spec, arg.ndim)}")
        binds: list[str] = []
        if arg.shape != "*":
            tests += self._shape(var, arg.shape, binds)
        tests += self._layout(var, contiguity(arg.strided, cap), arg.shape, arg.mutated)
        tests += self._alignment(var, cap)
        yield from self._refuse_if(tests)
        yield from self._bind(binds, certain)

    def _refuse_if(self, tests: list[str]) -> Iterator[str]:
        tests = [t for t in tests if t]
        if tests:
            yield f"if {' or '.join(tests)}: {self.fail}"

    def _constant(self, dtype: str) -> str:
        self.constants[dtype] = torch_dtype(dtype)
        return dtype

    def _dtype(self, var: str, accepted: tuple[str, ...]) -> str:
        # getattr with a default, so that a list or None reaches the sentence and no AttributeError.
        read = f'getattr({var}, "dtype", None)'
        if accepted == ("*",):
            return f"{read} is None"
        names = [self._constant(dtype) for dtype in accepted]
        if len(names) == 1:
            return f"{read} is not {names[0]}"
        return (
            f"({' and '.join([f'(d := {read}) is not {names[0]}', *(f'd is not {n}' for n in names[1:])])})"
        )

    def _anchor_device(self) -> Iterator[str]:
        """Read the device of one required operand before all others, for them to be compared with."""
        arg, var = self.op.args[self.anchor], self.anchor
        dtype = self._dtype(var, accepted_dtypes(arg, self.spec, self.terms.tensors.get(var)))
        kind, _, index = (self.terms.device or "").partition(":")
        if kind == "cpu" or index:
            tests = [dtype, self._device(var)]
        elif kind:  # any index of this kind; the host has none
            tests = [dtype, f"(g := {var}.get_device()) < 0"]
        else:
            tests = [dtype]
        yield from self._refuse_if(tests)
        if not kind:
            yield f"g = {var}.device"

    def _device(self, var: str) -> str:
        kind, _, index = (self.terms.device or "").partition(":")
        if kind == "cpu":
            return f"not {var}.is_cpu"
        if kind:
            return f"{var}.get_device() != {index or 'g'}"
        return f"{var}.device != g"

    def _shape(self, var: str, words: str, binds: list[str]) -> list[str]:
        """Return the tests of a shape, and add to ``binds`` the letters that it is the first to have."""
        pattern, read = words.split(), f"{var}.shape"
        if all(word[:2] not in BOUNDS and self._size(word) for word in pattern):
            sizes = "".join(f"{self._size(word)}, " for word in pattern)
            return [f"(s := {read}) != ({sizes})"]
        tests = [f"len(s := {read}) != {len(pattern)}"]
        for i, word in enumerate(pattern):
            bound, bare = (word[:2], word[2:]) if word[:2] in BOUNDS else ("", word)
            size = self._size(bare)
            if size:
                sign = {">=": "<", "<=": ">", "": "!="}[bound]
                tests.append(f"s[{i}] {sign} {size}")
            elif not bound and bare.partition("+")[0] in self.shared:
                binds.append(f"{bare} s[{i}]")
        return tests

    def _size(self, word: str) -> str:
        """Return the expression of a word's size, or ``""`` while nothing certain binds it."""
        if word.lstrip("-").isdigit():
            return word
        base, _, extra = word.partition("+")
        if base in self.fixed:
            return str(self.fixed[base] + int(extra or 0))
        return f"({base} + {extra})" if extra and base in self.known else base if base in self.known else ""

    def _bind(self, binds: list[str], certain: bool) -> Iterator[str]:
        for bind in binds:
            word, read = bind.split()
            base, _, extra = word.partition("+")
            value = f"{read} - {extra}" if extra else read
            if base in self.maybe or not certain:
                self.maybe.add(base)
                yield f"if {base} is None: {base} = {value}"
                yield f"elif {base} != {value}: {self.fail}"
            elif base in self.known:  # twice in one shape
                yield f"if {base} != {value}: {self.fail}"
            else:
                yield f"{base} = {value}"
                self.known.add(base)

    def _layout(self, var: str, needed: frozenset[str], words: str, written: bool) -> list[str]:
        """Return the test of the strides, which are read only where a tensor is not contiguous."""
        if words == "1" or not (needed or written):
            return []
        whole, st = f"{var}.is_contiguous()", f"(st := {var}.stride())"
        if "all" in needed:
            return [f"not {whole}"]
        tests: list[str] = []
        if "inner" in needed:
            tests.append(f"{st}[1:] != {self._packed(words)}")
        elif "heads" in needed:
            tests.append(f"{st}[-1] != 1 or st[-2] != s[-1]")
        elif needed:
            tests.append(f"{st}[-1:] != (1,)")
        if written:
            free = 1 if "inner" in needed else len(words.split()) - 1
            tests.append(self._shared("st" if tests else st, free))
        return [f"(not {whole} and ({' or '.join(tests)}))"]

    def _shared(self, strides: str, free: int) -> str:
        """Return the test of elements in one place; dimensions one inside the other, as most are, have none.

        Args:
            strides: the expression of the strides; it binds ``st``, unless a test in front of this one has.
            free: dimensions whose strides nothing has said yet, from the first on; 0: any number.
        """
        if not free:
            return f"shares_elements(s, {strides})"
        read = [strides, *["st"] * free]
        crossed = [f"{read[i]}[{i}] < st[{i + 1}] * s[{i + 1}]" for i in range(free)]
        return f"(({' or '.join(crossed)}) and shares_elements(s, st))"

    def _packed(self, words: str) -> str:
        """Return the strides of all but the first dimension where these are contiguous."""
        inner = words.split()[2:]
        sizes = [self._size(word) or f"s[{i}]" for i, word in enumerate(inner, start=2)]
        return f"({''.join(' * '.join(sizes[i:]) + ', ' for i in range(len(sizes)))}1,)"

    def _alignment(self, var: str, cap: Any) -> list[str]:
        if cap is None or cap.align <= 1:
            return []
        elements = f"max(1, {cap.align} // {var}.itemsize)"
        return [f"{var}.data_ptr() % {cap.align}", f"uneven({var}.shape, {var}.stride(), {elements})"]

    def _limits(self) -> Iterator[str]:
        limits = self.terms.limits
        if limits is None:
            return
        tests = []
        for letter, name in BOUNDED.items():
            present = f"{letter} is not None and " if letter in self.maybe else ""
            if letter in self.known | self.maybe:
                tests.append(f"{present}{letter} > {getattr(limits, name)}")
        if self.terms.static_rows and "T" in self.known:
            tests.append(f"T not in {limits.row_buckets!r}")
        yield from self._refuse_if(tests)

    def _outputs(self) -> Iterator[str]:
        for out in self.op.outs:
            yield f"if {out.keyword} is not None:"
            yield from indented(self._output(out))

    def _output(self, out: Out) -> Iterator[str]:
        cap, var = self.terms.tensors.get(out.keyword), out.keyword
        tests = [self._dtype(var, (out.dtype_name(self.spec),)), self._device(var)]
        sizes = [self._size(word) or self._sized(word) for word in out.shape.split()]
        if not all(sizes):  # an operand that may be absent would bind it: the long way
            yield self.fail
            return
        tests += [f"(s := {var}.shape) != ({', '.join(sizes)},)"]
        tests += self._layout(var, contiguity("last", cap), out.shape, written=True)
        tests += self._alignment(var, cap)
        yield from self._refuse_if(tests)

    def _sized(self, word: str) -> str:
        """Return the expression of a size that only ``op.sizes`` knows; it may stand for several dimensions."""
        if self.op.sizes is None or word in self.maybe:
            return ""
        self.constants |= {"sizes": self.op.sizes, "spec": self.spec, "limits": self.terms.limits}
        given = ", ".join(f"{n!r}: {n}" for n in self.op.signature.parameters)
        return f"*several(sizes(spec, limits, {{{given}}})[{word!r}])"

    def _buffer(self, name: str, least: int) -> Iterator[str]:
        aligned = [f"{name}.data_ptr() % {WORKSPACE_ALIGN}"] if name == "workspace" and least else []
        tests = [self._dtype(name, ("uint8",)), self._device(name), f"{name}.dim() != 1"]
        tests += [f"{name}.numel() < {least}"] if least else []
        yield f"if {name} is not None:"
        yield from indented(self._refuse_if([*tests, f"not {name}.is_contiguous()", *aligned]))


def indented(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines one level deeper; an empty block is a ``pass``."""
    empty = True
    for line in lines:
        empty = False
        yield f"    {line}"
    if empty:
        yield "    pass"
