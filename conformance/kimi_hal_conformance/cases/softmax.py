"""Attention whose right answer is known by hand: masked blocks, duplicates, empty parts, stale memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from kimi_hal import formats
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal_conformance.case import INTERP, QUICK, Case, Make, Operands, add
from kimi_hal_conformance.cases.composites import LIMITS as COMPOSED
from kimi_hal_conformance.cases.composites import Context, dsa_operands, dsa_spec
from kimi_hal_conformance.cases.sparse_mla import attention_operands, scale_for
from kimi_hal_conformance.draws import block_tables, column, ints, normal, owned_slots, stale_pages

LIMITS = Limits(max_rows=128, max_reqs=16, max_context=4096)
FP8, BF16 = "latent.fp8.e4m3fn.tensor", torch.bfloat16
#: Head counts that users met: of the model at each tensor-parallel size, of others, and odd ones.
HEADS = (2, 4, 6, 7, 8, 16, 20, 24, 31, 32, 40, 48, 64, 96)


# --- sparse_mla -----------------------------------------------------------------------------------------


def equal_scores(spec: SparseMLASpec, values: Sequence[float], rows: Sequence[Sequence[int]]) -> Make:
    """Return keys of the given values, all with the same score (their shared parts are equal), and index rows."""

    def make(g: torch.Generator) -> Operands:
        cache = stale_pages(1, spec.page * formats.latent(spec.latent).row_bytes)
        latent = torch.tensor(values)[:, None].expand(-1, 512).contiguous()
        slots = torch.arange(len(values))
        scale = torch.ones(1) if formats.latent(spec.latent).needs_scale else None
        formats.latent(spec.latent).write(cache, spec.page, slots, latent, torch.ones(len(values), 64), scale)
        q = torch.zeros(len(rows), spec.num_heads, 576, dtype=BF16)
        q[..., 512:] = normal(g, len(rows), spec.num_heads, 64)
        width = max(map(len, rows))
        padded = [[*row, *[-1] * (width - len(row))] for row in rows]
        given = {"q": q, "cache": cache, "indices": ints([i for row in padded for i in row]).view(-1, width)}
        return given if scale is None else given | {"k_scale": scale}

    return make


def half_masked() -> list[list[int]]:
    """Return rows whose first block, or first half of one, is masked, and one with nothing else."""
    return [
        [-1] * 16 + [0, 1, 2, 3],
        [-1] * 64,
        [-1] * 32 + [1, 2, 3] * 10,
        [0, -1, -1, -1] + [-1] * 28 + [1],
        [3] + [-1] * 63,
    ]


def stale_page(spec: SparseMLASpec) -> Make:
    """Return 13 tokens on pages of 4, what is behind them NaN, and a request whose page was another's."""

    def make(g: torch.Generator) -> Operands:
        table = block_tables(g, [13, 3], spec.page, 7, 4)
        live = owned_slots(table, [13, 3], spec.page)
        cache = torch.full((7, spec.page * formats.latent(spec.latent).row_bytes), 0x7F, dtype=torch.uint8)
        scale = scale_for(spec.latent)
        formats.latent(spec.latent).write(
            cache, spec.page, live, normal(g, 16, 512), normal(g, 16, 64), scale
        )
        indices = torch.full((2, 16), -1, dtype=torch.int32)
        indices[0, :13], indices[1, :3] = torch.randperm(13, generator=g).int(), ints([2, 0, 1])
        indices[1, 3:] = 1 << 30  # a stale tail that index_len cuts off
        return {
            "q": normal(g, 2, spec.num_heads, 576, dtype=BF16),
            "cache": cache,
            "indices": indices,
            "block_table": table,
            "row_req": column([0, 1]),
            "index_len": column([16, 3]),
        } | ({} if scale is None else {"k_scale": scale})

    return make


