"""Follows grid runs: prints their output, forwards Ctrl-C, and returns one outcome per node.

Each node is started and followed independently, so that an unresponsive node does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from genie.cli import output
from genie.cli.app import INTERRUPTED_EXIT_CODE
from genie.cli.grid.run_output import (
    COLLECTED_OUTPUT_BYTES_MAX,
    PrefixedLineWriter,
    StreamWriter,
    output_to_json,
    write_to_own_stream,
)
from genie.cli.interrupts import catch_interrupts
from genie.errors import GenieError, RunLostError

if TYPE_CHECKING:
    from pathlib import Path

    from genie.grid.grid_file import GridFile
    from genie.grid.runs.run import OutputCollector, Run
    from genie.grid.runs.run_client import Runner

TRANSPORT_EXIT_CODE = 255
_NEXT_CTRL_C_EFFECT_BY_SIGNAL = {"INT": "kill", "KILL": "exit at once"}


@dataclass(frozen=True)
class RunOutcome:
    """Result of one node. `abandoned_state` is the state of a run that was not followed until its end."""

    node: str
    run: Run | None
    exit_code: int
    error: BaseException | None = None
    took_s: float = 0.0
    abandoned_state: str = ""

    @property
    def summary(self) -> str:
        if self.abandoned_state:
            return self.abandoned_state
        if isinstance(self.error, RunLostError):
            return "lost"
        if isinstance(self.error, OSError):
            return f"could not write the output: {self.error.strerror}"
        if self.error is not None:
            return "unreachable" if getattr(self.error, "exit_code", 1) == TRANSPORT_EXIT_CODE else "refused"
        return f"exit code {self.exit_code}"


@dataclass
class _FollowedNode:
    """One node; `run` is None until the run has started."""

    node: str
    run_id: str
    run: Run | None = None
    start: Callable[[], Awaitable[Run]] | None = None
    announces_start: bool = False
    is_unreachable: bool = False
    task: asyncio.Task[RunOutcome] = field(init=False)

    @property
    def description(self) -> str:
        return f"{self.run_id} on {self.node}"


class RunFollower:
    """Starts runs, prints their output and forwards Ctrl-C.

    The first Ctrl-C cancels pending starts and interrupts the runs, the second kills the runs, the third
    stops following them. With `detach`, runs are not followed at all.
    """

    def __init__(
        self,
        runner: Runner,
        file: GridFile,
        *,
        state_dir: Path,
        several: bool,
        as_json: bool,
        detach: bool = False,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._grid_file = file
        self._state_dir = state_dir
        self._has_several_nodes = several
        self._as_json = as_json
        self._is_detached = detach
        self._on_start = on_start
        self._output_collector_by_node: dict[str, OutputCollector] = {}
        self._shown_errors: list[GenieError] = []
        self.was_interrupted = False

    def collected_output_json(self, node: str) -> dict[str, object]:
        return output_to_json(self._output_collector_by_node.get(node))

    async def follow(self, run: Run, *, announce: bool = False) -> RunOutcome:
        """Follow a started run. `announce` prints its ID and node first."""
        (outcome,) = await self._follow_all(
            [_FollowedNode(run.node, run.run_id, run, announces_start=announce)]
        )
        return outcome

    async def start_and_follow(
        self, run_ids: Mapping[str, str], start: Callable[[str], Awaitable[Run]]
    ) -> list[RunOutcome]:
        """Start and follow one run per node. `start` gets the node name; errors are printed immediately."""

        def make_followed_node(node: str) -> _FollowedNode:
            return _FollowedNode(node, run_ids[node], start=lambda: start(node), announces_start=True)

        return await self._follow_all([make_followed_node(node) for node in run_ids])

    async def _follow_all(self, followed: Sequence[_FollowedNode]) -> list[RunOutcome]:
        with catch_interrupts() as interrupts:
            async with asyncio.TaskGroup() as group:
                for each in followed:
                    each.task = group.create_task(self._start_and_follow_node(each))
                watch = group.create_task(self._forward_interrupts(interrupts, followed, group))
                await asyncio.wait([each.task for each in followed])
                watch.cancel()
        return [
            self._abandoned_run_outcome(each) if each.task.cancelled() else each.task.result()
            for each in followed
        ]

    async def _start_and_follow_node(self, each: _FollowedNode) -> RunOutcome:
        """Return errors as part of the outcome: raising one would cancel the other nodes."""
        if each.start is not None:
            try:
                each.run = await each.start()
            except GenieError as error:
                self._show_error_once(error)
                return RunOutcome(each.node, None, error.exit_code, error)
            self._on_start()
        assert each.run is not None
        if self._is_detached:
            return self._announce_detached_run(each.run)
        if each.announces_start:
            output.print_message(f"run {each.description}")
        return await self._wait_for_run(each.run, is_new=each.announces_start or not each.run.has_ended)

    async def _wait_for_run(self, run: Run, *, is_new: bool) -> RunOutcome:
        from genie.grid.runs.launch import track_run_in_metrics

        began = time.monotonic()
        error: BaseException | None = None
        code: int | None = None
        ended = track_run_in_metrics(run, state_dir=self._state_dir, file=self._grid_file, is_new=is_new)
        try:
            with self._make_output_callback(run.node) as sink:
                code = await self._runner.follow_until_end(run, sink, on_note=output.print_message_lines)
        except RunLostError as lost:
            ended("lost")
            error = lost
        except GenieError as trouble:
            error = trouble
        except OSError as trouble:  # of our own output: closed pipe or full disk
            error = trouble
            if code is None:
                output.print_message(_still_running_message(run.run_id, run.node))
        if code is not None:
            ended("cancelled" if self.was_interrupted and code else "failed" if code else "succeeded")
        if isinstance(error, GenieError):
            code = TRANSPORT_EXIT_CODE if isinstance(error, RunLostError) else error.exit_code
        elif error is not None:
            code = 1
        assert code is not None
        return RunOutcome(run.node, run, code, error, took_s=time.monotonic() - began)

    def _announce_detached_run(self, run: Run) -> RunOutcome:
        from genie.grid.runs.launch import track_run_in_metrics

        ended = track_run_in_metrics(run, state_dir=self._state_dir, file=self._grid_file)
        if run.has_ended:
            ended("lost" if run.exit_code is None else "failed" if run.exit_code else "succeeded")
        if self._as_json:
            return RunOutcome(run.node, run, 0)
        output.print_message(f"run {run.run_id} on {run.node}; to follow it: grid-cli attach {run.run_id}")
        try:
            output.write_line(run.run_id)
        except OSError as error:  # the other nodes still start
            return RunOutcome(run.node, run, 1, error)
        return RunOutcome(run.node, run, 0)

    def _show_error_once(self, error: GenieError) -> None:
        """Print an error once, even if several nodes have it. The error of a single node is raised later."""
        if self._has_several_nodes and error not in self._shown_errors:
            self._shown_errors.append(error)
            output.show_error(error, debug=False)

    @contextlib.contextmanager
    def _make_output_callback(self, node: str) -> Any:
        if self._as_json:
            from genie.grid.runs.run import OutputCollector

            self._output_collector_by_node[node] = OutputCollector(bytes_max=COLLECTED_OUTPUT_BYTES_MAX)
            yield self._output_collector_by_node[node]
        elif self._has_several_nodes:
            lines = PrefixedLineWriter(node, write_to_own_stream)
            try:
                yield lines
            finally:
                lines.close()
        else:
            sink: StreamWriter = write_to_own_stream
            yield sink

    def _abandoned_run_outcome(self, each: _FollowedNode) -> RunOutcome:
        if each.run is None:
            return self._cancelled_start_outcome(each)
        output.print_message(_still_running_message(each.run_id, each.node))
        code = TRANSPORT_EXIT_CODE if each.is_unreachable else INTERRUPTED_EXIT_CODE
        return RunOutcome(each.node, each.run, code, abandoned_state="may still be running")

    def _cancelled_start_outcome(self, each: _FollowedNode) -> RunOutcome:
        from genie.grid.runs.run_client import CancelledStartState

        known = self._runner.cancelled_start_state(each.run_id)
        if known is CancelledStartState.UNKNOWN:
            output.print_message(
                f"run {each.description} may have started; to cancel it: grid-cli cancel {each.run_id}"
            )
        elif known is CancelledStartState.INTERRUPTED:
            output.print_message(
                f"run {each.description} was interrupted; to show its output: grid-cli logs {each.run_id}"
            )
        return RunOutcome(each.node, None, INTERRUPTED_EXIT_CODE, abandoned_state=known.value)

    async def _forward_interrupts(
        self, interrupts: asyncio.Queue[None], followed: Sequence[_FollowedNode], group: asyncio.TaskGroup
    ) -> None:
        sending: list[asyncio.Task[None]] = []
        for name, verb in (("INT", "interrupting"), ("KILL", "killing")):
            await interrupts.get()
            self.was_interrupted = True
            unfinished = [each for each in followed if not each.task.done()]
            running = [each for each in unfinished if each.run is not None]
            starting = [each for each in unfinished if each.run is None] if name == "INT" else []
            messages = [f"{verb} {', '.join(each.description for each in running)}"] if running else []
            if starting:
                messages.append(f"cancelled the start on {', '.join(each.node for each in starting)}")
            if running or name == "KILL":
                messages.append(f"press Ctrl-C again to {_NEXT_CTRL_C_EFFECT_BY_SIGNAL[name]}")
            output.print_message("; ".join(messages))
            for each in starting:
                each.task.cancel()
            sending += [group.create_task(self._send_signal(each, name)) for each in running]
        await interrupts.get()
        for task in (*sending, *(each.task for each in followed)):
            task.cancel()

    async def _send_signal(self, each: _FollowedNode, name: str) -> None:
        assert each.run is not None
        try:
            await self._runner.send_signal(each.run, name)
        except GenieError as error:
            output.show_error(error, debug=False)
            output.print_message(f"run {each.description} could not be signalled")
            if name == "KILL":
                each.is_unreachable = True
                each.task.cancel()


def _still_running_message(run_id: str, node: str) -> str:
    return f"run {run_id} may still be running on {node}; to follow it: grid-cli attach {run_id}"
