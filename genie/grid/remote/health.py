"""Takes a node's readings: load, memory, disk, GPUs, and GPU errors in the kernel log.

`health.read` returns all of them. Each part has its own timeout, so a tool that hangs costs only its own
reading: the result has the others, and `failed` maps each missing part to the reason. A tool that still hangs
is not started again.

Runs on nodes: standard library only, Python 3.8. Does not evaluate the readings (health/check.py).
"""

from __future__ import annotations

import os
import re
import threading
import time
from typing import Any, Callable, Dict  # noqa: UP035 - at run time, Python 3.8 needs these

from genie.grid.remote import nvml
from genie.grid.remote.core import OpError, register_op

NVIDIA_SMI_QUERY_FIELDS = (
    "index,name,uuid,memory.total,memory.used,utilization.gpu,temperature.gpu,"
    "ecc.errors.uncorrected.volatile.total"
)
NVIDIA_SMI_FORMAT = "csv,noheader,nounits"
MIB = 1 << 20
_NEVER_CHECK_THROTTLING_C = float("inf")
FREE_GPU_MEMORY_USED_FRACTION_MAX = 0.05
FREE_GPU_MEMORY_USED_BYTES_MAX = 1 << 30
FREE_GPU_UTILIZATION_PCT_MAX = 10.0
TOOL_OUTPUT_BYTES_MAX = 1 << 20
"""Output limit of one tool."""
READING_TEXT_CHARS_MAX = 200
"""Maximum characters of a name, path or message."""
_KERNEL_LOG_RECORDS_PER_READ_MAX = 200_000
_XIDS_MAX = 100
_EXTRA_PROGRAM_FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin", "/opt/rocm/bin")
_NUMBER_PATTERN = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,9})?")
_XID_PATTERN = re.compile(
    r"(?:[0-9]+,[0-9]+,(?P<us>[0-9]+),[^;]*;|\[ *(?P<s>[0-9]+\.[0-9]+)\].*?)?"
    r"NVRM: Xid \((?P<bus>[^)]{1,64})\): (?P<code>[0-9]{1,6})[, ]*(?P<text>.*)"
)
_KERNEL_LOG_COMMANDS = (
    ("dmesg",),
    ("journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-monotonic", "-g", "NVRM: Xid", "-n", "100"),
)
_THROTTLE_REASON_BY_BIT = (
    (0x8, "hardware slowdown"),
    (0x20, "software thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "power brake"),
)

Reading = Dict[str, Any]  # noqa: UP006 - evaluated at run time


@register_op("health.read")
def take_all_readings(args: Any, blob: bytes) -> Reading:
    """Return all readings.

    args: root (a path, '~' allowed), timeout_s (of each part) and throttle_check_c (the temperature from
    which nvidia-smi is started a second time, for the throttle reasons).
    """
    root = os.path.expanduser(str(args["root"]))
    timeout_s = float(args["timeout_s"])
    throttle_check_c = float(args["throttle_check_c"])
    tool = _find_gpu_tool()
    nvidia = tool is not None and os.path.basename(tool) == "nvidia-smi"
    # Parts that may block run in threads; the others do not, because a thread costs more than most readings.
    inline: dict[str, Callable[[], Reading]] = {"load": _read_load, "memory": _read_memory}
    threaded: dict[str, Callable[[], Reading]] = {"disk": lambda: _read_disk(root)}
    (threaded if tool else inline)["gpus"] = lambda: _read_gpus_by_tool(tool, timeout_s, throttle_check_c)
    if nvidia or os.path.isdir("/proc/driver/nvidia"):
        (inline if _KERNEL_LOG.is_next_read_short else threaded)["xids"] = lambda: _read_xids(timeout_s)
    return _read_parts(threaded, inline, timeout_s)


_THREAD_AND_DEADLINE_BY_PART: dict[str, tuple[threading.Thread, float]] = {}
"""The latest thread of each part and its deadline. The lock ensures that no part has two threads."""
_PART_THREADS_LOCK = threading.Lock()


def _read_parts(
    threaded: dict[str, Callable[[], Reading]], inline: dict[str, Callable[[], Reading]], timeout_s: float
) -> Reading:
    """Run each threaded part in a thread and wait at most `timeout_s` for all of them."""
    # Tools are killed at the timeout; the margin lets their parts return that error.
    deadline = time.monotonic() + timeout_s + 0.1
    found: Reading = {}
    failed: dict[str, str] = {}
    results: dict[str, Reading] = {}
    started = {}
    # First, because next to a thread inside a library call they would take several times as long.
    for name, part in inline.items():
        _read_part_into(results, name, part)
    for name, part in threaded.items():
        thread = threading.Thread(target=_read_part_into, args=(results, name, part), daemon=True)
        if _try_start_part_thread(name, thread, deadline):
            started[name] = thread
        else:
            failed[name] = "a previous reading still hangs"
    for thread in started.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    for name in [*inline, *started]:
        result = results.get(name)
        if result is None:
            failed[name] = f"took longer than {timeout_s:.3g} s"
        else:
            failed.update(result.pop("failed", {}))
            found.update(result)
    found["failed"] = failed
    return found


def _try_start_part_thread(name: str, thread: threading.Thread, deadline: float) -> bool:
    """Start the thread after any previous one of this part; False if that one is past its deadline."""
    while True:
        with _PART_THREADS_LOCK:
            previous, until = _THREAD_AND_DEADLINE_BY_PART.get(name, (None, 0.0))
            if previous is None or not previous.is_alive():
                _THREAD_AND_DEADLINE_BY_PART[name] = (thread, deadline)
                thread.start()
                return True
        left_s = min(until, deadline) - time.monotonic()
        if left_s <= 0:
            return False
        previous.join(left_s)


def _read_part_into(results: dict[str, Reading], name: str, part: Callable[[], Reading]) -> None:
    try:
        results[name] = part()
    except (OpError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        text = str(error) if isinstance(error, (OpError, OSError)) else f"invalid: {error}"
        results[name] = {"failed": {name: text[:READING_TEXT_CHARS_MAX]}}


def _read_load() -> Reading:
    return {"load": list(os.getloadavg()), "cores": os.cpu_count() or 1}


def _read_memory() -> Reading:
    with open("/proc/meminfo", encoding="ascii", errors="replace") as file:
        return parse_meminfo(file.read(1 << 16))


def parse_meminfo(text: str) -> Reading:
    sizes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    # Kernels before 3.14 and some containers have no MemAvailable.
    available = sizes.get("MemAvailable", sizes.get("MemFree", 0) + sizes.get("Cached", 0))
    return {"memory_total_bytes": sizes["MemTotal"], "memory_available_bytes": available}


def _read_disk(root: str) -> Reading:
    """Readings of the file system of `root`, or of its first existing parent directory."""
    while root and not os.path.exists(root):
        parent = os.path.dirname(root)
        if parent == root:
            break
        root = parent
    root = root or "/"
    stat = os.statvfs(root)
    # access(2) also detects read-only file systems, even for root.
    writable = os.path.isdir(root) and os.access(root, os.W_OK | os.X_OK)
    return {
        "disk_total_bytes": stat.f_frsize * stat.f_blocks,
        "disk_free_bytes": stat.f_frsize * stat.f_bavail,
        "unwritable": "" if writable else root[:READING_TEXT_CHARS_MAX],
    }


# --- GPUs -------------------------------------------------------------------------------------


def read_gpus(timeout_s: float) -> Reading:
    """Return the vendor and gpus of `health.read`. Raises OpError on failure or timeout."""
    tool = _find_gpu_tool()
    found = _read_parts(
        {"gpus": lambda: _read_gpus_by_tool(tool, timeout_s, _NEVER_CHECK_THROTTLING_C)}, {}, timeout_s
    )
    if "gpus" not in found:
        raise OpError(f"could not read the GPUs: {found['failed']['gpus']}", reason="gpus")
    return found


def gpu_memory_used_fraction(total: int | None, used: int | None, utilization: float | None) -> float | None:
    """Fraction of memory in use, 0 to 1. Without memory readings (integrated GPUs), the utilization."""
    if total and used is not None:
        return min(1.0, used / total)
    return utilization / 100 if utilization is not None else None


def is_gpu_free(total: int | None, used: int | None, utilization: float | None) -> bool:
    """True if less than 5% or 1 GiB of memory is in use and utilization is below 10%."""
    share = gpu_memory_used_fraction(total, used, utilization)
    has_memory = share is not None and share < FREE_GPU_MEMORY_USED_FRACTION_MAX
    if used is not None:
        has_memory = has_memory or used < FREE_GPU_MEMORY_USED_BYTES_MAX
    return has_memory and (utilization or 0.0) < FREE_GPU_UTILIZATION_PCT_MAX


def _find_gpu_tool() -> str | None:
    return find_program("nvidia-smi") or find_program("rocm-smi") or find_program("amd-smi")


def _read_gpus_by_tool(tool: str | None, timeout_s: float, throttle_check_c: float) -> Reading:
    deadline = time.monotonic() + timeout_s
    name = os.path.basename(tool or "")
    if tool and name == "nvidia-smi":
        return _read_nvidia_gpus(tool, deadline, throttle_check_c)
    if tool and name == "rocm-smi":
        options = ["--showproductname", "--showuniqueid", "--showmeminfo", "vram", "--showuse", "--showtemp"]
        return parse_rocm_smi(_run_tool_and_get_output([tool, *options, "--json"], deadline))
    if tool:
        metric = _run_tool_and_get_output([tool, "metric", "--json"], deadline)
        return parse_amd_smi(metric, _read_amd_names(tool, deadline))
    return {"vendor": "none", "gpus": []}


def _read_nvidia_gpus(program: str, deadline: float, throttle_check_c: float) -> Reading:
    """Read by NVML, which starts no process; if it fails, by nvidia-smi, whose messages are well known."""
    try:
        return {"vendor": "nvidia", "gpus": [_make_nvml_reading(**each) for each in nvml.read_gpus()]}
    except nvml.NvmlError:
        return _read_gpus_by_nvidia_smi(program, deadline, throttle_check_c)


def _make_nvml_reading(index: int, throttle_mask: int | None, **values: Any) -> Reading:
    gpu = _make_gpu_reading(index, **values)
    gpu["throttled"] = _decode_throttle_reasons(throttle_mask or 0)
    return gpu


def _read_gpus_by_nvidia_smi(program: str, deadline: float, throttle_check_c: float) -> Reading:
    found = parse_nvidia_smi(
        _run_tool_and_get_output(
            [program, f"--query-gpu={NVIDIA_SMI_QUERY_FIELDS}", f"--format={NVIDIA_SMI_FORMAT}"], deadline
        )
    )
    if any((gpu["temperature_c"] or 0) >= throttle_check_c for gpu in found["gpus"]):
        _add_throttle_reasons(found["gpus"], program, deadline)
    return found


def _add_throttle_reasons(gpus: list[Reading], program: str, deadline: float) -> None:
    """Fill in `throttled`; it stays empty if the driver does not support the query."""
    try:
        query = "--query-gpu=index,clocks_throttle_reasons.active"
        text = _run_tool_and_get_output([program, query, f"--format={NVIDIA_SMI_FORMAT}"], deadline)
    except (OpError, OSError):
        return
    masks = dict(re.findall(r"^ *([0-9]{1,4}) *, *(0x[0-9a-fA-F]{1,16}) *$", text, re.MULTILINE))
    for gpu in gpus:
        mask = int(masks.get(str(gpu["index"]), "0x0"), 16)
        gpu["throttled"] = _decode_throttle_reasons(mask)


def _decode_throttle_reasons(mask: int) -> list[str]:
    return [reason for bit, reason in _THROTTLE_REASON_BY_BIT if mask & bit]


def parse_nvidia_smi(text: str) -> Reading:
    """Parse NVIDIA_SMI_QUERY_FIELDS as printed. `failed` reports an invalid line; other lines are used."""
    gpus = []
    failed = {}
    for line in text.splitlines():
        if not line.strip() or "no devices were found" in line.lower():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        # Eight cells; more if a name contains a comma, fewer if an old driver omits some.
        extra = max(0, len(cells) - 8)
        cells = [cells[0], ", ".join(cells[1 : 2 + extra]), *cells[2 + extra :]]
        if not cells[0].isdigit() or len(cells[0]) > 4:
            failed["gpus"] = f"nvidia-smi: {line.strip()}"[:READING_TEXT_CHARS_MAX]
            continue
        cells += [""] * (8 - len(cells))
        gpus.append(
            _make_gpu_reading(
                int(cells[0]),
                name=cells[1],
                uuid=cells[2],
                total=_parse_bytes(cells[3], MIB),
                used=_parse_bytes(cells[4], MIB),
                utilization=parse_number(cells[5]),
                temperature=parse_number(cells[6]),
                ecc=parse_number(cells[7]),
            )
        )
    found: Reading = {"vendor": "nvidia", "gpus": gpus}
    if failed:
        found["failed"] = failed
    return found


def parse_rocm_smi(text: str) -> Reading:
    """Parse rocm-smi --json: one object per card; the case of its keys differs between releases."""
    gpus = []
    for name, card in sorted(_parse_json_after_warnings(text).items()):
        index = re.fullmatch(r"card([0-9]{1,4})", name)
        if not index or not isinstance(card, dict):
            continue
        values = {str(key).lower(): str(value) for key, value in card.items()}
        named = values.get("card series") or values.get("card model") or values.get("device name") or ""
        gpus.append(
            _make_gpu_reading(
                int(index.group(1)),
                name=named,
                uuid=values.get("unique id", ""),
                total=_parse_bytes(values.get("vram total memory (b)"), 1),
                used=_parse_bytes(values.get("vram total used memory (b)"), 1),
                utilization=parse_number(values.get("gpu use (%)")),
                temperature=_max_temperature(
                    value for key, value in values.items() if key.startswith("temperature")
                ),
                ecc=None,
            )
        )
    return {"vendor": "amd", "gpus": sorted(gpus, key=lambda gpu: int(gpu["index"]))}


def parse_amd_smi(text: str, names: dict[int, tuple[str, str]]) -> Reading:
    """Parse amd-smi metric --json: a list, which newer releases wrap in an object."""
    body = _parse_json_after_warnings(text)
    cards = body.get("gpu_data", []) if isinstance(body, dict) else body
    gpus = []
    for card in cards:
        memory = card.get("mem_usage") or {}
        temperatures = card.get("temperature") or {}
        name, uuid = names.get(int(card["gpu"]), ("", ""))
        gpus.append(
            _make_gpu_reading(
                int(card["gpu"]),
                name=name,
                uuid=uuid,
                total=_parse_bytes_with_unit(memory.get("total_vram")),
                used=_parse_bytes_with_unit(memory.get("used_vram")),
                utilization=parse_number(_strip_unit((card.get("usage") or {}).get("gfx_activity"))),
                temperature=_max_temperature(_strip_unit(each) for each in temperatures.values()),
                ecc=parse_number(_strip_unit((card.get("ecc") or {}).get("total_uncorrectable_count"))),
            )
        )
    return {"vendor": "amd", "gpus": gpus}


def _read_amd_names(program: str, deadline: float) -> dict[int, tuple[str, str]]:
    """Return name and UUID by GPU index; empty on failure, because names are optional."""
    try:
        body = _parse_json_after_warnings(
            _run_tool_and_get_output([program, "static", "--asic", "--json"], deadline)
        )
        cards = body.get("gpu_data", []) if isinstance(body, dict) else body
        return {int(card["gpu"]): _asic_name_and_serial(card.get("asic") or {}) for card in cards}
    except (OpError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _asic_name_and_serial(asic: Any) -> tuple[str, str]:
    return str(asic.get("market_name", "")), str(asic.get("asic_serial", ""))


def _make_gpu_reading(
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
        "name": name[:READING_TEXT_CHARS_MAX],
        "uuid": uuid[:READING_TEXT_CHARS_MAX],
        "memory_total_bytes": total,
        "memory_used_bytes": used,
        "utilization_pct": utilization,
        "temperature_c": temperature,
        "ecc_uncorrected": None if ecc is None else int(ecc),
        "throttled": [],
    }


def parse_number(text: Any) -> float | None:
    """Parse a number; None for placeholders such as [N/A], [Not Supported], ERR! and empty text."""
    found = _NUMBER_PATTERN.match(str(text).strip()) if text is not None else None
    return float(found.group()) if found else None


def _parse_bytes(text: Any, unit: int) -> int | None:
    found = parse_number(text)
    return None if found is None else int(found * unit)


def _strip_unit(cell: Any) -> Any:
    return cell.get("value") if isinstance(cell, dict) else cell


def _parse_bytes_with_unit(cell: Any) -> int | None:
    units = {"B": 1, "KB": 1 << 10, "MB": MIB, "GB": 1 << 30}
    unit = str(cell.get("unit", "MB")) if isinstance(cell, dict) else "MB"
    return _parse_bytes(_strip_unit(cell), units.get(unit.upper(), MIB))


def _max_temperature(texts: Any) -> float | None:
    found = [each for each in map(parse_number, texts) if each is not None]
    return max(found) if found else None


def _parse_json_after_warnings(text: str) -> Any:
    import json

    # The tools print warnings before the JSON.
    start = min((index for index in (text.find("{"), text.find("[")) if index >= 0), default=-1)
    if start < 0:
        raise OpError(f"the output of the GPU tool has no JSON: {text.strip()[:80]!r}", reason="output")
    return json.loads(text[start:])


# --- the kernel log ---------------------------------------------------------------------------


class _KernelLog:
    """/dev/kmsg, kept open between readings so that each record is read once."""

    def __init__(self) -> None:
        self.file_descriptor = -1
        self.xids_seen: list[Reading] = []
        self.access_error = ""

    @property
    def is_next_read_short(self) -> bool:
        """True if the next read returns only new records, or none at all."""
        return self.file_descriptor >= 0 or bool(self.access_error)

    def read_xids(self, timeout_s: float) -> list[Reading]:
        deadline = time.monotonic() + timeout_s
        if self.file_descriptor < 0:
            self.file_descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        for _ in range(_KERNEL_LOG_RECORDS_PER_READ_MAX):
            try:
                data = os.read(self.file_descriptor, 1 << 16)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # this record was overwritten; the next one is available
            if not data or time.monotonic() > deadline:
                break
            if b"NVRM: Xid" in data:
                self.xids_seen += parse_xids(data.decode("utf-8", "replace"))
                del self.xids_seen[:-_XIDS_MAX]
        return self.xids_seen


_KERNEL_LOG = _KernelLog()


def _read_xids(timeout_s: float) -> Reading:
    """Xid errors; None if this user may not read the kernel log, which is not a fault of the node."""
    log = _KERNEL_LOG
    if log.access_error:
        return {"xids": None, "xids_unknown": log.access_error}
    try:
        return {"xids": xids_with_age(log.read_xids(timeout_s), time.monotonic())}
    except OSError as error:
        refused = error.strerror or str(error)
    deadline = time.monotonic() + timeout_s
    for command in _KERNEL_LOG_COMMANDS:
        program = find_program(command[0])
        if program:
            try:
                return {
                    "xids": xids_with_age(
                        parse_xids(_run_tool_and_get_output([program, *command[1:]], deadline)),
                        time.monotonic(),
                    )
                }
            except (OpError, OSError):
                continue
    log.access_error = refused
    return {"xids": None, "xids_unknown": refused}


def parse_xids(text: str) -> list[Reading]:
    """Parse lines of /dev/kmsg, or of dmesg and journalctl with seconds since boot in brackets."""
    found = []
    for line in text.splitlines():
        match = _XID_PATTERN.search(line)
        if match:
            at = float(match["us"]) / 1e6 if match["us"] else float(match["s"]) if match["s"] else None
            code, words = int(match["code"]), match["text"].strip()[:READING_TEXT_CHARS_MAX]
            found.append({"bus": match["bus"], "code": code, "text": words, "at_s": at})
    return found[-_XIDS_MAX:]


def xids_with_age(xids: list[Reading], now_s: float) -> list[Reading]:
    """Replace `at_s` by `age_s`. `now_s` is on the same clock: seconds since boot."""
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
    """Search PATH and the usual directories: a non-interactive login often has a short PATH."""
    for folder in [*os.environ.get("PATH", "").split(os.pathsep), *_EXTRA_PROGRAM_FOLDERS]:
        path = os.path.join(folder, name)
        if folder and os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def _run_tool_and_get_output(argv: list[str], deadline: float) -> str:
    """Run a program and return its output, at most 1 MiB; its process group is killed at the deadline."""
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
        data = _read_until_deadline(process.stdout.fileno(), deadline)
        is_complete = data is not None and len(data) < TOOL_OUTPUT_BYTES_MAX
        code = process.wait(max(0.05, deadline - time.monotonic())) if is_complete else None
    except subprocess.TimeoutExpired:
        data = code = None
    finally:
        process.stdout.close()
        if process.poll() is None:
            _kill_process_group(process)
    if data is not None and len(data) >= TOOL_OUTPUT_BYTES_MAX:
        raise OpError(f"{name} printed more than {TOOL_OUTPUT_BYTES_MAX} bytes", reason="output")
    if data is None:
        raise OpError(f"{name} took longer than {timeout_s:.3g} s", reason="timeout")
    text = data.decode("utf-8", "replace")
    if code and "no devices were found" not in text.lower():
        raise OpError(f"{name} exited with code {code}: {' '.join(text.split())[-160:]}", reason="exit")
    return text


def _read_until_deadline(descriptor: int, deadline: float) -> bytes | None:
    """Read to the end or TOOL_OUTPUT_BYTES_MAX; None if the deadline passes first."""
    import select

    data = b""
    while len(data) < TOOL_OUTPUT_BYTES_MAX:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            return None
        part = os.read(descriptor, 1 << 16)
        if not part:
            break
        data += part
    return data


def _kill_process_group(process: Any) -> None:
    """Does not wait long: a process stuck in the kernel survives SIGKILL."""
    import signal
    import subprocess

    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(0.2)
    except (OSError, subprocess.TimeoutExpired):
        pass
