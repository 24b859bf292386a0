"""The HTML page: everything that a report says, escaped, in one file that loads nothing."""

from __future__ import annotations

import re
from datetime import date
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from conformance_runs import environment, report

from kimi_hal_conformance.cli import cli
from kimi_hal_conformance.page import render, write_html
from kimi_hal_conformance.plot import AXIS, LABELS, Share, position
from kimi_hal_conformance.report import summary, write_json
from kimi_hal_conformance.schema import SCHEMA_VERSION
from kimi_hal_conformance.verdict import (
    CRASHED,
    FAILED,
    HUNG,
    NOT_RUN,
    PASSED,
    REFUSED,
    WAIVED,
    CouldBe,
    Measure,
    OnTrial,
    Verdict,
    Waiver,
)

VOID = {"meta", "br"}
HOSTILE = "expected <script>alert('1 & 2')</script> \x1b[31m"


def said(case: str, status: str, implementation: str = "acme.fast", **fields: Any) -> Verdict:
    operator = case.partition("/")[0]
    return Verdict(case=case, operator=operator, implementation=implementation, status=status, **fields)


def measure(norm: float | None, maximum: float | None, tensor: str = "g_out", exact: bool = False) -> Measure:
    return Measure(tensor=tensor, exact=exact, norm=norm, maximum=maximum)


ENVIRONMENT = environment(
    seed=3, versions={"acme": "1.5", "torch": "2.13.0", "acme-driver": "595.79"}, devices=("The acme <one>",)
)
ON_TRIAL = OnTrial(operator="kda_gate", implementation="acme.fast", version="1.5", source_hash="ab12")
REPORT = report(
    said("kda_gate/odd/rows1", PASSED, measures=(measure(0.5, 0.25),), seconds=0.5),
    said(
        "kda_gate/odd/rows9",
        FAILED,
        measures=(measure(31.0, None), measure(0.0, 0.0, "beta_out", exact=True)),
        problems=(HOSTILE,),
        replay="kimi-hal conformance replay kda_gate/odd/rows9 --backend acme",
        output="<b>torn</b>",
        fault=13,
        smallest="kda_gate/odd/rows9, row 2 of 9",
        input="raw_g bfloat16[1, 5, 60]",
    ),
    said("kda_gate/odd/rows1", PASSED, "acme.slow", measures=(measure(0.5, 2e-9),)),
    said("kda_decode/tp8/rows1", CRASHED, problems=("the process ended by SIGABRT",)),
    said("kda_decode/tp8/rows6", HUNG, problems=("no answer within 60 s",)),
    said("dsa_decode/tp8", REFUSED, problems=("heads: 96 is not 64",)),
    said("moe_route/*", NOT_RUN, problems=("no device: none was found",)),
    environment=ENVIRONMENT,
    on_trial=(ON_TRIAL,),
    not_implemented=("all_gather",),
)
PAGE = render(REPORT)


