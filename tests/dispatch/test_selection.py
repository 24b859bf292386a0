"""Selection: who decides, what fits, which is preferred, and the sentence when nothing is."""

from __future__ import annotations

import dataclasses
import logging
import sys
import types

import pytest
from fake_plugins import GONE, HERE, LIMITS, SPEC, capability, implementation

from kimi_hal.dispatch import fields
from kimi_hal.dispatch.contract import Capability, Implementation, Preference, Probe, Properties
from kimi_hal.dispatch.loader import load
from kimi_hal.dispatch.selection import select
from kimi_hal.domain import OneOf, Range
from kimi_hal.errors import PluginError, SelectionError, SettingsError, UnknownNameError
from kimi_hal.ops import OPERATORS, dsa_decode, sparse_mla
from kimi_hal.presets import Deployment
from kimi_hal.settings import Settings

AUTO, ACME = Settings(), Settings(backend="acme")


def choose(settings=AUTO, spec=SPEC, limits=LIMITS, device="cuda", implementation=None, op=sparse_mla):
    return select(op, spec, limits, device=device, implementation=implementation, settings=settings)


def refused(*args, **kwargs):
    with pytest.raises(SelectionError) as caught:
        choose(*args, **kwargs)
    return str(caught.value)


def ranked(name, rank, **fields):
    return implementation(name, preferences=(Preference(rank=rank, measured=f"A2, {name}"),), **fields)


def promises(name="fast", **properties):
    return implementation(name, capabilities=(capability(properties=Properties(**properties)),))


# ---- who decides ------------------------------------------------------------------------------------------


def test_auto_takes_the_plugin_whose_device_is_here(plugins):
    plugins.add("acme")
    plugins.add("zeta", probe=GONE)
    choice = choose()
    assert (choice.full_name, choice.execution, choice.probe) == ("acme.fast", "native", HERE)
    assert choice.why == "auto found Acme A2 (acme2)"


def test_auto_gives_a_cpu_tensor_the_reference(plugins):
    plugins.add("acme")
    choice = choose(device="cpu")
    assert choice.full_name == "reference.torch"
    assert choice.why == "auto found no plugin that claims the CPU"


def test_auto_gives_a_cpu_tensor_the_plugin_that_claims_the_cpu(plugins):
    plugins.add("acme", torch_device="cpu")
    assert choose(device="cpu").full_name == "acme.fast"


def test_only_the_type_of_a_device_counts(plugins):
    plugins.add("acme")
    assert choose(device="cuda:3").full_name == "acme.fast"


def test_auto_without_a_device_says_what_each_probe_looked_for(plugins):
    plugins.add("acme", probe=GONE)
    plugins.add("zeta", probe=Probe(present=False, why="no PCI device of vendor 0x1e36"))
    assert refused() == (
        "sparse_mla: auto found no device (acme: /dev/acme0 is missing; zeta: no PCI device of vendor 0x1e36). "
        "KIMI_HAL_FALLBACK=reference runs the reference"
    )


def test_auto_without_a_plugin_says_so(plugins):
    assert refused() == (
        "sparse_mla: auto found no device (no plugin is installed). "
        "KIMI_HAL_FALLBACK=reference runs the reference"
    )


def test_auto_never_ranks_plugins_against_each_other(plugins):
    plugins.add("acme")
    plugins.add("zeta", ranked("fast", 99), probe=Probe(present=True, arch="z1", devices=("Zeta Z1",)))
    assert refused() == (
        "auto found 2 accelerators: acme (Acme A2) and zeta (Zeta Z1). "
        "Name one: KIMI_HAL_BACKEND=acme or KIMI_HAL_BACKEND=zeta"
    )


