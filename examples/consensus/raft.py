"""The Raft algorithm of etcd, the store of a cluster with several servers, through a change of the leader.

    python examples/consensus/raft.py

Starts three etcd members on loopback, kills the leader, and starts it again. A write is acknowledged once a
majority of the members has it on disk, so two of three members can still write, and the member that returns
catches up. Requires the program etcd (Debian: apt install etcd-server).
"""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 30.0


class Member:
    """One etcd process. Its ports and data stay the same when it starts again."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder / name
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket() as client, socket.socket() as peer:
            client.bind(("127.0.0.1", 0))
            peer.bind(("127.0.0.1", 0))
            self.client, self.peer = (f"127.0.0.1:{each.getsockname()[1]}" for each in (client, peer))

    def start(self, members: list[Member]) -> None:
        etcd, client, peer = shutil.which("etcd") or "etcd", f"http://{self.client}", f"http://{self.peer}"
        cluster = ",".join(f"{member.name}=http://{member.peer}" for member in members)
        command = [etcd, "--name", self.name, "--data-dir", str(self.folder), "--initial-cluster", cluster]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        with self.folder.with_suffix(".log").open("ab") as log:  # without ETCD_* variables of the user
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={})

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def call(self, path: str, body: object) -> dict[str, Any]:
        """The reply of etcd's JSON API; empty if the member does not respond."""
        connection = http.client.HTTPConnection(self.client, timeout=5)
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body))
            return dict(json.loads(connection.getresponse().read()))
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()

    def write(self, value: str) -> None:
        """Writes a key through this member; a follower forwards the request to the leader."""
        reply = self.call("kv/put", {"key": encode("key"), "value": encode(value)})
        print(f"  {value!r} written through {self.name}: revision {reply['header']['revision']}")


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def wait_for_leader(members: list[Member], *, after_term: int = 0) -> tuple[Member, int]:
    """Waits until all `members` name the same leader of a later term. Returns it and its term."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        statuses = [member.call("maintenance/status", {}) for member in members]
        terms = {(int(status.get("raftTerm", 0)), status.get("leader")) for status in statuses}
        term, leader_id = terms.pop()
        if not terms and leader_id and term > after_term:
            headers = [status["header"] for status in statuses]
            leader = members[[header["member_id"] for header in headers].index(leader_id)]
            for member, header in zip(members, headers, strict=True):
                print(f"  {member.name}: term {term}, leader {leader.name}, revision {header['revision']}")
            return leader, term
        time.sleep(0.05)
    sys.exit(f"error: the members did not agree on a leader within {TIMEOUT_S:g} s")


def main() -> None:
    if shutil.which("etcd") is None:
        sys.exit("error: the program etcd is not on PATH (Debian: apt install etcd-server)")
    with tempfile.TemporaryDirectory() as folder:
        members = [Member(name, Path(folder)) for name in ("a", "b", "c")]
        try:
            for member in members:
                member.start(members)
            print("three members elect a leader:")
            leader, term = wait_for_leader(members)
            leader.write("before")
            leader.kill()
            print(f"the leader, {leader.name}, is killed; the others elect one of them in a later term:")
            others = [member for member in members if member is not leader]
            _, term = wait_for_leader(others, after_term=term)
            others[0].write("after")
            leader.start(members)
            print(f"{leader.name} returns as a follower and catches up:")
            wait_for_leader(members)
        finally:
            for member in members:
                member.kill()


if __name__ == "__main__":
    main()
