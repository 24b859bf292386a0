"""The description of an operator as data: arguments, outputs, Spec, and the rules between them.

Everything that is said about an operator in more than one place is derived from this one description: the
metadata check of every implementation, the output shapes for tracing, the torch schemas, the buffers that
the conformance suite poisons, and the contract reference in the documentation.

Shapes are written as words: ``"T H 576"``. A number is itself; a name that the Spec fixes (``Spec.dims``)
is that number; any other name is free and must agree between all arguments. ``">=T"`` allows more,
``"<=topk"`` less, ``"N+1"`` adds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kimi_hal.errors import unknown
from kimi_hal.ops.spec import Limits, Spec

if TYPE_CHECKING:
    import torch


#: What a word of a shape may begin with: then the size is a bound and not the size itself.
BOUNDS = (">=", "<=")


@dataclass(frozen=True)
class Arg:
    """One tensor argument.

    Args:
        dtype: dtype names that are accepted; ``"spec.FIELD"`` takes the name from a Spec field,
            ``"*"`` alone accepts any.
        shape: the shape in words (module docstring); ``"*"`` alone accepts any.
        ndim: the Spec field that says how many dimensions ``"*"`` has; ``""`` = any number.
        mutated: the call writes it.
        many: a list of such tensors.
        count: the word that says how many tensors such a list has; ``""`` = any number.
        strided: which leading strides are free. ``"last"``: the innermost is 1, others are free.
            ``"inner"``: all but the first dimension are contiguous. ``"any"``: every stride is free.
            ``"all"``: contiguous.
    """

    dtype: str | tuple[str, ...]
    shape: str
    ndim: str = ""
    mutated: bool = False
    many: bool = False
    count: str = ""
    strided: str = "last"

    def dtypes(self, spec: Spec) -> tuple[str, ...]:
        """Return the accepted dtype names under this Spec."""
        names = (self.dtype,) if isinstance(self.dtype, str) else self.dtype
        return tuple(str(getattr(spec, n[5:])) if n.startswith("spec.") else n for n in names)


@dataclass(frozen=True)
class Out:
    """One output. ``keyword`` is the argument through which a caller gives its buffer.

    ``alias`` names an input whose storage the buffer may share (``merge_attn_states``: ``outs[0]``).
    """

    dtype: str
    shape: str
    keyword: str
    alias: str = ""

    def dtype_name(self, spec: Spec) -> str:
        """Return the output's dtype name under this Spec."""
        return str(getattr(spec, self.dtype[5:])) if self.dtype.startswith("spec.") else self.dtype


#: Extra dimension letters that depend on operands or Limits: (spec, limits or None, tensors) -> letters.
Sizes = Callable[[Any, "Limits | None", Mapping[str, Any]], Mapping[str, Any]]
#: Which optional arguments this Spec requires (True) or refuses (False).
Presence = Callable[[Any], Mapping[str, bool]]
#: Problems with the values of arguments, looked at only in checked mode.
Values = Callable[[Any, "Limits | None", Mapping[str, Any]], Iterable[str]]


