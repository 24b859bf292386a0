"""The kept code is that of the kept sources, and the structures that are packed for it are as long as there."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_hal.errors import PluginError
from kimi_hal_nvidia import build, cubins, fp8_sum, scores, topk
from kimi_hal_nvidia.parameters import Parameters

FILES = cubins.kept()


@pytest.mark.parametrize(("stem", "arch"), FILES)
def test_a_kept_cubin_is_what_the_manifest_says_of_the_kept_source(stem: str, arch: str) -> None:
    kept = cubins.manifest()[cubins.file_name(stem, arch)]
    assert kept["sha256"] == hashlib.sha256(cubins.read(stem, arch)).hexdigest()
    assert kept["source"] == cubins.source_hash(stem), "run python -m kimi_hal_nvidia.build"


@pytest.mark.parametrize("stem", cubins.STEMS)
def test_all_that_a_source_includes_is_hashed_with_it(stem: str) -> None:
    found, todo = set(), [f"{stem}.cu"]
    while todo:
        text = (cubins.SOURCES / todo.pop()).read_text()
        new = set(re.findall(r'#include "(.+?)"', text)) - found
        found |= new
        todo += new
    assert found == set(cubins.STEMS[stem])


def test_nothing_is_kept_that_is_not_in_the_manifest() -> None:
    kept = {path.name for path in cubins.KEPT.glob("*.cubin")}
    assert kept == set(cubins.manifest())


def test_an_architecture_without_code_is_refused_by_name() -> None:
    with pytest.raises(PluginError) as refused:
        cubins.read("topk_short", "sm_80")
    assert str(refused.value) == (
        "plugin 'nvidia': no kernel was compiled for sm_80, only for sm_90, sm_100, sm_103"
    )


def test_a_missing_cubin_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cubins, "KEPT", tmp_path)
    with pytest.raises(PluginError) as refused:
        cubins.read("topk_short", "sm_90")
    assert str(refused.value) == (
        "plugin 'nvidia': topk_short.sm_90a.cubin is missing: reinstall kimi-hal-nvidia, "
        "or run python -m kimi_hal_nvidia.build"
    )


def test_without_a_compiler_the_build_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    with pytest.raises(SystemExit) as left:
        build.compiler()
    assert left.value.code == (
        "nvcc is not on the path: install the CUDA toolkit 13.0, or name its nvcc by NVCC=…"
    )


def test_a_source_that_is_not_there_is_told_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["build", "merge_states", "merge"])
    with pytest.raises(SystemExit) as left:
        build.main()
    assert str(left.value.code).startswith("there is no merge: the sources are topk_short, ")


def test_a_source_that_is_named_is_compiled_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = cubins.manifest()
    (tmp_path / "manifest.json").write_text(json.dumps(before))
    monkeypatch.setattr(sys, "argv", ["build", "merge_states"])
    monkeypatch.setattr(cubins, "KEPT", tmp_path)
    monkeypatch.setattr(cubins, "MANIFEST", tmp_path / "manifest.json")
    monkeypatch.setattr(build, "compiler", lambda: "nvcc")
    monkeypatch.setattr(build, "version", lambda nvcc: "1.2.3")
    monkeypatch.setattr(build, "compile_one", lambda nvcc, stem, target, out: out.write_text(stem + target))
    build.main()
    after = cubins.manifest()
    assert list(after) == list(before)
    changed = [name for name in after if after[name] != before[name]]
    assert changed == [f"merge_states.{target}.cubin" for target in cubins.TARGETS.values()]


LAYOUTS = """
#include <cstdio>
#include "scores.cuh"
#include "together.cuh"
#define LIKES LIKES_OF_HELD
#include "held.cuh"
#undef LIKES
#include "slices.cuh"
#include "sums.cuh"
int main() {
  printf("%zu %zu\\n", sizeof(Selection), sizeof(Scoring));
  printf("%zu %zu ", sizeof(HeldRoom<512, false, 16>), sizeof(HeldRoom<512, false, 32>));
  printf("%zu ", sizeof(HeldRoom<1024, false, 32>));
  printf("%zu %zu ", sizeof(HeldRoom<512, true, 16>), sizeof(HeldRoom<1024, true, 16>));
  printf("%zu %zu\\n", sizeof(Room<512, 8192, 16384, true>), sizeof(Room<512, 5632, 4096, false>));
"""


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: nothing is compiled again")
@pytest.mark.parametrize(("stem", "arch"), FILES)
def test_the_same_compiler_makes_the_same_bytes(stem: str, arch: str, tmp_path: Path) -> None:
    kept = cubins.manifest()[cubins.file_name(stem, arch)]
    if build.version("nvcc") != kept["nvcc"]:
        pytest.skip(f"this nvcc is {build.version('nvcc')}, the kept code was made by {kept['nvcc']}")
    build.compile_one("nvcc", stem, cubins.TARGETS[arch], tmp_path / "again.cubin")
    assert hashlib.sha256((tmp_path / "again.cubin").read_bytes()).hexdigest() == kept["sha256"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: layouts are not compared")
def test_packed_structures_and_shared_memory_are_as_long_as_in_the_sources(tmp_path: Path) -> None:
    rings = [(e, r) for e in ("fp8", "fp4") for r in scores.RINGS]
    lines = [
        f'printf("%zu\\n", sizeof(Ring<{name}, {n}, {r.cut[e][0]}, {r.cut[e][1]}>));'
        for e, r in rings
        for name, n in re.findall(
            rf"SCORES\({e}_{r.heads}x{r.rows}, (\w+), (\d+)",
            (cubins.SOURCES / f"index_scores_{e}.cu").read_text(),
        )
    ]
    lines.append(f'printf("%zu\\n", sizeof(sums::Memory<{fp8_sum.GROUPS}, {fp8_sum.PAGES}>));')
    source = tmp_path / "layouts.cu"
    source.write_text(LAYOUTS + "\n".join(lines) + "\n}\n")
    command = [
        "nvcc",
        *build.FLAGS[:1],
        "-I",
        str(cubins.SOURCES),
        str(source),
        "-o",
        str(tmp_path / "layouts"),
    ]
    subprocess.run([*command, "-gencode=arch=compute_90a,code=sm_90a"], check=True, capture_output=True)
    said = subprocess.run([str(tmp_path / "layouts")], check=True, capture_output=True, text=True).stdout
    first, second, *sizes, sums = said.splitlines()
    packed = [Parameters(module.ADDRESSES, module.NUMBERS).size for module in (topk, scores)]
    assert first == " ".join(map(str, packed))
    assert second == " ".join(str(shared) for _, _, shared in topk.FORMS.values())
    assert sums == str(fp8_sum.SHARED)
    assert [int(size) for size in sizes] == [r.shared(e) for e, r in rings]