def scale_ends(spec: SparseMLASpec, size: float = 1.0) -> Make:
    """Return records with given float32 scales, of which one is 0, all times ``size``, and elements that are 1."""

    def make(g: torch.Generator) -> Operands:
        cache = stale_pages(1, 64 * 656)
        rows = cache.view(64, 656)
        rows[:8, :512] = 0x38
        scales = torch.tensor([0.75, 1.3, 3.0, 0.001]).repeat(8, 1)
        scales[1] = torch.tensor([0.0, 1e-30, 2.0**-100, 1.0])
        scales[2] = torch.tensor([2.0**20, 1.0, 3e10, 0.5]) if size == 1.0 else scales[0]
        rows[:8, 512:528] = (scales * size).view(torch.uint8)
        rows[:8, 528:] = 0
        q = normal(g, 3, spec.num_heads, 576, dtype=BF16, spread=0.01)
        return {"q": q, "cache": cache, "indices": ints([0, 69, -1, 1, -1, -1, 2, -1, -1]).view(3, 3)}

    return make


def nvfp4_scales(spec: SparseMLASpec) -> Make:
    """Return records whose block scales are every finite e4m3 code that is not negative."""

    def make(g: torch.Generator) -> Operands:
        fmt = formats.latent(spec.latent)
        cache = stale_pages(1, 64 * fmt.row_bytes)
        fmt.write(cache, 64, torch.arange(8), normal(g, 8, 512), normal(g, 8, 64), None)
        lanes = fmt.row_bytes - 32
        rows = cache.view(64, fmt.row_bytes)
        rows[:4, lanes:] = torch.arange(128, dtype=torch.uint8).clamp(max=0x7E).view(4, 32)
        q = normal(g, 4, spec.num_heads, 576, dtype=BF16, spread=0.001)
        return {"q": q, "cache": cache, "indices": ints([0, 1, 2, 3]).view(4, 1)}

    return make


def infinite_logits(spec: SparseMLASpec) -> Make:
    """Return a row with one logit of −inf and one with all of them huge but finite."""

    def make(g: torch.Generator) -> Operands:
        given = dict(equal_scores(spec, (1.0, 2.0, 3.0), [[0, 1, 2], [2, 1, -1]])(g))
        rows = given["cache"][0].view(spec.page, -1)
        rows[1, 512:] = 0
        rows[1, 512] = 0xB8  # −1: the only element that the query sees
        given["q"][0] = 0.0
        given["q"][0, :, 512] = 3e38
        given["q"][1] = 0.0
        given["q"][1, :, 512] = 1e30
        return given

    return make


def masked_cases() -> Iterator[Case]:
    """Classes 1 and 4 on ``sparse_mla``: masked and repeated entries, and a page that was another's."""
    for name in (FP8, "latent.bf16"):
        spec = SparseMLASpec(num_heads=4, latent=name, topk=64)
        masked = equal_scores(spec, (0.0, 1.0, 2.0, 3.0), half_masked())
        yield attend(f"masked-first/{name}", spec, masked, 1)
        loud = equal_scores(spec, (448.0, 1.0, 1.0, 1.0), half_masked()[2:4])
        yield attend(f"masked-does-not-weigh/{name}", spec, loud, 1)
        twice = equal_scores(spec, (1.0, 3.0), [[0, 1, 1], [1, -1, 1], [0, 0, 0]])
        yield attend(f"duplicates/{name}", spec, twice, 1)
    for name in formats.names("latent"):
        spec = SparseMLASpec(
            num_heads=3, latent=name, topk=16, page=4, index_space="position", has_index_len=True
        )
        yield attend(f"stale-page/{name}", spec, stale_page(spec), 4)


def scale_cases() -> Iterator[Case]:
    """Classes 19 and 20 on ``sparse_mla``: scales and logits at their ends."""
    records = SparseMLASpec(num_heads=4, latent="latent.flashmla.656", topk=8)
    yield attend("record-scales", records, scale_ends(records), 20)
    yield attend("record-scales/small", records, scale_ends(records, 1e-8), 20)
    blocks = SparseMLASpec(num_heads=4, latent="latent.nvfp4.352", topk=8)
    yield attend("block-scales", blocks, nvfp4_scales(blocks), 20)
    far = SparseMLASpec(num_heads=2, latent=FP8, topk=8)
    yield attend("huge-logits", far, infinite_logits(far), 19)


