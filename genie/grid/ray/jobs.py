"""Jobs of the Ray cluster: submit a command, follow its output, and return its exit code.

Requests go to Ray's Jobs API on the head's loopback, over the grid's connection. A job continues when the
connection is lost, and following resumes at the same offset. Job IDs are created here, so that an interrupted
submission is looked up and never repeated.

Does not start the cluster (cluster.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genie.errors import ConnectionLostError, DeadlineError, RayError, TransportError
from genie.grid.ray.cluster import RayCluster

JOB_LOG_WAIT_S = 1.0
_REPLY_TIMEOUT_MARGIN_S = 20.0
_RECONNECTS_MAX = 30
_RECONNECT_INTERVAL_S = 1.0
_UNFINISHED_STATUSES = ("PENDING", "RUNNING")
FAILED_EXIT_CODE = 1
STOPPED_EXIT_CODE = 143


@dataclass(frozen=True)
class RayJobResult:
    """`exit_code` is that of the command, 128+n after signal n. `message` is Ray's."""

    job: str
    status: str
    exit_code: int
    message: str = ""


def exit_code_of_ended_job(info: Mapping[str, Any]) -> int:
    """Return the exit code of an ended job from its Jobs API info."""
    code = info.get("driver_exit_code")
    if isinstance(code, int):
        return 128 - code if code < 0 else code
    return {"SUCCEEDED": 0, "STOPPED": STOPPED_EXIT_CODE}.get(str(info.get("status")), FAILED_EXIT_CODE)


class RayJobs:
    """The jobs of one cluster."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    async def submit(
        self, command: str, *, env: Mapping[str, str] | None = None, gpus: float = 0, head: str | None = None
    ) -> str:
        """Submit a shell command line, which runs on the head; returns the job ID."""
        head = head or await self._cluster.find_head()
        job = f"grid_{secrets.token_hex(8)}"
        body: dict[str, Any] = {"entrypoint": command, "submission_id": job}
        if env:
            body["runtime_env"] = {"env_vars": _with_cluster_python_path(env)}
        if gpus:
            body["entrypoint_num_gpus"] = gpus
        try:
            await self._cluster.request_dashboard(head, "POST", "/api/jobs/", body)
        except (ConnectionLostError, DeadlineError):
            if await self._try_fetch_job_info(head, job) is None:
                raise
        return job

    async def follow(
        self, job: str, on_output: Callable[[bytes], None], *, head: str | None = None
    ) -> RayJobResult:
        """Wait for the end of a job and pass on its output. Cancelling this does not stop the job."""
        head = head or await self._cluster.find_head()
        offset, failures = 0, 0
        while True:
            try:
                info = await self.fetch_job_info(job, head=head)
                done = str(info.get("status")) not in _UNFINISHED_STATUSES
                offset, more = await self._read_log_from_head_and_get_next_offset(
                    head, job, offset, on_output, wait_s=0 if done else JOB_LOG_WAIT_S
                )
                failures = 0
            except TransportError:
                failures += 1
                if failures > _RECONNECTS_MAX:
                    raise
                await asyncio.sleep(_RECONNECT_INTERVAL_S)
                continue
            if done and not more:
                if offset == 0:
                    await self._fetch_log_from_dashboard(head, job, on_output)
                return RayJobResult(
                    job, str(info["status"]), exit_code_of_ended_job(info), str(info.get("message") or "")
                )

    async def fetch_job_info(self, job: str, *, head: str | None = None) -> dict[str, Any]:
        return await self._cluster.request_dashboard(
            head or await self._cluster.find_head(), "GET", f"/api/jobs/{job}"
        )

    async def stop(self, job: str, *, head: str | None = None) -> None:
        """Let Ray stop the job (SIGTERM, then SIGKILL), without waiting for its end."""
        head = head or await self._cluster.find_head()
        await self._cluster.request_dashboard(head, "POST", f"/api/jobs/{job}/stop")

    async def _try_fetch_job_info(self, head: str, job: str) -> dict[str, Any] | None:
        try:
            return await self.fetch_job_info(job, head=head)
        except RayError:
            return None

    async def _read_log_from_head_and_get_next_offset(
        self, head: str, job: str, offset: int, on_output: Callable[[bytes], None], *, wait_s: float
    ) -> tuple[int, bool]:
        args = {"job": job, "offset": offset, "wait_s": wait_s}
        answer, data = await self._cluster.call_ray_op(
            head, "job_log", args, timeout_s=wait_s + _REPLY_TIMEOUT_MARGIN_S
        )
        if data:
            on_output(data)
        return int(answer["next"]), bool(data)

    async def _fetch_log_from_dashboard(
        self, head: str, job: str, on_output: Callable[[bytes], None]
    ) -> None:
        """Read the log through the Jobs API: the driver ran on another node, or wrote nothing."""
        logs = (await self._cluster.request_dashboard(head, "GET", f"/api/jobs/{job}/logs")).get("logs")
        if logs:
            on_output(str(logs).encode())


def _with_cluster_python_path(env: Mapping[str, str]) -> dict[str, str]:
    """Append the cluster's PYTHONPATH, which sets the namespace, to the job's. Ray expands ${...}."""
    if "PYTHONPATH" not in env:
        return dict(env)
    return {**env, "PYTHONPATH": f"{env['PYTHONPATH']}:${{PYTHONPATH}}"}


def to_shell_line(words: Sequence[str]) -> str:
    """Return one word unchanged, as a shell command line; quote several as a command and its arguments."""
    import shlex

    return words[0] if len(words) == 1 else shlex.join(words)
