"""Which implementation is chosen, by whom, and every reason why another is not."""

from __future__ import annotations

from functools import partial

from kimi_hal_conformance.properties.plugins import Plugins
from kimi_hal_conformance.properties.property import Modules, expect, holds, plain, raises

ONE = "one backend with"


@plain("selection")
def one_backend(modules: Modules) -> object:
    """Choose where there is nothing to choose from."""
    plugins = Plugins(modules)
    plugins.add("acme", device="Acme A2")
    found = plugins.choose()
    return found.full_name, found.why, found.fallback


@holds("selection/equal-ranks", f"{ONE} two implementations of equal rank")
def equal_ranks(modules: Modules) -> None:
    """The order of registration decides nothing: equal ranks are an error that names both."""
    plugins, errors = Plugins(modules), modules("errors")
    plugins.add("acme", plugins.implementation("one"), plugins.implementation("two"), device="Acme A2")
    raises(errors.SelectionError, plugins.choose, "acme.one and acme.two", "equal rank")


@holds("selection/measured-rank", f"{ONE} implementations of rank 5, 9 and 7")
def measured_rank(modules: Modules) -> None:
    """The largest measured rank wins, wherever it stands."""
    plugins = Plugins(modules)
    own = [plugins.implementation(name, rank=rank) for name, rank in (("slow", 5), ("fast", 9), ("mid", 7))]
    plugins.add("acme", *own, device="Acme A2")
    expect("chosen", plugins.choose().full_name, "acme.fast")


@holds("selection/two-accelerators", "two backends whose devices are both here, under auto")
def two_accelerators(modules: Modules) -> None:
    """Two present accelerators under auto are an error that names them; one that is named settles it."""
    plugins, errors = Plugins(modules), modules("errors")
    plugins.add("acme", device="Acme A2")
    plugins.add("zeta", device="Zeta Z1")
    raises(errors.SelectionError, plugins.choose, "2 accelerators", "acme", "zeta")
    expect("named", plugins.choose(backend="zeta").full_name, "zeta.fast")


@holds("selection/no-silent-reference", "an accelerator's tensor and no backend for it")
def no_silent_reference(modules: Modules) -> None:
    """On an accelerator the reference runs only where it is admitted, and then it says so."""
    plugins, errors = Plugins(modules), modules("errors")
    plugins.add("acme")
    raises(errors.SelectionError, plugins.choose, "/dev/acme0 is missing")
    admitted = plugins.choose(fallback="reference")
    expect("admitted", (admitted.full_name, admitted.fallback), ("reference.torch", True))
    expect("for a CPU tensor", plugins.choose(device="cpu").full_name, "reference.torch")


@holds("selection/named-never-falls-back", "a named implementation that does not cover the Spec")
def named_never_falls_back(modules: Modules) -> None:
    """What is named by itself is taken or refused with its reasons, whatever else fits."""
    plugins, errors = Plugins(modules), modules("errors")
    plugins.add(
        "acme", plugins.implementation("fast"), plugins.implementation("other", rank=1), device="Acme A2"
    )
    spec = plugins.spec(page=32)
    call = lambda: plugins.choose(spec, implementation="acme.fast", fallback="reference")  # noqa: E731
    raises(errors.SelectionError, call, "acme.fast", "page=32")


@holds("selection/authority", "an override and a backend that name different plugins")
def authority(modules: Modules) -> None:
    """An argument wins over KIMI_HAL_OPS, and that over KIMI_HAL_BACKEND."""
    plugins = Plugins(modules)
    plugins.add("acme", device="Acme A2")
    plugins.add("zeta", device="Zeta Z1")
    ops = (("sparse_mla", "zeta.fast"),)
    expect("override", plugins.choose(backend="acme", ops=ops).full_name, "zeta.fast")
    argument = plugins.choose(backend="zeta", ops=ops, implementation="acme.fast")
    expect("argument", argument.full_name, "acme.fast")


@holds("selection/every-reason", f"{ONE} a kernel for another device, page and dtype")
def every_reason(modules: Modules) -> None:
    """A refusal holds all reasons, and a capability covers what it names and nothing else."""
    plugins, errors = Plugins(modules), modules("errors")
    own = plugins.implementation("fast", plugins.capability(arch=("a3",)))
    plugins.add("acme", own, device="Acme A2")
    spec = plugins.spec(page=32, out_dtype="float32")
    raises(errors.SelectionError, lambda: plugins.choose(spec), "arch a2", "page=32", "out_dtype='float32'")


@holds("selection/architecture", f"{ONE} a kernel for a2, on a device a2x")
def architecture(modules: Modules) -> None:
    """An architecture is covered by its own name, not by one that begins alike."""
    plugins, errors = Plugins(modules), modules("errors")
    plugins.add("acme", device="Acme A2X", arch="a2x")
    raises(errors.SelectionError, plugins.choose, "arch a2x is not a2")


