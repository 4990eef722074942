"""Probes of accelerators, with fake /sys and /dev."""

from __future__ import annotations

from pathlib import Path

from genie.hardware import ProbeResult, probe_accelerators
from genie.model.node import Vendor


def probe_vendor(root: Path, vendor: Vendor) -> ProbeResult:
    return next(result for result in probe_accelerators(root=root) if result.vendor is vendor)


def write_card(root: Path, name: str, pci_vendor: str) -> None:
    folder = root / "sys/class/drm" / name / "device"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{pci_vendor}\n")


def test_every_vendor_has_one_result_with_a_reason_even_on_an_empty_system(tmp_path: Path) -> None:
    results = probe_accelerators(root=tmp_path)
    assert [result.vendor for result in results] == [Vendor.NVIDIA, Vendor.AMD, Vendor.INTEL, Vendor.CPU]
    assert all(result.reason for result in results)


def test_cpu_is_always_usable(tmp_path: Path) -> None:
    assert probe_vendor(tmp_path, Vendor.CPU).usable


def test_amd_gpu_is_recognized_as_unsupported(tmp_path: Path) -> None:
    write_card(tmp_path, "card0", "0x1002")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    result = probe_vendor(tmp_path, Vendor.AMD)
    assert not result.usable
    assert "card0" in result.reason
    assert "does not support AMD GPUs" in result.reason


def test_amd_gpu_without_driver_has_a_fix(tmp_path: Path) -> None:
    write_card(tmp_path, "card0", "0x1002")
    result = probe_vendor(tmp_path, Vendor.AMD)
    assert "not loaded" in result.reason
    assert "/dev/kfd" in result.fix


def test_intel_gpu_is_recognized_by_vendor_and_render_node(tmp_path: Path) -> None:
    write_card(tmp_path, "card1", "0x8086")
    (tmp_path / "dev/dri").mkdir(parents=True)
    (tmp_path / "dev/dri/renderD128").touch()
    result = probe_vendor(tmp_path, Vendor.INTEL)
    assert not result.usable
    assert "renderD128" in result.reason
    assert probe_vendor(tmp_path, Vendor.AMD).reason == "no AMD GPU in /sys/class/drm"
