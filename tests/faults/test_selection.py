"""Fault class 25: what is selected, and what is said about it, never depends on luck or silence."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint

import pytest
from fake_plugins import FP8, GONE, LIMITS, SPEC, capability, implementation

from kimi_hal import settings as variables
from kimi_hal.dispatch import loader, points, policy
from kimi_hal.dispatch.contract import Capability, Preference, Probe, Properties, TensorCap
from kimi_hal.dispatch.explain import explain
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal.dispatch.selection import select
from kimi_hal.domain import OneOf, Range
from kimi_hal.errors import PluginError, SelectionError, SettingsError, SpecError
from kimi_hal.ops import kda_decode, sparse_mla
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.settings import Settings


def choose(settings=None, spec=SPEC, limits=LIMITS, implementation=None, op=sparse_mla, device="cuda"):
    settings = settings or policy.settings()
    return select(op, spec, limits, device=device, implementation=implementation, settings=settings)


def refused(error, *args, **kwargs):
    with pytest.raises(error) as caught:
        choose(*args, **kwargs)
    return str(caught.value)


PROBE_ERRORS = [ModuleNotFoundError("No module named 'acme_smi'"), OSError("libacme.so: wrong ELF class")]


def raising(error):
    def call():
        raise error

    return call


@pytest.mark.parametrize("error", PROBE_ERRORS)
def test_fault_25_a_raising_probe_is_a_warning_that_names_it(plugins, caplog, error):
    plugins.add("acme", probe=raising(error))
    assert choose(device="cpu").full_name == "reference.torch"
    text = f"fake_acme:probe raised {type(error).__name__}: {error}"
    assert caplog.messages == [f"plugin 'acme': {text}; it is left out, `kimi-hal doctor` says more"]
    assert caplog.records[0].levelname == "WARNING"
    assert refused(SelectionError) == (
        f"sparse_mla: auto found no device (acme: {text}). KIMI_HAL_FALLBACK=reference runs the reference"
    )


@pytest.mark.parametrize("error", PROBE_ERRORS)
def test_fault_25_a_raising_probe_fails_when_it_is_named(plugins, monkeypatch, error):
    plugins.add("acme", probe=raising(error))
    monkeypatch.setenv("KIMI_HAL_BACKEND", "acme")
    assert refused(PluginError) == (f"plugin 'acme': fake_acme:probe raised {type(error).__name__}: {error}")


PLUGIN = """
    from kimi_hal.dispatch.contract import *
    from kimi_hal.dispatch.hookspecs import hookimpl

    @hookimpl
    def kimi_hal_backend():
        return Backend("acme", "1.0", 1, "acme_hal:probe", "acme_hal:IMPLEMENTATIONS", "acme_hal:Device", "cuda")

    def probe():
        import sys
        before = set(sys.modules)
        answer = Probe(True, "acme2", ("Acme A2",))
        assert set(sys.modules) == before
        return answer

    COVERED = Capability(("acme2",), {"num_heads": Range(1, 128), "latent": OneOf(("latent.fp8.e4m3fn.tensor",))})
    IMPLEMENTATIONS = (Implementation("sparse_mla", "fast", "acme_hal:build", (COVERED,)),)
"""

SELECT = f"""
    import sys
    {{imports}}
    from kimi_hal.ops.sparse_mla import SparseMLASpec
    found = kimi_hal.explain("sparse_mla", SparseMLASpec(num_heads=12, latent={FP8!r}), device="cuda")
    assert "torch" not in sys.modules
    print(found.chosen)
