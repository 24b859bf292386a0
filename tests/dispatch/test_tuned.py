"""Tables of measurements: which line is about a plan, what it decides, and what is said of one that cannot be used."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from composite_cases import DSACase
from fake_plugins import GONE, LIMITS, SPEC, implementation

from kimi_hal.cli.main import main
from kimi_hal.dispatch import policy, shapes, tuned_tables
from kimi_hal.dispatch.contract import Preference, Probe
from kimi_hal.dispatch.explain import explain
from kimi_hal.dispatch.shapes import Shape, shape
from kimi_hal.dispatch.tuned import Entry, Line, Table
from kimi_hal.dispatch.tuned_file import read, text
from kimi_hal.errors import PluginError, TableError
from kimi_hal.ops.indexer import IndexerTopKSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKSpec

FIELDS = {"latent": "latent.fp8.e4m3fn.tensor", "num_heads": 12, "q_dtype": "bfloat16", "topk": 2048}
FAST, SLOW = Entry("fast", 10.0, {}, "0123"), Entry("slow", 4.5, {"parts": 8}, "4567")
LINE = Line("sparse_mla", FIELDS, Shape(256, 1, 2048), (SLOW, FAST))
TABLE = Table("acme.json", "acme", "1.0", "acme2", "Acme A2", "2026-11-30, torch 2.11", (LINE,))
TUNE = {"KIMI_HAL_ACME_TUNE": "off | FILE"}


def written(path: Path, table: Table = TABLE) -> Path:
    path.write_text(text(table))
    return path


def two(plugins: Any, **fields: Any) -> None:
    slow = implementation("slow", preferences=(Preference(rank=-5),))
    plugins.add(
        "acme", implementation("fast", preferences=(Preference(rank=5),)), slow, variables=TUNE, **fields
    )


def chosen(path: Path, plugins: Any, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    two(plugins, **fields)
    monkeypatch.setenv("KIMI_HAL_ACME_TUNE", str(path))
    return explain("sparse_mla", SPEC, LIMITS)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = written(tmp_path / "acme.json")
    assert read(path, "acme.json") == TABLE
    assert len(path.read_text().splitlines()) == 11


def test_without_a_table_the_declared_rank_decides(plugins: Any) -> None:
    two(plugins)
    found = explain("sparse_mla", SPEC, LIMITS)
    assert found.chosen == "acme.fast"
    assert found.why == "auto found Acme A2 (acme2); rank 5 before acme.slow"


def test_a_line_decides_before_every_rank_and_says_so(
    tmp_path: Path, plugins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "t.json")
    found = chosen(path, plugins, monkeypatch)
    assert found.chosen == "acme.slow"
    assert found.why == (
        f"auto found Acme A2 (acme2); {path}, line 1 (256 rows × 2048): 4.5 µs, parts=8 before acme.fast 10 µs"
    )
    assert [c.measured for c in found.candidates][:2] == [
        f"{path}, line 1 (256 rows × 2048): 10 µs",
        f"{path}, line 1 (256 rows × 2048): 4.5 µs",
    ]


def test_what_does_not_fit_is_passed_over(
    tmp_path: Path, plugins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Line("sparse_mla", FIELDS, Shape(256, 1, 2048), (Entry("gone", 1.0), FAST, SLOW))
    path = written(tmp_path / "t.json", Table(**{**vars(TABLE), "lines": (gone,)}))
    assert chosen(path, plugins, monkeypatch).chosen == "acme.fast"


def test_a_name_goes_before_the_table_and_takes_its_configuration(
    tmp_path: Path, plugins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "t.json")
    chosen(path, plugins, monkeypatch)
    found = explain("sparse_mla", SPEC, LIMITS, implementation="acme.fast")
    assert found.chosen == "acme.fast"
    assert found.why == f"implementation='acme.fast'; {path}, line 1 (256 rows × 2048): 10 µs"


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        (Limits(max_rows=256, max_reqs=8), True),
        (Limits(max_rows=1024, max_reqs=8), True),
        (Limits(max_rows=64, max_reqs=8), True),
        (Limits(max_rows=2048, max_reqs=8), False),
        (Limits(max_rows=32, max_reqs=8), False),
        (None, False),
    ],
)
def test_a_line_reaches_four_times_as_far_as_it_was_measured(
    tmp_path: Path, plugins: Any, monkeypatch: pytest.MonkeyPatch, limits: Limits | None, line: bool
) -> None:
    chosen(written(tmp_path / "t.json"), plugins, monkeypatch)
    assert explain("sparse_mla", SPEC, limits).chosen == ("acme.slow" if line else "acme.fast")


def test_a_line_of_another_spec_or_operator_is_about_nothing_here() -> None:
    other = Line("sparse_mla", FIELDS | {"num_heads": 96}, Shape(256, 1, 2048), (SLOW,))
    table = Table(**{**vars(TABLE), "lines": (other, Line("topk_select", FIELDS, LINE.shape, (SLOW,)))})
    assert table.find("sparse_mla", SPEC, LIMITS) is None


def test_a_line_of_a_composite_is_about_its_parts_specs() -> None:
    # what suits 2,048 keys may be impossible for 64: a configuration of theirs would refuse the plan
    case, limits = DSACase(), Limits(max_rows=8, max_reqs=8)
    fields = shapes.decisive("dsa_decode", case.spec())
    assert fields["attn.topk"] == case.spec().attn.topk
    size = shape("dsa_decode", case.spec(), limits)
    for changed, line in (({}, 1), ({"attn.topk": 1 << 20}, None), ({"attn.latent": "latent.bf16"}, None)):
        table = dataclasses.replace(TABLE, lines=(Line("dsa_decode", fields | changed, size, (FAST,)),))
        found = table.find("dsa_decode", case.spec(), limits)
        assert (found and found[0]) == line
    nothing = dataclasses.replace(TABLE, lines=(Line("dsa_decode", {}, size, (FAST,)),))
    assert nothing.find("dsa_decode", case.spec(), limits) is None


def test_the_nearest_class_decides_and_the_larger_of_two() -> None:
    rows = [Line("sparse_mla", FIELDS, Shape(n, 1, 2048), (FAST,)) for n in (16, 64, 512)]
    table = Table(**{**vars(TABLE), "lines": tuple(rows)})
    for count, line in ((16, 1), (32, 2), (64, 2), (128, 2), (256, 3)):
        found = table.find("sparse_mla", SPEC, Limits(max_rows=count, max_reqs=8))
        assert found is not None
        assert found[0] == line


@pytest.mark.parametrize(
    ("operator", "spec", "limits", "wanted"),
    [
        ("sparse_mla", SPEC, Limits(max_rows=100, max_reqs=4), Shape(128, 1, 2048)),
        ("topk_select", TopKSpec(), Limits(max_rows=3, max_reqs=3, max_context=9000), Shape(4, 1, 16384)),
        (
            "indexer_topk",
            IndexerTopKSpec(index="index.mxfp4.page64", dcp=DCP(world=8)),
            Limits(max_rows=64, max_reqs=16, rows_per_req=4, max_context=1 << 20),
            Shape(64, 4, 1 << 17),
        ),
        ("moe_route", None, Limits(max_rows=0, max_reqs=0), Shape(1)),
    ],
)
def test_sizes_are_powers_of_two_on_this_rank(
    operator: str, spec: Any, limits: Limits, wanted: Shape
) -> None:
    assert shape(operator, spec, limits) == wanted


def test_a_shipped_table_is_used_where_the_device_is_its_own(
    tmp_path: Path, plugins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pkg" / "tables").mkdir(parents=True)
    other = Table(**{**vars(TABLE), "device": "Acme A1"})
    files = [
        written(tmp_path / "pkg" / "tables" / "a1.json", other),
        written(tmp_path / "pkg" / "tables" / "a2.json"),
        tmp_path / "pkg" / "tables" / "broken.json",
    ]
    files[2].write_text("{")
    monkeypatch.setattr(tuned_tables, "package_files", lambda backend, patterns: files if patterns else [])
    two(plugins, tables=("pkg/tables/*.json",))
    found = explain("sparse_mla", SPEC, LIMITS)
    assert found.chosen == "acme.slow"
    assert "pkg/tables/a2.json, line 1" in found.why
    monkeypatch.setenv("KIMI_HAL_ACME_TUNE", "off")
    assert explain("sparse_mla", SPEC, LIMITS).chosen == "acme.fast"


def test_away_from_the_device_no_table_is_used(
    tmp_path: Path, plugins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = implementation("slow", preferences=(Preference(rank=-5),), execution=("native", "interpreted"))
    fast = implementation("fast", execution=("native", "interpreted"))
    plugins.add("acme", fast, slow, variables=TUNE, probe=GONE)
    monkeypatch.setenv("KIMI_HAL_ACME_TUNE", str(written(tmp_path / "t.json")))
    monkeypatch.setenv("KIMI_HAL_BACKEND", "acme")
    monkeypatch.setenv("KIMI_HAL_EXECUTION", "interpreted")
    assert explain("sparse_mla", SPEC, LIMITS).chosen == "acme.fast"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"backend": "other"}, "it ranks implementations of other, not of acme"),
        ({"version": "0.9"}, "it was measured with acme 0.9, this is 1.0"),
        ({"device": "Acme A1"}, "it was measured on Acme A1 (acme2), here is Acme A2 (acme2)"),
        ({"arch": "acme1"}, "it was measured on Acme A2 (acme1), here is Acme A2 (acme2)"),
    ],
)
def test_a_chosen_table_of_another_machine_is_an_error(
    tmp_path: Path, plugins: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], said: str
) -> None:
    path = written(tmp_path / "t.json", Table(**{**vars(TABLE), **fields}))
    with pytest.raises(TableError) as caught:
        chosen(path, plugins, monkeypatch)
    assert str(caught.value) == (
        f"KIMI_HAL_ACME_TUNE={path}: {said}. `kimi-hal bench --tune FILE` measures here"
    )


def test_a_device_s_place_is_not_its_name(
    tmp_path: Path, plugins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Probe(present=True, arch="acme2", devices=("Acme A2 at 00:01", "Acme A2 at 00:02"))
    assert chosen(written(tmp_path / "t.json"), plugins, monkeypatch, probe=here).chosen == "acme.slow"


GOOD = json.loads(text(TABLE))


def changed(**fields: Any) -> str:
    return json.dumps(GOOD | fields)


def line(**fields: Any) -> str:
    return changed(lines=[GOOD["lines"][0] | fields])


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("", "t.json is no JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "t.json is of schema None, this kimi-hal reads 1"),
        (changed(schema=2), "t.json is of schema 2, this kimi-hal reads 1"),
        (changed(device=3), "t.json is no table of measurements: TypeError: device is 3, not a text"),
        (
            changed(lines=None),
            "t.json is no table of measurements: TypeError: 'NoneType' object is not iterable",
        ),
        (line(shape={"rows": 1, "rows_per_req": 1}), "t.json, line 1: KeyError: 'length'"),
        (
            line(shape={"rows": 0, "rows_per_req": 1, "length": 1}),
            "t.json, line 1: ValueError: sizes are 1 or more, got {'rows': 0, 'rows_per_req': 1, 'length': 1}",
        ),
        (line(ranking=[{"us": 1}]), "t.json, line 1: KeyError: 'implementation'"),
    ],
)
def test_what_is_no_table_is_told(tmp_path: Path, held: str, said: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(held)
    with pytest.raises(TableError) as caught:
        read(path, "t.json")
    assert str(caught.value) == said


def test_a_table_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"^t\.json cannot be read: No such file or directory$"):
        read(tmp_path / "t.json", "t.json")


def test_a_backend_with_tables_declares_the_variable_that_chooses_among_them(plugins: Any) -> None:
    plugins.add("acme", tables=("pkg/*.json",))
    with pytest.raises(
        PluginError, match=r"tables: a backend that ships some declares KIMI_HAL_ACME_TUNE in variables"
    ):
        policy.registry(policy.settings()).get("acme")


def test_doctor_tells_of_each_table(
    tmp_path: Path, plugins: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two(plugins)
    path = written(tmp_path / "t.json")
    monkeypatch.setenv("KIMI_HAL_ACME_TUNE", str(path))
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert (
        f"  table {path}: 1 lines, Acme A2, 2026-11-30, torch 2.11; changed since: sparse_mla=acme.fast, "
        "sparse_mla=acme.slow\n"
    ) in capsys.readouterr().out
    path.write_text("{")
    policy.thaw()
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert f"problem: KIMI_HAL_ACME_TUNE: {path} is no JSON: " in capsys.readouterr().out
