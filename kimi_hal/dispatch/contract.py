"""What a plugin writes: frozen data, no torch, nothing but the standard library and the Domain classes.

A backend names its parts as ``"module:function"`` strings. Nothing they name is imported before it is
planned, so that a support matrix can be printed on a machine that has none of the vendor's libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_hal.dispatch.compiling import Compiled, Instruction, Kernel, Target
from kimi_hal.domain import Domain, OneOf, Range

__all__ = [
    "API_VERSION",
    "Backend",
    "BuildContext",
    "Capability",
    "Compiled",
    "Domain",
    "Implementation",
    "Instruction",
    "Kernel",
    "OneOf",
    "Preference",
    "Probe",
    "Properties",
    "Range",
    "Sizes",
    "Split",
    "Target",
    "TensorCap",
]

#: Raised when a plugin written for the previous number would break.
API_VERSION = 1

#: ``Backend.torch_device`` of code that runs wherever torch does.
ANY_DEVICE = "*"
EXECUTIONS = ("native", "portable", "interpreted", "compile_only")
CAPTURES = ("none", "piecewise", "full")

#: Everything that an implementation may round beyond the contract. A class outside this list is refused.
NUMERICS = {
    "attn.k=bf16": "keys times their scales rounded to bfloat16 before both products",
    "attn.p=bf16": "attention probabilities rounded to bfloat16 before the value product",
    "attn.p=fp8": "attention probabilities rounded to FP8 before the value product",
    "attn.q=fp8_block": "latent parts of attention's queries rounded to FP8 with a scale per 128",
    "attn.dots=fp8_sum": "both products of attention from FP8 numbers, added with 13 fraction bits of the largest",
    "kda.state=bf16": "recurrent state rounded to bfloat16 between chunks or steps",
    "kda.chunk=bf16": "decayed queries, keys and chunk products rounded to bfloat16",
    "logits=bf16": "index scores rounded to bfloat16 before selection although the Spec says float32",
    "logits=fp8_sum": "index scores from FP8 products added with 13 fraction bits of the largest, not in float32",
    "moe.act=mxfp8": "expert activations quantised to MXFP8",
    "moe.act=fp8_block": "expert activations quantised to FP8 with a scale per 128",
    "moe.act=fp8_tensor": "expert activations quantised to FP8 with one scale a tensor",
}


@dataclass(frozen=True)
class TensorCap:
    """What a kernel needs of one argument beyond the contract.

    Args:
        dtypes: accepted dtype names; ``()`` = as the contract says.
        align: bytes that ``data_ptr`` and every stride but the last are a multiple of.
        contiguous: ``("last",)``, ``("heads",)`` (the last two dimensions) or ``("all",)``.
    """

    dtypes: tuple[str, ...] = ()
    align: int = 16
    contiguous: tuple[str, ...] = ("last",)


@dataclass(frozen=True)
class Properties:
    """What an implementation promises. Which promises the suite tries stands in ``docs/conformance.md``.

    Args:
        deterministic: repeated runs give the same bits, whatever strides and addresses the operands have.
        batch_invariant: a row's bits depend on nothing but that row (rule 10).
        capture: how far it can stand in a graph: ``"none"``, ``"piecewise"``, ``"full"``.
        static_rows: needs ``Limits.row_buckets`` and refuses other row counts.
        concurrent: one plan may run in two threads at once, on a device each on a stream of its own.
        tie_rule: ``"contract"``, or ``"any"``: then a selection operator is reachable by name only.
        writer_tie: how a cache writer breaks rounding ties: ``"even"``, ``"away"``, ``"down"``.
        numerics_id: plans with equal ids give the same bits for a row.
        checkpoint_exact: continuing from a checkpoint gives the bits of the run that wrote it, in any batch.
    """

    deterministic: bool = False
    batch_invariant: bool = False
    capture: str = "none"
    static_rows: bool = False
    concurrent: bool = False
    tie_rule: str = "contract"
    writer_tie: str = "even"
    numerics_id: str = ""
    checkpoint_exact: bool = False


@dataclass(frozen=True)
class Capability:
    """One conjunction of what a kernel covers; an implementation has several, any of which may fit.

    Closed world: a Spec field that is not named covers its default value only, so that a field added to a
    Spec never widens an old claim. Nested fields are dotted (``"dcp.world"``).

    Args:
        arch: architecture names as the probe gives them (``"sm_90"``); ``"*"`` only for portable code.
        spec: Spec field -> values.
        limits: Limits field -> values; a field not named is unconstrained.
        tensors: argument -> what the kernel needs of it.
        properties: what it promises in this range.
        requires: distribution or probe fact -> version specifier (``{"triton": ">=3.6"}``).
        checkpoint_multiple: checkpoint offsets must be a multiple of this many tokens.
    """

    arch: tuple[str, ...]
    spec: Mapping[str, Domain]
    limits: Mapping[str, Domain] = field(default_factory=dict)
    tensors: Mapping[str, TensorCap] = field(default_factory=dict)
    properties: Properties = Properties()
    requires: Mapping[str, str] = field(default_factory=dict)
    checkpoint_multiple: int = 1


@dataclass(frozen=True)
class Preference:
    """A measured rank for a part of the Spec space. The largest matching rank wins; a tie is an error."""

    rank: int
    spec: Mapping[str, Domain] = field(default_factory=dict)
    limits: Mapping[str, Domain] = field(default_factory=dict)
    arch: tuple[str, ...] = ("*",)
    measured: str = ""


@dataclass(frozen=True)
class Sizes:
    """Bytes that a plan needs: per call, per step, kept by the plan, and records per request."""

    workspace: int = 0
    step: int = 0
    persistent: int = 0
    records: int = 0


@dataclass(frozen=True)
class Split:
    """Which compute unit does what, where a device has several kinds; for a reader, nothing is chosen by it.

    Args:
        arch: architectures on which it is so; ``"*"``: on all.
        parts: compute unit -> what it does, a verb first (``{"scalar unit": "translates positions"}``).
    """

    arch: tuple[str, ...]
    parts: Mapping[str, str]


@dataclass(frozen=True)
class Implementation:
    """One way to compute one operator.

    Args:
        operator: the abstract operator's name.
        name: this implementation's; its full name is ``backend.name``.
        build: ``"module:function"``; ``build(ctx: BuildContext)`` returns the run function, whose signature is
            the operator's.
        capabilities: what it covers.
        preferences: when it is to be taken before its siblings.
        prepare: optional; ``prepare(ctx)`` returns the function that fills ``step`` once a step.
        weights: optional; ``weights(ctx, *, donate, **checkpoint)`` returns the tensors that ``run`` takes.
        size: optional; ``size(spec, limits, arch) -> Sizes`` without a device.
        source: globs, relative to the package's parent, hashed into the compile-cache key; ``()`` = the build module.
        records: tag of the records that a verify writes and a commit reads.
        weights_format: tag of the prepared weights.
        execution: how it may run: native, portable, interpreted, compile_only.
        numerics: classes of rounding beyond the contract, from ``NUMERICS``.
        version: of a wrapped library; ``""`` = the plugin's.
        compile: optional; ``compile(target: Target)`` returns the ``Kernel`` descriptions that it launches there,
            which are compiled where the device is not (``kimi-hal conformance run --compile-only``).
        split: which compute unit does what, by architecture (``kimi-hal explain``); ``()`` = there is one kind.
        configurations: optional; ``configurations(spec, limits, arch)`` returns the ``BuildContext.configuration``
            values that ``kimi-hal bench --tune`` tries beside none. They change how fast it is, and neither its sizes
            nor its properties.
        not_run: why it was run on no device that it is for; such code is reachable by name alone, and says so.
            ``""``: it was.
    """

    operator: str
    name: str
    build: str
    capabilities: tuple[Capability, ...]
    preferences: tuple[Preference, ...] = (Preference(rank=0),)
    prepare: str | None = None
    weights: str | None = None
    size: str | None = None
    source: tuple[str, ...] = ()
    records: str | None = None
    weights_format: str | None = None
    execution: tuple[str, ...] = ("native",)
    numerics: tuple[str, ...] = ()
    version: str = ""
    compile: str | None = None
    split: tuple[Split, ...] = ()
    configurations: str | None = None
    not_run: str = ""


@dataclass(frozen=True)
class BuildContext:
    """What a builder is given.

    ``check`` is the core's metadata helper for this operator and Spec. ``parts`` holds the plans of a
    composite's parts by operator name, for its automatic implementation alone. ``configuration`` is what a table of
    measurements found best, one of ``Implementation.configurations``; empty: the builder chooses.
    """

    operator: str
    spec: Any
    limits: Any
    device: str
    arch: str
    sizes: Sizes
    group: Any | None
    persistent: Any | None
    check: Callable[..., None]
    settings: Mapping[str, str]
    parts: Mapping[str, Any] = field(default_factory=dict)
    configuration: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """What a backend found on this machine, without opening a device.

    Args:
        present: a device of this backend is here.
        arch: its architecture, as capabilities name it.
        devices: device names, by which two claims on one device are found; where it is may follow, behind " at ".
        facts: driver and library versions for ``Capability.requires`` and ``doctor``.
        why: what was looked for and not found.
    """

    present: bool
    arch: str = ""
    devices: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    why: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the devices without where they are."""
        return tuple(device.partition(" at ")[0] for device in self.devices)