@dataclass(frozen=True, eq=False)
class Operator:
    """An abstract operator. Calling it is the convenience form: Spec fields by name, plans kept.

    Attributes:
        name: ``"sparse_mla"``.
        family: the file that defines it, ``"sparse_mla"``.
        spec_type: its Spec class.
        signature: the parameters that every implementation's run function has, annotations left out.
        args: tensor arguments by name, in order.
        outs: outputs in order; empty for an operator that only mutates.
        tested: outputs that only a run function's test entry fills (``run.return_scores``).
        composite: made of other operators, whose names are ``parts``.
        grouped: needs a group when ``spec.dcp.world`` (or ``tp``) is above 1.
        listed: returns a list of tensors whose number only the implementation knows.
        nullable: tensor arguments that may be ``None`` under some Spec.
    """

    name: str
    family: str
    spec_type: type[Spec]
    signature: inspect.Signature
    args: Mapping[str, Arg]
    outs: tuple[Out, ...]
    doc: str
    tested: tuple[Out, ...] = ()
    sizes: Sizes | None = None
    presence: Presence | None = None
    values: Values | None = None
    parts: tuple[str, ...] = ()
    grouped: bool = False
    listed: bool = False
    nullable: frozenset[str] = frozenset()

    @property
    def composite(self) -> bool:
        """Tell whether this operator is made of others."""
        return bool(self.parts)

    @property
    def takes_weights(self) -> bool:
        """Tell whether a call takes the list that an implementation made of a checkpoint (``plan.weights``)."""
        return "weights" in self.args and self.args["weights"].many

    @property
    def binding_order(self) -> tuple[tuple[str, Arg], ...]:
        """Return the arguments, those with a bounded dimension last: what bounds it must be known by then."""
        return tuple(sorted(self.args.items(), key=lambda item: any(b in item[1].shape for b in BOUNDS)))

    @property
    def mutated(self) -> tuple[str, ...]:
        """Return the names of the arguments that a call writes."""
        return tuple(name for name, arg in self.args.items() if arg.mutated)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Return the names of the parameters that are neither tensors nor buffers (``total``, ``donate``)."""
        known = {*self.args, *(o.keyword for o in self.outs), "step", "workspace"}
        return tuple(name for name in self.signature.parameters if name not in known)

    def required(self, name: str, rule: bool | None) -> bool:
        """Tell whether a call must bring an argument: by the Spec's rule (``presence``), else by its default."""
        return rule is True or (rule is None and self.signature.parameters[name].default is not None)

    def results(self, returned: Any) -> tuple[Any, ...]:
        """Return what a call returned as a tuple, one entry an output; empty where there are none."""
        if not self.outs:
            return ()
        return returned if isinstance(returned, tuple) else (returned,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on tensors with Spec fields given by name; the plan is made once and kept."""
        from kimi_hal.dispatch.convenience import call

        return call(self, args, kwargs)

    def __repr__(self) -> str:
        return f"<kimi_hal operator {self.name}{self.signature}>"


@dataclass(frozen=True)
class OutputShape:
    """Shape and dtype of one output, for allocation and for tracing."""

    keyword: str
    shape: tuple[Any, ...]
    dtype: str = "float32"


OPERATORS: dict[str, Operator] = {}


def operator(
    *,
    spec: type[Spec],
    args: Mapping[str, Arg],
    outs: tuple[Out, ...] = (),
    tested: tuple[Out, ...] = (),
    sizes: Sizes | None = None,
    presence: Presence | None = None,
    values: Values | None = None,
    parts: tuple[str, ...] = (),
    grouped: bool = False,
    listed: bool = False,
) -> Callable[[Callable[..., Any]], Operator]:
    """Register the decorated function as an abstract operator: signature and docstring are the contract."""

    def register(fn: Callable[..., Any]) -> Operator:
        op = Operator(
            name=fn.__name__,
            family=fn.__module__.rpartition(".")[2],
            spec_type=spec,
            signature=bare_signature(fn),
            args=args,
            outs=outs,
            tested=tested,
            doc=inspect.cleandoc(fn.__doc__ or ""),
            sizes=sizes,
            presence=presence,
            values=values,
            parts=parts,
            grouped=grouped,
            listed=listed,
            nullable=frozenset(
                n for n, hint in fn.__annotations__.items() if n in args and "None" in str(hint)
            ),
        )
        OPERATORS[op.name] = op
        return op

    return register


def get(name: str) -> Operator:
    """Return an operator by name, or raise with the nearest name."""
    if name not in OPERATORS:
        raise unknown("operator", name, OPERATORS)
    return OPERATORS[name]


def bare_signature(fn: Callable[..., Any]) -> inspect.Signature:
    """Return names, kinds and defaults without annotations: what implementations are compared on."""
    signature = inspect.signature(fn)
    params = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return inspect.Signature(params)


@dataclass
class Dims:
    """Dimension letters: those that the Spec fixes, and those bound by the first operand that has them."""

    fixed: Mapping[str, Any]
    bound: dict[str, Any] = field(default_factory=dict)

    def value(self, word: str) -> Any | None:
        """Return the size that a word stands for, or ``None`` while it is free."""
        if word.lstrip("-").isdigit():
            return int(word)
        base, plus, extra = word.partition("+")
        size = self.fixed.get(base, self.bound.get(base))
        return size + int(extra) if plus and size is not None else size

    def bind(self, word: str, size: Any) -> None:
        """Give a free word its size."""
        base, plus, extra = word.partition("+")
        self.bound[base] = size - int(extra) if plus else size

    def _several(self, word: str) -> tuple[str, ...]:
        """Return a word, or the sizes of the several dimensions that it stands for."""
        size = self.value(word) if word[:2] not in BOUNDS else None
        return tuple(map(str, size)) if isinstance(size, tuple) else (word,)

    def mismatch(self, name: str, words: str, shape: tuple[Any, ...]) -> str | None:
        """Compare a shape with its words, binding free ones; return a reason or ``None``."""
        pattern = [one for word in words.split() for one in self._several(word)]
        if pattern != words.split() and all(word.isdigit() for word in pattern):
            whole = [int(word) for word in pattern]
            return None if list(shape) == whole else f"{name} must be {whole}, got shape {list(shape)}"
        if len(shape) != len(pattern):
            return f"{name} must have {len(pattern)} dimensions ({words}), got shape {list(shape)}"
        for word, size in zip(pattern, shape, strict=True):
            bound, word = (word[:2], word[2:]) if word[:2] in BOUNDS else ("", word)
            wanted = self.value(word)
            if wanted is None:
                self.bind(word, size)
            elif (size < wanted) if bound == ">=" else (size > wanted) if bound == "<=" else (size != wanted):
                return f"{name} must be [{words}] with {word}={wanted}, got shape {list(shape)}"
        return None


def bind_dims(op: Operator, spec: Spec, tensors: Mapping[str, Any]) -> Dims:
    """Bind dimension letters from operands without comparing, for tracing with symbolic sizes."""
    dims = Dims(spec.dims())
    for name, arg in op.args.items():
        value = tensors.get(name)
        if value is None or arg.shape == "*":
            continue
        first = value[0] if arg.many and value else value
        if arg.many and not value:
            continue
        for word, size in zip(arg.shape.split(), first.shape, strict=False):
            if word[:2] not in BOUNDS and dims.value(word) is None:
                dims.bind(word, size)
    return dims


def output_shapes(
    op: Operator, spec: Spec, limits: Limits | None, tensors: Mapping[str, Any]
) -> tuple[OutputShape, ...]:
    """Return the shape and dtype of every output for these operands; nothing is computed."""
    dims = bind_dims(op, spec, tensors)
    if op.sizes is not None:
        dims.bound.update(op.sizes(spec, limits, tensors))
    return tuple(OutputShape(o.keyword, tuple(_expand(dims, o.shape)), o.dtype_name(spec)) for o in op.outs)


def _expand(dims: Dims, words: str) -> Iterator[Any]:
    for word in words.split():
        size = dims.value(word)
        if size is None:  # a family's own fault: its Out names a letter that nothing binds
            raise KeyError(f"no operand binds {word!r}")
        if isinstance(size, tuple):  # a letter that stands for several dimensions
            yield from size
        else:
            yield size


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a dtype name."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise unknown("dtype", name, [n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)])
    return dtype