def size_cases() -> Iterator[Case]:
    """Classes 7, 15 and 17 on ``sparse_mla``: numbers of heads, keys and rows."""
    for heads in HEADS:
        spec = SparseMLASpec(num_heads=heads, latent=FP8, topk=32)
        make = attention_operands(spec, 2, 32, 40)
        yield attend(f"heads{heads}", spec, make, 15, INTERP if heads < 8 else QUICK)
    spec = SparseMLASpec(num_heads=3, latent=FP8, topk=70)
    for keys in (0, 1, 31, 32, 33, 63, 64, 65, 70):
        make = attention_operands(spec, 4, keys, 80)
        yield attend(f"keys{keys}", spec, make, 7, INTERP if keys in (0, 33, 65) else QUICK)
    rows = SparseMLASpec(num_heads=1, latent=FP8, topk=4)
    yield attend("rows-70", rows, attention_operands(rows, 70, 4, 30), 17, QUICK)


def shard_cases() -> Iterator[Case]:
    """Class 11 on ``sparse_mla``: each rank of three that own positions in turn."""
    for rank in range(3):
        dcp = DCP(world=3, rank=rank, interleave=4)
        shard = SparseMLASpec(num_heads=3, latent=FP8, topk=40, page=8, index_space="position", dcp=dcp)
        yield attend(f"owner-of-3/rank{rank}", shard, attention_operands(shard, 3, 40, 60), 11)


def attend(label: str, spec: SparseMLASpec, make: Make, fault: int, since: str = INTERP) -> Case:
    """Return a case of ``sparse_mla``."""
    name = f"sparse_mla/edges/{label}"
    return Case(name, "sparse_mla", spec, LIMITS, make, since=since, fault=fault)


# --- merge_attn_states ----------------------------------------------------------------------------------


def given_parts(spec: MergeSpec, outs: Sequence[float], lses: Sequence[float]) -> Make:
    """Return one row of parts with the given outputs and LSEs."""

    def make(g: torch.Generator) -> Operands:
        shape = (spec.parts, 1, spec.num_heads)
        out = torch.tensor(outs).view(-1, 1, 1, 1).expand(*shape, spec.dim).contiguous()
        lse = torch.tensor(lses).view(-1, 1, 1).expand(shape).contiguous()
        return {"outs": out.to(getattr(torch, spec.dtype)), "lses": lse}

    return make


def merge_cases() -> Iterator[Case]:
    """Classes 2, 11 and 15 on ``merge_attn_states``."""
    nan, inf = math.nan, math.inf
    parts = {
        "thirds": ((1.0, 3.0), (0.0, math.log(3.0)), 11),
        "two-of-four-empty": ((2.0, nan, 4.0, nan), (1.0, -inf, 1.0, inf), 2),
        "all-empty": ((nan, nan, nan), (-inf, inf, nan), 2),
        "all-plus-inf": ((nan, 3.0), (inf, inf), 2),
        "all-nan": ((nan, 3.0), (nan, nan), 2),
        "empty-and-minus-20000": ((nan, 2.0), (-inf, -20_000.0), 2),
        "plus-inf-is-empty": ((nan, 2.0), (inf, 0.5), 2),
        "far-apart": ((1.0, 5.0, 7.0), (3e4, -3e4, 3e4), 2),
        "largest": ((1.0, 5.0), (3e38, 3e38), 2),
    }
    for label, (outs, lses, fault) in parts.items():
        for dtype in ("bfloat16", "float32"):
            spec = MergeSpec(parts=len(outs), num_heads=3, dim=40, dtype=dtype, return_lse=True)
            yield merge(f"{label}/{dtype}", spec, given_parts(spec, outs, lses), fault)
    for heads, dim, rows in ((1, 1, 3), (7, 33, 70), (128, 8, 2)):
        spec = MergeSpec(parts=3, num_heads=heads, dim=dim, return_lse=True)
        yield merge(f"heads{heads}-dim{dim}-rows{rows}", spec, drawn_parts(spec, rows), 15)


def drawn_parts(spec: MergeSpec, rows: int) -> Make:
    """Return parts of very different weight; every third one is empty."""

    def make(g: torch.Generator) -> Operands:
        outs = normal(g, spec.parts, rows, spec.num_heads, spec.dim, dtype=BF16)
        lses = normal(g, spec.parts, rows, spec.num_heads, spread=20.0)
        empty = torch.arange(lses.numel()).view(lses.shape) % 3 == 1
        outs[empty], lses[empty] = math.nan, -math.inf
        return {"outs": outs, "lses": lses}

    return make


def merge(label: str, spec: MergeSpec, make: Make, fault: int) -> Case:
    """Return a case of ``merge_attn_states``."""
    name = f"merge_attn_states/edges/{label}"
    return Case(name, "merge_attn_states", spec, LIMITS, make, since=INTERP, fault=fault)


