"""Quoting for the shells of nodes: paths that may start with '~', and commands for any login shell.

A login shell may be csh or fish, whose quoting differs from sh. A command for it is a program and one
argument in single quotes, without any character that some shell treats as special.
"""

from __future__ import annotations

import re
import shlex

from genie.grid.remote.own_folder import broken_link_message, rejected_link_message

CHECK_GRID_FOLDER_LINK_SCRIPT = """
_grid_refused_link() {
  [ -L "$root/.grid" ] || return 1
  _grid_real=$(cd -P -- "$root/.grid" 2>/dev/null && pwd -P) || {
    printf '%s' "@BROKEN@"
    return 0
  }
  for _grid_place in "$HOME" "$root"; do
    _grid_place=$(cd -P -- "$_grid_place" && pwd -P) || continue
    case $_grid_real in "${_grid_place%/}"/?*) return 1 ;; esac
  done
  printf '%s' "@REFUSAL@"
}
""".replace("@REFUSAL@", rejected_link_message("$root/.grid", "$_grid_real")).replace(
    "@BROKEN@", broken_link_message("$root/.grid")
)
"""The sh version of remote/own_folder.py: prints why the link at $root/.grid is rejected, else fails."""

# Characters that are special within single quotes in some shell (' \ ! and newlines) or in double quotes.
_SPECIAL_CHARACTER_PATTERN = re.compile(r"[^\x20\x23\x25-\x5b\x5d-\x5f\x61-\x7e]|'")


def quote_path(path: str) -> str:
    """Quotes a path for sh; a leading '~' becomes the home directory on the node."""
    if path == "~":
        return '"$HOME"'
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def make_login_shell_command(script: str) -> str:
    """Returns a command for any login shell that runs a script in sh. The script keeps standard input."""
    escaped = _SPECIAL_CHARACTER_PATTERN.sub(
        lambda found: "".join(f"\\0{byte:03o}" for byte in found[0].encode()), script
    )
    return f'exec sh -c \'eval "$(printf %b "{escaped}")"\''
