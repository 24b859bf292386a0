"""Loading: one plugin at a time, whatever it raises kept, every mistake in a declaration a sentence."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from fake_plugins import FP8, HERE, capability, implementation

from kimi_hal.dispatch import loader
from kimi_hal.dispatch.contract import (
    Capability,
    Implementation,
    OneOf,
    Preference,
    Probe,
    Properties,
    Range,
    Split,
    Target,
    TensorCap,
)
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal.dispatch.loader import load, resolve
from kimi_hal.dispatch.points import GROUP, installed
from kimi_hal.errors import PluginError, SettingsError, UnknownNameError
from kimi_hal.settings import Settings

AUTO, ACME = Settings(), Settings(backend="acme")


def raising(error):
    def call():
        raise error

    return call


def refused(settings=ACME):
    with pytest.raises(PluginError) as caught:
        load(settings)
    return str(caught.value)


def test_auto_loads_every_plugin_and_the_reference(plugins):
    plugins.add("acme")
    plugins.add("zeta", implementation("other"))
    assert sorted(load(AUTO).backends) == ["acme", "reference", "zeta"]


def test_a_named_backend_is_the_only_plugin_loaded(plugins):
    plugins.add("acme")
    plugins.module("zeta", __getattr__=raising(AssertionError("zeta was touched")))
    assert sorted(load(ACME).backends) == ["acme", "reference"]


def test_an_override_loads_its_backend_too(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    settings = Settings(backend="acme", ops=(("sparse_mla", "zeta.fast"),))
    assert sorted(load(settings).backends) == ["acme", "reference", "zeta"]


def test_a_plugin_not_loaded_is_loaded_when_it_is_asked_for(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    registry = load(ACME)
    assert registry.get("zeta").name == "zeta"


def test_an_unknown_backend_names_the_nearest(plugins):
    plugins.add("acme")
    with pytest.raises(UnknownNameError) as caught:
        load(AUTO).get("acne")
    assert str(caught.value) == "unknown backend 'acne'; did you mean 'acme'? Known: acme, reference"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ImportError("libacme.so: cannot open shared object"),
            "ImportError: libacme.so: cannot open shared object",
        ),
        (OSError("/dev/acme0: permission denied"), "OSError: /dev/acme0: permission denied"),
        (SystemExit("no licence"), "SystemExit: no licence"),
        (SystemExit(), "SystemExit"),
        (RecursionError("too deep"), "RecursionError: too deep"),
    ],
)
def test_whatever_the_hook_raises_is_shown_when_named(plugins, error, text):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(error)))
    assert refused() == f"plugin 'acme': kimi_hal_backend() raised {text}"


def test_what_importing_raises_is_shown_when_named(plugins, monkeypatch):
    plugins.points.append(EntryPoint("acme", "acme_is_not_installed.plugin", GROUP))
    assert refused() == (
        "plugin 'acme': importing acme_is_not_installed.plugin raised ModuleNotFoundError: "
        "No module named 'acme_is_not_installed'"
    )


def test_under_auto_it_is_one_warning_and_the_others_stay(plugins, caplog):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(OSError("driver too old"))))
    plugins.add("zeta")
    with caplog.at_level(logging.WARNING, logger="kimi_hal"):
        load(AUTO)
        registry = load(AUTO)
    assert sorted(registry.backends) == ["reference", "zeta"]
    assert caplog.messages == [
        "plugin 'acme': kimi_hal_backend() raised OSError: driver too old; it is left out, "
        "`kimi-hal doctor` says more"
    ]


def test_a_failure_keeps_its_traceback(plugins):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(OSError("driver too old"))))
    failure = load(AUTO).failures["acme"]
    assert failure.message == "kimi_hal_backend() raised OSError: driver too old"
    assert "Traceback (most recent call last)" in failure.traceback
    assert "in call\n    raise error" in failure.traceback


def test_the_error_of_a_named_plugin_carries_its_traceback(plugins):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(OSError("driver too old"))))
    with pytest.raises(PluginError) as caught:
        load(ACME)
    assert "in call\n    raise error\nOSError: driver too old" in caught.value.__notes__[0]


def test_a_plugin_that_cannot_even_be_looked_at_is_kept(plugins):
    class Odd:
        @property
        def __dict__(self):
            raise RuntimeError("no entry")

        def __dir__(self):
            raise RuntimeError("no entry")

    plugins.module("acme", plugin=Odd())
    plugins.points[0] = EntryPoint("acme", "fake_acme:plugin", GROUP)
    assert load(AUTO).failures["acme"].message == "checking it raised RuntimeError: no entry"


def test_an_interrupt_is_not_kept(plugins):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        load(AUTO)


def test_without_strict_a_named_failure_is_only_kept(plugins, caplog):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(OSError("driver too old"))))
    registry = load(ACME, strict=False)
    assert caplog.messages == []
    assert registry.failures["acme"].message == "kimi_hal_backend() raised OSError: driver too old"


@pytest.mark.parametrize("settings", [AUTO, ACME])
def test_two_plugins_of_one_name_are_an_error(plugins, settings):
    plugins.add("acme")
    plugins.points.append(EntryPoint("acme", "other_acme.plugin", GROUP))
    assert refused(settings) == (
        "plugin 'acme': two plugins have this name, kimi-hal (fake_acme) and kimi-hal (other_acme.plugin); "
        "uninstall one of them"
    )


def test_two_plugins_of_another_name_do_not_stand_in_the_way(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    plugins.points.append(EntryPoint("zeta", "other_zeta.plugin", GROUP))
    assert sorted(load(ACME).backends) == ["acme", "reference"]


def test_a_plugin_may_not_be_called_reference(plugins):
    plugins.points.append(EntryPoint("reference", "fake_reference", GROUP))
    assert refused(AUTO) == (
        "plugin 'reference': two plugins have this name, kimi-hal (kimi_hal.reference.plugin) and kimi-hal "
        "(fake_reference); uninstall one of them"
    )


@pytest.mark.parametrize("settings", [AUTO, ACME])
def test_a_misspelt_hook_is_an_error(plugins, settings):
    plugins.module("acme", kimi_hal_backnd=hookimpl(lambda: None))
    assert refused(settings) == (
        "plugin 'acme': unknown hook 'kimi_hal_backnd'; did you mean 'kimi_hal_backend'?"
    )


def test_a_hook_that_is_not_ours_names_the_only_one(plugins):
    plugins.module("acme", start=hookimpl(lambda: None))
    assert refused() == "plugin 'acme': unknown hook 'start'; the only hook is 'kimi_hal_backend'"


def test_a_hook_without_its_mark_is_an_error(plugins):
    plugins.module("acme", kimi_hal_backend=lambda: None)
    assert refused() == (
        "plugin 'acme': kimi_hal_backend is not marked; decorate it with kimi_hal.dispatch.hookspecs.hookimpl"
    )


def test_a_plugin_without_a_hook_is_an_error(plugins):
    plugins.module("acme", kimi_hal_backends=lambda: None)
    assert refused() == "plugin 'acme': it has no hook 'kimi_hal_backend'; is it 'kimi_hal_backends'?"
    plugins.points.clear()
    plugins.module("acme")
    assert refused() == "plugin 'acme': it has no hook 'kimi_hal_backend'"


@pytest.mark.parametrize("settings", [AUTO, ACME])
def test_a_hook_with_argument_defaults_is_an_error(plugins, settings):
    plugins.module("acme", kimi_hal_backend=hookimpl(lambda config=None: None))
    assert refused(settings) == (
        "plugin 'acme': kimi_hal_backend has an argument with a default (config=None), "
        "which no caller ever fills"
    )


def test_a_hook_of_another_signature_is_an_error(plugins):
    plugins.module("acme", kimi_hal_backend=hookimpl(lambda config: None))
    assert refused() == "plugin 'acme': kimi_hal_backend takes no argument, this one takes (config)"


@pytest.mark.parametrize(("answer", "text"), [(None, "None"), ("acme", "str 'acme'"), ({}, "dict {}")])
def test_a_hook_that_answers_something_else_is_an_error(plugins, answer, text):
    plugins.module("acme", kimi_hal_backend=hookimpl(lambda: answer))
    assert refused() == f"plugin 'acme': kimi_hal_backend() must return a Backend, it returned {text}"


@pytest.mark.parametrize(
    ("version", "advice"), [(2, "install a newer kimi-hal"), (0, "install a newer version of it")]
)
def test_another_api_version_says_which_side_to_upgrade(plugins, version, advice):
    plugins.add("acme", api_version=version)
    assert refused() == (
        f"plugin 'acme': it was written for plugin API {version}, this kimi-hal has API 1; {advice}"
    )


def test_another_api_version_is_left_out_under_auto(plugins):
    plugins.add("acme", api_version=2)
    assert sorted(load(AUTO).backends) == ["reference"]


def test_a_name_unlike_its_entry_point_is_an_error(plugins):
    plugins.add("acme", name="acme2")
    assert refused() == (
        "plugin 'acme': its entry point is named 'acme' but its Backend 'acme2'; they must be equal"
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("auto", "the name 'auto' is reserved"),
        ("Acme", "the name 'Acme' must be lower-case letters, digits and underscores, a letter first"),
        ("acme-2", "the name 'acme-2' must be lower-case letters, digits and underscores, a letter first"),
    ],
)
def test_a_name_that_cannot_stand_in_a_variable_is_an_error(plugins, name, sentence):
    plugins.add(name)
    assert load(AUTO).failures[name].message == sentence


def test_a_missing_module_of_ours_names_both_versions(plugins):
    plugins.points.append(EntryPoint("acme", "kimi_hal.of_the_future", GROUP))
    assert refused() == (
        "plugin 'acme': importing kimi_hal.of_the_future raised ModuleNotFoundError: No module named "
        "'kimi_hal.of_the_future'; this is kimi-hal 0.1.0"
    )


def test_a_missing_module_of_ours_names_what_the_distribution_asks_for(tmp_path, monkeypatch):
    info = tmp_path / "acme_hal-9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-hal\nVersion: 9.0\nRequires-Dist: kimi-hal<0.3,>=0.2\n"
    )
    (info / "entry_points.txt").write_text("[kimi_hal]\nacme = kimi_hal.of_the_future\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert refused() == (
        "plugin 'acme': importing kimi_hal.of_the_future raised ModuleNotFoundError: No module named "
        "'kimi_hal.of_the_future'; this is kimi-hal 0.1.0, and acme-hal 9.0 requires kimi-hal<0.3,>=0.2"
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"implementations": "all"}, "Backend.implementations='all' is not of the form 'module:function'"),
        ({"device": None}, "Backend.device must be str, got None"),
        (
            {"variables": {"ACME_SPLITS": "1..64"}},
            "variables: 'ACME_SPLITS' must begin with KIMI_HAL_ACME_",
        ),
        (
            {"variables": ("KIMI_HAL_ACME_X",)},
            "Backend.variables must be Mapping[str, str], got tuple ('KIMI_HAL_ACME_X',)",
        ),
        ({"overrides_composites": ("sparse_mla",)}, "overrides_composites: unknown composite 'sparse_mla'"),
        ({"targets": ("acme2",)}, "Backend.targets must be tuple[Target, ...], got tuple ('acme2',)"),
        (
            {"targets": (Target("acme2", ""),)},
            "targets: a target needs a name and an arch, got Target(name='acme2', arch='', code='', stand_in='')",
        ),
        (
            {"targets": (Target("acme2", "acme2"), Target("acme2", "acme3"))},
            "targets: 'acme2' is declared twice",
        ),
    ],
)
def test_an_ill_formed_backend_is_a_sentence(plugins, fields, sentence):
    plugins.add("acme", **fields)
    assert refused() == f"plugin 'acme': {sentence}"


def test_all_problems_of_a_backend_are_told_at_once(plugins):
    plugins.add("acme", implementations="all", device="acme.Device")
    assert refused() == (
        "plugin 'acme': Backend.implementations='all' is not of the form 'module:function'; "
        "Backend.device='acme.Device' is not of the form 'module:function'"
    )


def changed(item, **fields):
    return dataclasses.replace(item, **fields)


GOOD, COVERED = implementation(), capability()


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (changed(GOOD, operator="sparse_mal"), "unknown operator 'sparse_mal'; did you mean 'sparse_mla'?"),
        (changed(GOOD, name="composed"), "the name 'composed' is reserved"),
        (
            changed(GOOD, name="fast.v2"),
            "the name 'fast.v2' must be lower-case letters, digits and underscores, a letter first",
        ),
        (
            changed(GOOD, build="acme.attn.build"),
            "build='acme.attn.build' is not of the form 'module:function'",
        ),
        (changed(GOOD, size="size:"), "size='size:' is not of the form 'module:function'"),
        (changed(GOOD, compile="kernels"), "compile='kernels' is not of the form 'module:function'"),
        (
            changed(GOOD, execution=("nativ",)),
            "execution: unknown 'nativ'; did you mean 'native'? Possible: native, portable, interpreted, "
            "compile_only",
        ),
        (
            changed(GOOD, execution=()),
            "execution is empty; it needs one of native, portable, interpreted, compile_only",
        ),
        (
            changed(GOOD, execution="native"),
            "Implementation.execution must be tuple[str, ...], got str 'native'",
        ),
        (
            changed(GOOD, numerics=("attn.p=fp16",)),
            "numerics: unknown 'attn.p=fp16'; did you mean 'attn.p=bf16'? Possible: attn.k=bf16, attn.p=bf16, "
            "attn.p=fp8, kda.state=bf16, kda.chunk=bf16, logits=bf16, logits=fp8_sum, moe.act=mxfp8, "
            "moe.act=fp8_block, moe.act=fp8_tensor",
        ),
        (changed(GOOD, capabilities=()), "capabilities is empty; it covers nothing"),
        (
            changed(GOOD, capabilities=("all",)),
            "Implementation.capabilities must be tuple[Capability, ...], got tuple ('all',)",
        ),
        (
            changed(GOOD, capabilities=(capability(tensors={"q": "bfloat16"}),)),
            "capabilities[0]: tensors['q']: must be a TensorCap, got str 'bfloat16'",
        ),
        (
            changed(GOOD, capabilities=(capability(requires={"triton": 3}),)),
            "capabilities[0]: Capability.requires must be Mapping[str, str], got dict {'triton': 3}",
        ),
        (
            changed(GOOD, capabilities=(capability(checkpoint_multiple=0),)),
            "capabilities[0]: checkpoint_multiple must be 1 or more, got 0",
        ),
        (
            changed(GOOD, preferences=(Preference(rank="high"),)),
            "preferences[0]: Preference.rank must be int, got str 'high'",
        ),
        (
            changed(GOOD, capabilities=(capability(spec={"num_head": Range(1, 2)}),)),
            "capabilities[0]: spec: SparseMLASpec has no field 'num_head'; did you mean 'num_heads'?",
        ),
        (
            changed(GOOD, capabilities=(COVERED, capability(spec={"dcp.word": Range(1, 2)}))),
            "capabilities[1]: spec: SparseMLASpec has no field 'dcp.word'; did you mean 'dcp.world'?",
        ),
        (
            changed(GOOD, capabilities=(capability(spec={"page": (64,)}),)),
            "capabilities[0]: spec['page'] must be OneOf or Range, got tuple (64,)",
        ),
        (
            changed(GOOD, capabilities=(capability(spec={"index_space": OneOf(("positions",))}),)),
            "capabilities[0]: spec['index_space']: 'positions' is not 'slot' | 'position' | 'local'; "
            "did you mean 'position'?",
        ),
        (
            changed(GOOD, capabilities=(capability(limits={"max_row": Range(1, 2)}),)),
            "capabilities[0]: limits: Limits has no field 'max_row'; did you mean 'max_rows'?",
        ),
        (
            changed(GOOD, capabilities=(capability(tensors={"query": TensorCap()}),)),
            "capabilities[0]: tensors: sparse_mla has no argument 'query'",
        ),
        (
            changed(GOOD, capabilities=(capability(tensors={"q": TensorCap(align=24)}),)),
            "capabilities[0]: tensors['q']: align must be a power of two, got 24",
        ),
        (
            changed(GOOD, capabilities=(capability(tensors={"q": TensorCap(contiguous=("head",))}),)),
            "capabilities[0]: tensors['q']: contiguous: unknown 'head'; did you mean 'heads'? "
            "Possible: last, heads, all",
        ),
        (
            changed(GOOD, capabilities=(capability(properties=Properties(capture="graph")),)),
            "capabilities[0]: capture: unknown 'graph'. Possible: none, piecewise, full",
        ),
        (
            changed(GOOD, capabilities=(capability(properties=Properties(tie_rule="anything")),)),
            "capabilities[0]: tie_rule: unknown 'anything'; did you mean 'any'? Possible: contract, any",
        ),
        (
            changed(GOOD, capabilities=(capability(requires={"triton": "3.6"}),)),
            "capabilities[0]: requires['triton']: '3.6' is not a version specifier; "
            "write '>=3.6' or '>=3.6,<4'",
        ),
        (
            changed(GOOD, capabilities=(capability(arch=()),)),
            "capabilities[0]: arch is empty; name architectures, or '*' for portable code",
        ),
        (
            changed(GOOD, preferences=(Preference(rank=1, spec={"heads": Range(1, 2)}),)),
            "preferences[0]: spec: SparseMLASpec has no field 'heads'; did you mean 'num_heads'?",
        ),
        (
            changed(GOOD, split=(Split(("acme2",), {}),)),
            "split[0]: it needs architectures and what each compute unit does there",
        ),
        (
            changed(GOOD, split=(Split(("acme",), {"tensor unit": "attends"}),)),
            "split[0]: no capability covers 'acme'; did you mean 'acme2'?",
        ),
        (
            changed(
                GOOD,
                split=(Split(("*",), {"tensor unit": "attends"}), Split(("*",), {"gather unit": "reads"})),
            ),
            "split[1]: '*' has a split already",
        ),
        (
            changed(GOOD, split=(Split(("acme2",), {"tensor unit": ("attends",)}),)),
            "split[0]: Split.parts must be Mapping[str, str], got dict {'tensor unit': ('attends',)}",
        ),
    ],
)
def test_an_ill_formed_implementation_is_a_sentence(plugins, item, sentence):
    plugins.add("acme", item)
    assert refused() == f"plugin 'acme': {item.operator}.{item.name}: {sentence}"


def test_an_unknown_format_in_a_capability_names_the_nearest(plugins):
    plugins.add(
        "acme",
        implementation(capabilities=(capability(spec={"latent": OneOf(("latent.fp8.e4m3.tensor",))}),)),
    )
    assert refused().startswith(
        "plugin 'acme': sparse_mla.fast: capabilities[0]: spec['latent']: unknown latent format "
        f"'latent.fp8.e4m3.tensor'; did you mean '{FP8}'? Known: "
    )


def test_an_implementation_declared_twice_is_an_error(plugins):
    plugins.add("acme", GOOD, GOOD)
    assert refused() == "plugin 'acme': sparse_mla.fast is declared twice"


def test_one_name_may_implement_two_operators(plugins):
    other = Implementation("merge_attn_states", "fast", "fake:build", (Capability(("acme2",), {}),))
    plugins.add("acme", GOOD, other)
    assert len(load(ACME).get("acme").implementations) == 2


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ([], "implementations must be a tuple of Implementation, got list []"),
        (("fast",), "implementations[0] must be an Implementation, got str 'fast'"),
    ],
)
def test_implementations_of_another_type_are_a_sentence(plugins, declared, sentence):
    plugins.add("acme").IMPLEMENTATIONS = declared
    assert refused() == f"plugin 'acme': {sentence}"


def test_implementations_that_cannot_be_found_name_the_nearest(plugins):
    plugins.add("acme", implementations="fake_acme:IMPLEMENTATION")
    assert refused() == (
        "plugin 'acme': fake_acme:IMPLEMENTATION raised UnknownNameError: module fake_acme has no "
        "'IMPLEMENTATION'; did you mean 'IMPLEMENTATIONS'?"
    )


def test_a_probe_is_asked_once(plugins):
    asked = []
    plugins.add("acme", probe=lambda: asked.append(1) or HERE)
    registry = load(ACME)
    assert registry.probe("acme") is registry.probe("acme")
    assert asked == [1]


@pytest.mark.parametrize(
    ("probe", "sentence"),
    [
        (lambda: None, "fake_acme:probe: must return a Probe, it returned None"),
        (
            lambda: Probe(present=True),
            "fake_acme:probe: a present device needs `arch`, its architecture as capabilities name it",
        ),
        (
            lambda: Probe(present=False),
            "fake_acme:probe: an absent device needs `why`, what was looked for and not found",
        ),
        (
            lambda: Probe(present=True, arch="a", devices="Acme A2"),
            "fake_acme:probe: Probe.devices must be tuple[str, ...], got str 'Acme A2'",
        ),
        (raising(OSError("libacme.so: bad ELF")), "fake_acme:probe raised OSError: libacme.so: bad ELF"),
    ],
)
def test_a_wrong_probe_is_an_error_when_named(plugins, probe, sentence):
    plugins.add("acme", probe=probe)
    with pytest.raises(PluginError) as caught:
        load(ACME).probe("acme")
    assert str(caught.value) == f"plugin 'acme': {sentence}"


def test_a_wrong_probe_is_an_absent_device_under_auto(plugins, caplog):
    plugins.add("acme", probe=raising(OSError("libacme.so: bad ELF")))
    registry = load(AUTO)
    assert registry.probe("acme") == Probe(
        present=False, why="fake_acme:probe raised OSError: libacme.so: bad ELF"
    )
    assert caplog.messages == [
        "plugin 'acme': fake_acme:probe raised OSError: libacme.so: bad ELF; it is left out, "
        "`kimi-hal doctor` says more"
    ]
    assert "Traceback" in registry.failures["acme"].traceback


def test_a_plugins_own_variable_reaches_it(plugins):
    plugins.add("acme", variables={"KIMI_HAL_ACME_SPLITS": "1..64"})
    registry = load(Settings(backend="acme", plugins=(("KIMI_HAL_ACME_SPLITS", "4"),)))
    assert registry.variables("acme") == {"KIMI_HAL_ACME_SPLITS": "4"}


def refused_variable(plugins, variable, **fields):
    plugins.add("acme", **fields)
    with pytest.raises(SettingsError) as caught:
        load(Settings(plugins=((variable, "4"),)))
    return str(caught.value)


def test_a_variable_that_the_plugin_does_not_declare_names_the_nearest(plugins):
    assert refused_variable(plugins, "KIMI_HAL_ACME_SPLIT", variables={"KIMI_HAL_ACME_SPLITS": "1..64"}) == (
        "unknown variable KIMI_HAL_ACME_SPLIT; did you mean 'KIMI_HAL_ACME_SPLITS'? "
        "Declared by acme: KIMI_HAL_ACME_SPLITS"
    )


def test_a_variable_that_the_plugin_removed_names_its_replacement(plugins):
    message = refused_variable(
        plugins, "KIMI_HAL_ACME_PARTS", removed_variables={"KIMI_HAL_ACME_PARTS": "use KIMI_HAL_ACME_SPLITS"}
    )
    assert message == "KIMI_HAL_ACME_PARTS was removed: use KIMI_HAL_ACME_SPLITS"


def test_a_cluster_may_inject_names_under_a_plugins_prefix(plugins):
    plugins.add("acme")
    registry = load(Settings(plugins=(("KIMI_HAL_ACME_SERVICE_HOST", "10.0.0.7"),)))
    assert registry.variables("acme") == {}


def test_a_variable_of_a_plugin_that_is_not_loaded_is_left_alone(plugins):
    plugins.add("acme")
    plugins.add("zeta")
    load(Settings(backend="acme", plugins=(("KIMI_HAL_ZETA_ANYTHING", "4"),)))


@pytest.mark.parametrize(
    ("full_name", "sentence"),
    [
        (
            "acme.fest",
            "KIMI_HAL_OPS: unknown implementation of sparse_mla 'acme.fest'; did you mean 'acme.fast'? "
            "Known: acme.fast",
        ),
        (
            "acme.merge",
            "KIMI_HAL_OPS: acme.merge implements merge_attn_states, not sparse_mla. Known: acme.fast",
        ),
    ],
)
def test_an_override_that_does_not_exist_is_an_error_at_load(plugins, full_name, sentence):
    merge = Implementation("merge_attn_states", "merge", "fake:build", (Capability(("acme2",), {}),))
    plugins.add("acme", GOOD, merge)
    with pytest.raises(SettingsError) as caught:
        load(Settings(ops=(("sparse_mla", full_name),)))
    assert str(caught.value) == sentence


def test_an_override_into_a_broken_plugin_shows_its_error(plugins):
    plugins.module("acme", kimi_hal_backend=hookimpl(raising(OSError("driver too old"))))
    assert refused(Settings(ops=(("sparse_mla", "acme.fast"),))) == (
        "plugin 'acme': kimi_hal_backend() raised OSError: driver too old"
    )


def test_without_strict_problems_of_settings_are_told_together(plugins):
    plugins.add("acme")
    wrong = Settings(ops=(("sparse_mla", "acme.fest"),), plugins=(("KIMI_HAL_ACME_X", "1"),))
    assert list(loader.problems_of_settings(load(wrong, strict=False))) == [
        "unknown variable KIMI_HAL_ACME_X. Declared by acme: none",
        "KIMI_HAL_OPS: unknown implementation of sparse_mla 'acme.fest'; did you mean 'acme.fast'? "
        "Known: acme.fast",
    ]


def test_a_plugin_may_bring_formats(plugins, monkeypatch):
    from kimi_hal.formats import latent, registry

    monkeypatch.setattr(registry, "_formats", dict(registry._formats))
    extra = dataclasses.replace(latent(FP8), name="latent.acme.576")
    covered = capability(spec={"latent": OneOf(("latent.acme.576",))})
    plugins.add("acme", implementation(capabilities=(covered,)), formats="fake_acme:FORMATS").FORMATS = (
        extra,
    )
    loaded = load(ACME)
    assert latent("latent.acme.576") is extra
    (reference,) = loaded.get("reference").of("sparse_mla")
    assert "latent.acme.576" in reference.capabilities[0].spec["latent"].values


def test_resolve_imports_what_a_name_stands_for():
    assert resolve("kimi_hal.dispatch.loader:resolve") is resolve


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("kimi_hal.dispatch.loader", "'kimi_hal.dispatch.loader' is not of the form 'module:function'"),
        (
            "kimi_hal.dispatch.loader:resolv",
            "module kimi_hal.dispatch.loader has no 'resolv'; did you mean 'resolve'?",
        ),
    ],
)
def test_resolve_says_what_is_wrong(name, sentence):
    with pytest.raises(UnknownNameError) as caught:
        resolve(name)
    assert str(caught.value) == sentence


def test_installed_names_plugins_without_loading_them(plugins):
    plugins.module("zeta")
    plugins.module("acme")
    assert installed() == ("acme", "zeta")


def test_loading_and_probing_everything_imports_no_torch():
    code = (
        "import sys\n"
        "from kimi_hal.dispatch.loader import load\n"
        "from kimi_hal.settings import Settings\n"
        "registry = load(Settings(), strict=False)\n"
        "[registry.probe(name) for name in registry.backends]\n"
        "assert 'reference' in registry.backends\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
