"""Commands pass through any login shell unchanged."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from genie.grid.ssh.pool import SshPool
from genie.grid.ssh.shell_words import make_login_shell_command, quote_path
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.testbed import SshNode, SshTestbed

ODD = 'it\'s "odd" $HOME `id` \\0101 \\n ! !! %s %d ~ \t ü *\nsecond; # line'

# A shell that accepts only the syntax that csh, fish and sh have in common.
NARROW = r"""#!/usr/bin/python3
import os, re, sys
found = re.fullmatch(r"exec sh -c '([^'!\n]*)'", sys.argv[2])
if not found or re.search(r"\\[\\']", found[1]):
    sys.exit("Unmatched '")
os.execvp("sh", ["sh", "-c", found[1]])
"""


def set_login_shell(node: SshNode, text: str) -> None:
    """Sets the shell of root, on that node only."""
    shell = node.folder / "narrow-shell"
    shell.write_text(text)
    shell.chmod(0o755)
    node.login_shell = shell
    node.restart()


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_script_arrives_unchanged_and_keeps_standard_input(shell: str) -> None:
    line = make_login_shell_command(f"printf %s {shlex.quote(ODD)}; cat; exit 3")
    done = subprocess.run([shell, "-c", line], input=b"in", capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (3, ODD.encode() + b"in", b"")


@pytest.mark.parametrize(
    ("path", "expanded"),
    [("~", "/h e"), ("~/a b", "/h e/a b"), ("~/$x'y", "/h e/$x'y"), ("/a;b", "/a;b"), ("a/~", "a/~")],
)
def test_only_a_leading_tilde_is_expanded(path: str, expanded: str) -> None:
    line = f'it={quote_path(path)}; printf %s "$it" {quote_path(path)}'
    done = subprocess.run(["sh", "-c", line], env={"HOME": "/h e"}, capture_output=True, timeout=30)
    assert done.stdout.decode() == expanded * 2


async def test_other_login_shells_pass_scripts_to_sh(own_testbed: SshTestbed) -> None:
    set_login_shell(own_testbed["gpu1"], NARROW)
    async with (
        SshPool(make_testbed_grid_file(own_testbed), ssh_config=own_testbed.ssh_config) as pool,
        pool.connect("gpu1", without_helper=True) as link,
    ):
        assert (await link.run_command("if [ -x /bin/sh ]; then :; fi", timeout_s=10)).exit_code != 0
        script = f"if [ -x /bin/sh ]; then printf %s {shlex.quote(ODD)}; fi"
        done = await link.run_command(make_login_shell_command(script), timeout_s=10)
        assert (done.exit_code, done.stdout) == (0, ODD.encode())