def test_two_claims_on_one_device_are_found(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    assert refused() == (
        "auto found 2 accelerators: acme (Acme A2) and zeta (Acme A2). Both claim 'Acme A2'. "
        "Name one: KIMI_HAL_BACKEND=acme or KIMI_HAL_BACKEND=zeta"
    )


def test_a_named_backend_settles_two_claims(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    assert choose(Settings(backend="zeta")).full_name == "zeta.fast"


def test_an_override_wins_over_the_backend(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    choice = choose(Settings(backend="acme", ops=(("sparse_mla", "zeta.fast"),)))
    assert choice.full_name == "zeta.fast"
    assert choice.why == "KIMI_HAL_OPS=sparse_mla=zeta.fast"


def test_an_override_on_another_kind_of_device_is_an_error(plugins):
    plugins.add("acme")
    plugins.add("zeta", torch_device="xla")
    assert refused(Settings(backend="acme", ops=(("sparse_mla", "zeta.fast"),))) == (
        "sparse_mla: zeta.fast does not cover this request (KIMI_HAL_OPS=sparse_mla=zeta.fast). "
        "These fit: acme.fast, reference.torch\n"
        "  zeta.fast: it runs on xla tensors, not cuda"
    )


def test_the_argument_wins_over_every_variable(plugins):
    plugins.add("acme", implementation("fast"), ranked("slow", -5))
    settings = Settings(backend="reference", ops=(("sparse_mla", "reference.torch"),))
    choice = choose(settings, implementation="acme.slow")
    assert (choice.full_name, choice.why) == ("acme.slow", "implementation='acme.slow'")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "acme.fest",
            "unknown implementation of sparse_mla 'acme.fest'; did you mean 'acme.fast'? Known: acme.fast",
        ),
        ("acne.fast", "unknown backend 'acne'; did you mean 'acme'? Known: acme, reference"),
        ("fast", "'fast' is not of the form backend.implementation"),
    ],
)
def test_an_unknown_implementation_names_the_nearest(plugins, name, sentence):
    plugins.add("acme")
    with pytest.raises(UnknownNameError) as caught:
        choose(implementation=name)
    assert str(caught.value) == sentence


def test_an_override_that_does_not_exist_is_an_error_for_every_operator(plugins):
    plugins.add("acme")
    with pytest.raises(SettingsError):
        choose(Settings(ops=(("store_latent", "acme.fast"),)))


# ---- devices and execution --------------------------------------------------------------------------------

RUNS_INTERPRETED = implementation(execution=("native", "interpreted"))


def test_a_named_backend_without_its_device_ends_with_what_to_type(plugins):
    plugins.add("acme", RUNS_INTERPRETED, probe=GONE)
    assert refused(ACME) == (
        "sparse_mla: KIMI_HAL_BACKEND=acme, but there is no device: /dev/acme0 is missing. "
        "KIMI_HAL_EXECUTION=interpreted runs its kernels on the CPU"
    )


def test_a_backend_that_has_no_interpreted_kernel_is_not_said_to(plugins):
    plugins.add("acme", probe=GONE)
    assert refused(ACME) == (
        "sparse_mla: KIMI_HAL_BACKEND=acme, but there is no device: /dev/acme0 is missing. "
        "KIMI_HAL_BACKEND=reference runs the reference"
    )


def test_a_named_implementation_without_its_device_goes_before_the_variable(plugins):
    plugins.add("acme", probe=GONE)
    assert refused(implementation="acme.fast") == (
        "sparse_mla: implementation='acme.fast', but there is no device: /dev/acme0 is missing. "
        "Without that name KIMI_HAL_BACKEND=reference runs the reference"
    )


def test_a_named_backend_does_not_run_natively_on_cpu_tensors(plugins):
    plugins.add("acme", RUNS_INTERPRETED)
    assert refused(ACME, device="cpu") == (
        "sparse_mla: KIMI_HAL_BACKEND=acme, but it runs on cuda tensors, not cpu. "
        "KIMI_HAL_EXECUTION=interpreted runs its kernels on the CPU"
    )


def test_interpreted_runs_on_the_cpu_without_a_device(plugins):
    plugins.add("acme", RUNS_INTERPRETED, implementation("wrapped"), probe=GONE)
    choice = choose(Settings(backend="acme", execution="interpreted"), device="cpu")
    assert (choice.full_name, choice.execution) == ("acme.fast", "interpreted")
    assert choice.why == (
        "KIMI_HAL_BACKEND=acme; not acme.wrapped (it runs native only, not interpreted); it runs interpreted"
    )


