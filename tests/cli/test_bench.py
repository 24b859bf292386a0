"""``kimi-hal bench``: times every candidate, writes down which was fastest, and a later plan takes it by that line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import implementation

import kimi_hal as hal
from kimi_hal.cli.bench import shapes
from kimi_hal.cli.main import main
from kimi_hal.dispatch import policy
from kimi_hal.dispatch.contract import BuildContext, Capability, OneOf, Preference, Properties, Range
from kimi_hal.dispatch.shapes import Shape, shape
from kimi_hal.dispatch.tuned import Entry
from kimi_hal.dispatch.tuned_file import read
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.presets import Deployment
from kimi_hal.reference import backend as reference
from kimi_hal.tuning import operands
from kimi_hal.tuning.tune import ranked

#: Milliseconds that the slow implementation waits, and that it waits when told so.
WAIT, LESS = 20, 0
TOLD: list[dict[str, int]] = []


def build(ctx: BuildContext) -> Callable[..., Any]:
    """Make the reference's selection."""
    return reference.build(ctx)


def build_slowed(ctx: BuildContext) -> Callable[..., Any]:
    """Make the same, after a wait that a configuration may shorten."""
    run, wait = reference.build(ctx), ctx.configuration.get("wait", WAIT) / 1000
    TOLD.append(dict(ctx.configuration))

    def slowed(
        scores: Any,
        row_len: Any,
        row_start: Any = None,
        *,
        out: Any = None,
        scores_out: Any = None,
        workspace: Any = None,
    ) -> Any:
        time.sleep(wait)
        return run(scores, row_len, row_start, out=out, scores_out=scores_out, workspace=workspace)

    return slowed


def build_broken(ctx: BuildContext) -> Callable[..., Any]:
    """Fail as a kernel that does not compile."""
    raise RuntimeError("no kernel image")


def build_partial(ctx: BuildContext) -> Callable[..., Any]:
    """Leave out the last row of those that are there, which takes less time."""
    run = reference.build(ctx)

    def partial(
        scores: Any,
        row_len: Any,
        row_start: Any = None,
        *,
        out: Any = None,
        scores_out: Any = None,
        workspace: Any = None,
    ) -> Any:
        if out is None:
            return run(scores, row_len, row_start)
        run(scores[:-1], row_len[:-1], row_start, out=out[:-1], scores_out=scores_out[:-1])
        return out, scores_out

    return partial


def waits(spec: Any, limits: Limits, arch: str) -> tuple[dict[str, int], ...]:
    """Return what the slow one can be told."""
    return ({"wait": LESS}, {"wait": 2 * WAIT})


def claimed(name: str, rank: int, tie_rule: str = "contract", **fields: Any) -> Any:
    covered = Capability(
        ("acme2",),
        {"topk": Range(1, 4096), "score": OneOf(("float32",))},
        properties=Properties(tie_rule=tie_rule),
    )
    return implementation(name, "topk_select", (covered,), preferences=(Preference(rank=rank),), **fields)