# --- dsa_decode -----------------------------------------------------------------------------------------


def all_keys_alike(spec: DSASpec, lengths: Sequence[int], grouped: bool) -> Make:
    """Return rows over requests whose index keys are all the same, so that position alone decides."""

    def context(g: torch.Generator) -> Context:
        found = Context.draw(g, lengths)
        key = found.keys[0][:1]
        return Context(found.latents, [key.expand(n, -1).contiguous() for n in lengths])

    return dsa_operands(spec, lengths, grouped, context)


def padded_rows_nan(make: Make) -> Make:
    """Return the operands with NaN in every operand of the last row, which is padding."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        for own in operands.get("ranks", [operands]):
            for name in ("q", "index_q", "index_w"):
                own[name][-1] = math.nan
        return operands

    return wrapped


def equal_once_rounded(make: Make) -> Make:
    """Return index queries and weights of ones, for which scores of keys of nearly ones are whole numbers."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        for own in operands.get("ranks", [operands]):
            own |= {name: torch.ones_like(own[name]) for name in ("index_q", "index_w")}
        return operands

    return wrapped


def nearly_ones(lengths: Sequence[int]) -> Callable[[torch.Generator], Context]:
    """Return requests with index keys of ones of which half have one larger element: bfloat16 scores are equal."""

    def context(g: torch.Generator) -> Context:
        found = Context.draw(g, lengths)
        keys = [torch.ones_like(own) for own in found.keys]
        for own in keys:
            own[torch.rand(len(own), generator=g) < 0.5, 0] = 1.125
        return Context(found.latents, keys)

    return context


def broken_latent(lengths: Sequence[int]) -> Callable[[torch.Generator], Context]:
    """Return requests of which the first has a NaN in one latent."""

    def context(g: torch.Generator) -> Context:
        found = Context.draw(g, lengths)
        found.latents[0][5, 7] = math.nan
        return found

    return context


def dsa_cases() -> Iterator[Case]:
    """Classes 1, 2, 3, 7, 15, 22 on ``dsa_decode``."""
    one, two, four = dsa_spec(1), dsa_spec(2), dsa_spec(4)
    k = one.attn.topk
    around = dsa_operands(one, (k - 1, k, k + 1, 1), False)
    yield compose("lengths-around-k", one, around, 7)
    yield compose("all-keys-alike", one, all_keys_alike(one, (70, 49), False), 5)
    yield compose("all-keys-alike/two-ranks", two, all_keys_alike(two, (70, 49), True), 5, 2)
    yield compose("broken-padding", one, padded_rows_nan(dsa_operands(one, (60, 5), False)), 3)
    yield compose("broken-padding/two-ranks", two, padded_rows_nan(dsa_operands(two, (60, 5), True)), 3, 2)
    yield compose("empty-shards/four-ranks", four, dsa_operands(four, (2, 1, 70, 3), True), 2, 4)
    wide = dsa_spec(2, interleave=4)
    yield compose("bounds/two-ranks", wide, dsa_operands(wide, (5, 6, 9, 10, 57), True), 11, 2)
    for label, spec in (("", one), ("/two-ranks", two)):
        grouped, held = spec is two, (40, 30)
        rounded = rounding(spec)
        ties = dsa_operands(rounded, (70, 49), grouped, nearly_ones((70, 49)))
        yield compose(f"equal-once-rounded{label}", rounded, equal_once_rounded(ties), 5, 2 * grouped)
        broken = dsa_operands(spec, held, grouped, broken_latent(held))
        yield compose(f"broken-latent{label}", spec, broken, 19, 2 * grouped)
    fnuz = dsa_spec(1, latent="latent.fp8.e4m3fnuz.tensor", index="index.fp8.e4m3fn.ue8m0x4.page64")
    yield compose("dialect-per-cache", fnuz, dsa_operands(fnuz, (70, 20), False), 22)
    other = dsa_spec(1, latent="latent.fp8.e4m3fn.tensor", index="index.fp8.e4m3fnuz.f32.page64")
    yield compose("dialect-per-cache/other-way", other, dsa_operands(other, (70, 20), False), 22)
    for name in ("latent.flashmla.656", "latent.bf16"):
        spec = dsa_spec(1, latent=name)
        yield compose(f"latent/{name}", spec, dsa_operands(spec, (50, 9), False), 23)


