"""Capacity arithmetic, against the public announcements' figures where these follow from a layout."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from cache_cases import FP8, MXFP4, NVFP4, POW2, kimi
from click.testing import CliRunner

from kimi_hal import cache
from kimi_hal.cache import Capacity, models
from kimi_hal.cli.capacity import command
from kimi_hal.errors import CacheError
from kimi_hal.ops.spec import DCP

GB = 10**9


def holds(memory: int = 52 * GB, states: int = 1, reserve: int = 0, **fields: Any) -> Capacity:
    return cache.capacity(kimi(**fields), memory, states=states, reserve=reserve)


# --- bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latent", "index", "size"),
    [
        (FP8, None, 13_824),  # Kimi K3
        (FP8, POW2, 16_992),
        (NVFP4, MXFP4, 10_080),
        (NVFP4, POW2, 11_616),
        (FP8, MXFP4, 15_456),
        ("latent.bf16", POW2, 30_816),
    ],
)
def test_bytes_of_a_token_on_every_device(latent: str, index: str | None, size: int) -> None:
    for tp in (4, 8, 16):
        assert holds(latent=latent, index=index, tp=tp).bytes_per_token == size
    assert holds(latent=latent, index=index, dcp=8).bytes_per_token == size / 8


def test_replicated_index_keys_are_not_divided() -> None:
    spread = cache.plan(block_size=1024, tp=8, latent=FP8, index=POW2, dcp=DCP(world=8, index="replicated"))
    assert cache.capacity(spread, 52 * GB).bytes_per_token == 24 * (576 / 8 + 132)


def test_state_bytes_follow_the_heads_and_not_the_formats() -> None:
    assert {holds(latent=x, index=y).state_bytes for x in (FP8, NVFP4) for y in (POW2, MXFP4)} == {
        69 * 814_080
    }
    assert holds(tp=16).state_bytes == 69 * 407_040


def test_public_kv_sizes_of_a_rollout() -> None:
    """SGLang: 589,824 tokens take 16.9 GiB a device, or 4.2 GiB with a quarter of the requests (bf16 latents)."""
    each = holds(latent="latent.bf16").bytes_per_token
    assert round(589_824 * each / 2**30, 1) == 16.9
    assert round(589_824 / 4 * each / 2**30, 1) == 4.2


def test_public_size_of_a_gathered_context() -> None:
    """vLLM: 0.7 GB a million tokens in FP8 for one layer's gathered latents and keys."""
    one_layer = (576 + 132) * 10**6
    assert one_layer == 0.708 * GB


# --- blocks and contexts -----------------------------------------------------------------------------------


def test_blocks_of_a_request() -> None:
    one = holds()
    assert one.num_blocks == 2986
    assert one.tokens == 2986 * 1024
    assert (one.blocks_per_context, one.state_blocks) == (1024 + 4, 4)
    assert one.contexts == 2986 / 1028
    assert one.full_contexts == 2
    assert one.context_tokens == int(2986 / 1028 * 2**20)
    kept = holds(states=3, dcp=8)
    assert (kept.blocks_per_context, kept.state_blocks) == (128 + 12, 12)


def test_padding_and_reserve_are_counted() -> None:
    assert holds(block_size=64, reserve=2 * GB).num_blocks == 50 * GB // 1_089_792
    assert holds(block_size=64).padding == pytest.approx(0.00212, abs=1e-5)


def test_windows_cost_a_request_a_fixed_number_of_blocks() -> None:
    layout = cache.plan(models.deepseek_v4_flash(), block_size=256)
    counted = cache.capacity(layout, 10 * GB, context=1 << 20)
    assert counted.blocks_per_context == 4096 + 2 * 3 + 3 + 17
    assert cache.capacity(layout, 10 * GB, context=64).blocks_per_context == 1 + 2 * 1 + 3 + 8
    assert counted.bytes_per_token == 21 * 584 / 4 + 20 * 584 / 128 + 21 * 132 / 4


# --- ratios of the announcements ---------------------------------------------------------------------------


def test_formats_alone() -> None:
    """1.48× and 1.7× published; the bytes of entries give 1.463 and 1.686, whole rows as much."""
    base = holds().tokens
    entries = 16_992 / 11_616
    assert entries == pytest.approx(1.463, abs=5e-4)
    assert holds(latent=NVFP4).tokens / base == pytest.approx(1.464, abs=5e-4)
    assert holds(latent=NVFP4).tokens / base == pytest.approx(4.49 / 3.04, rel=0.01)
    assert holds(latent=NVFP4, index=MXFP4).tokens / base == pytest.approx(1.684, abs=5e-4)
    assert round(holds(latent=NVFP4, index=MXFP4).tokens / base, 1) == 1.7


