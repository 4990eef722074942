"""Jobs of the Ray cluster: submit a command, follow its output, and give the exit code that it had.

The requests go to Ray's Jobs API on the head's loopback, over the grid's connection. The job goes on when
that breaks; following it takes up the output where it was. A job has an id that is made here, so one
whose submission broke off is looked for and never submitted twice.

Not for: starting the cluster (ray_cluster.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genie.errors import ConnectionLostError, DeadlineError, RayError, TransportError
from genie.grid.ray_cluster import RayCluster

WAIT_S = 1.0
_MARGIN_S = 20.0
_RECONNECTS_MAX = 30
_PAUSE_S = 1.0
_PENDING = ("PENDING", "RUNNING")
FAILED = 1
STOPPED = 143


@dataclass(frozen=True)
class JobEnd:
    """`exit_code` is the command's own, 128+n after signal n. `message` is Ray's, where there is none."""

    job: str
    status: str
    exit_code: int
    message: str = ""


def exit_code_of(info: Mapping[str, Any]) -> int:
    """Of a job that has ended, from what the Jobs API says of it."""
    code = info.get("driver_exit_code")
    if isinstance(code, int):
        return 128 - code if code < 0 else code
    return {"SUCCEEDED": 0, "STOPPED": STOPPED}.get(str(info.get("status")), FAILED)


class RayJobs:
    """The jobs of one cluster."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    async def submit(
        self, command: str, *, env: Mapping[str, str] | None = None, gpus: float = 0, head: str | None = None
    ) -> str:
        """Gives the job's id. `command` is a line of shell; its driver runs on the head."""
        head = head or await self._cluster.find_head()
        job = f"grid_{secrets.token_hex(8)}"
        body: dict[str, Any] = {"entrypoint": command, "submission_id": job}
        if env:
            body["runtime_env"] = {"env_vars": dict(env)}
        if gpus:
            body["entrypoint_num_gpus"] = gpus
        try:
            await self._cluster.ask(head, "POST", "/api/jobs/", body)
        except (ConnectionLostError, DeadlineError):
            if await self._look_up(head, job) is None:
                raise
        return job

    async def follow(
        self, job: str, on_output: Callable[[bytes], None], *, head: str | None = None
    ) -> JobEnd:
        """Waits for the end of a job. Cancelling this does not end the job; `stop` does."""
        head = head or await self._cluster.find_head()
        offset, failures = 0, 0
        while True:
            try:
                info = await self.info(job, head=head)
                done = str(info.get("status")) not in _PENDING
                offset, more = await self._read(head, job, offset, on_output, wait_s=0 if done else WAIT_S)
                failures = 0
            except TransportError:
                failures += 1
                if failures > _RECONNECTS_MAX:
                    raise
                await asyncio.sleep(_PAUSE_S)
                continue
            if done and not more:
                if offset == 0:
                    await self._whole_log(head, job, on_output)
                return JobEnd(job, str(info["status"]), exit_code_of(info), str(info.get("message") or ""))

    async def info(self, job: str, *, head: str | None = None) -> dict[str, Any]:
        return await self._cluster.ask(head or await self._cluster.find_head(), "GET", f"/api/jobs/{job}")

    async def stop(self, job: str, *, head: str | None = None) -> None:
        """Asks Ray to end the job: TERM, then KILL. `follow` sees the end."""
        head = head or await self._cluster.find_head()
        await self._cluster.ask(head, "POST", f"/api/jobs/{job}/stop")

    async def _look_up(self, head: str, job: str) -> dict[str, Any] | None:
        try:
            return await self.info(job, head=head)
        except RayError:
            return None

    async def _read(
        self, head: str, job: str, offset: int, on_output: Callable[[bytes], None], *, wait_s: float
    ) -> tuple[int, bool]:
        args = {"job": job, "offset": offset, "wait_s": wait_s}
        answer, data = await self._cluster.call(head, "job_log", args, timeout_s=wait_s + _MARGIN_S)
        if data:
            on_output(data)
        return int(answer["next"]), bool(data)

    async def _whole_log(self, head: str, job: str, on_output: Callable[[bytes], None]) -> None:
        """For a driver that ran on another node, or wrote nothing."""
        logs = (await self._cluster.ask(head, "GET", f"/api/jobs/{job}/logs")).get("logs")
        if logs:
            on_output(str(logs).encode())


def shell_line(words: Sequence[str]) -> str:
    """One word is a line of shell as it is; several are a command and its arguments."""
    import shlex

    return words[0] if len(words) == 1 else shlex.join(words)
