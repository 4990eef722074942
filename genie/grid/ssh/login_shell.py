"""Checks that the login shell of a node runs commands: an account may have nologin or false instead.

Used only after a failure, to explain it.
"""

from __future__ import annotations

from genie.errors import LoginRefusedError
from genie.grid.ssh.pool import NodeConnection

_EXPECTED_OUTPUT = "grid-shell-works"
_OUTPUT_CHARS_SHOWN_MAX = 200


async def check_login_shell(link: NodeConnection, *, timeout_s: float) -> None:
    """Raises LoginRefusedError if the shell does not run `echo`, and as `NodeConnection.run_command` does."""
    done = await link.run_command(f"echo {_EXPECTED_OUTPUT}", timeout_s=timeout_s)
    if _EXPECTED_OUTPUT.encode() in done.stdout:
        return
    output = b" ".join((done.stdout + b" " + done.stderr).split())[-_OUTPUT_CHARS_SHOWN_MAX:].decode(
        errors="replace"
    )
    raise LoginRefusedError(
        f"node {link.name}: its login shell does not run commands{f'; output: {output}' if output else ''}",
        hint="the shell of the account is nologin, false or similar: change it with 'chsh' on the node, "
        "or log in as another user",
    )