def test_dcp_multiplies_tokens_by_its_ranks_and_contexts_by_less() -> None:
    """States are divided by heads, not by DCP: their blocks are a larger part of a request's fewer blocks."""
    assert holds(dcp=8).tokens == 8 * holds().tokens
    ratios = [holds(dcp=8, states=n).contexts / holds(states=n).contexts for n in (1, 2, 3, 4)]
    assert ratios == pytest.approx([7.788, 7.588, 7.400, 7.222], abs=5e-4)


def test_published_tokens_of_eight_devices() -> None:
    """3.04M, 21.8M, 4.49M and 32.1M tokens; with three states kept and both published buffers within 2.5 %.

    The buffers under DCP: 0.8 GiB of exchange, and the gathered context of one layer, 2^20 tokens.
    """
    exchange = int(0.8 * 2**30)
    gathered = {FP8: 708 << 20, NVFP4: 484 << 20}
    published = {(FP8, 1): 3.04e6, (FP8, 8): 21.8e6, (NVFP4, 1): 4.49e6, (NVFP4, 8): 32.1e6}
    for (latent, dcp), tokens in published.items():
        reserve = exchange + gathered[latent] if dcp > 1 else 0
        counted = holds(int(52.2 * GB), states=3, reserve=reserve, latent=latent, dcp=dcp)
        assert counted.context_tokens == pytest.approx(tokens, rel=0.025), (latent, dcp)
    ratio = (
        holds(int(52.2 * GB), states=3, reserve=exchange + gathered[FP8], dcp=8).contexts
        / holds(int(52.2 * GB), states=3).contexts
    )
    assert ratio == pytest.approx(21.8 / 3.04, rel=0.005)


def test_published_full_contexts() -> None:
    """2.9 in FP8 without DCP, about 36 in both small formats with DCP8."""
    assert round(holds(states=2).contexts, 1) == 2.9
    assert round(holds(states=2, latent=NVFP4, index=MXFP4, dcp=8).contexts) == 36


# --- refusals and the command -------------------------------------------------------------------------------


def test_refuses_counts_below_one_and_a_memory_without_a_block() -> None:
    with pytest.raises(
        CacheError, match="context=1048576 and states=0 must be at least 1, reserve=0 at least 0"
    ):
        holds(states=0)
    with pytest.raises(
        CacheError,
        match=r"^memory=1,000,000,000 less reserve=2,000,000,000 is -1,000,000,000 bytes, and one block takes ",
    ):
        holds(memory=GB, reserve=2 * GB)


def test_the_command_prints_a_table_of_eight_rows() -> None:
    done = CliRunner().invoke(command, ["--memory", "52GB"])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if line.startswith("  8")]
    assert len(rows) == 8
    assert rows[0] == ["8", "1", "fp8+fp8", "16,992", "0.07%", "3.06M", "3.05M", "2.90", "1.00"]
    assert rows[7] == ["8", "8", "nvfp4+mxfp4", "1,260", "0.18%", "41.19M", "39.35M", "37.52", "12.92"]


def test_the_command_gives_json() -> None:
    asked = ["--memory", "48GiB", "--memory", "96GiB", "--tp", "8", "--dcp", "1", "--latent", "bf16"]
    done = CliRunner().invoke(command, [*asked, "--index", "none", "--block-size", "64", "--json"])
    rows = json.loads(done.output)
    assert [row["memory"] for row in rows] == [48 << 30, 96 << 30]
    assert rows[0]["bytes_per_token"] == 24 * 1152
    assert [row["ratio"] for row in rows] == [1.0, 1.0]
    assert sum(rows[0]["groups"].values()) == 24 + 69


def test_what_cannot_be_planned_is_said_below_the_table() -> None:
    done = CliRunner().invoke(command, ["--tp", "8", "--tp", "5", "--dcp", "1", "--latent", "fp8"])
    assert done.exit_code == 0
    assert "TP5 DCP1: tp=5 does not divide 96 heads of kda; possible: [1, 2, 3, 4, 6, 8" in done.output
    rows = json.loads(CliRunner().invoke(command, ["--tp", "8", "--tp", "5", "--dcp", "1", "--json"]).output)
    assert [row["problem"][:4] for row in rows if row["tp"] == 5] == ["tp=5"] * 4


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--block-size", "1000"), "kimi-hal: block_size=1000 is not a power of two"),
        (
            ("--latent", "nvfp5"),
            "kimi-hal: unknown latent format 'nvfp5'; did you mean 'nvfp4'? Known: bf16, fp8, latent.bf16",
        ),
        (("--memory", "5MB"), "kimi-hal: not one block of 17,411,328 bytes fits"),
        (("--memory", "much"), "'much' is not a size: write 48GiB, 52GB or 1M"),
    ],
)
def test_the_command_refuses_in_a_sentence(args: tuple[str, ...], sentence: str) -> None:
    line = [sys.executable, "-m", "kimi_hal.cli.main", "capacity", *args]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_imports_no_torch() -> None:
    code = (
        "import sys\nfrom kimi_hal.cli.main import main\n"
        "try:\n    main(['capacity'])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