def test_interpreted_needs_the_cpu(plugins):
    plugins.add("acme", RUNS_INTERPRETED)
    assert refused(Settings(backend="acme", execution="interpreted")) == (
        "sparse_mla: no implementation of acme covers this request (KIMI_HAL_BACKEND=acme). "
        "KIMI_HAL_FALLBACK=reference runs the reference\n"
        "  acme.fast: KIMI_HAL_EXECUTION=interpreted runs on the CPU; plan with device='cpu', not 'cuda'"
    )


def test_portable_runs_on_a_foreign_device(plugins):
    plugins.add("acme", implementation(execution=("native", "portable")), probe=GONE)
    choice = choose(Settings(backend="acme", execution="portable"))
    assert (choice.full_name, choice.execution) == ("acme.fast", "portable")


def test_portable_needs_code_that_is(plugins):
    plugins.add("acme", probe=GONE)
    assert refused(Settings(backend="acme", execution="portable")) == (
        "sparse_mla: no implementation of acme covers this request (KIMI_HAL_BACKEND=acme). "
        "KIMI_HAL_FALLBACK=reference runs the reference\n"
        "  acme.fast: it runs native only, not portable"
    )


def test_portable_code_on_its_own_device_is_native(plugins):
    plugins.add("acme", implementation(execution=("native", "portable")))
    assert choose(Settings(backend="acme", execution="portable")).execution == "native"


def test_what_can_only_be_compiled_is_never_run(plugins):
    plugins.add("acme", implementation(execution=("compile_only",)))
    assert "acme.fast: it is compiled only, not run native" in refused(ACME)


def test_compiling_is_no_way_to_run(plugins):
    plugins.add("acme", implementation(execution=("interpreted", "compile_only")))
    assert "acme.fast: it runs interpreted only, not native" in refused(ACME)


def test_the_reference_runs_on_any_device_when_asked_for(plugins):
    assert choose(Settings(backend="reference"), device="xla").full_name == "reference.torch"


# ---- coverage ---------------------------------------------------------------------------------------------


def test_named_but_not_covered_is_an_error_with_every_reason(plugins):
    covered = capability(spec={"num_heads": OneOf((64, 128))}, limits={"max_rows": Range(1, 64)})
    plugins.add("acme", implementation(capabilities=(covered,)))
    assert refused(ACME, dataclasses.replace(SPEC, page=128)) == (
        "sparse_mla: no implementation of acme covers this request (KIMI_HAL_BACKEND=acme). "
        "KIMI_HAL_FALLBACK=reference runs the reference\n"
        "  acme.fast: num_heads=12 is not 64 | 128; page=128 is not covered, only its default 64; "
        "max_rows=256 is not 1 to 64"
    )


def test_auto_takes_the_next_of_the_same_backend_and_says_why(plugins):
    narrow = ranked("narrow", 50, capabilities=(capability(spec={"num_heads": Range(64, 128)}),))
    plugins.add("acme", narrow, ranked("wide", 1))
    choice = choose()
    assert choice.full_name == "acme.wide"
    assert choice.why == "auto found Acme A2 (acme2); not acme.narrow (num_heads=12 is not 64 to 128)"


def test_the_first_capability_that_covers_the_request_is_the_one(plugins):
    both = (capability(spec={"page": OneOf((128,))}), capability(properties=Properties(capture="full")))
    plugins.add("acme", implementation(capabilities=both))
    assert choose().capability is both[1]


def test_the_reasons_of_several_capabilities_are_told_apart(plugins):
    both = (capability(spec={"page": OneOf((128,))}), capability(arch=("acme1",)))
    plugins.add("acme", implementation(capabilities=both))
    assert refused().endswith("\n  acme.fast: [1 of 2] page=64 is not 128; [2 of 2] arch acme2 is not acme1")