@pytest.fixture
def acme(plugins: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a backend on the CPU that prefers its slowest implementation."""
    TOLD.clear()
    own = (
        claimed("quick", 0),
        claimed("slowed", 9),
        claimed("broken", 1),
        claimed("untidy", 2, tie_rule="any"),
    )
    builders = {"quick": build, "slowed": build_slowed, "broken": build_broken, "untidy": build}
    own = tuple(
        replace(
            i,
            build=f"fake_acme:{i.name}",
            source=("fake_kernels.py",),
            configurations="fake_acme:waits" if i.name == "slowed" else None,
        )
        for i in own
    )
    variables = {"KIMI_HAL_ACME_TUNE": "off | FILE"}
    module = plugins.add(
        "acme",
        *own,
        device="kimi_hal.dispatch.device:HostDevice",
        torch_device="cpu",
        variables=variables,
    )
    vars(module).update(builders, waits=waits)
    monkeypatch.setattr(policy, "source_hash", lambda backend, implementation: "0123456789abcdef" * 4)
    return module


def bench(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["bench", *words])
    return int(left.value.code or 0)


def test_the_fastest_is_written_down_and_taken(
    acme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "acme.json"
    words = ("topk_select", "--rows", "2", "--length", "4096", "--without", "acme.slowed")
    limits = Limits(max_rows=2, max_reqs=2, max_context=4096)
    before = hal.plan("topk_select", TopKSpec(), limits, device="cpu", implementation="acme.quick")
    assert hal.plan("topk_select", TopKSpec(), limits, device="cpu").name == "acme.slowed"
    assert bench(*words, "--tune", str(path)) == 0
    told = capsys.readouterr().out
    assert (
        "  acme.broken: PluginError: plugin 'acme': fake_acme:broken raised RuntimeError: no kernel image."
        in told
    )
    assert "topk_select score=float32 scores_dtype=float32 topk=2048, 2 rows × 4096: quick " in told
    assert told.endswith(f"1 lines\nwritten to {path}\n")
    table = read(path, "acme")
    assert (table.backend, table.version, table.arch, table.device) == ("acme", "1.0", "acme2", "Acme A2")
    assert [[e.implementation for e in line.ranking] for line in table.lines] == [["quick"]]
    assert table.lines[0].ranking[0].source == "0123456789ab"
    monkeypatch.setenv("KIMI_HAL_ACME_TUNE", str(path))
    found = hal.plan("topk_select", TopKSpec(), limits, device="cpu")
    assert found.name == "acme.quick"
    assert found.key == before.key
    assert f"{path}, line 1 (2 rows × 4096): " in found.explain()
    assert " before acme.slowed" in found.explain()


def test_who_leaves_out_rows_is_not_measured(
    acme: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    acme.quick = build_partial
    words = ("topk_select", "--rows", "4", "--length", "64", "--without", "acme.slowed")
    bench(*words, "--tune", str(tmp_path / "acme.json"))
    assert "  acme.quick: RuntimeError: acme.quick leaves 1 of 4 rows unwritten\n" in capsys.readouterr().out


def test_a_configuration_is_measured_written_down_and_given_to_the_builder(
    acme: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "acme.json"
    words = (
        "topk_select",
        "--rows",
        "1",
        "--length",
        "64",
        "--implementation",
        "acme.slowed",
        "--budget",
        "0",
    )
    assert bench(*words, "--tune", str(path)) == 0
    assert TOLD == [{}, {"wait": LESS}, {"wait": 2 * WAIT}]
    held = json.loads(path.read_text())["lines"][0]["ranking"]
    assert [e["configuration"] for e in held] == [{"wait": LESS}]
    assert held[0]["us"] < 1000 * WAIT
    limits = Limits(max_rows=1, max_reqs=1, max_context=64)
    plain = hal.plan("topk_select", TopKSpec(), limits, device="cpu")
    monkeypatch.setenv("KIMI_HAL_ACME_TUNE", str(path))
    found = hal.plan("topk_select", TopKSpec(), limits, device="cpu")
    assert (found.name, plain.name) == ("acme.slowed", "acme.slowed")
    assert TOLD[-1] == {"wait": LESS}
    assert found.key != plain.key
    assert f"µs, wait={LESS} before acme.quick" in found.explain()
    selected, _ = found.run(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([3], dtype=torch.int32))
    assert selected[0, :4].tolist() == [0, 1, 2, -1]


def test_where_one_alone_fits_nothing_is_measured_and_no_table_is_written(
    acme: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("topk_select", "--rows", "1", "--length", "64", "--implementation", "acme.quick")
    path = tmp_path / "t.json"
    path.write_text("an older table", encoding="utf-8")
    assert bench(*words, "--tune", str(path)) == 2
    told = capsys.readouterr()
    assert "1 rows × 64: left out, acme.quick alone fits\n" in told.out
    assert told.err.endswith(
        f"kimi-hal: {path} is not written: no class was measured. What left each out stands above.\n"
    )
    assert path.read_text(encoding="utf-8") == "an older table"


def test_without_a_file_nothing_is_written(acme: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("topk_select", "--rows", "1", "--length", "64", "--implementation", "acme.quick") == 0
    assert "written" not in capsys.readouterr().out


def test_what_cannot_be_measured_is_told(
    acme: Any, plugins: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("topk_selec") == 2
    assert "no operands for 'topk_selec'; did you mean 'topk_select'? Possible: " in capsys.readouterr().err
    assert bench("topk_select", "--index", "index.none") == 2
    monkeypatch.setenv("KIMI_HAL_EXECUTION", "interpreted")
    assert bench("topk_select") == 2
    assert capsys.readouterr().err.endswith(
        "kimi-hal: nothing to measure on acme: KIMI_HAL_EXECUTION=interpreted is not how an engine runs\n"
    )


def test_equally_fast_candidates_stand_in_the_backend_s_own_order() -> None:
    entries = [
        Entry("a", 10.0),
        Entry("b", 10.2),
        Entry("c", 10.4),
        Entry("b", 10.1, {"n": 1}),
        Entry("d", 99.0),
    ]
    found = ranked(entries, {"a": 1.0, "b": 5.0, "c": 9.0, "d": 9.0})
    assert [str(e) for e in found] == ["b 10.2 µs", "a 10 µs", "c 10.4 µs", "d 99 µs"]


@pytest.mark.parametrize("operator", operands.OPERANDS)
def test_operands_are_what_the_operator_takes_in_the_class_that_was_asked_for(operator: str) -> None:
    for sizes in shapes(operator, (1, 3, 128), (512,)):
        spec = Deployment().specs()[operator]
        work = operands.make(operator, spec, sizes, "cpu")
        assert shape(operator, spec, work.limits) == sizes
        plan = hal.plan(operator, spec, work.limits, device="cpu", implementation="reference.torch")
        plan.bind(**work.operands)
        assert operands.size(operator, spec, sizes) <= 1 << 31


def test_rows_of_one_request_are_measured_together_from_some_number_on() -> None:
    assert shapes("indexer_topk", (64, 128), (8192,)) == [Shape(64, 1, 8192), Shape(128, 128, 8192)]
    assert shapes("sparse_mla", (3,), (8192, 512)) == [Shape(4, 1, 2048)]
    assert shapes("topk_select", (4096,), (65536, 1 << 20)) == [Shape(4096, 1, 65536)]
    assert shapes("merge_attn_states", (8,), (8192, 512)) == [Shape(8)]
    assert shapes("dsa_decode", (128,), (8192, 512)) == [Shape(128, 1, 8192), Shape(128, 1, 512)]
