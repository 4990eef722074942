"""Whether a node's login shell runs commands at all: accounts may have nologin or false in its place.

Asked only when something has failed there already, to say why. Not for: nodes that cannot be reached.
"""

from __future__ import annotations

from genie.errors import LoginRefusedError
from genie.grid.ssh_pool import Link

_WORD = "grid-shell-answers"
_SAID_MAX = 200


async def check_login_shell(link: Link, *, timeout_s: float) -> None:
    """Raises LoginRefusedError if the shell says not even a word after us, and what `Link.command` raises."""
    done = await link.command(f"echo {_WORD}", timeout_s=timeout_s)
    if _WORD.encode() in done.stdout:
        return
    said = b" ".join((done.stdout + b" " + done.stderr).split())[-_SAID_MAX:].decode(errors="replace")
    raise LoginRefusedError(
        f"node {link.name}: its login shell runs no commands{f', and says: {said}' if said else ''}",
        hint="the account has nologin, false or the like for a shell: change that with 'chsh' on the node, "
        "or log in as another user",
    )