def test_a_backend_without_the_operator_says_what_it_has(plugins):
    merge = Implementation("merge_attn_states", "merge", "fake:build", (Capability(("acme2",), {}),))
    plugins.add("acme", merge)
    assert refused(ACME) == (
        "sparse_mla: acme does not implement it (KIMI_HAL_BACKEND=acme); it implements merge_attn_states. "
        "KIMI_HAL_FALLBACK=reference runs the reference"
    )


# ---- preference -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_the_measured_rank_decides_not_the_order(plugins, order):
    plugins.add("acme", *(ranked("a", 10), ranked("b", 20), ranked("c", 5))[::order])
    assert choose().full_name == "acme.b"


def test_the_reason_names_the_measurement_and_what_was_beaten(plugins):
    plugins.add("acme", ranked("a", 10), ranked("b", 20))
    choice = choose()
    assert choice.why == "auto found Acme A2 (acme2); rank 20 (A2, b) before acme.a"
    assert [(c.full_name, c.refusals) for c in choice.candidates if not c.chosen] == [
        ("acme.a", ("acme.b is preferred",)),
        ("reference.torch", ("auto took acme",)),
    ]


def test_the_largest_rank_that_matches_counts(plugins):
    small = Preference(rank=50, limits={"max_rows": Range(1, 32)})
    plugins.add("acme", implementation("a", preferences=(Preference(rank=1), small)), ranked("b", 10))
    assert choose().full_name == "acme.b"
    assert choose(limits=dataclasses.replace(LIMITS, max_rows=16)).full_name == "acme.a"


def test_an_implementation_that_no_preference_matches_comes_last(plugins):
    elsewhere = Preference(rank=99, arch=("acme1",))
    plugins.add("acme", implementation("a", preferences=(elsewhere,)), ranked("b", -5))
    assert choose().full_name == "acme.b"


def test_a_tie_at_the_top_is_an_error_that_names_both(plugins):
    plugins.add("acme", ranked("a", 10), ranked("b", 10), ranked("c", 5))
    assert refused() == (
        "sparse_mla: acme.a and acme.b have equal rank for this request, and order decides nothing. "
        "Name one: KIMI_HAL_OPS=sparse_mla=acme.a"
    )


def test_a_tie_below_the_top_is_none(plugins):
    plugins.add("acme", ranked("a", 5), ranked("b", 5), ranked("c", 10))
    assert choose().full_name == "acme.c"


# ---- policy -----------------------------------------------------------------------------------------------


def test_batch_invariant_takes_the_next_that_declares_it(plugins):
    quick = ranked("quick", 50)
    plugins.add("acme", quick, promises("steady", batch_invariant=True))
    assert choose().full_name == "acme.quick"
    choice = choose(Settings(batch_invariant=True))
    assert choice.full_name == "acme.steady"
    assert choice.why == (
        "auto found Acme A2 (acme2); "
        "not acme.quick (KIMI_HAL_BATCH_INVARIANT=1, and it does not declare batch_invariant)"
    )


def test_another_tie_rule_is_reachable_by_name_only(plugins):
    plugins.add("acme", promises(tie_rule="any"))
    reason = "acme.fast: its tie rule is not the contract's; it is reachable by name only"
    assert reason in refused()
    assert reason in refused(ACME)
    for choice in (
        choose(implementation="acme.fast"),
        choose(Settings(ops=(("sparse_mla", "acme.fast"),))),
    ):
        assert not choice.conforming
        assert choice.why.endswith("; it does not conform: its tie rule is not the contract's")


def test_rounding_beyond_the_contract_needs_the_spec_or_a_name(plugins):
    plugins.add("acme", implementation(numerics=("attn.p=bf16", "attn.p=fp8")))
    assert refused(ACME, dataclasses.replace(SPEC, numerics=("attn.p=bf16",))).endswith(
        "\n  acme.fast: it rounds beyond the contract (attn.p=fp8); Spec.numerics or its name admits it"
    )
    admitted = dataclasses.replace(SPEC, numerics=("attn.p=bf16", "attn.p=fp8"))
    assert choose(ACME, admitted).why == (
        "KIMI_HAL_BACKEND=acme; it rounds beyond the contract (attn.p=bf16, attn.p=fp8)"
    )
    assert choose(implementation="acme.fast").full_name == "acme.fast"


