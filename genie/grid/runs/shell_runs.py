"""Runs on nodes without Python: remote/runs.py in POSIX shell.

`call_op_by_shell` has the same operations and replies, and both use the same files. The shell only reports
facts; `run_state_from_records` in remote/runs.py interprets them. Scripts are sent to `sh` on standard input,
so that the login shell does not parse them. There is no GPU selection, and commands have no standard input.
"""

from __future__ import annotations

import json
import math
import secrets
import shlex
from collections.abc import Mapping
from typing import Any

from genie.errors import NodeRefusedError, ProtocolError
from genie.grid.remote import runs
from genie.grid.runs.run import parse_run
from genie.grid.ssh.login_shell import check_login_shell
from genie.grid.ssh.node_helper import MALFORMED_REPLY_ERRORS
from genie.grid.ssh.pool import NodeConnection
from genie.grid.ssh.shell_words import CHECK_GRID_FOLDER_LINK_SCRIPT, quote_path

_OUTPUT_WAIT_S_MAX = 10
_NO_PYTHON_MESSAGE_START = "the node has no usable python3, so"

_COMMON_FUNCTIONS_SCRIPT = r"""
runs=$root/.grid/runs
run=$runs/$id
printf '%s\n' "$marker"
refuse() { printf 'refused %s\n--\n' "$(printf '%s' "$*" | tr '\n' ' ')"; exit 0; }
one_line() { cat -- "$1" 2>/dev/null | tr '\n' ' '; }
field() { sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" "$run/pid" 2>/dev/null; }
process() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 1,20; }
boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)
why=$(_grid_refused_link) && refuse "link $why"
there() { [ -d "$run" ] || refuse "missing no run has the ID $id"; }
facts() {
  printf 'run %s\n' "${run##*/}"
  printf 'boot %s\n' "$boot"
  printf 'pid %s\n' "$(one_line "$run/pid")"
  for who in pid watcher; do
    number=$(field $who)
    [ -z "$number" ] || printf 'process %s %s\n' "$number" "$(process "$number")"
  done
  printf 'exit %s\n' "$(one_line "$run/exit")"
  printf 'meta %s\n' "$(one_line "$run/meta.json")"
}
"""

# $1 is the folder of the run, $2 the command, $3 its timeout or nothing, $4 is _PROCESS_START_SCRIPT.
# Variable names must not clash with those of the command, which are in the environment already, except for
# its PATH.
# The command is in the foreground: in the background, sh would make it ignore SIGINT.
_SUPERVISOR_SCRIPT = r"""
_grid_kill() { kill -"$2" -"$(sed -n 's/.*"pid":\([0-9]*\).*/\1/p' "$1/pid")"; }
if [ -n "$3" ]; then
  (sleep "$3" || sleep $((${3%%.*} + 1))  # if sleep accepts integers only
   : >"$1/late"; _grid_kill "$1" TERM; sleep 10; _grid_kill "$1" KILL) &
fi
setsid sh -c "$4" sh "$1" "$2" $$
_grid_code=$?
_grid_late=false
if [ -e "$1/late" ]; then _grid_late=true; rm -f -- "$1/late"; fi
printf '{"code":%s,"timed_out":%s,"ended":%s}' $_grid_code $_grid_late "$(date +%s)" 1<>"$1/exit"
# The timeout process is in our own process group, and the command is not.
if [ -n "$3" ]; then kill -KILL -$$; fi
"""

# Records its pid, then becomes the command. $3 is the watcher. SHLVL is unset because a nested bash would not
# read ~/.bashrc, as it does for ssh.
_PROCESS_START_SCRIPT = r"""
_grid_began() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20 | grep . || echo 0; }
printf '{"boot":"%s","watcher":%s,"watcher_start":%s,"pid":%s,"pid_start":%s}' \
  "$(cat /proc/sys/kernel/random/boot_id)" $3 "$(_grid_began $3)" $$ "$(_grid_began $$)" 1<>"$1/pid"
set -- "$1" "$_grid_shell" "$2"
PATH=$_grid_path
unset _grid_path _grid_shell SHLVL
exec "$2" -c "$3" >>"$1/out" 2>>"$1/err"
"""

