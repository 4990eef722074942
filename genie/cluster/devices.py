"""Which accelerators the indices of `remote_accelerator` stand for, and opening an executor on one.

The list only grows, so that an index means the same accelerator all along: what joins the cluster
later comes to its end. Opening is asked for by user code on its own thread and blocks there. Not for: tensors
(genie/device), and choosing an accelerator for a job (scheduler/).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from genie.cluster.link import Link
from genie.device import ExecutorAddress, RemoteDevice, attach, detach, extend
from genie.device.roster import DEVICES_MAX
from genie.errors import DeviceUnavailableError, GenieError, TransportError
from genie.model.job import Job, JobState
from genie.model.messages import CancelJob, DeviceReply, OpenDevice, WaitDevice
from genie.model.node import GPUInfo, NodeInfo, NodeStatus, Vendor

_log = logging.getLogger(__name__)

_POLL_S = 5.0
_STEP_S = 0.02
_CALL_S = 10.0
_CANCEL_S = 2.0


@dataclass(frozen=True, slots=True)
class AcceleratorRef:
    """One accelerator of the cluster, as an index stands for it."""

    node_id: str
    gpu: GPUInfo

    def __str__(self) -> str:
        return f"accelerator {self.gpu.gpu_id} of node {self.node_id} ({self.gpu.name})"


def accelerators(nodes: Iterable[NodeInfo]) -> tuple[AcceleratorRef, ...]:
    """By node id, then by the node's own number. CPU accelerators count only where there is no GPU."""
    found = [
        AcceleratorRef(node.node_id, gpu)
        for node in sorted(nodes, key=lambda node: node.node_id)
        if node.status is not NodeStatus.DISCONNECTED
        for gpu in sorted(node.gpus, key=lambda gpu: gpu.gpu_id)
    ]
    gpus = tuple(ref for ref in found if ref.gpu.vendor is not Vendor.CPU)
    return gpus or tuple(found)


Submit = Callable[[Callable[[], Coroutine[Any, Any, ExecutorAddress]]], Future[ExecutorAddress]]
"""Runs something on the session's loop."""


