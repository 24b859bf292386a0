"""AMD's probe reads the kernel's compute topology."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_hal_amd.plugin import NODES, gfx_name, probe


def machine(root: Path, *versions: int) -> Path:
    for i, version in enumerate(versions):
        node = root / NODES / str(i)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 8\ngfx_target_version {version}\n")
    return root


@pytest.mark.parametrize(
    ("version", "name"),
    [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (120500, "gfx1250"), (110000, "gfx1100")],
)
def test_topology_versions_become_compiler_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


def test_gpu_nodes_are_claimed_and_cpu_nodes_are_not(tmp_path: Path) -> None:
    found = probe(machine(tmp_path, 0, 90500, 90500))
    assert found.present
    assert found.arch == "gfx950"
    assert found.devices == ("AMD gfx950 node 1", "AMD gfx950 node 2")


def test_a_machine_without_the_driver_says_so(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert found.why == "/sys/class/kfd/kfd/topology/nodes is missing: the amdgpu kernel driver is not loaded"


def test_a_machine_with_only_cpu_nodes_says_so(tmp_path: Path) -> None:
    assert probe(machine(tmp_path, 0)).why == "/sys/class/kfd/kfd/topology/nodes lists no GPU node"
