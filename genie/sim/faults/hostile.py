"""What a hostile tenant does in a simulation. Jobs of other tenants must not notice any of it.

Each action ends after `lasts_s` seconds; the jobs that it has submitted end by themselves or are cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import msgspec

from genie.controller.store import Put
from genie.controller.store.protocol import VALUE_BYTES_MAX
from genie.errors import GenieError, StoreError
from genie.model.job import Job, JobSpec, JobState, PlacementConstraints, Resources
from genie.model.messages import CancelJob, ListJobs, PutBlob, ReadLog
from genie.runtime import rpc
from genie.runtime.credentials import connect_authenticated
from genie.sim.cluster import CONTROLLER_PORT, SimCluster
from genie.sim.processes import FILLS_DISK_ENV_VARIABLE, UNKILLABLE_ENV_VARIABLE
from genie.sim.world import SimNetwork

HOSTILE_TENANT = "red"
_HOSTILE_CLIENT_HOST = "127.0.9.66"
_UNAUTHENTICATED_HOST_PREFIX = "127.0.10."
_FLOOD_CALL_TIMEOUT_S = 20.0
_FLOOD_REQUEST_INTERVAL_S = 4.0
_LOG_READ_WAIT_S = 10.0
_CONCURRENT_LOG_WAITS = 300
"""More than all waits for one node may be (192)."""
_FLOOD_CONNECTIONS, _FLOOD_REQUESTS_IN_FLIGHT = 4, 200
"""Together far more than the lists in flight may be (32), and below the limit of a connection (512)."""
_UNAUTHENTICATED_HOST_COUNT = 4
_CONNECTING_TASK_COUNT = 20
"""Each opens connections one after the other, until it is rejected: more than a token may have (256)."""
_LARGE_ENV_BYTES = 120_000
"""Just below the maximum of a job's environment."""
_UPLOADED_BLOB_BYTES = 100_000
_LARGE_JOB_COUNT, _LISTED_JOB_COUNT = 40, 4
_SUBMIT_TIMEOUT_S = 3.0

HostileAction = Callable[[SimCluster, str, float], Awaitable[None]]


async def submit_oversized_job(cluster: SimCluster, node: str, lasts_s: float) -> None:
    """Submit a job whose row grows sixfold when it is encoded."""
    await _try_submit_hostile_job(cluster, seconds=1.0, env={"X": "\x01" * 120_000})


async def store_oversized_job(cluster: SimCluster, node: str, lasts_s: float) -> None:
    """Let a running job have a row that an earlier version accepted: no later state of it fits."""
    controllers = cluster.controller_hosts
    job_id = await _try_submit_hostile_job(cluster, seconds=lasts_s, env={})
    await asyncio.sleep(1.0)
    for host in controllers:
        cluster.crash(host)
    with suppress(StoreError):  # another fault may have stopped the store
        await _enlarge_stored_job_row(cluster, job_id)
    for host in controllers:
        cluster.restart(host)


async def _enlarge_stored_job_row(cluster: SimCluster, job_id: str) -> None:
    stored = await cluster.store.get(f"job/{job_id}")
    if stored is None:
        return
    job = msgspec.json.decode(stored.value, type=Job)
    missing_bytes = VALUE_BYTES_MAX - len(stored.value) - 60
    env = {**job.spec.env, "X": "x" * missing_bytes}
    job = msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, env=env))
    if job.state is JobState.RUNNING:
        await cluster.store.commit([], [Put(f"job/{job_id}", msgspec.json.encode(job))])


async def flood_log_waits(cluster: SimCluster, node: str, lasts_s: float) -> None:
    """Wait for the output of a job on a node, as many times as possible."""
    job_id = await _try_submit_hostile_job(
        cluster, seconds=lasts_s + _LOG_READ_WAIT_S, env={}, node_id=cluster.node_id(node)
    )

    async def send(peer: rpc.Peer) -> None:
        await peer.call(ReadLog(job_id=job_id, wait_s=_LOG_READ_WAIT_S), timeout_s=_FLOOD_CALL_TIMEOUT_S)

    await _repeat_request_in_parallel(
        cluster, send, lasts_s=lasts_s, connections=2, in_flight=_CONCURRENT_LOG_WAITS // 2
    )


async def flood_requests(cluster: SimCluster, node: str, lasts_s: float) -> None:
    """List jobs with large rows as often as possible."""
    job_ids = await _submit_large_jobs(cluster, _LISTED_JOB_COUNT)

    async def send(peer: rpc.Peer) -> None:
        await peer.call(ListJobs(limit=1000), timeout_s=_FLOOD_CALL_TIMEOUT_S)

    await _repeat_request_in_parallel(
        cluster, send, lasts_s=lasts_s, connections=_FLOOD_CONNECTIONS, in_flight=_FLOOD_REQUESTS_IN_FLIGHT
    )
    await _cancel_hostile_jobs(cluster, job_ids)


