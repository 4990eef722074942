"""A node's readings where it has no Python: one script for sh, and its output made into the same readings.

The script goes to `sh` on standard input, so that the login shell does not matter. Pure. Not for: asking
(health_check.py), or nodes with a helper (remote/health.py).
"""

from __future__ import annotations

from typing import Any

from genie.grid.remote import health
from genie.grid.remote.core import OpError
from genie.grid.shell_words import path_word

MARK = "@@genie"
_ANSWER_CHARS_MAX = 4 << 20
# Each part between marks. A process costs a node a millisecond, and this is what every first look starts:
# so what sh can read itself, it reads itself. What is told together is written together, as every piece is a
# packet for both ends. Tools are ended after their time, by a watcher where there is no `timeout` on a
# system this small.
_SCRIPT = """\
LC_ALL=C; export LC_ALL
PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/opt/rocm/bin"
text=; end='
'
say() {{ text="$text$1$end"; }}
part() {{ say ""; say "{mark} $1"; }}
tell() {{ printf %s "$text"; text=; }}
lines() {{ n=0; while [ $n -lt "$1" ] && read -r line; do say "$line"; n=$((n+1)); done; }}
watched() {{
  "$@" </dev/null 2>&1 &
  started=$!
  ( sleep {limit}; kill -9 $started ) </dev/null >/dev/null 2>&1 &
  watcher=$!
  wait $started; code=$?
  kill $watcher 2>/dev/null
}}
if command -v timeout >/dev/null 2>&1
then limited() {{ tell; timeout -s KILL {limit} "$@" </dev/null 2>&1; part "code $?"; }}
else limited() {{ tell; watched "$@"; part "code $code"; }}
fi
part load; lines 1 < /proc/loadavg
part cores; n=0
while read -r name line; do
  case $name in cpu[0-9]*) n=$((n+1));; cpu) ;; *) break;; esac
done < /proc/stat; say $n
part memory; lines 8 < /proc/meminfo
folder={root}
while [ ! -e "$folder" ] && [ -n "$folder" ]; do folder="${{folder%/*}}"; done
folder="${{folder:-/}}"
part unwritable; [ -d "$folder" ] && [ -w "$folder" ] && [ -x "$folder" ] || say "$folder"
part disk; limited df -Pk "$folder"
if command -v nvidia-smi >/dev/null 2>&1; then
  part nvidia; limited nvidia-smi --query-gpu={query} --format={form}
  part uptime; lines 1 < /proc/uptime
  part xids; tell; {{ dmesg 2>/dev/null && echo readable; }} | grep -e 'NVRM: Xid' -e '^readable$'
elif command -v rocm-smi >/dev/null 2>&1; then
  part rocm
  limited rocm-smi --showproductname --showuniqueid --showmeminfo vram --showuse --showtemp --json
elif command -v amd-smi >/dev/null 2>&1; then part amd; limited amd-smi metric --json
else part none
fi
part end; tell
"""


def script(root: str, *, timeout_s: float) -> bytes:
    """`root` is a checked path that begins with '/' or '~/'."""
    return _SCRIPT.format(
        mark=MARK,
        limit=max(1, round(timeout_s)),
        root=path_word(root),
        query=health.NVIDIA_QUERY,
        form=health.NVIDIA_FORMAT,
    ).encode()


def parse(output: str) -> dict[str, Any]:
    """As `health.read` answers. A part that is missing or not understood is named in `failed`."""
    if len(output) > _ANSWER_CHARS_MAX:
        return {"failed": {"answer": f"it is longer than {_ANSWER_CHARS_MAX} characters"}}
    parts = _parts(output)
    found: dict[str, Any] = {"vendor": "none", "gpus": []}
    failed: dict[str, str] = {}
    for name, read in (("load", _load), ("memory", _memory), ("disk", _disk), ("gpus", _gpus)):
        try:
            found.update(read(parts))
        except (KeyError, ValueError, IndexError, TypeError, AttributeError, OpError) as error:
            failed[name] = str(error) if isinstance(error, OpError) else "the node's answer has none"
    failed.update(found.pop("failed", {}))
    if "unwritable" in parts:
        found["unwritable"] = parts["unwritable"].strip("\n")[: health.TEXT_MAX]
    if "nvidia" in parts:
        readable = parts.get("xids", "").rstrip().endswith("readable")
        found["xids"] = _xids(parts) if readable else None
        if not readable:
            found["xids_unknown"] = "the kernel's log cannot be read"
    found["failed"] = failed
    return found


def _parts(output: str) -> dict[str, str]:
    codes: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    name = ""
    for line in output.splitlines():
        if line.startswith(f"{MARK} code "):
            codes[f"{name} code"] = line.rsplit(" ", 1)[1]
        elif line.startswith(f"{MARK} "):
            name = line[len(MARK) + 1 :]
            parts[name] = []
        elif name and (line or parts[name]):
            parts[name].append(f"{line}\n")
    return {name: "".join(lines) for name, lines in parts.items()} | codes


def _load(parts: dict[str, str]) -> dict[str, Any]:
    return {"load": [float(word) for word in parts["load"].split()[:3]], "cores": int(parts["cores"].strip())}


def _memory(parts: dict[str, str]) -> dict[str, Any]:
    return health.parse_meminfo(parts["memory"])


def _disk(parts: dict[str, str]) -> dict[str, Any]:
    _check_code(parts, "disk", program="df")
    words = parts["disk"].strip().splitlines()[-1].split()
    return {"disk_total_bytes": int(words[1]) * 1024, "disk_free_bytes": int(words[3]) * 1024}


def _gpus(parts: dict[str, str]) -> dict[str, Any]:
    if "nvidia" in parts:
        if "no devices were found" not in parts["nvidia"].lower():
            _check_code(parts, "nvidia", program="nvidia-smi")
        return health.parse_nvidia(parts["nvidia"])
    if "rocm" in parts:
        _check_code(parts, "rocm", program="rocm-smi")
        return health.parse_rocm(parts["rocm"])
    if "amd" in parts:
        _check_code(parts, "amd", program="amd-smi")
        return health.parse_amd(parts["amd"], {})
    if "none" not in parts:
        raise OpError("output", "the node's answer has none")
    return {"vendor": "none", "gpus": []}


def _check_code(parts: dict[str, str], part: str, *, program: str) -> None:
    if len(parts[part]) > health.OUTPUT_BYTES_MAX:
        raise OpError("output", f"{program} prints more than {health.OUTPUT_BYTES_MAX} bytes")
    code = int(parts[f"{part} code"])
    if code == 137:
        raise OpError("timeout", f"{program} took too long and was ended")
    if code:
        raise OpError("exit", f"{program} ended with {code}: {' '.join(parts[part].split())[-160:]}")


def _xids(parts: dict[str, str]) -> list[dict[str, Any]]:
    found = health.parse_xids(parts["xids"])
    try:
        return health.with_age(found, float(parts["uptime"].split()[0]))
    except (KeyError, ValueError, IndexError):
        return [{**{name: xid[name] for name in ("bus", "code", "text")}, "age_s": None} for xid in found]
