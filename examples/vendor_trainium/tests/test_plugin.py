"""The plugin answers without torch and without a device, and claims Trainium by the driver's files alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kimi_hal.errors import SettingsError

from kimi_hal_trainium import plugin
from kimi_hal_trainium.tiles import tile_of


def add_device(root: Path, number: int, name: str) -> None:
    """Write what the Neuron driver would."""
    folder = root / f"sys/devices/virtual/neuron_device/neuron{number}/info/architecture"
    folder.mkdir(parents=True)
    (folder / "device_name").write_text(f"{name}\n")


def test_the_plugin_imports_no_torch() -> None:
    modules = "kimi_hal_trainium.plugin, kimi_hal_trainium.implementations"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_trainium_is_claimed(tmp_path: Path) -> None:
    add_device(tmp_path, 0, "Trainium2")
    add_device(tmp_path, 1, "Trainium2")
    version = tmp_path / "sys/module/neuron/version"
    version.parent.mkdir(parents=True)
    version.write_text("2.27.4.0\n")
    probe = plugin.probe(tmp_path)
    assert (probe.present, probe.arch) == (True, "trn2")
    assert probe.devices == ("AWS Trainium2 neuron0", "AWS Trainium2 neuron1")
    assert probe.facts == {"neuron-driver": "2.27.4.0"}


def test_inferentia_is_not_claimed(tmp_path: Path) -> None:
    add_device(tmp_path, 0, "Inferentia2")
    probe = plugin.probe(tmp_path)
    assert not probe.present
    assert probe.why == "the Neuron driver lists Inferentia2, none of Trainium2, Trainium3"


def test_an_absent_device_is_said(tmp_path: Path) -> None:
    probe = plugin.probe(tmp_path)
    assert not probe.present
    assert probe.why == ("no file /sys/devices/virtual/neuron_device/neuron*/info/architecture/device_name")


def test_its_variable_takes_three_values() -> None:
    assert [tile_of({}), tile_of({"KIMI_HAL_TRAINIUM_TILE": "128"})] == [512, 128]
    with pytest.raises(SettingsError, match="KIMI_HAL_TRAINIUM_TILE='100' is not 128, 256 or 512"):
        tile_of({"KIMI_HAL_TRAINIUM_TILE": "100"})
