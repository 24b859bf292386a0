"""What this backend's own attention claims and refuses, how it is cut, and what its code is told."""

from __future__ import annotations

import re

import pytest
import torch

from kimi_hal.dispatch import matching
from kimi_hal.errors import TableError
from kimi_hal.ops.operator import get
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal_nvidia import attention_plan, cubins, merge_states, sizes, sparse_mla
from kimi_hal_nvidia.attention_plan import FORMS, configurations, cut
from kimi_hal_nvidia.implementations import IMPLEMENTATIONS
from kimi_hal_nvidia.parameters import Parameters
from kimi_hal_nvidia.sparse_mla_claims import SPARSE_MLA

H200 = matching.Target("sm_90", {"nvidia-driver": "580.159"})
FP8 = "latent.fp8.e4m3fn.tensor"


def limits(rows: int) -> Limits:
    return Limits(max_rows=rows, max_reqs=rows)


def refusals(spec: SparseMLASpec, target: matching.Target = H200) -> list[str]:
    capability = SPARSE_MLA[0].capabilities[0]
    return list(matching.refusals(get("sparse_mla"), spec, limits(64), capability, target))


@pytest.mark.parametrize("heads", [1, 12, 96, 128])
@pytest.mark.parametrize("latent", [FP8, "latent.nvfp4.352"])
def test_any_head_count_and_both_packed_formats_are_covered(heads: int, latent: str) -> None:
    assert refusals(SparseMLASpec(num_heads=heads, latent=latent)) == []


def test_what_is_beyond_the_claim_is_refused_together() -> None:
    spec = SparseMLASpec(num_heads=12, latent="latent.bf16", q_dtype="float8_e4m3fnuz", out_dtype="float32")
    assert refusals(spec) == [
        "latent='latent.bf16' is not 'latent.fp8.e4m3fn.tensor' | 'latent.nvfp4.352'",
        "q_dtype='float8_e4m3fnuz' is not 'bfloat16' | 'float8_e4m3fn'",
        "out_dtype='float32' is not covered, only its default 'bfloat16'",
    ]


def test_another_architecture_is_refused_by_name() -> None:
    blackwell = matching.Target("sm_100", {"nvidia-driver": "580.159"})
    assert refusals(SparseMLASpec(num_heads=12, latent=FP8), blackwell) == ["arch sm_100 is not sm_90"]


@pytest.mark.parametrize(("operator", "before"), [("sparse_mla", True), ("merge_attn_states", False)])
def test_attention_goes_before_the_portable_one_and_the_merge_by_a_table_alone(
    operator: str, before: bool
) -> None:
    ranks = {i.name: max(p.rank for p in i.preferences) for i in IMPLEMENTATIONS if i.operator == operator}
    assert (ranks["cuda"] > ranks["triton"]) is before


@pytest.mark.parametrize(
    ("heads", "rows", "form", "parts", "in_memory"),
    [
        (12, 1, "few", 16, False),
        (12, 7, "few", 16, False),
        (12, 8, "16", 8, False),
        (12, 20, "16", 4, False),
        (12, 32, "16", 4, True),
        (12, 64, "16", 2, True),
        (12, 128, "16", 1, False),
        (12, 96, "16", 1, False),
        (12, 160, "16", 4, True),
        (12, 192, "16", 2, True),
        (12, 256, "pair", 1, False),
        (12, 320, "16", 2, True),
        (12, 1024, "pair", 1, False),
        (12, 4096, "pair", 1, False),
        (24, 512, "32", 1, False),
        (96, 1, "few", 16, False),
        (96, 4, "16", 4, False),
        (96, 8, "32", 4, False),
        (96, 16, "48", 4, True),
        (96, 24, "48", 2, True),
        (96, 32, "48", 2, True),
        (96, 64, "48", 1, False),
        (96, 320, "48", 1, False),
        (96, 4096, "48", 1, False),
    ],
)
def test_keys_are_cut_as_it_took_the_least_time(
    heads: int, rows: int, form: str, parts: int, in_memory: bool
) -> None:
    way = cut(SparseMLASpec(num_heads=heads, latent=FP8), limits(rows), {})
    assert (way.form.name, way.parts, way.in_memory) == (form, parts, in_memory)


@pytest.mark.parametrize(
    ("rows", "form", "parts", "in_memory"),
    [
        (1, "few", 16, False),
        (8, "16", 8, False),
        (32, "16", 4, True),
        (64, "16", 2, True),
        (320, "16", 2, True),
        (4096, "16", 1, False),
    ],
)
def test_nibbles_are_decoded_once_for_many_rows_too(
    rows: int, form: str, parts: int, in_memory: bool
) -> None:
    way = cut(SparseMLASpec(num_heads=12, latent="latent.nvfp4.352"), limits(rows), {})
    assert (way.form.name, way.parts, way.in_memory) == (form, parts, in_memory)