@dataclass(frozen=True)
class Backend:
    """A plugin's one answer: who it is and where its parts are.

    Args:
        name: what ``KIMI_HAL_BACKEND`` says.
        version: the plugin's version.
        api_version: the contract it was written for.
        probe: ``"module:function"``, ``() -> Probe``; opens no device, imports no engine and no torch.
        implementations: ``"module:NAME"``, a tuple of Implementation; torch-free.
        device: ``"module:Class"`` with the DeviceHooks methods.
        torch_device: the torch device type of its tensors; ``ANY_DEVICE``: any.
        variables: environment variables of its own, ``KIMI_HAL_<PLUGIN>_…`` -> values and meaning.
        removed_variables: old name -> what replaces it.
        formats: ``"module:NAME"``, a tuple of extra cache formats.
        overrides_composites: composites that it fuses.
        targets: what its kernels can be compiled for without a device.
        facts: which names of ``Capability.requires`` are found by the probe (a driver), and are no library. Away
            from a device they are not required.
        tables: tables of measurements that it ships, by globs relative to its package's parent
            (``"kimi_hal_acme/tables/*.json"``); a backend that has some declares ``KIMI_HAL_<PLUGIN>_TUNE``.
    """

    name: str
    version: str
    api_version: int
    probe: str
    implementations: str
    device: str
    torch_device: str
    variables: Mapping[str, str] = field(default_factory=dict)
    removed_variables: Mapping[str, str] = field(default_factory=dict)
    formats: str | None = None
    overrides_composites: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    facts: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
