"""A plan's key says what was planned; ranks compare what they must have in common; sources are hashed."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from kimi_hal.dispatch import keys, sources
from kimi_hal.dispatch.contract import Backend, Capability, Implementation
from kimi_hal.errors import PluginError
from kimi_hal.ops.moe import MoESpec
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import DCP, Limits

SPEC = SparseMLASpec(num_heads=12, latent="latent.fp8.e4m3fn.tensor")
LIMITS = Limits(max_rows=8, max_reqs=4)
PARTS = ("sparse_mla", SPEC, LIMITS, "acme.fast", "0" * 64)


def test_equal_parts_have_one_key_in_every_process():
    text = f"""
from kimi_hal.dispatch import keys
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
spec = SparseMLASpec(latent={SPEC.latent!r}, num_heads=12)
print(keys.key("sparse_mla", spec, Limits(max_reqs=4, max_rows=8), "acme.fast", "0" * 64))
"""
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, env=env)
    assert other.stdout.strip() == keys.key(*PARTS)
    assert len(keys.key(*PARTS)) == 64


@pytest.mark.parametrize(
    "change",
    [
        {0: "store_latent"},
        {1: dataclasses.replace(SPEC, page=32)},
        {1: dataclasses.replace(SPEC, numerics=("attn.p=bf16",))},
        {2: Limits(max_rows=9, max_reqs=4)},
        {3: "acme.slow"},
        {4: "1" * 64},
    ],
    ids=["operator", "Spec", "numerics", "Limits", "implementation", "source"],
)
def test_every_part_changes_the_key(change):
    assert keys.key(*(change.get(i, part) for i, part in enumerate(PARTS))) != keys.key(*PARTS)


def test_ranks_have_keys_of_their_own_and_one_shared_text():
    def rank(r):
        return dataclasses.replace(SPEC, dcp=DCP(world=4, rank=r))

    first, second = (keys.key("sparse_mla", rank(r), *PARTS[2:], (r, 4)) for r in (0, 1))
    assert first != second
    assert keys.shared("sparse_mla", rank(0), *PARTS[2:]) == keys.shared("sparse_mla", rank(1), *PARTS[2:])
    other = dataclasses.replace(rank(1), page=32)
    assert keys.shared("sparse_mla", other, *PARTS[2:]) != keys.shared("sparse_mla", rank(1), *PARTS[2:])


def test_a_ranks_first_expert_is_its_own():
    ranks = [MoESpec(num_local=448, expert_offset=offset) for offset in (0, 448)]
    texts = {keys.shared("moe_experts", spec, *PARTS[2:]) for spec in ranks}
    assert len(texts) == 1


def test_the_shared_text_begins_with_what_a_person_looks_for():
    assert keys.shared(*PARTS).startswith("acme.fast for sparse_mla, source 000000000000, {")


# --- sources ------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A plugin's package that nothing imports."""
    folder = tmp_path / "acme_kernels"
    (folder / "more").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "attn.py").write_text("one")
    (folder / "more" / "moe.cu").write_text("two")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


BACKEND = Backend("acme", "1.0", 1, "", "", "", "cuda")


def implementation(**fields):
    return Implementation(
        "sparse_mla", "fast", "acme_kernels.attn:build", (Capability(("*",), {}),), **fields
    )


def test_by_default_the_build_module_is_hashed_and_not_imported(package):
    before = sources.source_hash(BACKEND, implementation())
    assert "acme_kernels" not in sys.modules
    (package / "more" / "moe.cu").write_text("changed")
    assert sources.source_hash(BACKEND, implementation()) == before
    (package / "attn.py").write_text("changed")
    assert sources.source_hash(BACKEND, implementation()) != before


def test_globs_are_relative_to_the_folder_of_the_package(package):
    both = implementation(source=("acme_kernels/*.py", "acme_kernels/**/*.cu"))
    before = sources.source_hash(BACKEND, both)
    (package / "more" / "moe.cu").write_text("changed")
    assert sources.source_hash(BACKEND, both) != before


def test_moving_a_package_changes_nothing(package, tmp_path, monkeypatch):
    before = sources.source_hash(BACKEND, implementation(source=("acme_kernels/**/*",)))
    elsewhere = tmp_path / "site"
    elsewhere.mkdir()
    package.rename(elsewhere / "acme_kernels")
    monkeypatch.syspath_prepend(str(elsewhere))
    assert sources.source_hash(BACKEND, implementation(source=("acme_kernels/**/*",))) == before


@pytest.mark.parametrize(
    "change",
    [{"version": "2.8.1"}, {"backend": dataclasses.replace(BACKEND, version="1.1")}],
    ids=["library", "plugin"],
)
def test_versions_are_part_of_it(package, change):
    backend = change.pop("backend", BACKEND)
    assert sources.source_hash(backend, implementation(**change)) != sources.source_hash(
        BACKEND, implementation()
    )


def test_the_parts_of_a_composition_are_part_of_it(package):
    from kimi_hal.dispatch import composed

    class Part:
        name, source_hash = "acme.fast", "1" * 64

    assert composed.source_hash("0" * 64, {"sparse_mla": Part()}) != "0" * 64


def test_a_glob_that_matches_nothing_is_the_plugins_error(package):
    with pytest.raises(PluginError) as caught:
        sources.source_hash(BACKEND, implementation(source=("acme_kernels/*.hip",)))
    assert str(caught.value) == (
        f"plugin 'acme': fast: source 'acme_kernels/*.hip' matches no file in {package.parent}."
    )


def test_a_module_without_a_file_is_the_plugins_error():
    lost = dataclasses.replace(implementation(), build="acme_is_nowhere.attn:build")
    with pytest.raises(PluginError, match=r"module acme_is_nowhere has no file whose source could be hashed"):
        sources.source_hash(BACKEND, lost)