"""


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["kimi_hal", "acme_hal", "kimi_hal.dispatch.loader"])), ids="-".join
)
def test_fault_25_import_order_changes_nothing(tmp_path, order):
    (tmp_path / "acme_hal.py").write_text(textwrap.dedent(PLUGIN))
    info = tmp_path / "acme_hal-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-hal\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kimi_hal]\nacme = acme_hal\n")
    code = textwrap.dedent(SELECT).format(imports="\n".join(f"import {name}" for name in order))
    clean = {n: v for n, v in os.environ.items() if not n.startswith("KIMI_HAL_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()]), "KIMI_HAL_BACKEND": "acme"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "acme.fast\n"


def test_fault_25_without_its_preferred_backend_an_operator_says_so(plugins, monkeypatch):
    merge = Capability(("acme2",), {"parts": Range(1, 64), "num_heads": Range(1, 128)})
    plugins.add("acme")
    plugins.add("zeta", implementation("merge", "merge_attn_states", (merge,)))
    monkeypatch.setenv("KIMI_HAL_BACKEND", "zeta")
    assert refused(SelectionError) == (
        "sparse_mla: zeta does not implement it (KIMI_HAL_BACKEND=zeta); it implements merge_attn_states. "
        "KIMI_HAL_FALLBACK=reference runs the reference"
    )


def test_fault_25_a_variable_that_is_set_is_obeyed_or_refused(plugins):
    plugins.add("acme", variables={"KIMI_HAL_ACME_PATH": "directory of libacme"})
    read = Settings.from_env({"KIMI_HAL_ACME_PATH": "/opt/acme"})
    assert loader.load(read).variables("acme") == {"KIMI_HAL_ACME_PATH": "/opt/acme"}
    with pytest.raises(SettingsError) as caught:
        loader.load(Settings.from_env({"KIMI_HAL_ACME_PATHS": "/opt/acme"}))
    assert str(caught.value) == (
        "unknown variable KIMI_HAL_ACME_PATHS; did you mean 'KIMI_HAL_ACME_PATH'? "
        "Declared by acme: KIMI_HAL_ACME_PATH"
    )


def test_fault_25_a_plugin_for_another_version_is_refused_readably(plugins):
    plugins.add("acme", api_version=2)
    assert refused(PluginError, Settings(backend="acme")) == (
        "plugin 'acme': it was written for plugin API 2, this kimi-hal has API 1; install a newer kimi-hal"
    )
    plugins.points[:] = [EntryPoint("acme", "kimi_hal.not_yet", points.GROUP)]
    assert refused(PluginError, Settings(backend="acme")) == (
        "plugin 'acme': importing kimi_hal.not_yet raised ModuleNotFoundError: No module named "
        "'kimi_hal.not_yet'; this is kimi-hal 0.1.0"
    )


def environment(**extra):
    return Settings.from_env(extra)


def test_fault_25_a_removed_variable_names_its_replacement(plugins, monkeypatch):
    monkeypatch.setitem(variables.REMOVED, "KIMI_HAL_PLATFORM", "use KIMI_HAL_BACKEND")
    with pytest.raises(SettingsError, match=r"^KIMI_HAL_PLATFORM was removed: use KIMI_HAL_BACKEND$"):
        environment(KIMI_HAL_PLATFORM="acme")


@pytest.mark.parametrize("name", ["KIMI_HAL_BACKEDN", "KIMI_HAL_BACKENDS", "KIMI_HAL_BAKEND"])
def test_fault_25_one_wrong_letter_is_an_error_with_the_nearest_name(plugins, name):
    with pytest.raises(SettingsError, match=rf"^unknown variable {name}; did you mean 'KIMI_HAL_BACKEND'\?"):
        environment(**{name: "acme"})


def test_fault_25_a_plugins_own_variable_raises_no_false_alarm(plugins, caplog):
    plugins.add("acme", variables={"KIMI_HAL_ACME_TUNE": "off or on"})
    registry = loader.load(environment(KIMI_HAL_ACME_TUNE="on"))
    assert registry.variables("acme") == {"KIMI_HAL_ACME_TUNE": "on"}
    assert caplog.messages == []


def test_fault_25_names_that_a_cluster_injects_pass(plugins):
    assert (
        environment(
            KIMI_HAL_SERVICE_HOST="10.0.0.7",
            KIMI_HAL_SERVICE_PORT="80",
            KIMI_HAL_PORT="tcp://10.0.0.7:80",
            KIMI_HAL_PORT_80_TCP_PROTO="tcp",
        )
        == Settings()
    )


SM_120 = Probe(present=True, arch="sm_120", devices=("NVIDIA RTX 6000",))


def two_kernels(plugins):
    plugins.add(
        "acme",
        implementation(
            "tuned", capabilities=(capability(arch=("sm_90", "sm_100")),), preferences=(Preference(9),)
        ),
        implementation("plain", capabilities=(capability(arch=("sm_90", "sm_120")),)),
        probe=SM_120,
    )


def test_fault_25_named_without_the_architecture_is_an_error_with_the_reason(plugins):
    two_kernels(plugins)
    assert refused(SelectionError, implementation="acme.tuned") == (
        "sparse_mla: acme.tuned does not cover this request (implementation='acme.tuned'). "
        "These fit: acme.plain, reference.torch\n"
        "  acme.tuned: arch sm_120 is not sm_90 | sm_100"
    )


def test_fault_25_auto_takes_the_next_and_records_the_reason(plugins):
    two_kernels(plugins)
    choice = choose()
    assert choice.full_name == "acme.plain"
    assert choice.why == (
        "auto found NVIDIA RTX 6000 (sm_120); not acme.tuned (arch sm_120 is not sm_90 | sm_100)"
    )


def test_fault_25_every_refusal_is_printed_not_only_the_first(plugins):
    only = {"num_heads": OneOf((64, 128)), "q_dtype": OneOf(("bfloat16", "float8_e4m3fn"))}
    tensors = {"q": TensorCap(("bfloat16",))}
    plugins.add(
        "acme",
        implementation("mma", capabilities=(capability(arch=("sm_90",), spec=only, tensors=tensors),)),
        implementation("fp4", capabilities=(capability(spec={"latent": OneOf(("latent.nvfp4.352",))}),)),
        probe=SM_120,
    )
    spec = dataclasses.replace(SPEC, q_dtype="float8_e4m3fn")
    lines = str(explain("sparse_mla", spec, LIMITS, device="cuda")).splitlines()
    assert lines[2:4] == [
        "  acme.mma: arch sm_120 is not sm_90; num_heads=12 is not 64 | 128; "
        "q: bfloat16 only, Spec asks float8_e4m3fn",
        "  acme.fp4: arch sm_120 is not acme2; latent='latent.fp8.e4m3fn.tensor' is not 'latent.nvfp4.352'; "
        "q_dtype='float8_e4m3fn' is not covered, only its default 'bfloat16'",
    ]


def test_fault_25_another_width_does_not_cost_the_fast_kernel(plugins):
    fast = implementation("fast", capabilities=(capability(),), preferences=(Preference(rank=9),))
    wide = capability(spec={"topk": Range(1, 4096)})
    plugins.add("acme", fast, implementation("generic", capabilities=(wide,)))
    chosen = {k: choose(spec=dataclasses.replace(SPEC, topk=k)) for k in (2048, 512)}
    assert {k: c.full_name for k, c in chosen.items()} == {2048: "acme.fast", 512: "acme.generic"}
    assert chosen[512].why == (
        "auto found Acme A2 (acme2); not acme.fast (topk=512 is not covered, only its default 2048)"
    )


SHARDED = {"index_space": OneOf(("local",)), "dcp.world": Range(1, 8), "dcp.rank": Range(0, 7)}
WITHOUT_LSE = SHARDED | {"return_lse": OneOf((False,))}


def test_fault_25_a_missing_lse_is_named_with_who_has_it(plugins):
    plugins.add("acme", implementation(capabilities=(capability(spec=WITHOUT_LSE),)))
    plugins.add("zeta", implementation(capabilities=(capability(spec=SHARDED),)))
    spec = dataclasses.replace(SPEC, index_space="local", dcp=DCP(world=2))
    assert refused(SelectionError, spec=spec, implementation="acme.fast") == (
        "sparse_mla: acme.fast does not cover this request (implementation='acme.fast'). "
        "These fit: zeta.fast, reference.torch\n"
        "  acme.fast: return_lse=True is not False"
    )


def test_fault_25_a_capability_query_says_yes_or_every_missing_item(plugins):
    half = capability(spec={"latent": OneOf(("latent.flashmla.656",)), "return_lse": OneOf((False,))})
    plugins.add("acme", implementation(capabilities=(half,)), probe=SM_120)
    spec = SparseMLASpec(num_heads=8, latent="latent.flashmla.656")
    found = explain("sparse_mla", spec, LIMITS, device="cuda")
    assert found.chosen is None
    assert found.candidates[0].refusals == ("arch sm_120 is not acme2", "return_lse=True is not False")
    yes = explain("sparse_mla", spec, LIMITS, device="cpu")
    assert yes.chosen == "reference.torch"


def test_fault_25_a_rope_free_key_is_refused_by_name():
    with pytest.raises(SpecError, match=r"^SparseMLASpec: pe_dim=0 is not 64$"):
        SparseMLASpec(num_heads=8, latent=FP8, pe_dim=0)


INVARIANT = Settings(batch_invariant=True)


def steady(name, rank=0, **properties):
    covered = capability(properties=Properties(**properties))
    return implementation(name, capabilities=(covered,), preferences=(Preference(rank=rank),))


def test_fault_25_a_policy_passes_over_a_preferred_kernel_under_auto(plugins):
    plugins.add("acme", steady("quick", 9, deterministic=True), steady("exact", 0, batch_invariant=True))
    assert choose().full_name == "acme.quick"
    assert choose(INVARIANT).full_name == "acme.exact"


def test_fault_25_a_policy_refuses_what_was_named_and_does_not_promise(plugins):
    plugins.add("acme", steady("quick", 9, deterministic=True), steady("exact", 0, batch_invariant=True))
    head, reason = refused(SelectionError, INVARIANT, implementation="acme.quick").splitlines()
    assert head.startswith(
        "sparse_mla: acme.quick does not cover this request (implementation='acme.quick'). "
        "These fit: acme.exact"
    )
    assert reason == ("  acme.quick: KIMI_HAL_BATCH_INVARIANT=1, and it does not declare batch_invariant")


def test_fault_25_a_policy_that_an_operator_cannot_meet_names_the_operator(plugins):
    covered = Capability(("acme2",), {"num_heads": Range(1, 96)})
    plugins.add("acme", implementation("chunked", "kda_decode", (covered,)))
    head, reason = refused(SelectionError, INVARIANT, KDASpec(num_heads=12), op=kda_decode).splitlines()
    assert head.startswith(
        "kda_decode: no implementation of acme covers this request (auto found Acme A2 (acme2))."
    )
    assert reason == ("  acme.chunked: KIMI_HAL_BATCH_INVARIANT=1, and it does not declare batch_invariant")


def test_fault_25_what_stops_a_plugin_stops_no_other(plugins, caplog):
    @hookimpl
    def kimi_hal_backend():
        sys.exit("acme: no licence")

    plugins.module("acme", kimi_hal_backend=kimi_hal_backend)
    plugins.add("zeta")
    assert choose().full_name == "zeta.fast"
    assert caplog.messages == [
        "plugin 'acme': kimi_hal_backend() raised SystemExit: acme: no licence; it is left out, "
        "`kimi-hal doctor` says more"
    ]


def test_fault_25_the_reference_is_never_a_silent_slow_path(plugins):
    plugins.add("acme", probe=GONE)
    small = Limits(max_rows=1, max_reqs=1)
    assert "auto found no device" in refused(SelectionError, limits=small)
    assert choose(Settings(fallback="reference"), limits=small).fallback
