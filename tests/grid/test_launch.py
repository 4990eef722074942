"""Where a run is tried next when a node fails it: only where it provably has not begun."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from genie.errors import ConnectionLostError, DeadlineError, GenieError, NodeRefusedError, UnreachableError
from genie.grid.grid_file import GridNode, parse_grid_file
from genie.grid.health_check import HealthCache, HealthChecker, NodeHealth
from genie.grid.launch import Launch, Launcher
from genie.grid.run import Run, RunState
from genie.grid.runner import Runner
from genie.grid.ssh_pool import SshPool
from tests.grid.test_health_check import health

FILE = parse_grid_file("nodes: [a, b]", name="f")


class Failing(Runner):
    """Fails on node a in the way that it is told, and starts everything on node b."""

    error: GenieError

    async def start(self, node: str, command: str, **_: object) -> Run:  # type: ignore[override]
        if node == "a":
            raise self.error
        return Run(run_id="r-aaaaaaaaaa", node=node, command=command, state=RunState.RUNNING, started=1.0)


async def started_on(error: GenieError, state_dir: Path) -> str:
    nodes = [msgspec.structs.replace(health(name), at=time.time()) for name in ("a", "b")]
    HealthCache(state_dir).write(FILE, nodes)
    async with SshPool(FILE, ssh_config=state_dir) as pool:
        runner = Failing(pool, FILE)
        runner.error = error
        run = await Launcher(pool, FILE, runner, state_dir=state_dir).on_best(Launch(command="true"))
        return run.node


@pytest.mark.parametrize("error", [UnreachableError("gone"), NodeRefusedError("no GPU", reason="busy")])
async def test_what_has_not_begun_is_tried_on_the_next_node(error: GenieError, tmp_path: Path) -> None:
    assert await started_on(error, tmp_path) == "b"


@pytest.mark.parametrize(
    "error", [ConnectionLostError("cut"), DeadlineError("late"), NodeRefusedError("full", reason="no_space")]
)
async def test_what_may_have_begun_or_was_refused_is_not_repeated_elsewhere(
    error: GenieError, tmp_path: Path
) -> None:
    with pytest.raises(type(error), match=error.message):
        await started_on(error, tmp_path)


async def test_who_wants_a_node_at_the_same_time_knows_what_the_others_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def ask(_: HealthChecker, node: GridNode) -> NodeHealth:
        asked.append(node.name)
        await asyncio.sleep(0)
        return msgspec.structs.replace(health(node.name), at=time.time())

    monkeypatch.setattr(HealthChecker, "_ask", ask)
    async with SshPool(FILE, ssh_config=tmp_path) as pool:
        launcher = Launcher(pool, FILE, Runner(pool, FILE), state_dir=tmp_path)
        chosen = await asyncio.gather(*(launcher.best_node(without={}) for _ in range(4)))
    assert sorted(chosen) == ["a", "a", "b", "b"]
    assert sorted(asked) == ["a", "b"]
