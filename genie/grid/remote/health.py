"""A node's readings: load, memory, disk, GPUs, and what the kernel said about GPUs.

`health.read` gives all of them in one answer. Each part has its own time, so a tool that hangs costs
its own reading: the answer has the others, and `failed` says which is missing and why. A tool that
still hangs is not started a second time.

Runs on nodes, so: standard library only, Python 3.8. Not for: judging the readings (health_check.py).
"""

from __future__ import annotations

import os
import re
import threading
import time
from typing import Any, Callable, Dict  # noqa: UP035 - at run time, Python 3.8 needs these

from genie.grid.remote import nvml
from genie.grid.remote.core import OpError, op

NVIDIA_QUERY = (
    "index,name,uuid,memory.total,memory.used,utilization.gpu,temperature.gpu,"
    "ecc.errors.uncorrected.volatile.total"
)
NVIDIA_FORMAT = "csv,noheader,nounits"
MIB = 1 << 20
HOT_C = 80
"""From here on nvidia-smi is asked why clocks are held down; that is one more start of a slow tool."""
FREE_MEMORY_SHARE = 0.05
FREE_MEMORY_BYTES = 1 << 30
FREE_UTILIZATION_PCT = 10.0
OUTPUT_BYTES_MAX = 1 << 20
"""Of one tool."""
TEXT_MAX = 200
"""Characters of a name, a path or a complaint."""
_RECORDS_MAX = 200_000
_XIDS_MAX = 100
_MORE_FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin", "/opt/rocm/bin")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,9})?")
_XID = re.compile(
    r"(?:[0-9]+,[0-9]+,(?P<us>[0-9]+),[^;]*;|\[ *(?P<s>[0-9]+\.[0-9]+)\].*?)?"
    r"NVRM: Xid \((?P<bus>[^)]{1,64})\): (?P<code>[0-9]{1,6})[, ]*(?P<text>.*)"
)
_LOG_COMMANDS = (
    ("dmesg",),
    ("journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-monotonic", "-g", "NVRM: Xid", "-n", "100"),
)
_HELD_DOWN = ((0x8, "hardware slowdown"), (0x20, "heat"), (0x40, "heat (hardware)"), (0x80, "power brake"))

Reading = Dict[str, Any]  # noqa: UP006 - evaluated at run time


@op("health.read")
def read(args: Any, blob: bytes) -> Reading:
    """args: root (a path, '~' allowed) and timeout_s, which is for each part."""
    root = os.path.expanduser(str(args["root"]))
    timeout_s = float(args["timeout_s"])
    tool = _gpu_tool()
    nvidia = tool is not None and os.path.basename(tool) == "nvidia-smi"
    # What never waits is read at once; what might, in threads, which cost more than most readings.
    at_once: dict[str, Callable[[], Reading]] = {"load": _load, "memory": _memory}
    apart: dict[str, Callable[[], Reading]] = {"disk": lambda: _disk(root)}
    (apart if tool else at_once)["gpus"] = lambda: _gpus(tool, timeout_s)
    if nvidia or os.path.isdir("/proc/driver/nvidia"):
        (at_once if _KERNEL_LOG.is_ready else apart)["xids"] = lambda: _xids(timeout_s)
    return _side_by_side(apart, at_once, timeout_s)


_UNDER_WAY: dict[str, tuple[threading.Thread, float]] = {}
"""The last thread of each part, and until when it has time. With the lock, there is never a second one."""
_STARTING = threading.Lock()


def _side_by_side(
    parts: dict[str, Callable[[], Reading]], at_once: dict[str, Callable[[], Reading]], timeout_s: float
) -> Reading:
    """Runs each of the parts in a thread, and waits no longer than its time for any of them."""
    # A tool is ended at its time; a little more lets its part say so.
    deadline = time.monotonic() + timeout_s + 0.1
    found: Reading = {}
    failed: dict[str, str] = {}
    results: dict[str, Reading] = {}
    started = {}
    # First, because beside a thread that calls into a library it would take several times as long.
    for name, part in at_once.items():
        _into(results, name, part)
    for name, part in parts.items():
        thread = threading.Thread(target=_into, args=(results, name, part), daemon=True)
        if _start(name, thread, deadline):
            started[name] = thread
        else:
            failed[name] = "an earlier reading still hangs"
    for thread in started.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    for name in [*at_once, *started]:
        result = results.get(name)
        if result is None:
            failed[name] = f"took longer than {timeout_s:.3g} s"
        else:
            failed.update(result.pop("failed", {}))
            found.update(result)
    found["failed"] = failed
    return found


