"""``kimi-hal new-backend NAME`` writes a package that installs, is found, explains itself and passes the suite."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kimi_hal import specs
from kimi_hal.cli import main, new_backend
from kimi_hal.cli.new_backend import FILES, NewBackendError, command, write
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.reference import topk_merge as reference

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "kimi_hal" / "cli" / "templates" / "backend"
FORM = "must be lower-case letters, digits and underscores, a letter first"
IN_USE = "choose another place with --directory"


@pytest.fixture(autouse=True)
def alone(plugins: Any) -> Any:
    """Return the installed plugins: none, whatever this machine has."""
    return plugins


def refusal(name: str, folder: Path) -> str:
    with pytest.raises(NewBackendError) as caught:
        write(name, folder)
    return str(caught.value)


@pytest.mark.parametrize("name", ["acme", "a", "npu2", "acme_two"])
def test_a_name_of_letters_digits_and_underscores_is_taken(name: str, tmp_path: Path) -> None:
    written = write(name, tmp_path / "new")
    assert len(written) == len(FILES)
    assert all(path.is_file() for path in written)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Acme", f"the name 'Acme' {FORM}; try 'acme'"),
        ("my-chip", f"the name 'my-chip' {FORM}; try 'my_chip'"),
        ("2chips", f"the name '2chips' {FORM}; try 'chips'"),
        ("_acme", f"the name '_acme' {FORM}; try 'acme'"),
        ("../acme", f"the name '../acme' {FORM}; try 'acme'"),
        ("acme\n", f"the name 'acme\\n' {FORM}; try 'acme'"),
        ("$acme", f"the name '$acme' {FORM}; try 'acme'"),
        ("", f"the name '' {FORM}"),
        ("芯片", f"the name '芯片' {FORM}"),
        (
            "acme_",
            "the name 'acme_' must not end with an underscore or hold two in a row, "
            "since pip would call it kimi-hal-acme-; try 'acme'",
        ),
        (
            "my__chip",
            "the name 'my__chip' must not end with an underscore or hold two in a row, "
            "since pip would call it kimi-hal-my--chip; try 'my_chip'",
        ),
        ("a" * 65, "the name has 65 letters, 64 at most fit the names of files and variables"),
        ("auto", "the name 'auto' is kimi-hal's own; choose your device's"),
        ("reference", "the name 'reference' is kimi-hal's own; choose your device's"),
        ("conformance", "the name 'conformance' is kimi-hal's own; choose your device's"),
        (
            "batch",
            "variables of a backend 'batch' begin with KIMI_HAL_BATCH_, as kimi-hal's own "
            "KIMI_HAL_BATCH_INVARIANT does; choose another name",
        ),
    ],
)
def test_a_name_that_no_backend_can_have_is_refused(name: str, text: str, tmp_path: Path) -> None:
    assert refusal(name, tmp_path / "new") == text
    assert not (tmp_path / "new").exists()


def test_an_installed_backends_name_is_refused(alone: Any, tmp_path: Path) -> None:
    point = EntryPoint(name="acme", value="acme.plugin", group="kimi_hal")
    alone.points.append(point._for(types.SimpleNamespace(name="acme-hal", version="0.3")))  # type: ignore[attr-defined]
    assert refusal("acme", tmp_path) == (
        "a backend 'acme' is installed, acme-hal 0.3; choose another name, or first: pip uninstall acme-hal"
    )


def test_an_installed_backend_of_no_distribution_is_refused(alone: Any, tmp_path: Path) -> None:
    alone.add("acme")
    assert refusal("acme", tmp_path) == (
        "a backend 'acme' is installed; choose another name, or first: pip uninstall kimi-hal-acme"
    )


def test_a_package_that_can_be_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kimi_hal_taken.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "a package kimi_hal_taken can be imported already; choose another name"
    assert refusal("taken", tmp_path / "new") == text


def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".hidden").touch()
    text = f"{tmp_path} is not empty, and nothing is overwritten; {IN_USE}"
    assert refusal("acme", tmp_path) == text
    assert [p.name for p in tmp_path.iterdir()] == [".hidden"]


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert refusal("acme", file) == f"{file} is a file; {IN_USE}"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    assert refusal("acme", folder) == f"{folder} cannot be written: Not a directory"


def test_an_empty_folder_is_filled_and_a_missing_one_is_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "deep" / "new"):
        write("acme", folder)
        assert (folder / "kimi_hal_acme" / "plugin.py").is_file()


def test_the_command_lists_what_it_wrote_and_what_to_type_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, ["acme_two"])
    assert result.exit_code == 0
    assert result.output == (
        "kimi-hal-acme-two: backend acme_two, 9 files in kimi-hal-acme-two\n"
        "  pyproject.toml\n"
        "  README.md\n"
        "  .github/workflows/ci.yml\n"
        "  kimi_hal_acme_two/__init__.py\n"
        "  kimi_hal_acme_two/plugin.py\n"
        "  kimi_hal_acme_two/implementations.py\n"
        "  kimi_hal_acme_two/kernels.py\n"
        "  tests/test_plugin.py\n"
        "  tests/test_conformance.py\n"
        "Next:\n"
        "  pip install -e kimi-hal-acme-two[test]\n"
        "  kimi-hal list\n"
        "  kimi-hal conformance run --backend acme_two --execution interpreted --repeats 1\n"
        "  pytest kimi-hal-acme-two\n"
    )


def test_a_refusal_is_one_sentence_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["new-backend", "auto", "--directory", str(tmp_path)])
    assert end.value.code == 2
    assert capsys.readouterr().err == "kimi-hal: the name 'auto' is kimi-hal's own; choose your device's\n"


def test_no_placeholder_is_left(tmp_path: Path) -> None:
    for path in write("acme", tmp_path / "new"):
        left = [
            line for line in path.read_text().splitlines() if "$" in line.replace("${{ matrix.python }}", "")
        ]
        assert left == [], path


def test_the_project_file_names_package_entry_point_and_versions(tmp_path: Path) -> None:
    write("acme_two", tmp_path / "new")
    text = (tmp_path / "new" / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    assert project["name"] == "kimi-hal-acme-two"
    assert project["entry-points"]["kimi_hal"] == {"acme_two": "kimi_hal_acme_two.plugin"}
    assert project["dependencies"] == ["kimi-hal[cli]>=0.1,<0.2"]
    assert tomllib.loads(text)["tool"]["setuptools"]["packages"] == ["kimi_hal_acme_two"]


def test_every_template_is_used_and_travels_with_the_package() -> None:
    found = sorted(p.name for p in TEMPLATES.iterdir())
    assert sorted(FILES.values()) == found
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for name in found:
        path = f"cli/templates/backend/{name}"
        assert any(fnmatch.fnmatch(path, pattern) for pattern in config["kimi_hal"]), path


def test_what_is_written_passes_its_own_linter_settings(tmp_path: Path) -> None:
    pytest.importorskip("ruff", reason="ruff is not installed")
    write("acme", tmp_path / "new")
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "--no-cache", str(tmp_path / "new")],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_ci_file_runs_what_the_readme_shows(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    write("acme", tmp_path / "new")
    job = yaml.safe_load((tmp_path / "new/.github/workflows/ci.yml").read_text())["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert job["steps"][1]["with"]["python-version"] == "${{ matrix.python }}"
    runs = [step["run"] for step in job["steps"] if "run" in step]
    readme = (tmp_path / "new/README.md").read_text()
    shown = re.search(r"```console\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    for line in shown[1].splitlines():
        if "list" not in line:
            assert any(run.startswith(line) for run in runs), line


def kernels(folder: Path) -> types.ModuleType:
    write("acme", folder)
    spec = importlib.util.spec_from_file_location("acme_kernels", folder / "kimi_hal_acme" / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_selection_it_writes_holds_over_ranks_windows_and_specials(tmp_path: Path) -> None:
    """The suite has no such case on a rank of its own: shards, windows, ties, NaN and k beyond the row at once."""
    build = kernels(tmp_path / "new").build_topk_select
    g = torch.Generator().manual_seed(11)
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-40])
    for draw in range(60):
        world = 1 + draw % 4
        spec = TopKSpec(
            topk=1 + draw % 23,
            score="bfloat16" if draw % 3 == 0 else "float32",
            return_selected=True,
            has_row_start=draw % 2 == 0,
            dcp=specs.DCP(world=world, rank=draw % world, interleave=1 + draw % 5),
        )
        scores = values[torch.randint(0, len(values), (5, 17), generator=g)]
        lengths = torch.randint(-3, 70, (5,), generator=g).int()
        start = torch.randint(0, 19, (5,), generator=g).int() if spec.has_row_start else None
        context = types.SimpleNamespace(spec=spec, check=lambda **operands: None)
        index, selected = build(context)(scores, lengths, start)
        wanted, wanted_scores = reference.topk_select(spec, scores, lengths, start)
        assert torch.equal(index, wanted)
        assert torch.equal(selected.float().nan_to_num(7.0), wanted_scores.nan_to_num(7.0))


def test_a_row_of_the_selection_depends_on_no_other_row(tmp_path: Path) -> None:
    spec = TopKSpec(topk=5, return_selected=True)
    context = types.SimpleNamespace(spec=spec, check=lambda **operands: None)
    run = kernels(tmp_path / "new").build_topk_select(context)
    scores = torch.randn(64, 200, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    lengths = torch.arange(64, dtype=torch.int32) * 3
    together = run(scores, lengths)[0]
    for row in (0, 1, 31, 63):
        assert torch.equal(run(scores[row : row + 1], lengths[row : row + 1])[0][0], together[row])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a backend and install it with pip into a folder of its own; the tests stay beside it."""
    pytest.importorskip("pip", reason="installs a package")
    place = tmp_path_factory.mktemp("vireo")
    write("vireo", place / "source")
    options = "--quiet --no-build-isolation --no-deps --no-index --disable-pip-version-check"
    pip = [sys.executable, "-m", "pip", "install", *options.split(), "--target", str(place / "site")]
    pip.append(str(place / "source"))
    subprocess.run(pip, check=True)
    return place


