"""Tables of ``docs/nvidia.md`` hold what the kept run has: each figure as rounded there, each goal as met or not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nvidia.md").read_text(encoding="utf-8")
KEPT = json.loads((ROOT / "benchmarks" / "results" / "h200" / "summary.json").read_text(encoding="utf-8"))
CELLS = {(cell["operator"], cell["cell"]): cell for cell in KEPT}
STORED = {"quantize_index_query": "rows × 32 heads", "store_index_keys": "keys", "store_latent": "tokens"}
SIZE = r"[\d,]+ × \d+[KM]"


def rows(section: str, first: str) -> Iterator[list[str]]:
    """Yield the cells of each line of the section's tables whose first cell is of the form ``first``."""
    text = PAGE.split(f"\n{section}\n")[1].split("\n#")[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(first, cells[0]):
            yield cells


def says(text: str, value: float, which: int = 0) -> bool:
    """Return whether the first number of a text, or another, is the value, rounded to as many digits."""
    number = re.findall(r"\d[\d,]*(?:\.\d+)?", text)[which].replace(",", "")
    digits = len(number.partition(".")[2])
    return abs(float(number) - value) <= 0.5 * 10**-digits + 1e-6


def holds(kept: dict[str, Any], ours: str, theirs: str, ratio: str) -> bool:
    """Return whether a line has both times in µs and their ratio, and says ``not met`` where the goal is missed."""
    times = says(ours, kept["ours_ms"] * 1e3) and says(theirs, kept["peer_ms"] * 1e3, -1)
    goal = "met" not in ratio or ("not met" in ratio) != kept["met"]
    return times and goal and says(ratio, kept["ratio"], -1)


def sizes(cell: str) -> str:
    return cell.replace(",", "").replace("1M", "1024K")


def scored(cell: str) -> str:
    """Return the kept name of a cell of scores: requests × keys × rows of a request."""
    form, prefill, rows_, keys, two = re.fullmatch(
        r"(\w+) (prefill )?([\d,]+) × (\w+)(, 2 rows.*)?", cell
    ).groups()
    count = rows_.replace(",", "")
    keys = keys.replace("1M", "1024K")
    return (
        f"{form} prefill 1 × {keys} × {count}" if prefill else f"{form} {count} × {keys} × {2 if two else 1}"
    )


def summed(cell: str) -> str:
    return scored(f"FP8 {cell}") + ", fp8_sum"


@pytest.mark.parametrize(
    ("section", "first", "operator", "name", "columns", "count"),
    [
        (
            "### Scores",
            rf"(FP8|MXFP4) (prefill )?{SIZE}(, 2 rows.*)?",
            "indexer_logits",
            scored,
            (1, 3, 4),
            46,
        ),
        (
            "### Scores of many rows: `nvidia.cuda_fp8_sum`",
            rf"prefill {SIZE}",
            "indexer_logits",
            summed,
            (1, 2, 3),
            4,
        ),
        ("### Selection", SIZE, "topk_select", sizes, (1, 3, 4), 14),
        ("### Both together", rf"(FP8|MXFP4) {SIZE}", "indexer_topk", sizes, (1, 2, 3), 22),
    ],
    ids=["scores", "fp8 sums", "selection", "both"],
)
def test_a_line_of_the_indexer_is_the_kept_run_s(
    section: str, first: str, operator: str, name: Callable[[str], str], columns: tuple[int, ...], count: int
) -> None:
    lines = list(rows(section, first))
    assert len(lines) == count
    wrong = [line for line in lines if not holds(CELLS[operator, name(line[0])], *(line[c] for c in columns))]
    assert wrong == []


def test_a_line_of_stores_is_the_kept_run_s() -> None:
    lines = list(rows("### Stores and the query", r"`\w+` .*"))
    assert len(lines) == 8
    for line in lines:
        operator, form = re.fullmatch(r"`(\w+)` (.*)", line[0]).groups()
        kept = [
            CELLS[operator, f"{data}{form} {count} {STORED[operator]}"]
            for data in ("", "real text, ")
            for count in (1, 64, 4096)
        ]
        times = [cell["ours_ms"] for cell in kept] + [kept[2]["peer_ms"]]
        assert [text for text, ms in zip(line[1:], times, strict=True) if not says(text, ms * 1e3)] == [], (
            line
        )


def test_a_line_of_real_text_is_the_kept_run_s() -> None:
    forms = (
        (r"scores (\w+), (.*)", "indexer_logits", r"real text, \1 \2"),
        (r"selection, (.*)", "topk_select", r"real text, \1"),
        (r"both together, (.*)", "indexer_topk", r"real text, FP8 \1"),
        (r"attention (\w+), (\d+ heads), (\d+) rows?", "sparse_mla", r"real text, \2 \1, \3 rows"),
        (r"merge of (8 parts), (12 heads), (\d+) rows?", "merge_attn_states", r"real text, \1, \3 rows × \2"),
        (r"`dsa_decode`, (.*)", "dsa_decode", r"real text, \1, 12 heads"),
    )
    found = 0
    for pattern, operator, name in forms:
        for line in rows("### On real text", pattern):
            found += 1
            assert holds(CELLS[operator, re.sub(pattern, name, line[0])], *line[2:]), line
    assert found == 18


ATTENTION, PARTS = "## Attention over latents: `nvidia.cuda`", "### `merge_attn_states` and `dsa_decode`"
DECODE, PREFILL = ("1", "8", "32", "64", "128", "320"), ("1024", "4096", "16384")
CHAIN = ("1 × 32K", "1 × 128K", "8 × 32K", "8 × 128K", "64 × 32K", "64 × 128K")
MERGED = ("1 × 12", "1 × 96", "8 × 12", "64 × 12", "64 × 96", "320 × 12", "320 × 96")


@pytest.mark.parametrize(
    ("section", "label", "which", "operator", "name", "sizes", "field", "scale"),
    [
        (ATTENTION, "FP8", 0, "sparse_mla", "12 heads FP8, {} rows", DECODE, "ours_ms", 1e3),
        (
            ATTENTION,
            "FlashMLA, 64 heads, .*",
            0,
            "sparse_mla",
            "12 heads FP8, {} rows",
            DECODE,
            "peer_ms",
            1e3,
        ),
        (
            ATTENTION,
            "times as fast, goal 2.5, .*",
            0,
            "sparse_mla",
            "12 heads FP8, {} rows",
            DECODE,
            "ratio",
            1,
        ),
        (ATTENTION, "NVFP4", 0, "sparse_mla", "12 heads NVFP4, {} rows", DECODE, "ours_ms", 1e3),
        (
            ATTENTION,
            "times as fast as our FP8, .*",
            0,
            "sparse_mla",
            "12 heads NVFP4, {} rows",
            DECODE,
            "ratio",
            1,
        ),
        (ATTENTION, "96 heads, FP8", 0, "sparse_mla", "96 heads FP8, {} rows", DECODE, "ours_ms", 1e3),
        (ATTENTION, "FlashMLA, 128 heads", 0, "sparse_mla", "96 heads FP8, {} rows", DECODE, "peer_ms", 1e3),
        (ATTENTION, "times as fast, goal 1.2", 0, "sparse_mla", "96 heads FP8, {} rows", DECODE, "ratio", 1),
        (
            ATTENTION,
            "12 heads, FP8",
            0,
            "sparse_mla",
            "prefill 12 heads FP8, {} rows × 128K",
            PREFILL,
            "ours_ms",
            1,
        ),
        *(
            (
                ATTENTION,
                label,
                which,
                "sparse_mla",
                f"prefill 12 heads FP8, {{}} rows × 128K{beside}",
                PREFILL,
                field,
                1,
            )
            for which, (label, beside) in enumerate(
                (("FlashMLA, 64 heads over bf16", ""), ("FlashMLA, 16 heads over bf16", ", beside 16 heads"))
            )
            for label, which, field in ((label, 0, "peer_ms"), ("times as fast, goal 1.8", which, "ratio"))
        ),
        (
            ATTENTION,
            "96 heads, FP8",
            1,
            "sparse_mla",
            "prefill 96 heads FP8, {} rows × 128K",
            PREFILL,
            "ours_ms",
            1,
        ),
        (PARTS, "ours", 0, "dsa_decode", "{}, 12 heads", CHAIN, "ours_ms", 1e3),
        (PARTS, "DeepGEMM .*", 0, "dsa_decode", "{}, 12 heads", CHAIN, "peer_ms", 1e3),
        (PARTS, "times as fast, .*", 0, "dsa_decode", "{}, 12 heads", CHAIN, "ratio", 1),
        *(
            (PARTS, label, 0, "dsa_decode", "{}, 12 heads, MXFP4 index keys", CHAIN, field, scale)
            for label, field, scale in (
                ("ours, MXFP4 .*", "ours_ms", 1e3),
                ("MXFP4: times .*", "ratio", 1),
            )
        ),
    ],
)
def test_a_line_over_sizes_is_the_kept_run_s(
    section: str,
    label: str,
    which: int,
    operator: str,
    name: str,
    sizes: tuple[str, ...],
    field: str,
    scale: float,
) -> None:
    line = list(rows(section, label))[which]
    kept = [CELLS[operator, name.format(size)][field] * scale for size in sizes]
    assert [text for text, value in zip(line[1:], kept, strict=True) if not says(text, value)] == []


@pytest.mark.parametrize(("label", "field"), [("as planned", "ours_ms"), ("a copy .*", "peer_ms")])
def test_a_line_of_the_merge_is_the_kept_run_s(label: str, field: str) -> None:
    (line,) = rows(PARTS, label)
    names = [f"8 parts, {size.replace(' × ', ' rows × ')} heads" for size in MERGED]
    kept = [CELLS["merge_attn_states", name][field] * 1e3 for name in names]
    assert [text for text, value in zip(line[1:], kept, strict=True) if not says(text, value)] == []
