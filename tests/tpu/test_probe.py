"""TPU's probe reads the PCI bus; an importable libtpu is not a TPU."""

from __future__ import annotations

from pathlib import Path

from kimi_hal_tpu.plugin import DEVICES, probe


def machine(root: Path, *ids: tuple[str, str]) -> Path:
    for i, (vendor, device) in enumerate(ids):
        path = root / DEVICES / f"0000:00:0{i}.0"
        path.mkdir(parents=True)
        (path / "vendor").write_text(vendor + "\n")
        (path / "device").write_text(device + "\n")
    return root


def test_a_tpu_is_claimed_with_its_generation(tmp_path: Path) -> None:
    found = probe(machine(tmp_path, ("0x8086", "0x1234"), ("0x1ae0", "0x0076")))
    assert found.present
    assert found.arch == "tpu7x"
    assert found.devices == ("TPU tpu7x at 0000:00:01.0",)


def test_another_google_device_is_not_a_tpu(tmp_path: Path) -> None:
    found = probe(machine(tmp_path, ("0x1ae0", "0x0042")))
    assert found.why == "no PCI device of vendor 0x1ae0 with a TPU's device id"


def test_a_machine_without_pci_has_none(tmp_path: Path) -> None:
    assert not probe(tmp_path).present
