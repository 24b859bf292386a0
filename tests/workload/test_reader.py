"""What an accessor gives, on a synthetic file: no encoder is needed to read a workload."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from workload_cases import CONTENT, METADATA
from workload_cases import tensors as synthetic_tensors

from kimi_hal.errors import FormatError
from kimi_hal.workload import Workload, codes


def real_hidden(workload: Workload) -> torch.Tensor:
    tensors = synthetic_tensors()
    return codes.unpack(tensors["hidden.codes"]).double() * tensors["hidden.scale"] * 2.0**-16


def real_heads(workload: Workload, name: str) -> torch.Tensor:
    """The projection in floating point, without the roundings to integers."""
    tensors = synthetic_tensors()
    weight, bias = tensors[f"{name}.weight"].double() * 2**-13, tensors[f"{name}.bias"].double() * 2**-12
    return (real_hidden(workload) @ weight.T + bias).view(-1, 12, 32)


def test_importing_the_reader_needs_no_torch() -> None:
    code = "import sys, kimi_hal.workload as w; w.activations_path(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shapes_and_types(synthetic: Workload) -> None:
    bf16, rows = torch.bfloat16, range(4, 10)
    query, weights = synthetic.index_query(rows)
    kv_c, k_pe = synthetic.latents(2, 7)
    gate, bias = synthetic.router()
    kda = synthetic.kda_inputs(rows, 12)
    shapes = {
        "index_keys": (synthetic.index_keys(), (synthetic.context, 128), bf16),
        "index_query": (query, (6, 32, 128), bf16),
        "index_weights": (weights, (6, 32), bf16),
        "kv_c": (kv_c, (5, 512), bf16),
        "k_pe": (k_pe, (5, 64), bf16),
        "mla_query": (synthetic.mla_query(rows), (6, 96, 576), bf16),
        "hidden": (synthetic.hidden(rows), (6, 7168), bf16),
        "latent_hidden": (synthetic.hidden(rows, 3584), (6, 3584), bf16),
        "gate": (gate, (896, 7168), bf16),
        "bias": (bias, (896,), torch.float32),
        "logits": (synthetic.router_logits(rows), (6, 896), torch.float32),
        "x": (kda.x, (6, 3 * 12 * 128), bf16),
        "raw_g": (kda.raw_g, (6, 12, 128), bf16),
        "raw_beta": (kda.raw_beta, (6, 12), bf16),
        "out_gate": (kda.out_gate, (6, 12, 128), bf16),
        "conv_weight": (kda.conv_weight, (3 * 12 * 128, 4), bf16),
        "A_log": (kda.A_log, (12,), torch.float32),
        "dt_bias": (kda.dt_bias, (12 * 128,), torch.float32),
        "norm_weight": (kda.norm_weight, (128,), torch.float32),
    }
    for name, (tensor, shape, dtype) in shapes.items():
        assert tuple(tensor.shape) == shape, name
        assert tensor.dtype == dtype, name
        assert tensor.is_contiguous(), name


def test_no_rows_give_empty_operands(synthetic: Workload) -> None:
    assert synthetic.index_query([])[0].shape == (0, 32, 128)
    assert synthetic.mla_query([]).shape == (0, 96, 576)
    assert synthetic.kda_inputs([], 2).x.shape == (0, 768)
    assert synthetic.hidden([]).shape == (0, 7168)
    assert synthetic.latents(3, 3)[0].shape == (0, 512)


def test_index_keys_are_the_keys_of_four_heads(synthetic: Workload) -> None:
    expected = real_heads(synthetic, "key")[:, [4, 6, 9, 10]].flatten(1)
    torch.testing.assert_close(synthetic.index_keys(dtype=torch.float64), expected, rtol=0, atol=2**-12)


def test_an_index_head_sums_real_attention_scores(synthetic: Workload) -> None:
    heads = [4, 6, 9, 10]
    query, key = real_heads(synthetic, "query")[:, heads], real_heads(synthetic, "key")[:, heads]
    each = torch.einsum("tjd,sjd->tjs", query, key)
    patterns = synthetic._patterns
    expected = torch.einsum("nj,tjs->tns", patterns, each)
    wide, _ = synthetic.index_query(slice(None), dtype=torch.float64)
    scores = torch.einsum("tnd,sd->tns", wide, synthetic.index_keys(dtype=torch.float64))
    torch.testing.assert_close(scores, expected, rtol=0, atol=0.3)
    assert len({tuple(p) for p in patterns.tolist()}) == 32
    assert patterns.sum(-1).min() > 0


def test_mla_heads_have_the_encoders_attention(synthetic: Workload) -> None:
    query, key = real_heads(synthetic, "query"), real_heads(synthetic, "key")
    logits = torch.einsum("thd,shd->ths", query, key) * 32**-0.5
    latents = torch.cat(synthetic.latents(dtype=torch.float64), -1)
    wide = synthetic.mla_query(slice(None), 12, dtype=torch.float64)
    found = torch.einsum("thd,sd->ths", wide, latents) * 192**-0.5
    # Equal up to a constant of the row, which the key's bias adds.
    off = (found - logits) - (found - logits).mean(-1, keepdim=True)
    assert float(off.abs().max()) < 0.05 < float(logits.std())


def test_a_ranks_heads_are_a_part_of_all(synthetic: Workload) -> None:
    rows, heads = range(3), range(12, 24)
    assert synthetic.mla_query(rows, heads).equal(synthetic.mla_query(rows)[:, 12:24])
    part, whole = synthetic.kda_inputs(rows, heads), synthetic.kda_inputs(rows)
    assert part.x.view(3, 3, 12, 128).equal(whole.x.view(3, 3, 96, 128)[:, :, 12:24])
    assert part.raw_g.equal(whole.raw_g[:, 12:24])
    assert part.raw_beta.equal(whole.raw_beta[:, 12:24])
    assert part.out_gate.equal(whole.out_gate[:, 12:24])
    assert part.conv_weight.view(3, 12, 128, 4).equal(whole.conv_weight.view(3, 96, 128, 4)[:, 12:24])
    assert part.A_log.equal(whole.A_log[12:24])
    assert part.dt_bias.view(12, 128).equal(whole.dt_bias.view(96, 128)[12:24])


def test_kda_keeps_the_dot_product_of_q_and_k(synthetic: Workload) -> None:
    x = synthetic.kda_inputs(range(9), range(6), dtype=torch.float64).x.view(9, 3, 6, 128)
    found = torch.einsum("thd,shd->ths", x[:, 0], x[:, 1])
    joined = [real_heads(synthetic, n)[:9].reshape(9, 3, 128) for n in ("query", "key")]
    expected = torch.einsum("thd,shd->ths", *joined).repeat(1, 2, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)


def test_rows_that_are_named_twice_are_equal(synthetic: Workload) -> None:
    once = synthetic.hidden([5])
    assert synthetic.hidden(5).equal(once)
    assert synthetic.hidden(torch.tensor([5, 5])).equal(once.repeat(2, 1))
    assert synthetic.hidden(slice(5, 6)).equal(once)


def test_projections_join_the_widths(synthetic: Workload) -> None:
    f64 = torch.float64
    for wide, narrow in ((3584, 7168), (7168, 3584)):
        expected = synthetic.hidden(range(4), wide, dtype=f64)
        found = (
            synthetic.hidden(range(4), narrow, dtype=f64) @ synthetic.projection(wide, narrow, dtype=f64).T
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_router_logits_are_hidden_states_times_the_gate(synthetic: Workload) -> None:
    gate = synthetic.router(dtype=torch.float64).gate
    product = synthetic.hidden(range(6), dtype=torch.float64) @ gate.T
    torch.testing.assert_close(synthetic.router_logits(range(6)), product.float(), rtol=1e-6, atol=1e-6)


def test_a_channel_that_stands_out_is_kept(synthetic: Workload) -> None:
    narrow, wide = real_hidden(synthetic)[:8], synthetic.hidden(range(8), dtype=torch.float64)
    ratio = [x.abs().max() / x.square().mean().sqrt() for x in (narrow, wide)]
    torch.testing.assert_close(ratio[0], ratio[1], rtol=0.05, atol=0)


def test_the_text_of_a_position(synthetic: Workload) -> None:
    assert synthetic.text(2, around=0) == CONTENT[10:13]
    assert synthetic.text(2, around=2) == CONTENT[0:23]
    assert synthetic.text(0) == CONTENT[0:18]
    last = synthetic.context - 1
    assert synthetic.text(last, around=1) == CONTENT[5 * last - 5 : 5 * last + 3]


def test_the_place_of_a_position(synthetic: Workload) -> None:
    assert synthetic.place(0) == "a.py:1"
    assert synthetic.place(5) == f"a.py:{CONTENT[:25].count(chr(10)) + 1}"
    assert synthetic.place(176) == "b.py:1"
    assert synthetic.place(180) == f"b.py:{CONTENT[880:900].count(chr(10)) + 1}"


@pytest.mark.parametrize("rows", [-1, [0, 10_000], torch.tensor([-5]), range(10_000, 10_001)])
def test_a_position_outside_the_text_is_refused(synthetic: Workload, rows: object) -> None:
    with pytest.raises(IndexError, match=r"^position -?\d+ is outside the text's \d+ tokens$"):
        synthetic.hidden(rows)  # type: ignore[arg-type]


def test_a_head_outside_the_model_is_refused(synthetic: Workload) -> None:
    with pytest.raises(IndexError, match=r"^head 96 is outside the model's 96 heads$"):
        synthetic.mla_query([0], range(90, 97))
    with pytest.raises(IndexError, match=r"^head -1 is outside the model's 96 heads$"):
        synthetic.kda_inputs([0], [-1])


def test_the_expansion_is_pinned(synthetic: Workload) -> None:
    # The same bits on every machine and torch version; another hash means another file.FORMAT.
    assert synthetic.expansion_sha256() == PINNED


def test_verify_accepts_what_was_written() -> None:
    Workload(synthetic_tensors(), METADATA | {"expansion_sha256": PINNED}).verify()


def test_verify_refuses_other_bits() -> None:
    workload = Workload(synthetic_tensors(), METADATA | {"expansion_sha256": "0" * 64})
    sentence = (
        f"this machine widens the workload to other bits: sha256 {PINNED[:12]} with torch {torch.__version__}, "
        "written 000000000000 with torch 2.x; figures from the two machines are not of the same input"
    )
    with pytest.raises(FormatError) as caught:
        workload.verify()
    assert str(caught.value) == sentence


def test_another_seed_gives_other_maps() -> None:
    other = Workload(synthetic_tensors(), METADATA | {"seed": "32"})
    assert not other.hidden([0]).equal(Workload(synthetic_tensors(), METADATA).hidden([0]))


def test_repr_says_what_it_is(synthetic: Workload) -> None:
    assert repr(synthetic) == f"Workload({synthetic.context} tokens, seed 31, sha256 )"


PINNED = "278dd9b42d830353495d68333e4fd1368f0140a9fd789d91341177b08840f18c"