_START_SCRIPT = r"""
if [ -d "$run" ]; then facts; printf -- '--\n'; exit 0; fi
command -v setsid >/dev/null 2>&1 || refuse "missing neither python3 nor setsid is installed"
said=$(mkdir -p -m 700 -- "$runs" 2>&1) || refuse "os $said"
CDPATH= cd -- "$root" && CDPATH= cd -- "$cwd" 2>/dev/null || refuse "missing there is no directory $cwd"
# Until the pid of the command is recorded, record our own.
began=$(process $$ | cut -d ' ' -f 2)
starting=$(printf '{"boot":"%s","watcher":%s,"watcher_start":%s}' "$boot" $$ "${began:-0}")
said=$(mkdir -m 700 -- "$run" 2>&1) || {
  if [ -d "$run" ]; then facts; printf -- '--\n'; exit 0; fi
  refuse "os $said"
}
said=$( { printf '%-512s' "$starting" >"$run/pid" && printf '%512s' '' >"$run/exit" &&
  : >"$run/out" && : >"$run/err" && printf '%s' "$meta" >"$run/meta.json"; } 2>&1) || {
  rm -rf -- "$run"
  refuse "os $said"
}
set -- "$watch" "$run" "$command" "$timeout_s" "$begin"
# The second setsid is a group leader already, so it forks, and we need not wait.
said=$( {
  _grid_own_path=$PATH
  export GRID_RUN_ID="$id" GRID_ROOT="$root" _grid_shell="${SHELL:-/bin/sh}"
  @EXPORTS@
  export _grid_path="$PATH" PATH="$_grid_own_path"
  exec setsid setsid sh -c "$1" sh "$2" "$3" "$4" "$5" </dev/null >/dev/null 2>&1
} 2>&1) || {
  rm -rf -- "$run"
  refuse "os ${said:-could not start the command; its environment may be too large}"
}
tries=0
while [ $tries -lt 100 ] && ! grep -q '"pid"' "$run/pid"; do
  tries=$((tries + 1))
  sleep 0.05 2>/dev/null || sleep 1
done
printf 'created\n'
facts
printf -- '--\n'
ls -t -- "$runs" | tail -n +$((kept + 1)) | while IFS= read -r id; do
  case $id in r-*) if grep -q '"code"' "$runs/$id/exit"; then rm -rf -- "$runs/$id"; fi ;; esac
done
"""

_READ_OUTPUT_SCRIPT = r"""
there
size() { wc -c <"$1" 2>/dev/null | tr -d ' '; }
until=$(($(date +%s) + wait_s))
while [ -d "$run" ] && [ "$(date +%s)" -lt $until ]; do
  if [ "$(size "$run/out")" -gt $out ] || [ "$(size "$run/err")" -gt $err ]; then break; fi
  if grep -q '"code"' "$run/exit"; then break; fi
  sleep 0.1 2>/dev/null || sleep 1
done
facts
part() { left=$(($(size "$1") - $2)); [ $left -gt 0 ] || left=0; [ $left -lt $chunk ] || left=$chunk; }
part "$run/out" $out; more_out=$left
part "$run/err" $err; more_err=$left
printf 'lengths %s %s\n--\n' $more_out $more_err
tail -c +$((out + 1)) -- "$run/out" | head -c $more_out
tail -c +$((err + 1)) -- "$run/err" | head -c $more_err
"""