class Reader(HTMLParser):
    """Follows the tags and keeps the text of each row of the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.circles: list[dict[str, str | None]] = []
        self.rows: list[list[str]] = []
        self._matrix = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [found[name] or "" for name in ("href", "src", "xlink:href") if name in found]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "circle":
            self.circles.append(found)
        if tag == "table":
            self._matrix = found.get("id") == "matrix"
        if tag == "tr" and self._matrix:
            self.rows.append([])
        if tag in ("td", "th") and self._matrix:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._matrix and self.rows and self.rows[-1] and self.open[-1] in ("td", "th", "a"):
            self.rows[-1][-1] = f"{self.rows[-1][-1]} {data.strip()}".strip()


def parsed(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def test_every_tag_that_is_opened_is_closed_in_its_place() -> None:
    assert parsed(PAGE).open == []


def test_the_page_loads_nothing() -> None:
    reader = parsed(PAGE)
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img", PAGE)
    assert reader.links
    assert {link.partition("#")[0] for link in reader.links} == {""}
    assert {link.partition("#")[2] for link in reader.links} <= set(reader.ids)
    assert len(set(reader.ids)) == len(reader.ids)


def test_the_page_has_every_verdict() -> None:
    for verdict in REPORT.verdicts:
        row = rf'<td class="id"><code>{re.escape(verdict.case)}</code></td><td class="{verdict.status}">'
        assert re.search(row, PAGE), verdict.case
    assert PAGE.count('</code></td><td class="') == len(REPORT.verdicts)
    assert summary(REPORT) in PAGE


def test_what_a_report_says_is_escaped() -> None:
    assert "<script>" not in PAGE
    assert "expected &lt;script&gt;alert(&#39;1 &amp; 2&#39;)&lt;/script&gt; \ufffd[31m" in PAGE
    assert "&lt;b&gt;torn&lt;/b&gt;" in PAGE
    assert "The acme &lt;one&gt;" in PAGE


def test_a_failure_stands_with_its_problem_replay_and_class() -> None:
    (article,) = re.findall(r"<article>(?:(?!</article>).)*rows9.*?</article>", PAGE, re.DOTALL)
    assert "<li>expected &lt;script" in article
    assert "Replay: <code>kimi-hal conformance replay kda_gate/odd/rows9 --backend acme</code>" in article
    assert "fault class 13 of docs/faults.md" in article
    assert "<code>kda_gate/odd/rows9, row 2 of 9</code>: <code>raw_g bfloat16[1, 5, 60]</code>" in article
    assert PAGE.count("<article>") == 3


def test_a_level_is_told_without_colour() -> None:
    assert "A box of a level: ✓ reached, ✗ failed, &lt; not reached, – not tested." in PAGE
    assert re.search(r'<span class="step failed" title="correct: failed[^>]*>1✗</span>', PAGE)
    assert re.search(r'<span class="step not_tested" title="[^>]*>\d–</span>', PAGE)


def test_each_implementation_has_its_level_and_what_stops_it() -> None:
    (row,) = re.findall(r"<tr><th>kda_gate</th><td>acme.fast</td>.*?</tr>", PAGE, re.DOTALL)
    assert '<td class="number">0</td>' in row
    assert len(re.findall(r'<span class="step \w+" title="', row)) == 6
    assert '<td class="wide">level 1, correct: ' in row


def test_what_could_be_claimed_stands_apart() -> None:
    found = CouldBe(
        case="kda_gate/odd/rows1",
        operator="kda_gate",
        implementation="acme.fast",
        refusals=("head_dim=60 is not 64 or 128",),
    )
    page = render(report(said("kda_gate/tp8/rows1", PASSED), could_be_claimed=(found,)))
    assert parsed(page).open == []
    assert '<a href="#claimable">could be claimed</a>' in page
    assert '<td class="wide">head_dim=60 is not 64 or 128</td>' in page
    assert "claimable" not in PAGE


def test_the_page_is_for_light_and_dark_screens() -> None:
    assert "color-scheme: light dark" in PAGE
    assert "prefers-color-scheme: dark" in PAGE


def test_the_matrix_has_each_operator_by_each_implementation() -> None:
    assert parsed(PAGE).rows == [
        ["operator", "acme.fast", "acme.slow"],
        ["kda_gate", "failed 1 passed, 1 failed", "passed 1 passed"],
        ["kda_decode", "failed 1 crashed, 1 hung", "–"],
        ["dsa_decode", "refused 1 refused", "–"],
        ["moe_route", "not run 1 not run", "–"],
    ]
    assert '<p class="none" id="missing">Not implemented: all_gather.</p>' in PAGE


def test_device_driver_and_library_versions_stand_in_it() -> None:
    for name, version in REPORT.environment.versions.items():
        assert f"<tr><th>{name}</th><td>{version}</td></tr>" in PAGE
    assert "version 1.5, sources <code>ab12</code>" in PAGE
    assert "version unknown, sources <code>not hashed</code>" in PAGE


def test_every_error_that_has_a_budget_is_a_point() -> None:
    # the overview's worst of each implementation, then both errors of each tensor that is not discrete
    places = [(c["class"], float(c["cx"] or "")) for c in parsed(PAGE).circles]
    end, half = LABELS + AXIS, round(position(0.5), 1)
    assert places == [
        ("beyond", end),
        ("within", half),
        ("within", half),
        ("within", round(position(0.25), 1)),
        ("beyond", round(position(31.0), 1)),
        ("beyond", end),
        ("within", half),
        ("within", LABELS),
    ]
    assert "<title>kda_gate/odd/rows9, g_out, largest entry: beyond any share</title>" in PAGE


@pytest.mark.parametrize(
    ("value", "place", "within"),
    [
        (0.0, LABELS, True),
        (1e-4, LABELS, True),
        (1.0, LABELS + AXIS * 4 / 6, True),
        (1.0001, LABELS + AXIS * 4 / 6, False),
        (1e9, LABELS + AXIS, False),
        (None, LABELS + AXIS, False),
    ],
)
def test_a_share_stands_on_a_logarithmic_axis(value: float | None, place: float, within: bool) -> None:
    share = Share(value, "")
    assert share.x == pytest.approx(place, abs=0.01)
    assert share.within is within


def test_waivers_stand_with_what_became_of_them() -> None:
    admitted = said(
        "kda_gate/odd/rows9", WAIVED, problems=("g_out: error",), was=FAILED, waiver="flushes <subnormals>"
    )
    given: dict[str, Any] = {
        "reason": "flushes",
        "link": "ACME-7",
        "expires": date(2027, 3, 31),
        "suite": "0.1.0",
    }
    waivers = (
        Waiver(case="kda_gate/odd/rows9", covers=("acme.fast",), **given),
        Waiver(case="kda_gate/odd/rows1", problem="it is stale & gone", **given),
    )
    page = render(report(admitted, waivers=waivers))
    assert parsed(page).open == []
    assert parsed(page).rows[1] == ["kda_gate", "waived 1 waived"]
    assert "g_out: error<br>waived (failed): flushes &lt;subnormals&gt;</td>" in page
    assert "<td>ACME-7</td><td>2027-03-31</td><td>0.1.0</td><td>admits acme.fast</td>" in page
    assert '<span class="failed">it is stale &amp; gone</span>' in page


def test_a_run_of_nothing_is_a_page_too() -> None:
    page = render(report(environment=environment(devices=())))
    assert parsed(page).open == []
    assert "<td>none found</td>" in page
    assert "nothing fits what was asked for" in page


# --- the command line -----------------------------------------------------------------------------------


def show(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["show", *arguments])


def test_a_stored_report_is_shown_again(tmp_path: Path) -> None:
    write_json(REPORT, tmp_path / "report.json")
    result = show(str(tmp_path / "report.json"), "--html", str(tmp_path / "report.html"))
    assert result.exit_code == 0, result.output
    assert "does NOT conform" in result.output
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == PAGE


def test_a_report_of_another_schema_is_status_2(tmp_path: Path) -> None:
    write_json(msgspec.structs.replace(REPORT, schema=7), tmp_path / "report.json")
    result = show(str(tmp_path / "report.json"), "--html", str(tmp_path / "report.html"))
    assert result.exit_code == 2
    assert (
        f"report.json: this report has schema version 7, this suite reads {SCHEMA_VERSION};" in result.output
    )
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_does_not_exist_is_status_2(tmp_path: Path) -> None:
    write_json(REPORT, tmp_path / "report.json")
    result = show(str(tmp_path / "report.json"), "--html", "/nowhere/r.html")
    assert result.exit_code == 2
    assert "Error: cannot write /nowhere/r.html: there is no folder /nowhere" in result.output


def test_a_run_writes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    given = ["--backend", "reference", "--case", "kda_gate/tp8/rows0", "--html", str(path)]
    result = CliRunner().invoke(cli, ["run", *given])
    assert result.exit_code == 0, result.output
    assert "conforms: 1 passed" in path.read_text(encoding="utf-8")


def test_a_page_is_written_as_it_is_rendered(tmp_path: Path) -> None:
    write_html(REPORT, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == PAGE
