"""Explaining: every candidate with all its reasons, as text and as data, chosen or not."""

from __future__ import annotations

import json

import pytest
from fake_plugins import FP8, GONE, LIMITS, SPEC, capability, implementation

import kimi_hal
from kimi_hal.dispatch.contract import Preference, Split
from kimi_hal.dispatch.explain import explain
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal.domain import Range
from kimi_hal.errors import PluginError, SelectionError, UnknownNameError
from kimi_hal.presets import Deployment
from kimi_hal.settings import Settings


def install(plugins):
    narrow = (capability(spec={"num_heads": Range(64, 128)}, limits={"max_rows": Range(1, 8)}),)
    plugins.add(
        "acme",
        implementation("wide", preferences=(Preference(rank=7, measured="A2, 2026-11-29"),)),
        implementation("narrow", capabilities=narrow, numerics=("attn.p=bf16",)),
    )


def test_the_text_names_every_candidate(plugins):
    install(plugins)
    assert str(explain("sparse_mla", SPEC, LIMITS, device="cuda")) == (
        "sparse_mla on cuda: acme.wide\n"
        "  why: auto found Acme A2 (acme2); not acme.narrow\n"
        "  not built: a plan imports its kernels, and says what they lack\n"
        "  acme.wide: chosen\n"
        "  acme.narrow: it rounds beyond the contract (attn.p=bf16); Spec.numerics or its name admits it; "
        "num_heads=12 is not 64 to 128; max_rows=256 is not 1 to 8\n"
        "  reference.torch: auto took acme"
    )


def test_the_data_is_json_with_every_reason(plugins):
    install(plugins)
    data = json.loads(json.dumps(explain("sparse_mla", SPEC, LIMITS, device="cuda").to_dict()))
    assert data["operator"] == "sparse_mla"
    assert data["spec"] == SPEC.to_dict()
    assert (data["chosen"], data["execution"], data["failures"]) == ("acme.wide", "native", {})
    assert data["candidates"] == [
        {
            "full_name": "acme.wide",
            "refusals": [],
            "chosen": True,
            "execution": "native",
            "rank": 7,
            "measured": "A2, 2026-11-29",
            "numerics": [],
            "conforming": True,
            "split": {},
        },
        {
            "full_name": "acme.narrow",
            "refusals": [
                "it rounds beyond the contract (attn.p=bf16); Spec.numerics or its name admits it",
                "num_heads=12 is not 64 to 128",
                "max_rows=256 is not 1 to 8",
            ],
            "chosen": False,
            "execution": "native",
            "rank": 0,
            "measured": "",
            "numerics": ["attn.p=bf16"],
            "conforming": True,
            "split": {},
        },
        {
            "full_name": "reference.torch",
            "refusals": ["auto took acme"],
            "chosen": False,
            "execution": "native",
            "rank": 0,
            "measured": "",
            "numerics": [],
            "conforming": True,
            "split": {},
        },
    ]


def test_the_data_says_why_in_one_sentence_with_every_reason(plugins):
    install(plugins)
    assert explain("sparse_mla", SPEC, LIMITS, device="cuda").to_dict()["why"] == (
        "auto found Acme A2 (acme2); not acme.narrow (it rounds beyond the contract (attn.p=bf16); "
        "Spec.numerics or its name admits it, num_heads=12 is not 64 to 128, max_rows=256 is not 1 to 8)"
    )


def test_a_composition_without_its_parts_is_not_chosen(plugins):
    plugins.add("acme", torch_device="cpu")
    spec = Deployment(tp=8).specs()["kda_layer_decode"]
    found = explain("kda_layer_decode", spec, LIMITS, device="cpu")
    assert (found.chosen, found.execution) == (None, "")
    assert found.why == (
        "kda_layer_decode: acme.composed needs kda_conv: kda_conv: acme does not implement it "
        "(KIMI_HAL_BACKEND=acme); it implements sparse_mla. KIMI_HAL_FALLBACK=reference runs the reference"
    )
    assert str(found).splitlines()[2] == "  acme.composed: nothing fits for its parts: kda_conv, kda_decode"
    with pytest.raises(SelectionError) as caught:
        kimi_hal.plan("kda_layer_decode", spec, LIMITS, device="cpu")
    assert str(caught.value) == found.why


def test_a_composition_with_all_of_its_parts_is_chosen(plugins):
    spec = Deployment(tp=8).specs()["kda_layer_decode"]
    found = explain("kda_layer_decode", spec, LIMITS, device="cpu", implementation="reference.composed")
    assert found.chosen == "reference.composed"