def rounding(spec: DSASpec) -> DSASpec:
    """Return the Spec with bfloat16 scores, and a weight of 1 for every head."""
    query, indexer = replace(spec.query, weight_scale=1.0), replace(spec.indexer, score="bfloat16")
    return replace(
        spec, query=query, indexer=indexer, merge=spec.merge and replace(spec.merge, score="bfloat16")
    )


def compose(label: str, spec: DSASpec, make: Make, fault: int, ranks: int = 0) -> Case:
    """Return a case of ``dsa_decode``."""
    name = f"dsa_decode/edges/{label}"
    since = QUICK if ranks > 2 else INTERP
    return Case(name, "dsa_decode", spec, COMPOSED, make, since=since, fault=fault, ranks=ranks)


WHY = {
    "sparse_mla/edges/masked-first": "A first block that is masked, then four equal scores: their mean, and no NaN.",
    "sparse_mla/edges/masked-does-not-weigh": "Masked entries must not weigh 1: slot 0, where they may point, is loud.",
    "sparse_mla/edges/duplicates": "A key named twice counts twice: 7/3 and not 2.",
    "sparse_mla/edges/stale-page": "13 tokens on pages of 4, NaN behind them, a stale tail of indices.",
    "sparse_mla/edges/record-scales": "Scales of 0.75, 1.3, 3.0, 0.001, 0 and huge ones: none is a power of two.",
    "sparse_mla/edges/block-scales": "Every block scale that e4m3 has, each key read alone.",
    "sparse_mla/edges/huge-logits": "Logits near the end of float32, of both signs: none is taken for a mask.",
    "sparse_mla/edges/heads": "A head count that users met behind some tensor-parallel split.",
    "sparse_mla/edges/keys": "A number of keys around every tile.",
    "sparse_mla/edges/rows-70": "More rows than a block has.",
    "sparse_mla/edges/owner-of-3": "Positions of all ranks, of which this one attends to its own.",
    "merge_attn_states/edges/thirds": "1 and 3 with natural LSEs of 0 and ln 3: 2.5; another base gives 2.36 or 2.66.",
    "merge_attn_states/edges/two-of-four-empty": "Two of four parts NaN with LSEs of −inf and +inf: the others alone.",
    "merge_attn_states/edges/all-empty": "Every part empty, each in its own way: 0 and −inf.",
    "merge_attn_states/edges/all-plus-inf": "Every part empty by +inf: −inf, not their largest LSE.",
    "merge_attn_states/edges/all-nan": "Every part empty by NaN: −inf, not their largest LSE.",
    "merge_attn_states/edges/empty-and-minus-20000": "An LSE of −20,000 beside an empty part: exactly its output.",
    "merge_attn_states/edges/plus-inf-is-empty": "An LSE of +inf stands for no key, as some kernels write it.",
    "merge_attn_states/edges/far-apart": "LSEs 60,000 apart, two of them equal.",
    "merge_attn_states/edges/largest": "LSEs at the end of float32.",
    "merge_attn_states/edges/heads": "Head counts and sizes off every tile, weights that differ by e^40, empty parts.",
    "dsa_decode/edges/all-keys-alike": "Every index key the same: each rank attends to the smallest positions.",
    "dsa_decode/edges/equal-once-rounded": "Scores that are equal once rounded to bfloat16: position decides.",
    "dsa_decode/edges/broken-latent": "A NaN in a selected latent: it propagates; of a group its rank is empty.",
    "dsa_decode/edges/lengths-around-k": "One key fewer than k, as many, one more, and one key.",
    "dsa_decode/edges/broken-padding": "A padding row whose every operand is NaN gives 0 and −inf.",
    "dsa_decode/edges/empty-shards": "Requests of fewer keys than ranks: some ranks have none.",
    "dsa_decode/edges/bounds": "Global bounds under an interleave of 4: local counts 4 and 1, 4 and 2.",
    "dsa_decode/edges/dialect-per-cache": "Two caches in one call, each in a dialect of its own.",
    "dsa_decode/edges/latent/": "A latent format whose records hold no FP8 of one scale.",
}

for group in (masked_cases, scale_cases, size_cases, shard_cases, merge_cases, dsa_cases):
    add(group(), WHY)
