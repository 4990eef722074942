"""Readings of nodes without Python: a script for sh, and a parser that returns the result of `health.read`.

The script is passed to `sh` on standard input, so that the login shell does not matter. Pure.
"""

from __future__ import annotations

from typing import Any

from genie.grid.remote import health
from genie.grid.remote.core import OpError
from genie.grid.ssh.shell_words import quote_path

SECTION_MARK = "@@genie"
_SCRIPT_OUTPUT_CHARS_MAX = 4 << 20
# Prints each part after a line with MARK. Every first check of a node runs this and a process costs about a
# millisecond, so sh reads what it can itself, and buffers its output because every write becomes a packet.
# Tools are killed after the timeout, by a watcher on systems without `timeout`.
_READINGS_SCRIPT = """\
LC_ALL=C; export LC_ALL
PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/opt/rocm/bin"
text=; end='
'
add() {{ text="$text$1$end"; }}
part() {{ add ""; add "{mark} $1"; }}
flush() {{ printf %s "$text"; text=; }}
lines() {{ n=0; while [ $n -lt "$1" ] && read -r line; do add "$line"; n=$((n+1)); done; }}
watched() {{
  "$@" </dev/null 2>&1 &
  started=$!
  ( sleep {limit}; kill -9 $started ) </dev/null >/dev/null 2>&1 &
  watcher=$!
  wait $started; code=$?
  kill $watcher 2>/dev/null
}}
if command -v timeout >/dev/null 2>&1
then limited() {{ flush; timeout -s KILL {limit} "$@" </dev/null 2>&1; part "code $?"; }}
else limited() {{ flush; watched "$@"; part "code $code"; }}
fi
part load; lines 1 < /proc/loadavg
part cores; n=0
while read -r name line; do
  case $name in cpu[0-9]*) n=$((n+1));; cpu) ;; *) break;; esac
done < /proc/stat; add $n
part memory; lines 8 < /proc/meminfo
folder={root}
while [ ! -e "$folder" ] && [ -n "$folder" ]; do folder="${{folder%/*}}"; done
folder="${{folder:-/}}"
part unwritable; [ -d "$folder" ] && [ -w "$folder" ] && [ -x "$folder" ] || add "$folder"
part disk; limited df -Pk "$folder"
if command -v nvidia-smi >/dev/null 2>&1; then
  part nvidia; limited nvidia-smi --query-gpu={query} --format={form}
  part uptime; lines 1 < /proc/uptime
  part xids; flush; {{ dmesg 2>/dev/null && echo readable; }} | grep -e 'NVRM: Xid' -e '^readable$'
elif command -v rocm-smi >/dev/null 2>&1; then
  part rocm
  limited rocm-smi --showproductname --showuniqueid --showmeminfo vram --showuse --showtemp --json
elif command -v amd-smi >/dev/null 2>&1; then part amd; limited amd-smi metric --json
else part none
fi
part end; flush
"""


def make_readings_script(root: str, *, timeout_s: float) -> bytes:
    """Return the script. `root` is a validated path that begins with '/' or '~/'."""
    return _READINGS_SCRIPT.format(
        mark=SECTION_MARK,
        limit=max(1, round(timeout_s)),
        root=quote_path(root),
        query=health.NVIDIA_SMI_QUERY_FIELDS,
        form=health.NVIDIA_SMI_FORMAT,
    ).encode()


def parse_readings(output: str) -> dict[str, Any]:
    """Return the same as `health.read`. Missing and invalid parts are listed in `failed`."""
    if len(output) > _SCRIPT_OUTPUT_CHARS_MAX:
        return {"failed": {"answer": f"longer than {_SCRIPT_OUTPUT_CHARS_MAX} characters"}}
    parts = _split_sections(output)
    found: dict[str, Any] = {"vendor": "none", "gpus": []}
    failed: dict[str, str] = {}
    for name, read in (
        ("load", _parse_load),
        ("memory", _parse_memory),
        ("disk", _parse_disk),
        ("gpus", _parse_gpus),
    ):
        try:
            found.update(read(parts))
        except (KeyError, ValueError, IndexError, TypeError, AttributeError, OpError) as error:
            failed[name] = str(error) if isinstance(error, OpError) else "missing in the node's output"
    failed.update(found.pop("failed", {}))
    if "unwritable" in parts:
        found["unwritable"] = parts["unwritable"].strip("\n")[: health.READING_TEXT_CHARS_MAX]
    if "nvidia" in parts:
        readable = parts.get("xids", "").rstrip().endswith("readable")
        found["xids"] = _parse_xids(parts) if readable else None
        if not readable:
            found["xids_unknown"] = "the kernel log is not readable"
    found["failed"] = failed
    return found


def _split_sections(output: str) -> dict[str, str]:
    codes: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    name = ""
    for line in output.splitlines():
        if line.startswith(f"{SECTION_MARK} code "):
            codes[f"{name} code"] = line.rsplit(" ", 1)[1]
        elif line.startswith(f"{SECTION_MARK} "):
            name = line[len(SECTION_MARK) + 1 :]
            parts[name] = []
        elif name and (line or parts[name]):
            parts[name].append(f"{line}\n")
    return {name: "".join(lines) for name, lines in parts.items()} | codes


def _parse_load(parts: dict[str, str]) -> dict[str, Any]:
    return {"load": [float(word) for word in parts["load"].split()[:3]], "cores": int(parts["cores"].strip())}


def _parse_memory(parts: dict[str, str]) -> dict[str, Any]:
    return health.parse_meminfo(parts["memory"])


def _parse_disk(parts: dict[str, str]) -> dict[str, Any]:
    _check_tool_succeeded(parts, "disk", program="df")
    words = parts["disk"].strip().splitlines()[-1].split()
    return {"disk_total_bytes": int(words[1]) * 1024, "disk_free_bytes": int(words[3]) * 1024}


def _parse_gpus(parts: dict[str, str]) -> dict[str, Any]:
    if "nvidia" in parts:
        if "no devices were found" not in parts["nvidia"].lower():
            _check_tool_succeeded(parts, "nvidia", program="nvidia-smi")
        return health.parse_nvidia_smi(parts["nvidia"])
    if "rocm" in parts:
        _check_tool_succeeded(parts, "rocm", program="rocm-smi")
        return health.parse_rocm_smi(parts["rocm"])
    if "amd" in parts:
        _check_tool_succeeded(parts, "amd", program="amd-smi")
        return health.parse_amd_smi(parts["amd"], {})
    if "none" not in parts:
        raise OpError("the GPUs are missing in the node's output", reason="output")
    return {"vendor": "none", "gpus": []}


def _check_tool_succeeded(parts: dict[str, str], part: str, *, program: str) -> None:
    if len(parts[part]) > health.TOOL_OUTPUT_BYTES_MAX:
        raise OpError(f"{program} printed more than {health.TOOL_OUTPUT_BYTES_MAX} bytes", reason="output")
    code = int(parts[f"{part} code"])
    if code == 137:
        raise OpError(f"{program} timed out and was killed", reason="timeout")
    if code:
        raise OpError(
            f"{program} exited with code {code}: {' '.join(parts[part].split())[-160:]}", reason="exit"
        )


def _parse_xids(parts: dict[str, str]) -> list[dict[str, Any]]:
    found = health.parse_xids(parts["xids"])
    try:
        return health.xids_with_age(found, float(parts["uptime"].split()[0]))
    except (KeyError, ValueError, IndexError):
        return [{**{name: xid[name] for name in ("bus", "code", "text")}, "age_s": None} for xid in found]