def test_what_was_never_run_is_reachable_by_name_only(plugins):
    plugins.add("acme", implementation(numerics=("attn.p=bf16",), not_run="no Acme A2 was here"))
    admitted = dataclasses.replace(SPEC, numerics=("attn.p=bf16",))
    assert refused(ACME, admitted).endswith(
        "\n  acme.fast: it was not run: no Acme A2 was here; it is reachable by name only"
    )
    for choice in (
        choose(implementation="acme.fast"),
        choose(Settings(ops=(("sparse_mla", "acme.fast"),))),
    ):
        assert choice.why.endswith("; it was not run: no Acme A2 was here")


# ---- fallback ---------------------------------------------------------------------------------------------

FALLBACK = Settings(fallback="reference")


def test_the_reference_is_no_silent_fallback(plugins):
    plugins.add("acme")
    assert refused(AUTO, dataclasses.replace(SPEC, page=128)) == (
        "sparse_mla: no implementation of acme covers this request (auto found Acme A2 (acme2)). "
        "KIMI_HAL_FALLBACK=reference runs the reference\n"
        "  acme.fast: page=128 is not covered, only its default 64"
    )


def test_an_admitted_fallback_warns_once_an_operator(plugins, caplog):
    plugins.add("acme")
    for _ in range(2):
        choice = choose(FALLBACK, dataclasses.replace(SPEC, page=128))
    assert (choice.full_name, choice.fallback) == ("reference.torch", True)
    assert caplog.messages == [
        "sparse_mla runs the reference: auto found Acme A2 (acme2); KIMI_HAL_FALLBACK=reference admits the "
        "reference; not acme.fast (page=128 is not covered, only its default 64)"
    ]


def test_an_admitted_fallback_is_not_taken_where_something_fits(plugins):
    plugins.add("acme")
    choice = choose(FALLBACK)
    assert (choice.full_name, choice.fallback) == ("acme.fast", False)


def test_an_admitted_fallback_serves_an_absent_device(plugins):
    plugins.add("acme", probe=GONE)
    assert choose(dataclasses.replace(FALLBACK, backend="acme")).full_name == "reference.torch"
    assert choose(FALLBACK).why == (
        "auto found no device (acme: /dev/acme0 is missing); KIMI_HAL_FALLBACK=reference admits the reference"
    )


def test_no_advice_is_given_that_does_not_help(plugins):
    plugins.add("acme")
    registry = load(AUTO)
    del registry.backends["reference"]
    with pytest.raises(SelectionError) as caught:
        select(
            sparse_mla,
            dataclasses.replace(SPEC, page=128),
            LIMITS,
            device="cuda",
            implementation=None,
            settings=AUTO,
            registry=registry,
        )
    assert str(caught.value).splitlines()[0] == (
        "sparse_mla: no implementation of acme covers this request (auto found Acme A2 (acme2))."
    )


def test_a_named_implementation_never_falls_back(plugins):
    plugins.add("acme")
    assert refused(FALLBACK, dataclasses.replace(SPEC, page=128), implementation="acme.fast") == (
        "sparse_mla: acme.fast does not cover this request (implementation='acme.fast'). "
        "These fit: reference.torch\n"
        "  acme.fast: page=128 is not covered, only its default 64"
    )


def test_a_broken_named_plugin_never_falls_back(plugins):
    plugins.module("acme")
    with pytest.raises(PluginError):
        choose(dataclasses.replace(FALLBACK, backend="acme"))


# ---- composites -------------------------------------------------------------------------------------------