class DeviceBroker:
    """Between user threads, which open devices, and the session's loop, which talks to the controller."""

    def __init__(
        self,
        refs: tuple[AcceleratorRef, ...],
        *,
        link: Link,
        session_id: str,
        submit: Submit,
        timeout_s: float,
    ) -> None:
        self.refs = refs[:DEVICES_MAX]
        """By index."""
        self.opened = 0
        """Executors opened so far in this session."""
        self._link = link
        self._session_id = session_id
        self._request_ids: dict[int, str] = {}
        """By index, for requests that may have arrived although no answer came: asked again, they give the
        same executor and not a second one."""
        self._submit = submit
        self._timeout_s = timeout_s
        if len(refs) > DEVICES_MAX:
            _log.warning("of %d accelerators the first %d have an index", len(refs), DEVICES_MAX)

    def follow(self, nodes: Iterable[NodeInfo]) -> tuple[AcceleratorRef, ...]:
        """Those of these nodes that have no index yet get the next ones. Says which they are.

        Where one index stands for a GPU, CPU accelerators get none, also while all GPUs are out of reach.
        """
        known = {(ref.node_id, ref.gpu.gpu_id) for ref in self.refs}
        has_gpu = any(ref.gpu.vendor is not Vendor.CPU for ref in self.refs)
        found = (ref for ref in accelerators(nodes) if (ref.node_id, ref.gpu.gpu_id) not in known)
        wanted = [ref for ref in found if ref.gpu.vendor is not Vendor.CPU or not has_gpu]
        new = tuple(wanted[: DEVICES_MAX - len(self.refs)])
        if new:
            extend(self._remote_devices(new, start=len(self.refs)))
            self.refs += new
        return new

    def remote_devices(self) -> list[RemoteDevice]:
        return self._remote_devices(self.refs, start=0)

    def _remote_devices(self, refs: Iterable[AcceleratorRef], *, start: int) -> list[RemoteDevice]:
        return [
            RemoteDevice(
                node_id=ref.node_id,
                gpu_id=str(ref.gpu.gpu_id),
                name=ref.gpu.name,
                memory_bytes=ref.gpu.memory_total_bytes,
                vendor=ref.gpu.vendor,
                open=functools.partial(self.open, index),
            )
            for index, ref in enumerate(refs, start=start)
        ]

    def open(self, index: int) -> ExecutorAddress:
        """An executor on the accelerator of this index. Blocks; never call it on the session's loop.

        DeviceUnavailableError says what it waited for, or why the executor ended.
        """
        return self._submit(lambda: self._open(index)).result()

    async def _open(self, index: int) -> ExecutorAddress:
        ref = self.refs[index]
        job: Job | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._ask(index)
                job = reply.job
                while reply.endpoint is None:
                    job = reply.job
                    _check_on_its_way(ref, job)
                    request = WaitDevice(job_id=job.job_id, wait_s=_POLL_S)
                    reply = await self._link.call(request, timeout_s=_POLL_S + _CALL_S)
                    await asyncio.sleep(0 if reply.endpoint else _STEP_S)
        except TimeoutError:
            await self._give_back(job)
            raise _too_late(ref, job, self._timeout_s) from None
        except (GenieError, asyncio.CancelledError):
            await self._give_back(job)
            raise
        self.opened += 1
        trusted = self._link.access.tls
        return ExecutorAddress(
            host=reply.endpoint.host,
            port=reply.endpoint.port,
            server_name=reply.endpoint.server_name,
            ticket=reply.ticket,
            ssl_context=trusted.context if trusted else None,
        )

    async def _ask(self, index: int) -> DeviceReply:
        ref = self.refs[index]
        request = OpenDevice(
            session_node_id=self._session_id,
            node_id=ref.node_id,
            gpu_id=ref.gpu.gpu_id,
            request_id=self._request_ids.setdefault(index, secrets.token_hex(16)),
        )
        try:
            reply = await self._link.call(request, timeout_s=self._timeout_s)
        except TransportError:
            raise
        except GenieError:  # an answer: this request is over
            del self._request_ids[index]
            raise
        del self._request_ids[index]
        return reply

    async def _give_back(self, job: Job | None) -> None:
        """Nobody waits for it any more, so it must not take the accelerator later."""
        if job is None or job.state.is_final:
            return
        try:
            await self._link.call(CancelJob(job_id=job.job_id), timeout_s=_CANCEL_S)
        except GenieError as error:
            _log.warning("could not take back the request for %s: %s", job.job_id, error)


@contextmanager
def attached(broker: DeviceBroker, *, launch_blocking: bool) -> Iterator[None]:
    """The torch device, for the length of the session. torch itself is imported when user code does."""
    attach(broker.remote_devices(), launch_blocking=launch_blocking)
    try:
        yield
    finally:
        detach()


def _check_on_its_way(ref: AcceleratorRef, job: Job) -> None:
    if job.state.is_final:
        raise DeviceUnavailableError(
            f"the executor on {ref} ended before it could be used: {job.reason}",
            hint=f"'genie logs {job.job_id}' has what it said",
        )


def _too_late(ref: AcceleratorRef, job: Job | None, timeout_s: float) -> DeviceUnavailableError:
    if job is not None and job.state is JobState.RUNNING and job.reason:
        return DeviceUnavailableError(
            f"the executor on {ref} is not ready after {timeout_s:g} s: it is {job.reason}",
            hint="try again in a minute",
        )
    what = "the controller did not answer" if job is None else f"it is {job.state}: {job.reason}"
    return DeviceUnavailableError(
        f"no executor on {ref} within {timeout_s:g} s; {what}",
        hint="'genie jobs' shows who holds it; try later, or use another index",
    )
