"""The commands of `genie etcd` without a cluster; tests/integration/test_servers.py runs them on one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from genie.cli import main
from genie.cli.commands import etcd
from genie.config import ControllerConfig
from genie.controller.etcd.membership import MemberInfo, MemberStatus
from genie.supervisor.etcd_member import new_local_member, write_etcd_member_certificate
from genie.supervisor.process_records import SUPERVISOR, record_process
from tests.ports import free_ports

MEMBER = MemberInfo(
    member_id=0x23880E7DA931810,
    name="s1",
    peer_url="https://10.0.0.1:2380",
    endpoint="10.0.0.1:2379",
    is_learner=False,
)


@pytest.mark.parametrize("arguments", [["status"], ["remove", "s1"], ["defrag"]])
def test_error_without_a_member_names_the_right_machine(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GENIE_STATE_DIR", str(tmp_path))
    # As without the etcd extra.
    monkeypatch.setitem(sys.modules, "genie.controller.etcd.membership", None)
    assert main(["etcd", *arguments]) != 0
    shown = capsys.readouterr().err
    assert f"there is no etcd member in {tmp_path}" in shown
    assert "genie up --store etcd" in shown


def test_status_row_shows_role_size_and_fragmentation() -> None:
    status = MemberStatus(
        info=MEMBER, version="3.4.23", is_leader=True, size_bytes=4 << 20, used_bytes=1 << 20, revision=7
    )
    assert etcd._member_status_row(status) == (
        *("s1", "10.0.0.1:2379", "leader", "3.4.23", "4.0 MiB", "75%", "7", "healthy"),
    )
    lost = MemberStatus(info=MEMBER, problem="could not reach it")
    assert etcd._member_status_row(lost)[-1] == "could not reach it"


def test_status_shows_a_failed_handshake_without_the_log_of_grpc(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.recv(4096)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        config = ControllerConfig(etcd_client_port=listener.getsockname()[1])
        member = new_local_member(config, name="s1")
        member.write(tmp_path)
        write_etcd_member_certificate(config, member, state_dir=tmp_path)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "genie", "etcd", "status"],
                env={**os.environ, "GENIE_STATE_DIR": str(tmp_path)},
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert done.returncode == 1
    assert "TLS handshake with etcd failed" in done.stdout and "ipv4:" not in done.stdout
    assert done.stderr == "0 of 1 members respond, 1 needed\n"


@pytest.mark.parametrize(
    ("problems", "shown"),
    [
        (["", ""], ""),
        (["", "", "no response"], ""),
        (["", "no response"], "1 of 2 members respond, 2 needed"),
        (["", "no response", "belongs to another etcd cluster"], "1 of 3 members respond, 2 needed"),
    ],
)
def test_status_says_how_many_members_respond_without_a_majority(problems: list[str], shown: str) -> None:
    learner = MemberStatus(info=replace(MEMBER, is_learner=True))
    statuses = [MemberStatus(info=MEMBER, problem=problem) for problem in problems]
    assert etcd._find_majority_problem([*statuses, learner]) == shown


def test_member_ids_are_hexadecimal_in_json() -> None:
    found = etcd._member_status_to_json(MemberStatus(info=MEMBER))
    assert (found["member_id"], found["healthy"]) == ("23880e7da931810", True)


def test_status_without_a_responding_member_shows_the_own_name_and_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("grpc")
    monkeypatch.setenv("GENIE_STATE_DIR", str(tmp_path))
    own_port, other_port = free_ports(2)
    config = ControllerConfig(etcd_client_port=own_port)
    member = replace(new_local_member(config, name="s1"), endpoints=(f"127.0.0.1:{other_port}",))
    member.write(tmp_path)
    write_etcd_member_certificate(config, member, state_dir=tmp_path)
    waiting = "waiting for a majority of the etcd members: 1 of 2 running, 2 needed"
    record_process(tmp_path, SUPERVISOR, os.getpid(), missing_servers=waiting)
    assert main(["etcd", "status"]) == 1
    shown = capsys.readouterr()
    rows = {row.split()[1]: row.split()[0] for row in shown.out.splitlines()[1:]}
    assert rows == {member.endpoint: "s1", f"127.0.0.1:{other_port}": "-"}
    assert shown.err == f"0 of 2 members respond, 2 needed\nthis server is {waiting}\n"
