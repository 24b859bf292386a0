"""Settings: every variable, every ill-formed value, and the sentence for each."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kimi_hal import settings
from kimi_hal.errors import SettingsError
from kimi_hal.settings import Settings


def read(*plugins, **variables):
    return Settings.from_env({f"KIMI_HAL_{n}": v for n, v in variables.items()}, plugins=plugins)


def refused(*plugins, **variables):
    with pytest.raises(SettingsError) as caught:
        read(*plugins, **variables)
    return str(caught.value)


def test_no_variable_gives_the_defaults():
    assert read() == Settings()
    assert Settings() == Settings(
        backend="auto",
        ops=(),
        fallback="error",
        execution="native",
        batch_invariant=False,
        check="off",
        shadow=0,
        log="",
        plugins=(),
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("BACKEND", "acme", Settings(backend="acme")),
        ("BACKEND", "reference", Settings(backend="reference")),
        ("OPS", "sparse_mla=acme.fast", Settings(ops=(("sparse_mla", "acme.fast"),))),
        ("FALLBACK", "reference", Settings(fallback="reference")),
        ("EXECUTION", "interpreted", Settings(execution="interpreted")),
        ("EXECUTION", "portable", Settings(execution="portable")),
        ("BATCH_INVARIANT", "1", Settings(batch_invariant=True)),
        ("BATCH_INVARIANT", "0", Settings()),
        ("CHECK", "args", Settings(check="args")),
        ("CHECK", "shadow:100", Settings(check="shadow", shadow=100)),
        ("LOG", "info", Settings(log="INFO")),
    ],
)
def test_a_legal_value_is_read(name, value, expected):
    assert read("acme", **{name: value}) == expected


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "BACKEND",
            "acne",
            "KIMI_HAL_BACKEND: unknown backend 'acne'; did you mean 'acme'? Possible: auto, acme, reference",
        ),
        (
            "BACKEND",
            "ACME",
            "KIMI_HAL_BACKEND: unknown backend 'ACME'; did you mean 'acme'? Possible: auto, acme, reference",
        ),
        ("BACKEND", "xyz", "KIMI_HAL_BACKEND: unknown backend 'xyz'. Possible: auto, acme, reference"),
        (
            "FALLBACK",
            "refrence",
            "KIMI_HAL_FALLBACK: unknown value 'refrence'; did you mean 'reference'? "
            "Possible: error, reference",
        ),
        (
            "EXECUTION",
            "interpreter",
            "KIMI_HAL_EXECUTION: unknown value 'interpreter'; did you mean 'interpreted'? "
            "Possible: native, portable, interpreted",
        ),
        ("BATCH_INVARIANT", "yes", "KIMI_HAL_BATCH_INVARIANT: unknown value 'yes'. Possible: 0, 1"),
        (
            "CHECK",
            "arg",
            "KIMI_HAL_CHECK: unknown value 'arg'; did you mean 'args'? Possible: off, args, shadow:N",
        ),
        (
            "CHECK",
            "shadow",
            "KIMI_HAL_CHECK: shadow needs the number of calls of which one is checked: shadow:100",
        ),
        (
            "CHECK",
            "shadow:0",
            "KIMI_HAL_CHECK: shadow:0 needs a whole number of calls, 1 or more: shadow:100",
        ),
        (
            "LOG",
            "WARN",
            "KIMI_HAL_LOG: unknown value 'WARN'; did you mean 'WARNING'? "
            "Possible: DEBUG, INFO, WARNING, ERROR, CRITICAL",
        ),
        (
            "OPS",
            "sparse_mla:acme.fast",
            "KIMI_HAL_OPS: 'sparse_mla:acme.fast' is not of the form operator=backend.implementation",
        ),
        (
            "OPS",
            "sparse_mla=acme",
            "KIMI_HAL_OPS: 'sparse_mla=acme' is not of the form operator=backend.implementation",
        ),
        (
            "OPS",
            "sparse_mla=acne.fast",
            "KIMI_HAL_OPS: unknown backend 'acne'; did you mean 'acme'? Possible: acme, reference",
        ),
        (
            "OPS",
            "sparse_mla=acme.fast,sparse_mla=acme.slow",
            "KIMI_HAL_OPS: sparse_mla is named twice: acme.fast and acme.slow",
        ),
    ],
)
def test_an_illegal_value_is_a_sentence(name, value, sentence):
    assert refused("acme", **{name: value}) == sentence


def test_an_unknown_operator_names_the_nearest_and_all():
    message = refused("acme", OPS="sparse_mal=acme.fast")
    start = "KIMI_HAL_OPS: unknown operator 'sparse_mal'; did you mean 'sparse_mla'? Possible: "
    assert message.startswith(start)
    assert "sparse_mla" in message.removeprefix(start).split(", ")


def test_overrides_are_read_with_spaces_and_a_trailing_comma():
    found = read("acme", OPS=" store_latent = acme.put , sparse_mla=reference.torch, ")
    assert found.override("store_latent") == "acme.put"
    assert found.override("sparse_mla") == "reference.torch"
    assert found.override("merge_attn_states") is None


def test_an_empty_value_counts_as_unset():
    assert read(BACKEND="", OPS=" ", LOG="") == Settings()


def test_an_unknown_variable_names_the_nearest_and_all():
    assert refused("acme", BAKEND="acme") == (
        "unknown variable KIMI_HAL_BAKEND; did you mean 'KIMI_HAL_BACKEND'? Known: KIMI_HAL_BACKEND, "
        "KIMI_HAL_OPS, KIMI_HAL_FALLBACK, KIMI_HAL_EXECUTION, KIMI_HAL_BATCH_INVARIANT, KIMI_HAL_CHECK, "
        "KIMI_HAL_LOG, KIMI_HAL_ACME_*"
    )


def test_every_problem_is_told_at_once():
    message = refused(BAKEND="acme", CHECK="on", FALLBACK="cpu")
    assert [line.split(":")[0].split(";")[0] for line in message.splitlines()] == [
        "KIMI_HAL_FALLBACK",
        "KIMI_HAL_CHECK",
        "unknown variable KIMI_HAL_BAKEND",
    ]


def test_a_removed_variable_names_its_replacement(monkeypatch):
    monkeypatch.setitem(settings.REMOVED, "KIMI_HAL_DEVICE", "use KIMI_HAL_BACKEND")
    assert refused(DEVICE="acme") == "KIMI_HAL_DEVICE was removed: use KIMI_HAL_BACKEND"


@pytest.mark.parametrize(
    "name", ["SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP_ADDR", "WEB_SERVICE_PORT", "WEB_PORT"]
)
def test_a_name_that_a_cluster_injects_passes(name):
    assert read(**{name: "tcp://10.0.0.7:80"}) == Settings()


def test_a_plugins_variables_are_kept_for_it():
    assert read("acme", ACME_SPLITS="4").plugins == (("KIMI_HAL_ACME_SPLITS", "4"),)


def test_a_variable_belongs_to_the_plugin_with_the_longest_prefix():
    assert settings.owner("KIMI_HAL_ACME_PRO_SPLITS", ["acme", "acme_pro"]) == "acme_pro"


def test_variables_tell_what_differs_from_the_defaults():
    found = read("acme", BACKEND="acme", CHECK="shadow:7", BATCH_INVARIANT="1", ACME_SPLITS="4")
    assert found.variables() == {
        "KIMI_HAL_BACKEND": "acme",
        "KIMI_HAL_CHECK": "shadow:7",
        "KIMI_HAL_BATCH_INVARIANT": "1",
        "KIMI_HAL_ACME_SPLITS": "4",
    }


def test_other_programs_variables_are_none_of_ours():
    assert Settings.from_env({"KIMI_HALO": "1", "PATH": "/bin"}, plugins=()) == Settings()


def test_reading_settings_imports_no_torch():
    code = (
        "import sys; from kimi_hal.settings import Settings; Settings.from_env(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"KIMI_HAL_OPS": "sparse_mla=reference.torch"}
    )
