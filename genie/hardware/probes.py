"""Read-only probes for `genie doctor`: which accelerators this machine has and what they lack.

AMD and Intel GPUs are recognized by the files of their drivers, and reported as unsupported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from genie.errors import HardwareError
from genie.hardware.host import cpu_model, host_facts
from genie.hardware.nvidia import NvidiaReader
from genie.model.node import Vendor

_PCI_VENDOR_IDS = {Vendor.AMD: "0x1002", Vendor.INTEL: "0x8086"}
_VENDOR_NAMES = {Vendor.AMD: "AMD", Vendor.INTEL: "Intel"}


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """`reason`: what was found or is missing. `fix`: what to do; may be empty."""

    vendor: Vendor
    usable: bool
    reason: str
    fix: str = ""


def probe_accelerators(*, root: Path = Path("/")) -> list[ProbeResult]:
    """One result for each vendor. `root` is the directory of /sys, /dev and /proc. Blocks."""
    return [_probe_nvidia(), _probe_amd(root), _probe_intel(root), _probe_cpu(root)]


def _probe_nvidia() -> ProbeResult:
    try:
        reader = NvidiaReader()
    except HardwareError as error:
        return ProbeResult(vendor=Vendor.NVIDIA, usable=False, reason=error.message, fix=error.hint)
    gpus = reader.read()
    reader.close()
    if not gpus:
        return ProbeResult(
            vendor=Vendor.NVIDIA,
            usable=False,
            reason="NVML works but lists no GPU",
            fix="run 'nvidia-smi -L', and check whether this container has access to a GPU",
        )
    lost = [f"GPU {gpu.gpu_id}: {gpu.reason}" for gpu in gpus if not gpu.available]
    return ProbeResult(
        vendor=Vendor.NVIDIA,
        usable=len(lost) < len(gpus),
        reason="; ".join([", ".join(gpu.name for gpu in gpus), *lost]),
        fix="run 'nvidia-smi' and check the kernel log; a lost GPU needs a reset or a reboot" if lost else "",
    )


def _probe_amd(root: Path) -> ProbeResult:
    cards = _find_gpu_cards(root, Vendor.AMD)
    if (root / "dev/kfd").exists():
        found = f"/dev/kfd exists, with {_format_gpu_cards(cards)}"
        return ProbeResult(
            vendor=Vendor.AMD, usable=False, reason=f"{found}; {_unsupported_reason(Vendor.AMD)}"
        )
    return _driver_missing_result(Vendor.AMD, cards, driver="amdgpu with ROCm (/dev/kfd)")


def _probe_intel(root: Path) -> ProbeResult:
    cards = _find_gpu_cards(root, Vendor.INTEL)
    nodes = sorted(path.name for path in (root / "dev/dri").glob("renderD*"))
    if cards and nodes:
        found = f"{_format_gpu_cards(cards)} with {', '.join(nodes)}"
        return ProbeResult(
            vendor=Vendor.INTEL, usable=False, reason=f"{found}; {_unsupported_reason(Vendor.INTEL)}"
        )
    return _driver_missing_result(Vendor.INTEL, cards, driver="i915 or xe (/dev/dri/renderD*)")


def _driver_missing_result(vendor: Vendor, cards: list[str], *, driver: str) -> ProbeResult:
    if not cards:
        return ProbeResult(
            vendor=vendor, usable=False, reason=f"no {_VENDOR_NAMES[vendor]} GPU in /sys/class/drm"
        )
    reason = (
        f"{_format_gpu_cards(cards)}, but the compute driver is not loaded; {_unsupported_reason(vendor)}"
    )
    return ProbeResult(vendor=vendor, usable=False, reason=reason, fix=f"load {driver}")


def _probe_cpu(root: Path) -> ProbeResult:
    facts = host_facts(root=root)
    memory_gib = facts.memory_total_bytes / 1024**3
    return ProbeResult(
        vendor=Vendor.CPU,
        usable=True,
        reason=f"{cpu_model(root=root)}: {facts.cpus:g} processors, {memory_gib:.1f} GiB",
    )


def _find_gpu_cards(root: Path, vendor: Vendor) -> list[str]:
    """Names such as card0. Outputs (card0-DP-1) have no vendor file."""
    found: list[str] = []
    for path in sorted((root / "sys/class/drm").glob("card[0-9]*")):
        try:
            if (path / "device/vendor").read_text("ascii").strip() == _PCI_VENDOR_IDS[vendor]:
                found.append(path.name)
        except (OSError, UnicodeDecodeError):
            continue
    return found


def _format_gpu_cards(cards: list[str]) -> str:
    return f"{len(cards)} GPU(s) in /sys/class/drm" + (f" ({', '.join(cards)})" if cards else "")


def _unsupported_reason(vendor: Vendor) -> str:
    return f"this version of Genie does not support {_VENDOR_NAMES[vendor]} GPUs"
