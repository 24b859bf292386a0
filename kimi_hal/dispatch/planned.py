"""A plan: the function to call, and everything that was decided about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from kimi_hal import formats
from kimi_hal.dispatch import account, signatures
from kimi_hal.dispatch.checked import validate
from kimi_hal.dispatch.construction import Built
from kimi_hal.dispatch.contract import Implementation, Properties, Sizes
from kimi_hal.dispatch.loader import resolve
from kimi_hal.dispatch.selection import Choice
from kimi_hal.errors import PlanError, PluginError
from kimi_hal.ops.check import WORKSPACE_ALIGN, Terms
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from kimi_hal.parallel.groups import Group


@dataclass(frozen=True, eq=False)
class Plan:
    """One operator, planned: the function to call and everything that was decided about it.

    Attributes:
        operator: the abstract operator.
        spec: its meaning.
        limits: the sizes it serves.
        device: where its operands are.
        run: the implementation's own function, for eager calls and for capture. Under
            ``KIMI_HAL_CHECK=args`` or ``shadow:N`` another function around it.
        key: 64 hexadecimal digits over operator, Spec, Limits, implementation and source hash (and the rank,
            with a group): what a compiled graph holds, and what a compile cache must depend on.
        source_hash: of the implementation's sources and version.
        group: the ranks it runs with, or ``None``.
        choice: how the implementation was chosen.
        sizes: bytes that it needs.
        settings: the variables it was planned under.
        built: what the implementation's builders returned.
        failures: plugins that could not be used, and why.
        pair: the plan whose records it reads, for ``kda_commit``.
        op: the torch operator with this plan bound: for ``torch.compile``, which must never trace ``run``.
        unshadowed: why ``shadow:N`` does not compare it; empty if it does, or where it was not asked for.
    """

    operator: Operator
    spec: Spec
    limits: Limits
    device: str
    run: Callable[..., Any]
    key: str
    source_hash: str
    group: Group | None
    choice: Choice = field(repr=False)
    sizes: Sizes = field(repr=False)
    settings: Settings = field(repr=False)
    built: Built = field(repr=False)
    failures: dict[str, str] = field(default_factory=dict, repr=False)
    unshadowed: str = field(default="", repr=False)
    pair: Plan | None = field(default=None, repr=False)
    op: Callable[..., Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        from kimi_hal.dispatch import torch_ops

        object.__setattr__(self, "op", torch_ops.bound(self))

    @property
    def prepare(self) -> Callable[..., None]:
        """Return the function that fills ``step`` once a step; one that does nothing where there is none."""
        return self.built.prepare or _nothing

    @property
    def name(self) -> str:
        """Return the implementation's full name, ``backend.implementation``."""
        return self.choice.full_name

    @property
    def version(self) -> str:
        """Return the version of the library that the implementation wraps, or of its plugin."""
        return self.implementation.version or self.choice.backend.version

    @property
    def implementation(self) -> Implementation:
        """Return the implementation's declaration."""
        return self.choice.implementation

    @property
    def properties(self) -> Properties:
        """Return what it promises for this Spec: ``deterministic``, ``batch_invariant``, ``capture`` and the rest."""
        return self.choice.capability.properties

    @property
    def execution(self) -> str:
        """Return how it runs: ``"native"``, ``"portable"`` or ``"interpreted"``."""
        return self.choice.execution

    @property
    def checkpoint_multiple(self) -> int:
        """Return the rows that checkpoint offsets must be a multiple of."""
        return self.choice.capability.checkpoint_multiple

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of ``workspace=``: the caller's, with arbitrary contents before and after a call."""
        return self.sizes.workspace

    @property
    def step_bytes(self) -> int:
        """Return the bytes of ``step=``, which ``prepare`` fills once a step."""
        return self.sizes.step

    @property
    def persistent_bytes(self) -> int:
        """Return the bytes that the plan itself keeps."""
        return self.sizes.persistent

    @property
    def records_bytes(self) -> int:
        """Return the bytes of one request's records between a verify and its commit."""
        return self.sizes.records

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the names of the cache and weight formats that the Spec names."""
        named = set(account.strings(self.spec.to_dict()))
        return tuple(sorted(named & set(formats.names())))

    def weights(self, *, donate: bool = False, **checkpoint: Tensor) -> list[Tensor]:
        """Turn a checkpoint's tensors into the list that ``run`` takes as ``weights``.

        Args:
            donate: the tensors may be freed or overwritten.
            checkpoint: by the names that the operator's contract gives them.

        Raises:
            PlanError: this operator takes no weights.
            PluginError: the implementation declares no function that makes them.
        """
        where = self.implementation.weights
        if where is not None:
            made: list[Tensor] = resolve(where)(self.built.context, donate=donate, **checkpoint)
            return made
        if not self.operator.takes_weights:
            raise PlanError(f"{self.operator.name} takes no weights: pass its operands to plan.run")
        raise PluginError(
            self.choice.backend.name,
            f"{self.name}: {self.operator.name} takes weights, and Implementation.weights names nothing "
            f"that makes them.",
        )

    def new_step(self) -> Tensor:
        """Return a step buffer on the plan's device; keep it, its address is captured."""
        return self._bytes(self.step_bytes)

    def new_workspace(self) -> Tensor:
        """Return a workspace on the plan's device; plans that never run at once may share the largest."""
        return self._bytes(self.workspace_bytes)

    def bind(self, *example: Any, **keywords: Any) -> Callable[..., Any]:
        """Check one call as ``KIMI_HAL_CHECK=args`` would, all operands and values, and return ``run``.

        Call it before capture: a captured call cannot read values.

        Raises:
            ContractError: all reasons together.
        """
        given = signatures.bound(self.operator, example, keywords)
        terms = Terms.of(self.limits, self.sizes, self.choice.capability, self.device)
        validate(self.operator, self.spec, terms, given)
        return self.run

    def explain(self, json: bool = False) -> str:
        """Say who was chosen, and every reason why each other candidate was not.

        Args:
            json: as a JSON text with every field of the plan, instead of lines for a person.
        """
        return account.as_json(self) if json else account.as_text(self)

    def __copy__(self) -> Plan:
        """Return the plan itself: it is frozen, and what it keeps on the device belongs to its ``run``."""
        return self

    def __deepcopy__(self, memo: object) -> Plan:
        """Return the plan itself, so that a module that holds plans can be copied."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            PlanError: says what to send instead.
        """
        raise PlanError(
            f"{self!r} holds functions of this process and cannot be pickled: send hal.dump_plans(), and "
            "hal.load_plans(…) there"
        )

    def __repr__(self) -> str:
        return f"<plan {self.key[:12]} of {self.operator.name}: {self.name} on {self.device}>"

    def _bytes(self, size: int) -> Tensor:
        import torch

        room = torch.zeros(size + WORKSPACE_ALIGN, dtype=torch.uint8, device=self.device)
        start = -room.data_ptr() % WORKSPACE_ALIGN
        return room[start : start + size]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Fill no step buffer: the implementation has none."""
