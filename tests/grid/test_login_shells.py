"""Nodes with all common login shells of Debian, with and without Python, behave the same.

A node without Python has nothing but a few programs in its PATH: those of busybox, or those that the grid
starts, with dash, mksh or bash as `sh`.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from genie.errors import NodeRefusedError, SyncError
from genie.grid.grid_file import GridFile
from genie.grid.health.check import HealthState, NodeHealthChecker
from genie.grid.runs.run import RunState
from genie.grid.runs.run_client import Runner
from genie.grid.ssh.pool import SshPool
from genie.grid.sync.syncer import Syncer
from tests.grid.conftest import make_testbed_grid_file
from tests.grid.runs.test_run_client import OutputRecorder, run_to_end
from tests.grid.sync.trees import read_tree, write_files
from tests.grid.testbed import SshNode, SshTestbed
from tests.needs import require_program
from tests.waiting import until

pytestmark = pytest.mark.long("fourteen nodes, one for each login shell with Python and without")

# Each with and without Python; the second word is `sh` on the node without Python.
LOGINS = (
    ("bash", "bash"),
    ("dash", "dash"),
    ("ash", "ash"),
    ("mksh", "mksh"),
    ("zsh", "ash"),
    ("tcsh", "mksh"),
    ("fish", "ash"),
)
TOOLS = (
    *("cat", "cut", "date", "df", "dmesg", "find", "grep", "head", "ls", "mkdir", "mv", "printf", "rm"),
    *("sed", "setsid", "sleep", "tail", "tar", "timeout", "tr", "wc"),
)
"""Programs that a node without Python needs in addition to a shell."""
STARTUP = {"bash": ".bashrc", "zsh": ".zshenv", "tcsh": ".tcshrc", "fish": ".config/fish/config.fish"}
"""The startup file that a shell reads before each command; the others read none."""
ODD = 'it\'s "odd" $HOME `id` \\0101 \\n ! %s ~ \t ü *\nsecond; # line \\'
UTF8 = {"LC_ALL": "C.UTF-8"}
"""Without it, fish changes characters in the environment."""
NOISE = "printf 'welcome to %s' here; sh -c 'printf \"and hello\" >&2'\n"
"""No newline: our own output must not be taken for the rest of that line."""
# Each shell interprets them as it does for ssh.
COMMANDS = (
    "printf '%s|' 'a  b' \"c 'd' e\" '$HOME \\d `x` é' -x a\\ b \"$HOME\"",
    "echo one two\necho 'three' # no\nexit 4",
    "-n x",
    "no-such-program-here",
    "printf x ; ; '",
)


@pytest.fixture(scope="module")
def shell_testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshTestbed]:
    """gpu1 to gpu7 are LOGINS with Python, the next seven the same without."""
    programs = [(shell, "busybox" if shell == "ash" else shell) for shell, _ in LOGINS]
    found = {shell: require_program(name, package=name) for shell, name in programs}
    testbed = SshTestbed(tmp_path_factory.mktemp("testbed") / "nodes", count=2 * len(LOGINS))
    for number, node in enumerate(testbed.nodes):
        node.login_shell = node.folder / "shells" / get_login_shell(node)
        if number >= len(LOGINS):
            node.path = str(node.bin)
    with testbed:
        for number, node in enumerate(testbed.nodes):
            shell, sh = LOGINS[number % len(LOGINS)]
            (node.folder / "shells").mkdir()
            (node.folder / "shells" / shell).symlink_to(found[shell])
            if number >= len(LOGINS):
                install_shell_and_tools(node.bin, sh, found[sh])
        yield testbed


def get_login_shell(node: SshNode) -> str:
    return LOGINS[(int(node.name.removeprefix("gpu")) - 1) % len(LOGINS)][0]


def has_python(node: SshNode) -> bool:
    return str(node.bin) != node.path


def install_shell_and_tools(folder: Path, sh: str, program: str) -> None:
    if sh == "ash":
        subprocess.run([program, "--install", "-s", str(folder)], check=True, timeout=30)
        return
    (folder / "sh").symlink_to(program)
    for tool in TOOLS:
        (folder / tool).symlink_to(require_program(tool, package="coreutils"))


@pytest.fixture
def shell_grid_file(shell_testbed: SshTestbed) -> GridFile:
    ssh = "ssh: {connect_timeout: 20, pool_size: 20, max_retries: 1}\n"
    return make_testbed_grid_file(shell_testbed, more=f"{ssh}health_check: {{timeout: 20}}\n")


@pytest_asyncio.fixture
async def shell_pool(shell_testbed: SshTestbed, shell_grid_file: GridFile) -> AsyncIterator[SshPool]:
    async with SshPool(shell_grid_file, ssh_config=shell_testbed.ssh_config) as pool:
        yield pool


@pytest.fixture
def runner(shell_pool: SshPool, shell_grid_file: GridFile) -> Runner:
    return Runner(shell_pool, shell_grid_file)


@contextmanager
def written_startup_files(nodes: Sequence[SshNode], text: str) -> Iterator[None]:
    """Writes the startup files of the shells."""
    files = [node.home / STARTUP[get_login_shell(node)] for node in nodes]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    try:
        yield
    finally:
        for file in files:
            file.unlink()


async def check_each_node(nodes: Sequence[SshNode], check: Callable[[SshNode], Awaitable[None]]) -> None:
    """Runs `check` on all nodes concurrently; names each node that fails."""

    async def one(node: SshNode) -> None:
        try:
            await check(node)
        except BaseException as error:
            way = "with" if has_python(node) else "without"
            error.add_note(f"{node.name}: {get_login_shell(node)}, {way} Python")
            raise

    failed = [e for e in await asyncio.gather(*map(one, nodes), return_exceptions=True) if e is not None]
    if failed:
        raise BaseExceptionGroup("some shells", failed)


async def test_shell_reading_and_helper_reading_agree(
    shell_testbed: SshTestbed, shell_pool: SshPool, shell_grid_file: GridFile
) -> None:
    checker = NodeHealthChecker(shell_pool, shell_grid_file, clock=time.time)
    for _ in range(2):
        for found in await checker.check_all_in_file_order(fresh=True):
            assert (found.state, found.note) == (HealthState.OK, ""), found
            assert found.readings is not None
            assert (found.readings.cores, found.readings.vendor) == (os.cpu_count(), "none")

    async def check(node: SshNode) -> None:
        async with shell_pool.connect(node.name) as link:
            assert link.has_helper == has_python(node)

    await check_each_node(shell_testbed.nodes, check)


async def test_run_has_both_streams_exit_code_and_environment(
    shell_testbed: SshTestbed, runner: Runner
) -> None:
    async def check(node: SshNode) -> None:
        command = "sh -c 'printf %s \"$A\"; echo no >&2'; exit 3"
        assert await run_to_end(runner, node.name, command, env={"A": ODD, **UTF8}) == (
            3,
            ODD.encode(),
            b"no\n",
        )
        assert (await run_to_end(runner, node.name, "sh -c 'kill -TERM $$'"))[0] == 128 + 15
        itself = "kill -KILL $fish_pid" if get_login_shell(node) == "fish" else "kill -KILL $$"
        assert (await run_to_end(runner, node.name, itself))[0] == 128 + 9

    await check_each_node(shell_testbed.nodes, check)


async def test_command_of_a_run_behaves_as_over_plain_ssh(
    shell_testbed: SshTestbed, shell_pool: SshPool, runner: Runner
) -> None:
    async def check(node: SshNode) -> None:
        for command in COMMANDS:
            async with shell_pool.connect(node.name) as link:
                done = await link.run_command(command, timeout_s=20)
            code, out, _ = await run_to_end(runner, node.name, command)
            assert (code, out) == (done.exit_code, done.stdout), command
            if command == COMMANDS[0]:
                assert out.decode() == "a  b|c 'd' e|$HOME \\d `x` é|-x|a b|/root|"

    await check_each_node(shell_testbed.nodes, check)


async def test_standard_input_reaches_the_command_with_python(
    shell_testbed: SshTestbed, runner: Runner
) -> None:
    async def check(node: SshNode) -> None:
        if has_python(node):
            assert (await run_to_end(runner, node.name, "cat", stdin=b"\0\xff\n x"))[1] == b"\0\xff\n x"
        else:
            with pytest.raises(NodeRefusedError, match="standard input is not supported"):
                await runner.start(node.name, "cat", stdin=b"x")
        assert await run_to_end(runner, node.name, "cat") == (0, b"", b"")

    await check_each_node(shell_testbed.nodes, check)


async def test_runs_can_be_interrupted_cancelled_timed_out_and_listed(
    shell_testbed: SshTestbed, runner: Runner
) -> None:
    async def check(node: SshNode) -> None:
        for signal, code in (("INT", 2), ("TERM", 15)):
            run = await runner.start(node.name, "exec sh -c 'echo ready; exec sleep 7301'")
            await runner.read_output(run, out=0, err=0, wait_s=10)  # fish ignores interrupts while it starts
            (listed,) = await runner.list_runs(node.name, prefix=run.run_id)
            assert listed.state is RunState.RUNNING
            assert (await runner.cancel(run, signal=signal)).exit_code == 128 + code, signal
        assert (await run_to_end(runner, node.name, "sleep 7301", timeout_s=1))[0] == 124
        await until(lambda: not node.processes("sleep 7301"), what="the end of its processes")

    await check_each_node(shell_testbed.nodes, check)


async def test_output_is_read_from_any_offset(shell_testbed: SshTestbed, runner: Runner) -> None:
    async def check(node: SshNode) -> None:
        command = "printf 'abc\\nd\\377f\\000'; sh -c 'printf 12345 >&2'; sleep 7302"
        run = await runner.start(node.name, command)
        recorder = OutputRecorder()
        following = asyncio.ensure_future(runner.follow_until_end(run, recorder, out=2, err=4))
        await until(lambda: (recorder.out, recorder.err) == (b"c\nd\xfff\0", b"5"), what="its output")
        await runner.send_signal(run, "KILL")
        assert await following == 128 + 9
        chunk = await runner.read_output(run, out=5, err=0)
        assert (chunk.out, chunk.err, chunk.is_last) == (b"\xfff\0", b"12345", True)

    await check_each_node(shell_testbed.nodes, check)


async def test_changed_tree_is_synced_with_every_login_shell(
    shell_testbed: SshTestbed, shell_pool: SshPool, shell_grid_file: GridFile, tmp_path: Path
) -> None:
    root = tmp_path / "project"
    names = [f"d {n % 3}/-f$n'{n}\n".encode() for n in range(12)]
    write_files(root, dict.fromkeys(names, b"1" * 3000))
    (root / "link").symlink_to("/etc/passwd")
    syncer = Syncer(shell_pool, shell_grid_file, state_dir=tmp_path / "state")
    for changed in (0, 0, 10):
        write_files(root, dict.fromkeys(names[:changed], b"2"))
        for report in await syncer.sync(root, [node.name for node in shell_testbed.nodes]):
            assert report.error is None, report
        for node in shell_testbed.nodes:
            there = read_tree(node.home / "grid_workspace")
            assert there == read_tree(root), node.name


async def test_output_of_startup_files_does_not_disturb_replies(
    shell_testbed: SshTestbed, shell_pool: SshPool, shell_grid_file: GridFile, tmp_path: Path
) -> None:
    runner, checker = (
        Runner(shell_pool, shell_grid_file),
        NodeHealthChecker(shell_pool, shell_grid_file, clock=time.time),
    )
    syncer = Syncer(shell_pool, shell_grid_file, state_dir=tmp_path / "state")
    nodes = [node for node in shell_testbed.nodes if get_login_shell(node) in STARTUP]

    async def check(node: SshNode) -> None:
        for _ in range(2):
            found = await checker.check(node.name, fresh=True)
            assert (found.state, found.note) == (HealthState.OK, "")
        async with shell_pool.connect(node.name) as link:
            assert link.has_helper == has_python(node)
            done = await link.run_command("echo; exit 3", timeout_s=20)
        assert (done.exit_code, done.stdout, done.stderr) == (3, b"welcome to here\n", b"and hello")
        assert await run_to_end(runner, node.name, "echo; exit 3") == (3, done.stdout, done.stderr)
        root = tmp_path / node.name
        for content in (b"1", b"2"):
            data = content * (3 << 20)
            write_files(root, {b"a": data})
            (report,) = await syncer.sync(root, [node.name])
            assert (report.error, report.sent_files) == (None, 1)
            assert (node.home / "grid_workspace/a").read_bytes() == data
        write_files(root, {b"in the way/b": b""})
        (node.home / "grid_workspace/in the way").symlink_to("/tmp")
        (report,) = await syncer.sync(root, [node.name])
        assert isinstance(report.error, SyncError)
        assert re.fullmatch(rf"node {node.name}: (\./)?in the way is .*", report.error.message)

    with written_startup_files(nodes, NOISE):
        await check_each_node(nodes, check)


async def test_slow_startup_file_is_tolerated(
    shell_testbed: SshTestbed, shell_pool: SshPool, shell_grid_file: GridFile
) -> None:
    runner, checker = (
        Runner(shell_pool, shell_grid_file),
        NodeHealthChecker(shell_pool, shell_grid_file, clock=time.time),
    )
    nodes = [node for node in shell_testbed.nodes if get_login_shell(node) == "zsh"]

    async def check(node: SshNode) -> None:
        found, done = await asyncio.gather(checker.check(node.name), run_to_end(runner, node.name, "exit 3"))
        assert (found.state, done) == (HealthState.OK, (3, b"", b""))

    with written_startup_files(nodes, "sleep 1\n"):
        await check_each_node(nodes, check)
