"""`genie join --server`, killed when its etcd member may already vote, and continued by `genie up`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.supervisor import local_cluster
from tests.integration.test_servers import Server, end_servers
from tests.needs import require_program

pytestmark = pytest.mark.timeout(300)

# Kills the process at the first event after the record of the member was written (the member is still a
# learner), or when the controller is started (it is a voter).
_KILLING_COMMAND = """
import os, signal, sys

kill_at, is_record_written = os.environ.pop("KILL_AT"), False

def kill_self(event, arguments):
    global is_record_written
    starts_controller = event == "subprocess.Popen" and "genie.controller" in map(str, arguments[1])
    must_kill = starts_controller if kill_at == "promoted" else is_record_written
    if must_kill and event != "os.kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if event == "os.rename" and str(arguments[1]).endswith("/etcd/member.json"):
        is_record_written = True

sys.addaudithook(kill_self)
from genie.cli import main
sys.exit(main())
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    require_program("etcd", package="etcd-server")
    first, second = (
        Server(f"s{number}", f"127.0.0.{number + 1}", tmp_path / f"s{number}") for number in (1, 2)
    )
    try:
        first.start_first()
        yield first, second
    finally:
        end_servers((first, second))


@pytest.mark.parametrize("kill_at", ["learner", "promoted"])
def test_join_killed_when_its_member_may_vote_is_continued_by_up(
    servers: tuple[Server, Server], tmp_path: Path, kill_at: str
) -> None:
    first, second = servers
    token_file = first.create_server_token(tmp_path / "server.token")
    arguments = ("--bind", second.host, "--port", str(second.ports[0]), "--node-id", second.name)
    joining = subprocess.run(
        [
            *(sys.executable, "-c", _KILLING_COMMAND, "join", "--server", first.where),
            *(*arguments, "--token-file", str(token_file)),
        ],
        env={**second.environ(), "KILL_AT": kill_at},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert joining.returncode == -signal.SIGKILL, joining.stderr
    running = local_cluster.find_running_cluster(second.state_dir)
    assert running is not None
    for pid in running.pids.values():
        os.kill(pid, signal.SIGKILL)
    assert "run 'genie up', which continues the join" in second.run("doctor", check=False).stdout
    refused = second.join(first.where, token_file, check=False)
    output = refused.stdout + refused.stderr
    assert f"this machine is the server {second.name} already" in output
    assert "which continues its join" in output and str(second.state_dir / "owner.token") in output

    second.run("up", "--detach")
    members = {member["name"]: member["healthy"] for member in first.list_members()}
    assert len(members) == 2 and members[second.name] and all(members.values())
    assert not (second.state_dir / "server-join.json").exists()
    assert second.try_submit("on two servers")
