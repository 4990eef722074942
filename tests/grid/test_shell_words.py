"""What goes through a node's shells arrives as it was meant, whichever login shell the user has."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from genie.grid.shell_words import path_word, through_login_shell
from genie.grid.ssh_pool import SshPool
from tests.grid.bed import Bed, Node
from tests.grid.conftest import grid_file_of

ODD = 'it\'s "odd" $HOME `id` \\0101 \\n ! !! %s %d ~ \t ü *\nsecond; # line'

# Neither csh nor fish: a shell that takes the little that all of them have in common, and nothing else.
NARROW = r"""#!/usr/bin/python3
import os, re, sys
found = re.fullmatch(r"exec sh -c '([^'!\n]*)'", sys.argv[2])
if not found or re.search(r"\\[\\']", found[1]):
    sys.exit("Unmatched '")
os.execvp("sh", ["sh", "-c", found[1]])
"""


def give_login_shell(node: Node, text: str) -> None:
    """root's shell, on that node only."""
    shell = node.folder / "narrow-shell"
    shell.write_text(text)
    shell.chmod(0o755)
    node.login_shell = shell
    node.restart()


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_script_arrives_as_it_is_and_keeps_its_standard_input(shell: str) -> None:
    line = through_login_shell(f"printf %s {shlex.quote(ODD)}; cat; exit 3")
    done = subprocess.run([shell, "-c", line], input=b"in", capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (3, ODD.encode() + b"in", b"")


@pytest.mark.parametrize(
    ("path", "is_at"),
    [("~", "/h e"), ("~/a b", "/h e/a b"), ("~/$x'y", "/h e/$x'y"), ("/a;b", "/a;b"), ("a/~", "a/~")],
)
def test_only_a_home_at_the_beginning_of_a_path_is_the_shells(path: str, is_at: str) -> None:
    line = f'it={path_word(path)}; printf %s "$it" {path_word(path)}'
    done = subprocess.run(["sh", "-c", line], env={"HOME": "/h e"}, capture_output=True, timeout=30)
    assert done.stdout.decode() == is_at * 2


async def test_a_login_shell_that_is_not_sh_passes_scripts_on(own_bed: Bed) -> None:
    give_login_shell(own_bed["gpu1"], NARROW)
    async with (
        SshPool(grid_file_of(own_bed), ssh_config=own_bed.ssh_config) as pool,
        pool.use("gpu1", bare=True) as link,
    ):
        assert (await link.command("if [ -x /bin/sh ]; then :; fi", timeout_s=10)).exit_code != 0
        script = f"if [ -x /bin/sh ]; then printf %s {shlex.quote(ODD)}; fi"
        done = await link.command(through_login_shell(script), timeout_s=10)
        assert (done.exit_code, done.stdout) == (0, ODD.encode())