async def flood_connections(cluster: SimCluster, node: str, lasts_s: float) -> None:
    """Keep as many connections open as possible: with one token, and without any."""
    token, world, hosts = (
        await cluster.get_user_token(HOSTILE_TENANT),
        cluster.world,
        cluster.controller_hosts,
    )
    end_s = world.now_s + lasts_s + _LOG_READ_WAIT_S

    async def hold_connections(number: int) -> None:
        host = hosts[number % len(hosts)]
        async with AsyncExitStack() as stack:
            with suppress(GenieError):
                silent = SimNetwork(
                    world, f"{_UNAUTHENTICATED_HOST_PREFIX}{number % _UNAUTHENTICATED_HOST_COUNT}"
                )
                stack.callback((await silent.connect(host, CONTROLLER_PORT, tls=None, timeout_s=1.0)).close)
            while world.now_s < end_s:
                network, access = SimNetwork(world, _HOSTILE_CLIENT_HOST), cluster.make_access(host, token)
                with suppress(GenieError):
                    opening = connect_authenticated(network, access, timeout_s=1.0, program="flood")
                    await stack.enter_async_context(opening)
                    continue
                await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as group:
        for number in range(_CONNECTING_TASK_COUNT):
            group.create_task(hold_connections(number))


async def fill_store(cluster: SimCluster, node: str, lasts_s: float) -> None:
    """Submit large jobs until the store rejects them; cancel them later."""
    job_ids = await _submit_large_jobs(cluster, _LARGE_JOB_COUNT)
    await asyncio.sleep(lasts_s)
    await _cancel_hostile_jobs(cluster, job_ids)


async def run_unkillable_job(cluster: SimCluster, node: str, lasts_s: float) -> None:
    """Run a job with a process that survives SIGKILL for a while."""
    await _try_submit_hostile_job(
        cluster, seconds=1.0, env={UNKILLABLE_ENV_VARIABLE: f"{lasts_s:.2f}"}, node_id=cluster.node_id(node)
    )


async def fill_node_disk(cluster: SimCluster, node: str, lasts_s: float) -> None:
    """Run a job that fills the disk of its node."""
    await _try_submit_hostile_job(
        cluster, seconds=lasts_s, env={FILLS_DISK_ENV_VARIABLE: "1"}, node_id=cluster.node_id(node)
    )


async def upload_blobs(cluster: SimCluster, node: str, lasts_s: float) -> None:
    """Upload more working directories than the controller has space for."""
    token, random = await cluster.get_user_token(HOSTILE_TENANT), cluster.world.random
    for _ in range(2 * cluster.config.blobs_bytes_max // _UPLOADED_BLOB_BYTES):
        data = random.randbytes(_UPLOADED_BLOB_BYTES)
        put = PutBlob(digest=hashlib.sha256(data).hexdigest(), offset=0, data=data, is_last=True)
        with suppress(GenieError, TimeoutError):
            async with asyncio.timeout(_SUBMIT_TIMEOUT_S):
                await cluster.send_request(put, token=token)


HOSTILE_ACTIONS: dict[str, HostileAction] = {
    action.__name__: action
    for action in (
        submit_oversized_job,
        store_oversized_job,
        flood_log_waits,
        flood_requests,
        flood_connections,
        fill_store,
        run_unkillable_job,
        fill_node_disk,
        upload_blobs,
    )
}


async def _try_submit_hostile_job(
    cluster: SimCluster,
    *,
    seconds: float,
    env: dict[str, str],
    node_id: str = "",
    workers: int = 1,
) -> str:
    """Return the job ID, or an empty string if the job is rejected."""
    spec = JobSpec(
        name=HOSTILE_TENANT,
        command=("simulated",),
        resources=Resources(gpus=1),
        env=env,
        node_id=node_id,
        constraints=PlacementConstraints(workers=workers),
    )
    try:
        async with asyncio.timeout(_SUBMIT_TIMEOUT_S):
            return await cluster.submit_spec(spec, seconds=seconds, tenant=HOSTILE_TENANT)
    except (GenieError, TimeoutError):
        return ""


async def _submit_large_jobs(cluster: SimCluster, count: int) -> list[str]:
    """Submit jobs with large rows that need the whole cluster, until one is rejected."""
    job_ids: list[str] = []
    workers = cluster.node_count * cluster.gpus_per_node
    while len(job_ids) < count:
        env = {"X": "x" * _LARGE_ENV_BYTES}
        job_id = await _try_submit_hostile_job(cluster, seconds=1.0, env=env, workers=workers)
        if not job_id:
            break
        job_ids.append(job_id)
    return job_ids


async def _cancel_hostile_jobs(cluster: SimCluster, job_ids: list[str]) -> None:
    token = await cluster.get_user_token(HOSTILE_TENANT)
    for job_id in job_ids:
        with suppress(GenieError):
            await cluster.send_request(CancelJob(job_id=job_id), token=token)


async def _repeat_request_in_parallel(
    cluster: SimCluster,
    send: Callable[[rpc.Peer], Awaitable[None]],
    *,
    lasts_s: float,
    connections: int,
    in_flight: int,
) -> None:
    """Call `send` again and again, over several connections at once."""
    token, world = await cluster.get_user_token(HOSTILE_TENANT), cluster.world
    end_s = world.now_s + lasts_s

    async def repeat(peer: rpc.Peer) -> None:
        while world.now_s < end_s and not peer.is_closed:
            with suppress(GenieError):
                await send(peer)
            await asyncio.sleep(_FLOOD_REQUEST_INTERVAL_S)

    async def flood_connection() -> None:
        network = SimNetwork(world, _HOSTILE_CLIENT_HOST)
        while world.now_s < end_s:
            host = world.random.choice(cluster.controller_hosts)
            with suppress(GenieError):
                access = cluster.make_access(host, token)
                async with (
                    connect_authenticated(network, access, timeout_s=5.0, program="flood") as (peer, _),
                    asyncio.TaskGroup() as group,
                ):
                    for _ in range(in_flight):
                        group.create_task(repeat(peer))
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(flood_connection())
