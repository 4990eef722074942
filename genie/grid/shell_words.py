"""Text for the shells of nodes: paths that may begin with '~', and lines for login shells of every kind.

A login shell may be csh or fish, which quote in other ways than sh does; what goes through it is a
program and one argument in single quotes, without any character that some shell takes for its own.

Not for: what is asked of a node.
"""

from __future__ import annotations

import re
import shlex

from genie.grid.remote.own_folder import broken, refusal

OWN_FOLDER = """
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
""".replace("@REFUSAL@", refusal("$root/.grid", "$_grid_real")).replace("@BROKEN@", broken("$root/.grid"))
"""sh's twin of remote/own_folder.py: says why the link at $root/.grid is not followed, else fails."""

# What single quotes do not keep everywhere (' \ ! and line ends), and what double quotes within them do not.
_SPECIAL = re.compile(r"[^\x20\x23\x25-\x5b\x5d-\x5f\x61-\x7e]|'")


def path_word(path: str) -> str:
    """A word of sh: the path as it is, but for a '~' at its beginning, which is the home there."""
    if path == "~":
        return '"$HOME"'
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def through_login_shell(script: str) -> str:
    """A line for any login shell that has sh run a script. Standard input stays the script's own."""
    told = _SPECIAL.sub(lambda found: "".join(f"\\0{byte:03o}" for byte in found[0].encode()), script)
    return f'exec sh -c \'eval "$(printf %b "{told}")"\''