_SIGNAL_SCRIPT = r"""
there
facts
number=$(field pid) began=$(field pid_start)
if [ -n "$number" ] && [ -n "$began" ] && grep -qF "\"boot\":\"$boot\"" "$run/pid" &&
  [ "$(process "$number" | cut -d ' ' -f 2)" = "$began" ] && ! grep -q '"code"' "$run/exit" &&
  kill -"$signal" -"$number" 2>/dev/null; then printf 'sent\n'; fi
printf -- '--\n'
"""

_LIST_SCRIPT = r"""
ls -t -- "$runs" 2>/dev/null | head -n 1000 | while IFS= read -r id; do
  run=$runs/$id
  case $id in "$prefix"*) [ ! -f "$run/meta.json" ] || facts ;; esac
done
printf -- '--\n'
"""

_REMOVE_SCRIPT = r"""
there
rm -rf -- "$run"
printf -- '--\n'
"""

_SCRIPT_BY_OP = {
    "start": _START_SCRIPT,
    "status": "there\nfacts\nprintf -- '--\\n'\n",
    "read": _READ_OUTPUT_SCRIPT,
    "signal": _SIGNAL_SCRIPT,
    "list": _LIST_SCRIPT,
    "remove": _REMOVE_SCRIPT,
}


async def call_op_by_shell(
    link: NodeConnection, name: str, args: Mapping[str, Any], blob: bytes = b"", *, timeout_s: float
) -> tuple[Any, bytes]:
    """The equivalent of `NodeConnection.call("runs.NAME", ...)`. Raises the same errors."""
    if blob or args.get("gpus"):
        what = "standard input is not supported" if blob else "GPUs cannot be selected"
        raise NodeRefusedError(f"node {link.name}: {_NO_PYTHON_MESSAGE_START} {what}", reason="missing")
    marker = f"@{secrets.token_hex(8)}"
    text = make_op_script(name, args, marker=marker)
    done = await link.run_command("exec sh -s", stdin=text.encode(), timeout_s=timeout_s)
    _, found, rest = done.stdout.partition(f"{marker}\n".encode())
    if not found:
        await check_login_shell(link, timeout_s=timeout_s)
        stderr = done.stderr[-400:].decode(errors="replace").strip()
        raise NodeRefusedError(f"node {link.name}: its shell could not run the script: {stderr}", reason="os")
    try:
        return _parse_reply(link.name, name, rest)
    except (*MALFORMED_REPLY_ERRORS, RecursionError) as error:
        raise ProtocolError(f"node {link.name}: invalid reply from its shell: {error!r}") from None


def make_op_script(name: str, args: Mapping[str, Any], *, marker: str) -> str:
    """Returns the script for `sh -s`. Every value is quoted and assigned to a variable.

    The script is in braces, so that sh runs nothing until it has all of it: the connection may be lost.
    """
    paths = {"root": args["root"]}
    values: dict[str, object] = {"id": args.get("id", ""), "marker": marker}
    exports = ""
    if name == "start":
        paths["cwd"] = args.get("cwd") or "."
        values |= {"command": args["command"], "watch": _SUPERVISOR_SCRIPT, "begin": _PROCESS_START_SCRIPT}
        values |= {"meta": _encode_run_metadata(args), "timeout_s": _format_timeout(args.get("timeout_s"))}
        values["kept"] = runs.ENDED_RUNS_KEPT
        # Exported after the last use of our own variables: the user's may have the same names.
        exports = "".join(
            f"export {key}={shlex.quote(value)}; " for key, value in (args.get("env") or {}).items()
        )
    elif name == "read":
        wait_s = min(math.ceil(args.get("wait_s", 0)), _OUTPUT_WAIT_S_MAX)
        values |= {"out": int(args["out"]), "err": int(args["err"])}
        values |= {"wait_s": wait_s, "chunk": runs.OUTPUT_CHUNK_BYTES}
    elif name == "signal":
        values["signal"] = args["signal"]
    elif name == "list":
        values["prefix"] = args.get("prefix", "")
    assigned = "".join(f"{key}={quote_path(str(path))}\n" for key, path in paths.items())
    assigned += "".join(f"{key}={shlex.quote(str(value))}\n" for key, value in values.items())
    request_script = _SCRIPT_BY_OP[name].replace("@EXPORTS@", exports)
    return f"{{\n{assigned}{CHECK_GRID_FOLDER_LINK_SCRIPT}{_COMMON_FUNCTIONS_SCRIPT}{request_script}}}\n"