@holds("selection/sizes", f"{ONE} a kernel for at most 64 rows")
def sizes(modules: Modules) -> None:
    """A kernel is not taken for more rows than it claims, nor where nobody says how many."""
    plugins, errors = Plugins(modules), modules("errors")
    small = plugins.capability(limits={"max_rows": plugins.domain.Range(1, 64)})
    plugins.add("acme", plugins.implementation("fast", small), device="Acme A2")
    limits = modules("ops.spec").Limits
    raises(
        errors.SelectionError, lambda: plugins.choose(limits=limits(max_rows=65, max_reqs=1)), "max_rows=65"
    )
    raises(errors.SelectionError, plugins.choose, "max_rows is unknown")
    expect("64 rows", plugins.choose(limits=limits(max_rows=64, max_reqs=1)).full_name, "acme.fast")


@holds("selection/batch-invariant", f"{ONE} a fast kernel and one that is batch-invariant")
def batch_invariant(modules: Modules) -> None:
    """KIMI_HAL_BATCH_INVARIANT=1 takes only what declares it."""
    plugins = Plugins(modules)
    steady = plugins.contract.Properties(batch_invariant=True)
    deterministic = plugins.contract.Properties(deterministic=True)
    own = (
        plugins.implementation("fast", plugins.capability(properties=deterministic), rank=9),
        plugins.implementation("steady", plugins.capability(properties=steady)),
    )
    plugins.add("acme", *own, device="Acme A2")
    expect("free", plugins.choose().full_name, "acme.fast")
    expect("invariant", plugins.choose(batch_invariant=True).full_name, "acme.steady")


@holds("selection/tie-rule", f"{ONE} a kernel without the contract's tie rule")
def tie_rule(modules: Modules) -> None:
    """A kernel without the tie rule is reachable by name alone, and marked."""
    plugins, errors = Plugins(modules), modules("errors")
    free = plugins.capability(properties=plugins.contract.Properties(tie_rule="any"))
    plugins.add("acme", plugins.implementation("fast", free), device="Acme A2")
    raises(errors.SelectionError, plugins.choose, "reachable by name only")
    named = plugins.choose(implementation="acme.fast")
    expect("named", (named.full_name, named.conforming), ("acme.fast", False))


@holds("selection/numerics", f"{ONE} a faster kernel that rounds probabilities to FP8")
def numerics(modules: Modules) -> None:
    """A kernel that rounds beyond the contract is taken only where the Spec admits its class."""
    plugins = Plugins(modules)
    own = (plugins.implementation("fp8", rank=9, numerics=("attn.p=fp8",)), plugins.implementation("exact"))
    plugins.add("acme", *own, device="Acme A2")
    expect("not admitted", plugins.choose().full_name, "acme.exact")
    expect("admitted", plugins.choose(plugins.spec(numerics=("attn.p=fp8",))).full_name, "acme.fp8")


@holds("selection/broken-probe", "a plugin whose probe raises, under auto and by name")
def broken_probe(modules: Modules) -> None:
    """A probe that raises leaves its cause; by name it is an error."""
    plugins, errors = Plugins(modules), modules("errors")
    plugins.add("acme")
    settings = modules("settings").Settings
    for wanted in (settings(), settings(backend="acme")):
        registry = plugins.registry(wanted)
        registry.backends["acme"]._probe = None  # its probe is nowhere, so that asking it raises
        if wanted.backend == "acme":
            raises(errors.PluginError, partial(registry.probe, "acme"), "nowhere:probe")
            continue
        expect("presence under auto", registry.probe("acme").present, False)
        expect("cause under auto", "ModuleNotFoundError" in registry.probe("acme").why, True)
        said = modules("dispatch.failure")._WARNED
        expect("warning under auto", any("nowhere:probe" in text for text in said), True)


@holds("selection/records", "a verify whose records are read by the second of two commits")
def records(modules: Modules) -> None:
    """A commit is one that reads the layout which its verify writes."""
    plugins, contract = Plugins(modules), modules("dispatch.contract")
    covered = contract.Capability(("a2",), {})

    def kda(operator: str, name: str, layout: str) -> object:
        return contract.Implementation(operator, name, "nowhere:build", (covered,), records=layout)

    own = (
        kda("kda_verify", "v", "layout.b"),
        kda("kda_commit", "one", "layout.a"),
        kda("kda_commit", "two", "layout.b"),
    )
    plugins.add("acme", *own, device="Acme A2")

    class Verify:
        """As much of a plan as pairing looks at."""

        implementation, name = own[0], "acme.v"

    pairing, op = modules("dispatch.pairing"), modules("ops").get("kda_commit")
    registry = plugins.registry(modules("settings").Settings())
    expect("reader", pairing.reader(op, Verify, registry, None), "acme.two")
    raises(modules("errors").PlanError, lambda: pairing.reader(op, Verify, registry, "acme.one"), "layout.a")