def run(folder: Path, site: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a folder, whose packages go before the installed ones."""
    env = {n: v for n, v in os.environ.items() if not n.startswith(("KIMI_HAL_", "PYTEST_"))}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (site, ROOT, ROOT / "conformance")))
    env |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | variables
    command = (sys.executable, "-m", *command)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


HAL = "kimi_hal.cli.main"


def test_it_installs_is_found_and_explains_itself(place: Path) -> None:
    listed = json.loads(run(place, place / "site", HAL, "list", "--json").stdout)
    assert listed["failures"] == {}
    found = {op: [i["name"] for i in b["vireo"]] for op, b in listed["operators"].items() if b.get("vireo")}
    assert found["merge_attn_states"] == found["topk_select"] == ["torch"]
    assert (
        "backend vireo 0.1.0: 2 implementations; no device: no file /sys/class/vireo/*/architecture: "
        "the vireo driver is not loaded"
    ) in run(place, place / "site", HAL, "doctor").stdout
    explain = (HAL, "explain", "merge_attn_states")
    interpreted = {"KIMI_HAL_BACKEND": "vireo", "KIMI_HAL_EXECUTION": "interpreted"}
    assert run(place, place / "site", *explain, **interpreted).stdout.splitlines()[:4] == [
        "merge_attn_states on cpu: vireo.torch",
        "  why: KIMI_HAL_BACKEND=vireo; it runs interpreted",
        "  not built: a plan imports its kernels, and says what they lack",
        "  vireo.torch: chosen",
    ]
    beyond = run(place, place / "site", *explain, "--spec", '{"dim": 513}', **interpreted).stdout
    assert "  vireo.torch: dim=513 is not 1 to 512" in beyond.splitlines()


def test_without_its_device_it_says_what_to_type(place: Path) -> None:
    out = run(place, place / "site", HAL, "explain", "topk_select", KIMI_HAL_BACKEND="vireo").stdout
    assert "KIMI_HAL_EXECUTION=interpreted runs its kernels on the CPU" in out


def test_its_own_tests_pass_and_with_them_the_suite(place: Path) -> None:
    done = run(place / "source", place / "site", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout


def test_the_suite_shows_the_case_that_a_broken_kernel_fails(place: Path, tmp_path: Path) -> None:
    """One wrong line, the place of NaN in ``topk_select``: the suite names the case and how to replay it."""
    source = (place / "source/kimi_hal_vireo/kernels.py").read_text()
    broken = source.replace(
        "return by_score.gather(1, rank.sort(dim=1, stable=True).indices)", "return by_score"
    )
    assert broken != source
    shutil.copytree(place / "source/kimi_hal_vireo", tmp_path / "kimi_hal_vireo")
    (tmp_path / "kimi_hal_vireo/kernels.py").write_text(broken)
    arguments = ("--backend", "vireo", "--execution", "interpreted", "--case", "topk_select/special/ordered")
    done = run(tmp_path, place / "site", HAL, "conformance", "run", *arguments)
    assert done.returncode == 1
    assert "does NOT conform" in done.stdout
    assert "kimi-hal conformance replay topk_select/special/ordered" in done.stdout


def test_its_own_suite_finds_a_promise_of_equal_bits_that_is_broken(place: Path, tmp_path: Path) -> None:
    """Every second call is a last bit off: within every budget, and not what ``deterministic=True`` promises."""
    source = (place / "source/kimi_hal_vireo/kernels.py").read_text()
    broken = source.replace(
        "    return merged / divisor[..., None], top + torch.log(divisor)\n",
        "    CALLS.append(0)\n"
        "    off = 1 + 2.0**-23 * (len(CALLS) // 2 % 2)\n"
        "    return merged / divisor[..., None], (top + torch.log(divisor)) * off\n"
        "\n\n"
        "CALLS: list[int] = []\n",
    )
    assert broken != source
    shutil.copytree(place / "source", tmp_path / "source")
    (tmp_path / "source/kimi_hal_vireo/kernels.py").write_text(broken)
    shutil.copytree(place / "site", tmp_path / "site", ignore=shutil.ignore_patterns("kimi_hal_vireo"))
    done = run(
        tmp_path / "source", tmp_path / "site", "pytest", "-q", "-p", "no:cacheprovider", "-k", "no_claim"
    )
    assert done.returncode == 1
    assert "declared deterministic, but lse_out of call 2 has other bits than of call 1" in done.stdout


def test_the_version_range_follows_kimi_hal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_backend, "__version__", "1.9.3")
    names = new_backend.names_of("acme")
    assert (names["oldest"], names["next"]) == ("1.9", "1.10")