@pytest.mark.parametrize(("heads", "rows"), [(12, 32), (12, 320), (96, 8), (96, 32), (12, 64)])
def test_a_plan_asks_for_what_its_parts_leave_and_for_the_words_that_count_them(
    heads: int, rows: int
) -> None:
    spec = SparseMLASpec(num_heads=heads, latent=FP8)
    way, asked = cut(spec, limits(rows), {}), sizes.sparse_mla(spec, limits(rows), "sm_90")
    items = rows * way.form.blocks(spec)
    each = items * way.parts * way.form.heads * attention_plan.PARTIAL_BYTES
    assert asked.workspace == (each if way.in_memory else 0)
    assert asked.persistent == (sizes.ATTENTION_LAUNCHES * -(-8 * items // 16) * 16 if way.in_memory else 0)
    assert asked.workspace <= attention_plan.MOST_WORKSPACE


def test_ways_that_meet_in_memory_are_tried_where_the_plan_asks_for_as_much() -> None:
    spec = SparseMLASpec(num_heads=12, latent=FP8)
    some, none = (configurations(spec, limits(rows), "sm_90") for rows in (32, 128))
    assert {"form": 1, "parts": 4, "in_memory": 1} in some
    assert {"form": 1, "parts": 3} in some
    assert not any("in_memory" in way for way in none)


@pytest.mark.parametrize("latent", [FP8, "latent.nvfp4.352"])
@pytest.mark.parametrize("heads", [1, 12, 16, 17, 24, 40, 48, 90, 96, 128])
def test_each_configuration_that_is_tried_is_what_a_plan_launches(latent: str, heads: int) -> None:
    words = torch.zeros(8)
    for topk in (1, 64, 130, 512, 1000, 2048, 4096):
        spec = SparseMLASpec(num_heads=heads, latent=latent, topk=topk)
        for rows in (1, 2, 3, 5, 8, 16, 24, 31, 32, 33, 48, 64, 100, 160, 192, 256, 320, 500, 1024):
            asked = sizes.sparse_mla(spec, limits(rows), "sm_90")
            tried = configurations(spec, limits(rows), "sm_90")
            assert len({tuple(way.items()) for way in tried}) == len(tried)
            for chosen in tried:
                way = cut(spec, limits(rows), chosen)
                assert way.configuration == chosen
                counted = sparse_mla.words_of(spec, limits(rows), way, words)
                assert (counted is words) is way.in_memory
                if way.in_memory:
                    counts = sizes.ATTENTION_LAUNCHES * attention_plan.counter_bytes(spec, limits(rows), way)
                    assert attention_plan.workspace_bytes(spec, limits(rows), way) <= asked.workspace
                    assert counts <= asked.persistent


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return how kernels are launched from here on: blocks in x and y, stream, and blocks of a cluster."""
    every: list[tuple[int, ...]] = []
    monkeypatch.setattr(sparse_mla.driver, "kernel", lambda *_, **__: None)
    monkeypatch.setattr(sparse_mla.driver, "launcher", lambda *_, **__: lambda *how: every.append(how))
    monkeypatch.setattr(sparse_mla, "raw_stream", lambda _: lambda: 0)
    return every


def attend_without_words(spec: SparseMLASpec, rows: int, chosen: dict[str, int]) -> None:
    """Attend by a configuration, with no words to count parts by."""
    attend = sparse_mla.Attention(spec, limits(rows), cut(spec, limits(rows), chosen), "sm_90", 0)
    q, cache = torch.empty(rows, spec.num_heads, 576, dtype=torch.bfloat16), torch.empty(1, 64 * 576)
    indices, out = torch.empty(rows, spec.topk), torch.empty(rows, spec.num_heads, 512)
    attend(q, cache, indices, None, None, None, None, None, out, torch.empty(out.shape[:2]))


def test_parts_of_any_number_meet_in_a_cluster_where_words_are_wanting(
    launched: list[tuple[int, ...]],
) -> None:
    spec, rows = SparseMLASpec(num_heads=96, latent=FP8), 8
    attend_without_words(spec, rows, {"form": 2, "parts": 5, "in_memory": 1})
    assert launched == [(rows * 3 * 5, 1, 0, 5)]


@pytest.mark.parametrize(
    "chosen",
    [
        {"form": 9, "parts": 1},
        {"form": 1, "parts": 5},
        {"form": 5, "parts": 2, "in_memory": 1},
        {"parts": 64},
    ],
)
def test_a_table_that_names_no_way_of_cutting_is_refused_with_a_sentence(chosen: dict[str, int]) -> None:
    with pytest.raises(TableError, match=r"sparse_mla cannot cut 32 tiles of keys by .*--tune"):
        cut(SparseMLASpec(num_heads=12, latent=FP8), limits(8), chosen)


def test_a_table_s_line_holds_for_all_rows_of_its_class_in_clusters_where_more_would_be_left() -> None:
    spec, chosen = SparseMLASpec(num_heads=12, latent=FP8), {"form": 1, "parts": 2, "in_memory": 1}
    few, many = (cut(spec, limits(rows), chosen) for rows in (320, 512))
    assert few == many
    words = torch.zeros(8)
    assert sparse_mla.words_of(spec, limits(320), few, words) is words
    assert sparse_mla.words_of(spec, limits(512), many, words) is None


@pytest.mark.parametrize(
    ("topk", "form", "parts"), [(2048, "few", 16), (512, "few", 8), (3000, "16", 16), (5000, "16", 16)]
)
def test_few_rows_are_cut_into_a_power_of_two_of_parts_that_fit(topk: int, form: str, parts: int) -> None:
    way = cut(SparseMLASpec(num_heads=12, latent=FP8, topk=topk), limits(1), {})
    assert (way.form.name, way.parts) == (form, parts)


@pytest.mark.parametrize(("topk", "most"), [(1, 1), (64, 1), (65, 2), (200, 4)])
def test_no_part_is_without_a_tile(topk: int, most: int) -> None:
    spec = SparseMLASpec(num_heads=12, latent=FP8, topk=topk)
    assert cut(spec, limits(1), {}).parts <= most
    assert all(way["parts"] <= most for way in configurations(spec, limits(1), "sm_90"))


def test_a_form_cuts_a_row_no_further_than_its_blocks_have_room_to_meet() -> None:
    spec, most = SparseMLASpec(num_heads=96, latent=FP8), {form.number: form.parts for form in FORMS}
    assert all(way["parts"] <= most[way["form"]] for way in configurations(spec, limits(1), "sm_90"))


def test_a_configuration_is_followed_and_the_builder_s_own_choice_is_one() -> None:
    spec = SparseMLASpec(num_heads=24, latent=FP8)
    tried = configurations(spec, limits(8), "sm_90")
    for way in tried:
        assert cut(spec, limits(8), way).configuration == way
    assert cut(spec, limits(8), {}).configuration == tried[0]
    assert [form.number for form in FORMS] == sorted({form.number for form in FORMS})


@pytest.mark.parametrize("rows", [133, 256, 70000])
def test_an_uncut_row_of_few_keys_has_a_block_of_its_own(launched: list[tuple[int, ...]], rows: int) -> None:
    attend_without_words(SparseMLASpec(num_heads=12, latent=FP8, topk=128), rows, {"form": 5, "parts": 1})
    assert launched == [(rows, 1, 0, 1)]


@pytest.mark.parametrize("by", [1, 2, 3, 48, 64, 1000, 1 << 20, (1 << 31) - 1, (1 << 32) - 1])
def test_a_division_is_a_product_and_a_shift(by: int) -> None:
    divisor, factor, shift = sparse_mla.divisor(by)
    assert (divisor, factor >> 32, shift < 64) == (by, 0, True)
    for n in (0, 1, by - 1, by, by + 1, 5 * by - 1, 12345678, (1 << 31) - 1):
        if n < 1 << 31:
            assert n * factor >> shift == n // by


def test_the_structure_and_the_shared_memory_are_those_that_the_source_asserts() -> None:
    source = (cubins.SOURCES / "sparse_mla.cu").read_text()
    rooms = dict(re.findall(r"sizeof\(Room<(\w+)_shape>\) == (\d+)", source))
    for name, slices, size in re.findall(r"sizeof\(FewRoom<(\w+), (\d)>\) == (\d+)", source):
        rooms[f"{name.lower()}_{sparse_mla.SLICES[int(slices)]}"] = size
    kept = [kernel for kernels in sparse_mla.KERNELS.values() for kernel in kernels.values()]
    assert {name: int(size) for name, size in rooms.items()} == dict(kept)
    packed = Parameters(sparse_mla.ADDRESSES, sparse_mla.NUMBERS).size
    assert re.findall(r"sizeof\(Attention\) == (\d+)", source) == [str(packed)]


@pytest.mark.parametrize(("structure", "form"), [("Merging", merge_states.ANY), ("Few", merge_states.FEW)])
def test_the_merge_s_structures_are_as_long_as_in_the_source(structure: str, form: merge_states.Form) -> None:
    source = (cubins.SOURCES / "merge_states.cu").read_text()
    packed = Parameters(merge_states.ADDRESSES, form.numbers).size
    assert re.findall(rf"sizeof\({structure}\) == (\d+)", source) == [str(packed)]


def test_a_merge_counts_in_32_bits_where_tensors_are_no_larger() -> None:
    small, large = torch.empty(4, 8), torch.empty(1).expand(1 << 20, 1 << 20)
    assert merge_states.within(small)
    assert merge_states.within(large)  # one number, wherever its steps lead
    assert not merge_states.within(torch.empty((1 << 33) + 1, dtype=torch.uint8, device="meta"))


def test_a_merge_takes_64_bits_where_a_step_needs_them_though_none_is_taken() -> None:
    lone = torch.empty(8).as_strided((1, 8), (1 << 32, 1))
    assert not merge_states.within(lone)
    assert merge_states.within(lone.as_strided((1, 8), ((1 << 32) - 1, 1)))
