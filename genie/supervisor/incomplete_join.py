"""What a server join has written and added, to undo it: when it fails, or later, if its process was killed.

    STATE/server-join.json    exists while a join as a server is not complete

The file is written before the key of the CA, and removed when all processes of the server have started. It
contains no secrets.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from genie.agent.identity import AGENTS_DIR
from genie.controller.etcd.local_member import etcd_member_directory, make_managed_etcd_address
from genie.controller.store.open import CONTROLLER_DIRECTORY
from genie.errors import GenieError
from genie.processes import files
from genie.runtime.credentials import OWNER_TOKEN_FILE

_RECORD_FILE = "server-join.json"


@dataclass(frozen=True)
class IncompleteJoin:
    """`peer_url` is that of the added etcd member; empty before one was added."""

    etcd_endpoints: tuple[str, ...]
    had_agents_before: bool
    peer_url: str = ""

    @classmethod
    def read(cls, state_dir: Path) -> IncompleteJoin | None:
        """None without an incomplete join. A damaged record names no member."""
        path = state_dir / _RECORD_FILE
        try:
            body = json.loads(files.read_small_file(path))
            return cls(
                etcd_endpoints=tuple(map(str, body["etcd_endpoints"])),
                had_agents_before=bool(body["had_agents_before"]),
                peer_url=str(body["peer_url"]),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return cls(etcd_endpoints=(), had_agents_before=True)

    def write(self, state_dir: Path) -> None:
        files.write_private(state_dir / _RECORD_FILE, json.dumps(asdict(self)).encode())

    async def remove_added_member(self, state_dir: Path, *, progress: Callable[[str], None]) -> None:
        """Removes the etcd member; best effort, because the cluster may be unreachable."""
        if not self.peer_url:
            return
        from genie.controller.etcd.membership import open_etcd_cluster  # late: needs gRPC

        try:
            address = make_managed_etcd_address(self.etcd_endpoints, state_dir=state_dir)
            async with open_etcd_cluster(address) as cluster:
                for member in await cluster.list_members():
                    if member.peer_url == self.peer_url:
                        await cluster.remove_member(member.member_id)
                        progress(f"removed etcd member {member.label} again")
        except GenieError as error:
            progress(
                f"warning: could not remove the etcd member of this machine ({self.peer_url}) again: "
                f"{error.message}; remove it with 'genie etcd remove' on another server"
            )

    def remove_written_files(self, state_dir: Path) -> None:
        """Removes what the join has written. Call it when its processes have ended."""
        shutil.rmtree(state_dir / CONTROLLER_DIRECTORY, ignore_errors=True)
        shutil.rmtree(etcd_member_directory(state_dir), ignore_errors=True)
        (state_dir / OWNER_TOKEN_FILE).unlink(missing_ok=True)
        if not self.had_agents_before:
            shutil.rmtree(state_dir / AGENTS_DIR, ignore_errors=True)
        mark_join_complete(state_dir)


def mark_join_complete(state_dir: Path) -> None:
    (state_dir / _RECORD_FILE).unlink(missing_ok=True)


async def undo_incomplete_join(state_dir: Path, *, progress: Callable[[str], None]) -> bool:
    """Removes what a killed join has left; returns whether there was one. Call it while no process of this
    state directory runs."""
    found = IncompleteJoin.read(state_dir)
    if found is None:
        return False
    progress("an earlier join of this machine as a server was interrupted: removing what it has left")
    await found.remove_added_member(state_dir, progress=progress)
    found.remove_written_files(state_dir)
    progress("removed the key of the certificate authority, the owner token and the etcd member's files")
    return True
