"""The whole step: three layers' calls on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from kimi_hal.dispatch import policy
from kimi_hal.dispatch.device import HostDevice
from kimi_hal.dispatch.explain import default_device
from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal.dispatch.loader import resolve
from kimi_hal.presets import Deployment
from kimi_hal.step.attention import AttentionStep
from kimi_hal.step.experts import ExpertStep
from kimi_hal.step.inputs import RandomInputs, choose
from kimi_hal.step.measure import Row, run
from kimi_hal.step.recurrence import RecurrenceStep
from kimi_hal.workload import Workload


@dataclass
class Step:
    """One decode step of a DSA layer, a KDA layer and a MoE layer.

    Args:
        deployment: sizes and formats of the attention layers.
        experts: sizes of the expert layer.
        shard: checkpoint shard that holds this rank's experts.
        layer: its layer.
        context: tokens of the sequence.
        batch: query rows.
        workload: activations file; ``None`` = the default place.
        random: random activations instead.
        seed: of random activations.
        device: a torch device; ``None`` = where the settings lead.
    """

    deployment: Deployment
    experts: Deployment
    shard: Path
    layer: int
    context: int
    batch: int
    workload: Path | None = None
    random: bool = False
    seed: int = 0
    device: str | None = None

    @cached_property
    def inputs(self) -> Workload | RandomInputs:
        """Return the activations."""
        return choose(self.workload, self.random, self.context, self.seed)

    @cached_property
    def target(self) -> str:
        """Return the torch device."""
        settings = policy.settings()
        return self.device or default_device(settings, policy.registry(settings))

    @cached_property
    def hooks(self) -> DeviceHooks:
        """Return how this device is waited for and timed."""
        if self.target == "cpu":
            return HostDevice()
        registry = policy.registry(policy.settings())
        backends = [
            loaded.backend for loaded in registry.backends.values() if registry.probe(loaded.name).present
        ]
        name = next((b.device for b in backends if b.torch_device == self.target.partition(":")[0]), None)
        found: DeviceHooks = resolve(name)() if name else HostDevice()
        return found

    @cached_property
    def attention(self) -> AttentionStep:
        """Return the DSA layer."""
        return AttentionStep(self.inputs, self.deployment, self.batch, self.context, self.target)

    @cached_property
    def recurrence(self) -> RecurrenceStep:
        """Return the KDA layer."""
        return RecurrenceStep(self.inputs, self.deployment, self.batch, self.context, self.target)

    @property
    def title(self) -> str:
        """Return what was run, in a line."""
        inputs = self.inputs
        source = f"real text {inputs.sha256[:12]}" if isinstance(inputs, Workload) else "random activations"
        return f"TP{self.deployment.tp}, {self.context:,} tokens, {self.batch} rows, {self.target}; {source}"

    def fill(self, advance: Callable[[int], None]) -> None:
        """Store the context in the caches and bring the recurrent states to where the step begins."""
        self.attention.fill(advance)
        self.recurrence.fill()

    def rows(self) -> Iterator[Row]:
        """Run every call and yield what it did."""
        experts = ExpertStep(
            self.inputs, self.experts, self.batch, self.context, self.target, self.shard, self.layer
        )
        layers = (self.attention.calls(), self.recurrence.calls(), experts.calls())
        return chain.from_iterable(run(calls, self.target, self.hooks) for calls in layers)
