"""Maps the indices of `remote_accelerator` to accelerators, and opens executors on them.

The list only grows, so that an index always means the same accelerator: those that join later are appended.
User threads open executors and block meanwhile. Tensors are handled by genie/device.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from genie.config import ControllerConfig
from genie.device import ExecutorAddress, RemoteDevice, attach, detach, extend
from genie.device.registry import DEVICES_MAX, device_slot
from genie.errors import DeviceUnavailableError, GenieError, JobNotFoundError, TransportError
from genie.model.job import Job, JobState
from genie.model.messages import CancelJob, DeviceReply, Endpoint, OpenDevice, WaitDevice
from genie.model.node import GPUInfo, NodeInfo, NodeStatus, Vendor
from genie.runtime.controller_connection import ControllerConnection
from genie.runtime.data_plane import TransportCoordinator

_log = logging.getLogger(__name__)

_LONG_POLL_S = 5.0
_DEVICE_POLL_PAUSE_S = 0.02
_CALL_TIMEOUT_S = 10.0
_CANCEL_SESSION_JOB_TIMEOUT_S = 2.0
_EXECUTOR_CONNECT_TIMEOUT_S = 5.0
UNREACHABLE_EXECUTOR_TIMEOUT_S = ControllerConfig.node_ttl_s + ControllerConfig.node_reclaim_grace_s
"""How long an executor on a disconnected node must be unreachable before its session job is cancelled. Longer
than the time by which a new leader declares nodes lost earlier than it reclaims their accelerators."""


@dataclass(frozen=True, slots=True)
class AcceleratorRef:
    """One accelerator of the cluster."""

    node_id: str
    gpu: GPUInfo

    def __str__(self) -> str:
        return f"accelerator {self.gpu.gpu_id} of node {self.node_id} ({self.gpu.name})"


def list_accelerators(nodes: Iterable[NodeInfo]) -> tuple[AcceleratorRef, ...]:
    """Sorted by node ID and GPU ID. CPU accelerators are included only if there is no GPU."""
    found = [
        AcceleratorRef(node.node_id, gpu)
        for node in sorted(nodes, key=lambda node: node.node_id)
        if node.status is not NodeStatus.DISCONNECTED
        for gpu in sorted(node.gpus, key=lambda gpu: gpu.gpu_id)
    ]
    gpus = tuple(ref for ref in found if ref.gpu.vendor is not Vendor.CPU)
    return gpus or tuple(found)


SubmitToSessionLoop = Callable[[Callable[[], Coroutine[Any, Any, ExecutorAddress]]], Future[ExecutorAddress]]
"""Runs a coroutine on the event loop of the session."""


class DeviceBroker(TransportCoordinator):
    """Opens devices for user threads through the event loop of the session.

    Copies configuration, discovery and selected backend from `transport`.
    """

    def __init__(
        self,
        refs: tuple[AcceleratorRef, ...],
        *,
        transport: TransportCoordinator,
        connection: ControllerConnection,
        session_id: str,
        submit: SubmitToSessionLoop,
    ) -> None:
        super().__init__(transport.config)
        self.discovery, self.selection = transport.discovery, transport.selection
        self.accelerator_refs = refs[:DEVICES_MAX]
        """By index."""
        self.opened_executor_count = 0
        """Executors opened so far in this session."""
        self._connection = connection
        self._session_id = session_id
        self._request_id_by_device_index: dict[int, str] = {}
        """By index, of requests without a reply: a retry with the same ID returns the same executor."""
        self._session_job_id_by_device_index: dict[int, str] = {}
        """By index: the session job of the last opened executor."""
        self._unreachable_since_s_by_device_index: dict[int, float] = {}
        """By index, of executors on disconnected nodes; monotonic times."""
        self._submit_to_loop = submit
        if len(refs) > DEVICES_MAX:
            _log.warning(
                "%d accelerators found; only the first %d can be used as remote_accelerator devices",
                len(refs),
                DEVICES_MAX,
            )

    def add_new_accelerators(self, nodes: Iterable[NodeInfo]) -> tuple[AcceleratorRef, ...]:
        """Appends the accelerators of these nodes that have no index yet, and returns them.

        If any index is a GPU, CPU accelerators get none, even while all GPUs are disconnected.
        """
        known = {(ref.node_id, ref.gpu.gpu_id) for ref in self.accelerator_refs}
        has_gpu = any(ref.gpu.vendor is not Vendor.CPU for ref in self.accelerator_refs)
        found = (ref for ref in list_accelerators(nodes) if (ref.node_id, ref.gpu.gpu_id) not in known)
        wanted = [ref for ref in found if ref.gpu.vendor is not Vendor.CPU or not has_gpu]
        new = tuple(wanted[: DEVICES_MAX - len(self.accelerator_refs)])
        if new:
            extend(self._make_remote_devices(new, start=len(self.accelerator_refs)))
            self.accelerator_refs += new
        return new

    async def mark_lost_executors(self, nodes: Mapping[str, NodeInfo]) -> None:
        """Marks executors on disconnected nodes as lost once the cluster has ended their session jobs, or if
        they cannot be reached for UNREACHABLE_EXECUTOR_TIMEOUT_S: the cluster does not end jobs on a node
        that is only isolated, and the session continues when the node returns."""
        for index, job_id in list(self._session_job_id_by_device_index.items()):
            node = nodes.get(self.accelerator_refs[index].node_id)
            if node is not None and node.status is not NodeStatus.DISCONNECTED:
                self._unreachable_since_s_by_device_index.pop(index, None)
                continue
            try:
                request = WaitDevice(job_id=job_id, wait_s=0.0)
                reply = await self._connection.call(request, timeout_s=_CALL_TIMEOUT_S)
                reason = reply.job.reason if reply.job.state.is_final else ""
                if not reason and await self._is_unreachable_for_long(index, reply.endpoint):
                    reason = "its node does not respond, and the executor cannot be reached"
                    await self._cancel_session_job(reply.job)
            except JobNotFoundError:
                reason = "the controller no longer has its session"
            if reason:
                del self._session_job_id_by_device_index[index]
                self._unreachable_since_s_by_device_index.pop(index, None)
                _log.warning("lost the executor on %s: %s", self.accelerator_refs[index], reason)
                await asyncio.to_thread(device_slot(index).disconnect_lost_executor, reason)

    async def _is_unreachable_for_long(self, index: int, endpoint: Endpoint | None) -> bool:
        if await _can_reach_executor(endpoint):
            self._unreachable_since_s_by_device_index.pop(index, None)
            return False
        now_s = time.monotonic()
        since_s = self._unreachable_since_s_by_device_index.setdefault(index, now_s)
        return now_s - since_s >= UNREACHABLE_EXECUTOR_TIMEOUT_S

    def remote_devices(self) -> list[RemoteDevice]:
        return self._make_remote_devices(self.accelerator_refs, start=0)

    def _make_remote_devices(self, refs: Iterable[AcceleratorRef], *, start: int) -> list[RemoteDevice]:
        return [
            RemoteDevice(
                node_id=ref.node_id,
                gpu_id=str(ref.gpu.gpu_id),
                name=ref.gpu.name,
                memory_bytes=ref.gpu.memory_total_bytes,
                vendor=ref.gpu.vendor,
                start_executor=functools.partial(self.open_executor_blocking, index),
            )
            for index, ref in enumerate(refs, start=start)
        ]

    def open_executor_blocking(self, index: int) -> ExecutorAddress:
        """Opens an executor on the accelerator of this index. Blocks; never call it on the session's loop.

        Raises DeviceUnavailableError with the pending reason, or why the executor ended.
        """
        return self._submit_to_loop(lambda: self._open_executor(index)).result()

    async def _open_executor(self, index: int) -> ExecutorAddress:
        ref = self.accelerator_refs[index]
        job: Job | None = None
        try:
            async with asyncio.timeout(self.config.timeout_s):
                reply = await self._request_executor(index)
                job = reply.job
                while reply.endpoint is None:
                    job = reply.job
                    _check_session_job_not_ended(ref, job)
                    request = WaitDevice(job_id=job.job_id, wait_s=_LONG_POLL_S)
                    reply = await self._connection.call(request, timeout_s=_LONG_POLL_S + _CALL_TIMEOUT_S)
                    await asyncio.sleep(0 if reply.endpoint else _DEVICE_POLL_PAUSE_S)
        except TimeoutError:
            await self._cancel_session_job(job)
            raise _make_executor_timeout_error(ref, job, self.config.timeout_s) from None
        except (GenieError, asyncio.CancelledError):
            await self._cancel_session_job(job)
            raise
        self.opened_executor_count += 1
        self._unreachable_since_s_by_device_index.pop(index, None)
        self._session_job_id_by_device_index[index] = reply.job.job_id
        client_tls = self._connection.access.tls
        return ExecutorAddress(
            host=reply.endpoint.host,
            port=reply.endpoint.port,
            server_name=reply.endpoint.server_name,
            ticket=reply.ticket,
            ssl_context=client_tls.context if client_tls else None,
        )

    async def _request_executor(self, index: int) -> DeviceReply:
        ref = self.accelerator_refs[index]
        request = OpenDevice(
            session_node_id=self._session_id,
            node_id=ref.node_id,
            gpu_id=ref.gpu.gpu_id,
            request_id=self._request_id_by_device_index.setdefault(index, secrets.token_hex(16)),
        )
        try:
            reply = await self._connection.call(request, timeout_s=self.config.timeout_s)
        except TransportError:
            raise
        except GenieError:  # the controller rejected the request
            del self._request_id_by_device_index[index]
            raise
        del self._request_id_by_device_index[index]
        return reply

    async def _cancel_session_job(self, job: Job | None) -> None:
        """Cancels the session job, so that it does not take the accelerator later."""
        if job is None or job.state.is_final:
            return
        try:
            await self._connection.call(CancelJob(job_id=job.job_id), timeout_s=_CANCEL_SESSION_JOB_TIMEOUT_S)
        except GenieError as error:
            _log.warning("could not cancel session job %s: %s", job.job_id, error)


@contextmanager
def registered_torch_device(broker: DeviceBroker, *, launch_blocking: bool) -> Iterator[None]:
    """Registers the torch device for the block; does not import torch."""
    attach(broker.remote_devices(), launch_blocking=launch_blocking)
    try:
        yield
    finally:
        detach()


async def _can_reach_executor(endpoint: Endpoint | None) -> bool:
    """Whether something listens at the address of an executor; True if the address is not known yet."""
    if endpoint is None:
        return True
    try:
        async with asyncio.timeout(_EXECUTOR_CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except OSError:  # also TimeoutError
        return False
    writer.transport.abort()
    return True


def _check_session_job_not_ended(ref: AcceleratorRef, job: Job) -> None:
    if job.state.is_final:
        raise DeviceUnavailableError(
            f"the executor on {ref} ended before it was ready: {job.reason}",
            hint=f"see its log: 'genie logs {job.job_id}'",
        )


def _make_executor_timeout_error(
    ref: AcceleratorRef, job: Job | None, timeout_s: float
) -> DeviceUnavailableError:
    if job is not None and job.state is JobState.RUNNING and job.reason:
        return DeviceUnavailableError(
            f"the executor on {ref} was not ready within {timeout_s:g} s: {job.reason}",
            hint="retry in a minute",
        )
    status = "the controller did not reply" if job is None else f"{job.state}: {job.reason}"
    return DeviceUnavailableError(
        f"could not open an executor on {ref} within {timeout_s:g} s: {status}",
        hint="'genie jobs' shows the jobs that use it; retry later, or use another index",
    )