def _start(name: str, thread: threading.Thread, deadline: float) -> bool:
    """False where an earlier thread of this part is beyond its time. One that is not yet is waited for."""
    while True:
        with _STARTING:
            before, until = _UNDER_WAY.get(name, (None, 0.0))
            if before is None or not before.is_alive():
                _UNDER_WAY[name] = (thread, deadline)
                thread.start()
                return True
        left_s = min(until, deadline) - time.monotonic()
        if left_s <= 0:
            return False
        before.join(left_s)


def _into(results: dict[str, Reading], name: str, part: Callable[[], Reading]) -> None:
    try:
        results[name] = part()
    except (OpError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        text = str(error) if isinstance(error, (OpError, OSError)) else f"not understood: {error}"
        results[name] = {"failed": {name: text[:TEXT_MAX]}}


def _load() -> Reading:
    return {"load": list(os.getloadavg()), "cores": os.cpu_count() or 1}


def _memory() -> Reading:
    with open("/proc/meminfo", encoding="ascii", errors="replace") as file:
        return parse_meminfo(file.read(1 << 16))


def parse_meminfo(text: str) -> Reading:
    sizes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    # Kernels before 3.14 and some containers do not tell what is available.
    available = sizes.get("MemAvailable", sizes.get("MemFree", 0) + sizes.get("Cached", 0))
    return {"memory_total_bytes": sizes["MemTotal"], "memory_available_bytes": available}


def _disk(root: str) -> Reading:
    """Of the filesystem that the path is on, or would be: it may not have been made yet."""
    while root and not os.path.exists(root):
        above = os.path.dirname(root)
        if above == root:
            break
        root = above
    root = root or "/"
    stat = os.statvfs(root)
    # The system's own answer: it knows of read-only file systems, which bind root, too.
    writable = os.path.isdir(root) and os.access(root, os.W_OK | os.X_OK)
    return {
        "disk_total_bytes": stat.f_frsize * stat.f_blocks,
        "disk_free_bytes": stat.f_frsize * stat.f_bavail,
        "unwritable": "" if writable else root[:TEXT_MAX],
    }


# --- GPUs -------------------------------------------------------------------------------------


def read_gpus(timeout_s: float) -> Reading:
    """As `health.read` has them: vendor and gpus. Raises OpError where that fails, or takes longer."""
    tool = _gpu_tool()
    found = _side_by_side({"gpus": lambda: _gpus(tool, timeout_s)}, {}, timeout_s)
    if "gpus" not in found:
        raise OpError("gpus", f"GPUs: {found['failed']['gpus']}")
    return found


def memory_share(total: int | None, used: int | None, utilization: float | None) -> float | None:
    """Memory in use, 0 to 1. Where memory is the host's own and not told, the utilisation instead."""
    if total and used is not None:
        return min(1.0, used / total)
    return utilization / 100 if utilization is not None else None


def is_free(total: int | None, used: int | None, utilization: float | None) -> bool:
    """Nobody computes there: hardly any memory in use (5% or 1 GiB), and less than 10% busy."""
    share = memory_share(total, used, utilization)
    little = share is not None and share < FREE_MEMORY_SHARE
    if used is not None:
        little = little or used < FREE_MEMORY_BYTES
    return little and (utilization or 0.0) < FREE_UTILIZATION_PCT


def _gpu_tool() -> str | None:
    return find_program("nvidia-smi") or find_program("rocm-smi") or find_program("amd-smi")


def _gpus(tool: str | None, timeout_s: float) -> Reading:
    deadline = time.monotonic() + timeout_s
    name = os.path.basename(tool or "")
    if tool and name == "nvidia-smi":
        return _nvidia(tool, deadline)
    if tool and name == "rocm-smi":
        shown = ["--showproductname", "--showuniqueid", "--showmeminfo", "vram", "--showuse", "--showtemp"]
        return parse_rocm(_output([tool, *shown, "--json"], deadline))
    if tool:
        metric = _output([tool, "metric", "--json"], deadline)
        return parse_amd(metric, _amd_names(tool, deadline))
    return {"vendor": "none", "gpus": []}


def _nvidia(program: str, deadline: float) -> Reading:
    """By NVML, which starts nothing; where that fails by nvidia-smi, whose words people know."""
    try:
        return {"vendor": "nvidia", "gpus": [_gpu_by_nvml(**each) for each in nvml.read()]}
    except nvml.NvmlError:
        return _nvidia_smi(program, deadline)


def _gpu_by_nvml(index: int, held_down: int | None, **values: Any) -> Reading:
    gpu = _gpu(index, **values)
    gpu["throttled"] = _reasons(held_down or 0)
    return gpu


def _nvidia_smi(program: str, deadline: float) -> Reading:
    found = parse_nvidia(
        _output([program, f"--query-gpu={NVIDIA_QUERY}", f"--format={NVIDIA_FORMAT}"], deadline)
    )
    if any((gpu["temperature_c"] or 0) >= HOT_C for gpu in found["gpus"]):
        _add_reasons(found["gpus"], program, deadline)
    return found


def _add_reasons(gpus: list[Reading], program: str, deadline: float) -> None:
    """Why clocks are held down, where the driver tells; without it the readings are still whole."""
    try:
        query = "--query-gpu=index,clocks_throttle_reasons.active"
        text = _output([program, query, f"--format={NVIDIA_FORMAT}"], deadline)
    except (OpError, OSError):
        return
    masks = dict(re.findall(r"^ *([0-9]{1,4}) *, *(0x[0-9a-fA-F]{1,16}) *$", text, re.MULTILINE))
    for gpu in gpus:
        mask = int(masks.get(str(gpu["index"]), "0x0"), 16)
        gpu["throttled"] = _reasons(mask)


def _reasons(mask: int) -> list[str]:
    return [reason for bit, reason in _HELD_DOWN if mask & bit]


def parse_nvidia(text: str) -> Reading:
    """The lines of NVIDIA_QUERY. A line that is not understood fails the reading, not the other lines."""
    gpus = []
    failed = {}
    for line in text.splitlines():
        if not line.strip() or "no devices were found" in line.lower():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        # Eight cells, more if a name has a comma in it, fewer if an old driver leaves some out.
        extra = max(0, len(cells) - 8)
        cells = [cells[0], ", ".join(cells[1 : 2 + extra]), *cells[2 + extra :]]
        if not cells[0].isdigit() or len(cells[0]) > 4:
            failed["gpus"] = f"nvidia-smi: {line.strip()}"[:TEXT_MAX]
            continue
        cells += [""] * (8 - len(cells))
        gpus.append(
            _gpu(
                int(cells[0]),
                name=cells[1],
                uuid=cells[2],
                total=_bytes(cells[3], MIB),
                used=_bytes(cells[4], MIB),
                utilization=number(cells[5]),
                temperature=number(cells[6]),
                ecc=number(cells[7]),
            )
        )
    found: Reading = {"vendor": "nvidia", "gpus": gpus}
    if failed:
        found["failed"] = failed
    return found


def parse_rocm(text: str) -> Reading:
    """rocm-smi --json: one object for each card, whose keys differ in case between releases."""
    gpus = []
    for name, card in sorted(_json(text).items()):
        index = re.fullmatch(r"card([0-9]{1,4})", name)
        if not index or not isinstance(card, dict):
            continue
        values = {str(key).lower(): str(value) for key, value in card.items()}
        named = values.get("card series") or values.get("card model") or values.get("device name") or ""
        gpus.append(
            _gpu(
                int(index.group(1)),
                name=named,
                uuid=values.get("unique id", ""),
                total=_bytes(values.get("vram total memory (b)"), 1),
                used=_bytes(values.get("vram total used memory (b)"), 1),
                utilization=number(values.get("gpu use (%)")),
                temperature=_hottest(value for key, value in values.items() if key.startswith("temperature")),
                ecc=None,
            )
        )
    return {"vendor": "amd", "gpus": sorted(gpus, key=lambda gpu: int(gpu["index"]))}


def parse_amd(text: str, names: dict[int, tuple[str, str]]) -> Reading:
    """amd-smi metric --json: a list, or an object around it in newer releases."""
    body = _json(text)
    cards = body.get("gpu_data", []) if isinstance(body, dict) else body
    gpus = []
    for card in cards:
        memory = card.get("mem_usage") or {}
        heat = card.get("temperature") or {}
        name, uuid = names.get(int(card["gpu"]), ("", ""))
        gpus.append(
            _gpu(
                int(card["gpu"]),
                name=name,
                uuid=uuid,
                total=_with_unit(memory.get("total_vram")),
                used=_with_unit(memory.get("used_vram")),
                utilization=number(_value((card.get("usage") or {}).get("gfx_activity"))),
                temperature=_hottest(_value(each) for each in heat.values()),
                ecc=number(_value((card.get("ecc") or {}).get("total_uncorrectable_count"))),
            )
        )
    return {"vendor": "amd", "gpus": gpus}


def _amd_names(program: str, deadline: float) -> dict[int, tuple[str, str]]:
    """Names are worth showing, not worth failing for."""
    try:
        body = _json(_output([program, "static", "--asic", "--json"], deadline))
        cards = body.get("gpu_data", []) if isinstance(body, dict) else body
        return {int(card["gpu"]): _asic(card.get("asic") or {}) for card in cards}
    except (OpError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _asic(asic: Any) -> tuple[str, str]:
    return str(asic.get("market_name", "")), str(asic.get("asic_serial", ""))


def _gpu(
    index: int,
    *,
    name: str,
    uuid: str,
    total: int | None,
    used: int | None,
    utilization: float | None,
    temperature: float | None,
    ecc: float | None,
) -> Reading:
    return {
        "index": index,
        "name": name[:TEXT_MAX],
        "uuid": uuid[:TEXT_MAX],
        "memory_total_bytes": total,
        "memory_used_bytes": used,
        "utilization_pct": utilization,
        "temperature_c": temperature,
        "ecc_uncorrected": None if ecc is None else int(ecc),
        "throttled": [],
    }


def number(text: Any) -> float | None:
    """None for what a tool writes where it has no number: [N/A], [Not Supported], ERR!, nothing."""
    found = _NUMBER.match(str(text).strip()) if text is not None else None
    return float(found.group()) if found else None


def _bytes(text: Any, unit: int) -> int | None:
    found = number(text)
    return None if found is None else int(found * unit)


def _value(cell: Any) -> Any:
    return cell.get("value") if isinstance(cell, dict) else cell


def _with_unit(cell: Any) -> int | None:
    units = {"B": 1, "KB": 1 << 10, "MB": MIB, "GB": 1 << 30}
    unit = str(cell.get("unit", "MB")) if isinstance(cell, dict) else "MB"
    return _bytes(_value(cell), units.get(unit.upper(), MIB))


def _hottest(texts: Any) -> float | None:
    found = [each for each in map(number, texts) if each is not None]
    return max(found) if found else None


def _json(text: str) -> Any:
    import json

    # The tools print warnings in front of what they were asked for.
    start = min((place for place in (text.find("{"), text.find("[")) if place >= 0), default=-1)
    if start < 0:
        raise OpError("output", f"no JSON in {text.strip()[:80]!r}")
    return json.loads(text[start:])


# --- what the kernel said ---------------------------------------------------------------------


class _KernelLog:
    """Stays open between readings, so that each record is read once."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.seen: list[Reading] = []
        self.refused = ""

    @property
    def is_ready(self) -> bool:
        """Whether the next reading is only of what is new."""
        return self.descriptor >= 0 or bool(self.refused)

    def read(self, timeout_s: float) -> list[Reading]:
        deadline = time.monotonic() + timeout_s
        if self.descriptor < 0:
            self.descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        for _ in range(_RECORDS_MAX):
            try:
                data = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overwritten before it was read; the next one is there
            if not data or time.monotonic() > deadline:
                break
            if b"NVRM: Xid" in data:
                self.seen += parse_xids(data.decode("utf-8", "replace"))
                del self.seen[:-_XIDS_MAX]
        return self.seen


_KERNEL_LOG = _KernelLog()


def _xids(timeout_s: float) -> Reading:
    """None where this user may not read the kernel's log: that is no fault of the node."""
    log = _KERNEL_LOG
    if log.refused:
        return {"xids": None, "xids_unknown": log.refused}
    try:
        return {"xids": with_age(log.read(timeout_s), time.monotonic())}
    except OSError as error:
        refused = error.strerror or str(error)
    deadline = time.monotonic() + timeout_s
    for command in _LOG_COMMANDS:
        program = find_program(command[0])
        if program:
            try:
                return {
                    "xids": with_age(parse_xids(_output([program, *command[1:]], deadline)), time.monotonic())
                }
            except (OpError, OSError):
                continue
    log.refused = refused
    return {"xids": None, "xids_unknown": refused}


def parse_xids(text: str) -> list[Reading]:
    """Lines of /dev/kmsg, or of dmesg and journalctl with seconds since the start in brackets."""
    found = []
    for line in text.splitlines():
        match = _XID.search(line)
        if match:
            at = float(match["us"]) / 1e6 if match["us"] else float(match["s"]) if match["s"] else None
            code, words = int(match["code"]), match["text"].strip()[:TEXT_MAX]
            found.append({"bus": match["bus"], "code": code, "text": words, "at_s": at})
    return found[-_XIDS_MAX:]


def with_age(xids: list[Reading], now_s: float) -> list[Reading]:
    """`now_s` is on the same clock: seconds since the start."""
    return [
        {
            "bus": xid["bus"],
            "code": xid["code"],
            "text": xid["text"],
            "age_s": None if xid["at_s"] is None else max(0.0, round(now_s - xid["at_s"], 1)),
        }
        for xid in xids
    ]


# --- programs ---------------------------------------------------------------------------------


def find_program(name: str) -> str | None:
    """A login without a terminal often has a short PATH."""
    for folder in [*os.environ.get("PATH", "").split(os.pathsep), *_MORE_FOLDERS]:
        path = os.path.join(folder, name)
        if folder and os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def _output(argv: list[str], deadline: float) -> str:
    """What a program writes, at most 1 MiB; ended at the deadline, with all that it has started."""
    import subprocess

    timeout_s = max(0.0, deadline - time.monotonic())
    name = os.path.basename(argv[0])
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=dict(os.environ, LC_ALL="C"),
    )
    assert process.stdout is not None
    try:
        data = _until(process.stdout.fileno(), deadline)
        whole = data is not None and len(data) < OUTPUT_BYTES_MAX
        code = process.wait(max(0.05, deadline - time.monotonic())) if whole else None
    except subprocess.TimeoutExpired:
        data = code = None
    finally:
        process.stdout.close()
        if process.poll() is None:
            _end(process)
    if data is not None and len(data) >= OUTPUT_BYTES_MAX:
        raise OpError("output", f"{name} prints more than {OUTPUT_BYTES_MAX} bytes")
    if data is None:
        raise OpError("timeout", f"{name} took longer than {timeout_s:.3g} s")
    text = data.decode("utf-8", "replace")
    if code and "no devices were found" not in text.lower():
        raise OpError("exit", f"{name} ended with {code}: {' '.join(text.split())[-160:]}")
    return text


def _until(descriptor: int, deadline: float) -> bytes | None:
    """None when the deadline came first."""
    import select

    data = b""
    while len(data) < OUTPUT_BYTES_MAX:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            return None
        part = os.read(descriptor, 1 << 16)
        if not part:
            break
        data += part
    return data


def _end(process: Any) -> None:
    """A process that is stuck in the kernel outlives this, and is not waited for."""
    import signal
    import subprocess

    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(0.2)
    except (OSError, subprocess.TimeoutExpired):
        pass