def _format_timeout(timeout_s: float | None) -> str:
    """Formats a timeout for sleep, '' for none: some versions accept only integers, none an exponent."""
    return f"{timeout_s:.3f}".rstrip("0").rstrip(".") if timeout_s else ""


def _encode_run_metadata(args: Mapping[str, Any]) -> str:
    keys = ("id", "command", "cwd", "who", "started", "timeout_s")
    return json.dumps(
        {**{key: args.get(key) for key in keys}, "env": sorted(args.get("env") or {}), "gpus": []}
    )


def _parse_reply(node: str, name: str, text: bytes) -> tuple[Any, bytes]:
    head, _, data = (b"\n" + text).partition(b"\n--\n")
    # Not splitlines(): contents of files may contain other line separators.
    lines = [line for line in head.decode(errors="replace").split("\n") if line]
    if lines and lines[-1].startswith("refused "):
        _, reason, why = lines[-1].split(" ", 2)
        raise NodeRefusedError(f"node {node}: {why.strip()}", reason=_reason_from_shell_error(reason, why))
    runs_lines = [lines[start:] for start, line in enumerate(lines) if line.startswith("run ")]
    if name == "list":
        return {
            "runs": [run for run in map(_try_parse_run, runs_lines) if run is not None],
            "more": False,
        }, b""
    if name == "remove":
        return {}, b""
    (one,) = map(_parse_run, runs_lines)
    if name == "read":
        out, err = (int(each) for each in lines[-1].split()[1:])
        over = one["state"] in ("exited", "lost")
        end = over and out < runs.OUTPUT_CHUNK_BYTES and err < runs.OUTPUT_CHUNK_BYTES
        return {**one, "out": out, "err": err, "end": end}, data
    return {**one, "created": "created" in lines, "sent": "sent" in lines}, b""


def _try_parse_run(lines: list[str]) -> dict[str, Any] | None:
    """Parses a run; None if it is damaged, so that the others are still listed."""
    try:
        found = _parse_run(lines)
        parse_run("", found)
    except (*MALFORMED_REPLY_ERRORS, RecursionError, ProtocolError):
        return None
    return found


def _parse_run(lines: list[str]) -> dict[str, Any]:
    """Parses the facts of one run, from its first line on."""
    facts: dict[str, str] = {}
    processes: dict[int, tuple[str, int]] = {}
    for number, line in enumerate(lines):
        word, _, rest = line.partition(" ")
        if word == "run" and number:
            break
        if word == "process":
            pid, *runs_lines = rest.split()
            processes[int(pid)] = (runs_lines[0], int(runs_lines[1])) if len(runs_lines) == 2 else ("", 0)
        else:
            facts[word] = rest.strip()
    ended = json.loads(facts["exit"]) if facts.get("exit") else None
    pid_record = json.loads(facts["pid"]) if facts.get("pid") else {}
    meta = json.loads(facts["meta"])
    if not runs.is_valid_metadata(meta):
        raise ValueError("meta.json is damaged")

    def process_info(pid: int) -> tuple[str, int]:
        return processes.get(pid, ("", 0))

    return {
        **meta,
        "id": facts["run"],
        **runs.run_state_from_records(ended, pid_record, facts.get("boot", ""), process_info),
    }


def _reason_from_shell_error(reason: str, why: str) -> str:
    if reason != "os":
        return reason
    known = {"No space left": "no_space", "Read-only file": "read_only", "Permission denied": "denied"}
    return next((word for text, word in known.items() if text in why), "os")