def test_what_each_compute_unit_does_is_said_by_architecture(plugins):
    tensor, scalar = (
        {"tensor unit": "attends", "gather unit": "fetches rows"},
        {"tensor unit": "does all of it"},
    )
    splits = (Split(("acme2", "acme3"), tensor), Split(("acme1",), scalar))
    covering = (capability(arch=("acme1", "acme2", "acme3")),)
    plugins.add("acme", implementation("fast", capabilities=covering, split=splits))
    found = explain("sparse_mla", SPEC, LIMITS, device="cuda")
    assert (
        "  acme.fast: chosen\n"
        "    on acme2, acme3: tensor unit attends; gather unit fetches rows\n"
        "    on acme1: tensor unit does all of it\n"
        "  reference.torch: auto took acme"
    ) in str(found)
    listed = json.loads(json.dumps(found.to_dict()))["candidates"][0]["split"]
    assert listed == {"acme2": tensor, "acme3": tensor, "acme1": scalar}


def test_one_split_for_all_architectures_names_none(plugins):
    plugins.add("acme", implementation("fast", split=(Split(("*",), {"tensor unit": "does all of it"}),)))
    assert "\n    on any: tensor unit does all of it\n" in str(
        explain("sparse_mla", SPEC, LIMITS, device="cuda")
    )


def test_a_refusal_is_an_answer(plugins):
    plugins.add("acme", probe=GONE)
    found = explain("sparse_mla", SPEC, LIMITS, device="cuda")
    assert found.chosen is None
    assert str(found) == (
        "sparse_mla on cuda: nothing fits\n"
        "  why: sparse_mla: auto found no device (acme: /dev/acme0 is missing). "
        "KIMI_HAL_FALLBACK=reference runs the reference\n"
        "  acme.fast: no device: /dev/acme0 is missing\n"
        "  reference.torch: auto takes no reference on an accelerator; KIMI_HAL_FALLBACK=reference admits it"
    )


def test_two_accelerators_are_an_answer(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    found = explain("sparse_mla", SPEC, LIMITS, device="cuda")
    assert found.why.startswith("auto found 2 accelerators: acme (Acme A2) and zeta (Acme A2).")
    assert [c.full_name for c in found.candidates] == ["acme.fast", "zeta.fast", "reference.torch"]


def test_a_broken_plugin_is_listed(plugins):
    @hookimpl
    def kimi_hal_backend():
        raise OSError("driver too old")

    plugins.module("acme", kimi_hal_backend=kimi_hal_backend)
    found = explain("sparse_mla", SPEC, LIMITS)
    assert found.chosen == "reference.torch"
    assert found.failures == {"acme": "kimi_hal_backend() raised OSError: driver too old"}
    assert str(found).endswith("\n  plugin acme: kimi_hal_backend() raised OSError: driver too old")


@pytest.mark.parametrize(
    ("settings", "gone", "device"),
    [
        (Settings(), False, "cuda"),
        (Settings(), True, "cpu"),
        (Settings(backend="acme"), True, "cuda"),
        (Settings(backend="reference"), False, "cpu"),
        (Settings(backend="acme", execution="interpreted"), True, "cpu"),
    ],
)
def test_the_device_follows_from_the_settings(plugins, settings, gone, device):
    plugins.add("acme", **({"probe": GONE} if gone else {}))
    assert explain("sparse_mla", SPEC, LIMITS, settings=settings).device == device


def test_explaining_a_fallback_warns_of_nothing(plugins, caplog):
    plugins.add("acme", probe=GONE)
    found = explain("sparse_mla", SPEC, LIMITS, device="cuda", settings=Settings(fallback="reference"))
    assert found.chosen == "reference.torch"
    assert caplog.messages == []


def test_an_unknown_operator_names_the_nearest(plugins):
    with pytest.raises(
        UnknownNameError, match=r"^unknown operator 'sparse_mal'; did you mean 'sparse_mla'\?"
    ):
        explain("sparse_mal", SPEC)


def test_a_named_broken_plugin_is_an_error(plugins):
    plugins.module("acme")
    with pytest.raises(PluginError):
        explain("sparse_mla", SPEC, settings=Settings(backend="acme"))


def test_explain_is_public(plugins):
    assert kimi_hal.explain is explain


def test_explaining_imports_no_torch():
    import subprocess
    import sys

    code = (
        "import sys\n"
        "import kimi_hal as hal\n"
        "from kimi_hal.ops.sparse_mla import SparseMLASpec\n"
        f"found = hal.explain('sparse_mla', SparseMLASpec(num_heads=12, latent={FP8!r}), device='cpu')\n"
        "assert found.chosen == 'reference.torch', found\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
