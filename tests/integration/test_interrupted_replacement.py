"""`genie store migrate --to etcd`, killed with SIGKILL before each of its renames, and then repeated."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from genie import config
from genie.controller.etcd.local_member import LocalMember
from genie.controller.nodes.admission import Certificates
from genie.controller.rows import ClusterRecord
from genie.controller.store import Put
from genie.controller.store.etcd import EtcdStore
from genie.controller.store.sqlite import SqliteStore
from genie.processes.clock import SystemClock
from genie.supervisor.etcd_member import EtcdMemberProcess
from genie.supervisor.process_records import read_process_record
from tests.needs import require_program
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(300)

_COMMAND_TIMEOUT_S = 60
_JOB = b'{"job":"kept"}'
# Kills the process before the rename with this number; the command then runs as usual.
_KILLING_COMMAND = """
import os, signal, sys
from pathlib import Path

state_dir, left = os.environ["GENIE_STATE_DIR"], int(os.environ.pop("KILL_BEFORE_RENAME"))

def count_renames(event, arguments):
    global left
    if event == "os.rename" and str(arguments[1]).startswith(state_dir):
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

sys.addaudithook(count_renames)
from genie.cli import main
sys.exit(main())
"""


class Machine:
    """A machine with a cluster in SQLite that is not running."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.directory = state_dir / "controller"
        self._ports = free_ports(2)

    async def fill(self) -> None:
        settings = config.load({"paths.state_dir": self.state_dir})
        pin = Certificates.open(self.directory, settings.controller, clock=SystemClock()).pin
        cluster = msgspec.json.encode(ClusterRecord(cluster_id="c0ffee", ca_pin=pin))
        store = await SqliteStore.open(self.directory / "store.sqlite3")
        await store.commit([], [Put("cluster", cluster), Put("job/j-1", _JOB)])
        await store.close()

    def migrate(self, *, kill_before_rename: int = 1000) -> subprocess.CompletedProcess[str]:
        arguments = ("store", "migrate", "--to", "etcd", "--bind", "127.0.0.1")
        return self._run(arguments, kill_before_rename=kill_before_rename)

    def _run(
        self, arguments: tuple[str, ...], *, kill_before_rename: int
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _KILLING_COMMAND, *arguments],
            env={
                **os.environ,
                "GENIE_STATE_DIR": str(self.state_dir),
                "GENIE_CONTROLLER_ETCD_CLIENT_PORT": str(self._ports[0]),
                "GENIE_CONTROLLER_ETCD_PEER_PORT": str(self._ports[1]),
                "KILL_BEFORE_RENAME": str(kill_before_rename),
            },
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )

    async def read_job_of_sqlite(self) -> bytes | None:
        """From the store under its name or under the one that it is kept as."""
        files = [path for path in self.directory.glob("store.sqlite3*") if path.suffix != ".lock"]
        store = await SqliteStore.open(min(files, key=lambda path: len(path.name)))
        try:
            found = await store.get("job/j-1")
        finally:
            await store.close()
        return None if found is None else found.value

    async def read_job_of_etcd(self) -> bytes | None:
        settings = config.load({"paths.state_dir": self.state_dir, "controller.store": "etcd"})
        member = LocalMember.read(self.state_dir)
        assert member is not None
        process = EtcdMemberProcess(
            settings.controller, state_dir=self.state_dir, progress=lambda _line: None
        )
        await process.start(member)
        try:
            store = await EtcdStore.open_address(member.address(self.state_dir))
            found = await store.get("job/j-1")
            await store.close()
        finally:
            await process.child.stop(grace_s=10)
        return None if found is None else found.value


async def test_migration_killed_before_any_rename_is_completed_by_repeating_it(tmp_path: Path) -> None:
    require_program("etcd", package="etcd-server")
    kill_before_rename, is_killed = 0, True
    while is_killed:
        machine = Machine(tmp_path / str(kill_before_rename))
        await machine.fill()
        done = await asyncio.to_thread(machine.migrate, kill_before_rename=kill_before_rename)
        is_killed = done.returncode == -signal.SIGKILL
        assert is_killed or done.returncode == 0, done.stderr
        if is_killed:
            done = await asyncio.to_thread(machine.migrate)
        what = f"killed before rename {kill_before_rename}: {done.stderr}"
        assert done.returncode == 0, what
        assert "next: genie up --detach" in done.stderr, what
        assert read_process_record(machine.state_dir, "etcd") is None, what
        assert not (machine.directory / "store.sqlite3").exists(), what
        assert await machine.read_job_of_sqlite() == _JOB, what
        assert await machine.read_job_of_etcd() == _JOB, what
        kill_before_rename += 1
    assert kill_before_rename > 8
