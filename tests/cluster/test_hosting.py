"""What a session of the role server or worker starts on its machine, and what it leaves alone."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from genie import config
from genie.cluster import hosting, local, processes
from genie.errors import AgentRunningError
from genie.model.tenant import TokenKind
from genie.runtime.files import write_private
from genie.tenancy.access import NO_PIN, new_token

OURS, OTHERS = "a" * 43, "b" * 43


def token(kind: TokenKind, pin: str) -> str:
    return str(new_token(kind, token_id="abcd", secret=b"\x01" * 32, pin=pin))


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """Of a machine on which an agent runs: this process, for want of a real one."""
    processes.record_process(tmp_path, local.AGENT, os.getpid(), node_id="n1")
    return tmp_path


def join(state_dir: Path, *, pin: str, controllers: str = '["10.0.0.1:5555"]') -> None:
    write_private(state_dir / "agents" / "n1" / "node.token", token(TokenKind.NODE, pin).encode())
    write_private(state_dir / "agents" / "n1" / "controllers.json", controllers.encode())


async def lend(state_dir: Path, *, pin: str, host: str = "10.0.0.1") -> None:
    settings = config.load({"paths.state_dir": state_dir})
    access = config.ClusterConfig(master_addr=host, token=token(TokenKind.OWNER, pin))
    async with AsyncExitStack() as stack:
        await hosting.lend_machine(settings, access, stack, timeout_s=5)


async def test_a_machine_that_is_in_the_cluster_is_not_lent_again(state_dir: Path) -> None:
    join(state_dir, pin=OURS)
    await lend(state_dir, pin=OURS)


async def test_a_machine_that_is_in_another_cluster_cannot_be_lent(state_dir: Path) -> None:
    join(state_dir, pin=OTHERS)
    with pytest.raises(AgentRunningError, match=r"another cluster than 10\.0\.0\.1:5555 .*genie down"):
        await lend(state_dir, pin=OURS)


async def test_clusters_without_tls_are_told_apart_by_address(state_dir: Path) -> None:
    join(state_dir, pin=NO_PIN, controllers='["127.0.0.1:5555"]')
    await lend(state_dir, pin=NO_PIN, host="localhost")
    with pytest.raises(AgentRunningError, match="another cluster"):
        await lend(state_dir, pin=NO_PIN, host="127.0.0.1:5556")
