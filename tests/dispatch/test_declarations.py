"""What a plugin declares of itself and of its implementations: every mistake a sentence."""

from __future__ import annotations

import dataclasses

import pytest
from fake_plugins import FP8, capability, implementation
from loading import ACME, refused

from kimi_hal.dispatch.contract import (
    Capability,
    Implementation,
    OneOf,
    Preference,
    Properties,
    Range,
    Split,
    Target,
    TensorCap,
)
from kimi_hal.dispatch.loader import load


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
            "attn.p=fp8, attn.q=fp8_block, attn.dots=fp8_sum, kda.state=bf16, kda.chunk=bf16, logits=bf16, "
            "logits=fp8_sum, moe.act=mxfp8, moe.act=fp8_block, moe.act=fp8_tensor",
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
