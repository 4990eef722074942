"""A run is tried on the next node only if it has provably not started."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from genie.errors import ConnectionLostError, DeadlineError, GenieError, NodeRefusedError, UnreachableError
from genie.grid.grid_file import GridNode, parse_grid_file
from genie.grid.health.check import HealthCache, NodeHealth, NodeHealthChecker
from genie.grid.runs.launch import RunLauncher, RunSpec
from genie.grid.runs.run import Run, RunState
from genie.grid.runs.run_client import Runner
from genie.grid.ssh.pool import SshPool
from tests.grid.health.test_check import make_node_health

FILE = parse_grid_file("nodes: [a, b]", name="f")


class RunnerFailingOnNodeA(Runner):
    """Fails on node a with the given error, and starts everything on node b."""

    error: GenieError

    async def start(self, node: str, command: str, **_: object) -> Run:  # type: ignore[override]
        if node == "a":
            raise self.error
        return Run(run_id="r-aaaaaaaaaa", node=node, command=command, state=RunState.RUNNING, started=1.0)


async def start_run_after_error_on_node_a(error: GenieError, state_dir: Path) -> str:
    nodes = [msgspec.structs.replace(make_node_health(name), at=time.time()) for name in ("a", "b")]
    HealthCache(state_dir).write(FILE, nodes)
    async with SshPool(FILE, ssh_config=state_dir) as pool:
        runner = RunnerFailingOnNodeA(pool, FILE)
        runner.error = error
        run = await RunLauncher(pool, FILE, runner, state_dir=state_dir).start_on_best_node(
            RunSpec(command="true")
        )
        return run.node


@pytest.mark.parametrize("error", [UnreachableError("gone"), NodeRefusedError("no GPU", reason="busy")])
async def test_run_that_has_not_started_is_tried_on_the_next_node(error: GenieError, tmp_path: Path) -> None:
    assert await start_run_after_error_on_node_a(error, tmp_path) == "b"


@pytest.mark.parametrize(
    "error", [ConnectionLostError("cut"), DeadlineError("late"), NodeRefusedError("full", reason="no_space")]
)
async def test_run_that_may_have_started_or_was_rejected_is_not_repeated(
    error: GenieError, tmp_path: Path
) -> None:
    with pytest.raises(type(error), match=error.message):
        await start_run_after_error_on_node_a(error, tmp_path)


async def test_concurrent_launches_choose_different_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def ask(_: NodeHealthChecker, node: GridNode) -> NodeHealth:
        asked.append(node.name)
        await asyncio.sleep(0)
        return msgspec.structs.replace(make_node_health(node.name), at=time.time())

    monkeypatch.setattr(NodeHealthChecker, "_check_node_now", ask)
    async with SshPool(FILE, ssh_config=tmp_path) as pool:
        launcher = RunLauncher(pool, FILE, Runner(pool, FILE), state_dir=tmp_path)
        chosen = await asyncio.gather(*(launcher.choose_best_node(without={}) for _ in range(4)))
    assert sorted(chosen) == ["a", "a", "b", "b"]
    assert sorted(asked) == ["a", "b"]