@pytest.fixture
def pair(monkeypatch):
    """A composite of two operators, and a composition of it for every backend."""
    op = dataclasses.replace(sparse_mla, name="pair", parts=("store_latent", "sparse_mla"))
    monkeypatch.setitem(OPERATORS, "pair", op)
    composed = types.ModuleType("kimi_hal.dispatch.composed")
    composed.implementation = lambda op: implementation(
        "composed", op.name, (capability(arch=("*",)),), preferences=(Preference(rank=1000),)
    )
    monkeypatch.setitem(sys.modules, composed.__name__, composed)
    return op


def test_a_composite_can_always_be_composed(plugins, pair):
    plugins.add("acme")
    assert choose(op=pair).full_name == "acme.composed"


def test_one_kernel_goes_before_its_composition_whatever_the_rank(plugins, pair):
    plugins.add("acme", implementation("fused", "pair"))
    choice = choose(op=pair)
    assert choice.full_name == "acme.fused"
    assert choice.why == "auto found Acme A2 (acme2); one kernel goes before its composition"


def test_an_override_of_a_part_switches_off_every_kernel_that_contains_it(plugins, pair):
    plugins.add("acme", implementation("fast"), implementation("fused", "pair"))
    choice = choose(Settings(ops=(("sparse_mla", "reference.torch"),)), op=pair)
    assert choice.full_name == "acme.composed"
    assert choice.why == (
        "auto found Acme A2 (acme2); "
        "not acme.fused (KIMI_HAL_OPS=sparse_mla=reference.torch names a part that it would not run)"
    )


def test_an_override_of_both_is_a_contradiction(plugins, pair):
    plugins.add("acme", implementation("fast"), implementation("fused", "pair"))
    both = Settings(ops=(("pair", "acme.fused"), ("sparse_mla", "acme.fast")))
    assert refused(both, op=pair) == (
        "pair: acme.fused does not cover this request (KIMI_HAL_OPS=pair=acme.fused). "
        "These fit: acme.composed, reference.composed\n"
        "  acme.fused: KIMI_HAL_OPS=sparse_mla=acme.fast names a part that it would not run"
    )


def test_the_argument_wins_over_an_override_of_a_part(plugins, pair):
    plugins.add("acme", implementation("fast"), implementation("fused", "pair"))
    settings = Settings(ops=(("sparse_mla", "acme.fast"),))
    assert choose(settings, op=pair, implementation="acme.fused").full_name == "acme.fused"


def test_a_composition_can_be_named(plugins, pair):
    plugins.add("acme", implementation("fused", "pair"))
    assert choose(Settings(ops=(("pair", "acme.composed"),)), op=pair).full_name == "acme.composed"


def test_the_models_composites_obey_the_same_rule(plugins):
    spec = Deployment(tp=8).specs()["dsa_decode"]
    plugins.add("acme", implementation("fused", "dsa_decode", (covering(spec),)))
    assert choose(spec=spec, op=dsa_decode).full_name == "acme.fused"
    choice = choose(Settings(ops=(("sparse_mla", "reference.torch"),)), spec, op=dsa_decode)
    assert choice.full_name == "acme.composed"
    assert choice.candidates[0].refusals == (
        "KIMI_HAL_OPS=sparse_mla=reference.torch names a part that it would not run",
    )


def covering(spec):
    return Capability(("acme2",), {n: OneOf((v,)) for n, v in fields.values(spec).items() if v is not None})


# ---- records ----------------------------------------------------------------------------------------------


def test_every_candidate_of_every_backend_is_recorded(plugins):
    plugins.add("acme", ranked("a", 1), implementation("b", capabilities=(capability(arch=("acme1",)),)))
    plugins.add("zeta", probe=GONE)
    choice = choose()
    assert {c.full_name: c.refusals for c in choice.candidates} == {
        "acme.a": (),
        "acme.b": ("arch acme2 is not acme1",),
        "zeta.fast": ("auto took acme", "no device: /dev/acme0 is missing"),
        "reference.torch": ("auto took acme",),
    }


def test_the_choice_is_logged_at_info(plugins, caplog):
    plugins.add("acme")
    with caplog.at_level(logging.INFO, logger="kimi_hal"):
        choose()
    assert caplog.messages == ["sparse_mla: acme.fast, auto found Acme A2 (acme2)"]
