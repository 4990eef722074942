"""Commands that show the cluster: status and nodes. Read-only."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.quantities import format_count, format_duration, format_size
from genie.cli.reply_age import is_without_leader, open_client_and_report_age

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.model.allocation import NodeHolds
    from genie.model.messages import NodeView, StatusReply
    from genie.model.node import GPUInfo
    from genie.supervisor.local_server import LocalServerProblem

_NODE_COLUMNS = (
    "node",
    "status",
    "address",
    "cpus allocated",
    "host memory allocated",
    "last heartbeat",
    "reason",
)
_NODE_COLUMNS_DROPPED_IF_NARROW = ("address", "last heartbeat", "cpus allocated")
_GPU_COLUMNS = ("node", "gpu", "accelerator", "memory total", "memory used", "utilization", "temp", "jobs")
_GPU_COLUMNS_DROPPED_IF_NARROW = ("temp", "utilization")


@command(app, "status", example="genie status --json")
def status(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """Show a summary of the cluster: controller, store, nodes, accelerators and jobs.

    Exit code 1 if the cluster has no leader.
    """
    settings = invocation.load_settings()
    reply, where = asyncio.run(_fetch_status_and_address(settings))
    if problem := _find_problem_of_own_server(settings):
        output.print_message(f"{problem.message} ({problem.hint}); this is the status of {where}")
    if as_json:
        no_leader = {"leader": ""} if is_without_leader(reply) else {}
        output.write_json({"address": where} | output.struct_to_json(reply) | no_leader)
    else:
        _write_status(reply, where)
    if is_without_leader(reply):
        raise typer.Exit(1)


def _find_problem_of_own_server(settings: Settings) -> LocalServerProblem | None:
    """Return why the server of this machine does not work, unless another address is configured."""
    from genie.supervisor.local_server import find_local_server_problem

    if settings.cluster.master_addr is not None:
        return None
    return find_local_server_problem(settings.paths.state_dir)


def _write_status(reply: StatusReply, where: str) -> None:
    facts = [
        ("address", where),
        ("cluster", reply.cluster_id or "-"),
        ("version", reply.version),
        *([("leader", reply.leader)] if reply.leading else standby_fields(reply)),
        ("store", _format_store(reply)),
        ("uptime", format_duration(time.time() - reply.started_at)),
    ]
    if reply.leading or reply.has_cluster_data:
        facts += [
            ("nodes", _format_nonzero_counts(reply.nodes)),
            ("accelerators", f"{reply.gpus_free} free of {reply.gpus_total}"),
            ("jobs", _format_nonzero_counts(reply.jobs)),
            ("clients", str(reply.clients)),
            ("policy", reply.policy_fault or reply.policy),
        ]
    facts += [("alarm", text) for text in reply.alarms]
    if reply.leading:
        facts += [("quarantined", f"{row.key}: {row.reason}") for row in reply.quarantined]
    output.write_fields(facts)


def _format_store(reply: StatusReply) -> str:
    members = f" ({format_count(len(reply.store_members), 'member')}: {', '.join(reply.store_members)})"
    shown = reply.store + (members if reply.store_members else "")
    if reply.store_ok:
        return shown
    return f"{shown} (not responding{f': {reply.store_reason}' if reply.store_reason else ''})"


def standby_fields(reply: StatusReply) -> list[tuple[str, str]]:
    """Return role and leader, for a controller that does not lead."""
    if is_without_leader(reply):
        last = f" (last: {reply.leader})" if reply.leader else ""
        return [("role", "standby"), ("leader", f"none{last}")]
    hint = f" (genie status --address {reply.leader})" if reply.leader else ""
    return [("role", "standby"), ("leader", f"{reply.leader or 'none elected'}{hint}")]


@command(app, "nodes", example="genie nodes")
def nodes(invocation: Invocation, *, as_json: JsonOption = False) -> None:
    """List nodes and accelerators, and the jobs that use them."""
    views, age_s = asyncio.run(_fetch_nodes_and_age_s(invocation.load_settings()))
    if as_json:
        output.write_json({"nodes": [_node_to_json(view) for view in views], "age_s": age_s})
        return
    write_node_and_gpu_tables(views)


def write_node_and_gpu_tables(views: tuple[NodeView, ...]) -> None:
    """Write the node table and the accelerator table."""
    if not views:
        output.print_message("no nodes; add one: genie join")
        return
    _write_node_table(views, now=time.time())
    rows = [_gpu_row(view, gpu) for view in views for gpu in view.info.gpus]
    if rows:
        output.write_line("")
        output.write_table(_GPU_COLUMNS, rows, droppable=_GPU_COLUMNS_DROPPED_IF_NARROW)


def _write_node_table(views: tuple[NodeView, ...], *, now: float) -> None:
    """Write the node table, with racks and labels if any node has them, and with versions that differ."""
    versions = [view.info.version for view in views]
    extra: dict[str, list[str]] = {
        "rack": [view.info.rack for view in views],
        "labels": [", ".join(f"{key}={value}" for key, value in view.info.labels.items()) for view in views],
        "version": versions if len(set(versions)) > 1 else [],
    }
    extra = {name: texts for name, texts in extra.items() if any(texts)}
    rows = [_node_row(view, now=now) for view in views]
    # The reason stays last: only the last column is wrapped.
    *columns, last = _NODE_COLUMNS
    output.write_table(
        (*columns, *extra, last),
        [
            (*row[:-1], *(texts[index] or "-" for texts in extra.values()), row[-1])
            for index, row in enumerate(rows)
        ],
        droppable=_NODE_COLUMNS_DROPPED_IF_NARROW,
    )


async def _fetch_status_and_address(settings: Settings) -> tuple[StatusReply, str]:
    async with open_client_and_report_age(settings) as client:
        return await client.status(), client.where


async def _fetch_nodes_and_age_s(settings: Settings) -> tuple[tuple[NodeView, ...], float]:
    async with open_client_and_report_age(settings) as client:
        return await client.nodes(), client.reply_age_s


def _node_to_json(view: NodeView) -> dict[str, object]:
    """Return the fields of the node, with its drain as an object: null if it accepts jobs."""
    drain: dict[str, object] | None = None
    if view.drained:
        jobs_left = count_jobs_left(view)
        drain = {
            "state": "draining" if jobs_left else "drained",
            "reason": view.drained.partition(": ")[2],
            "jobs_left": jobs_left,
        }
    return output.struct_to_json(view) | {"drain": drain}


def job_ids_on_node(view: NodeView) -> list[str]:
    """Return the IDs of the jobs on the node, except hidden ones of other tenants."""
    from genie.model.job import parse_worker_name

    return sorted({parse_worker_name(hold.job_id)[0] for hold in view.node_holds.holds if hold.job_id})


def count_jobs_left(view: NodeView) -> int:
    """Return the number of jobs on the node. Each worker of another tenant counts, if its job is hidden."""
    return len(job_ids_on_node(view)) + sum(not hold.job_id for hold in view.node_holds.holds)


def _node_row(view: NodeView, *, now: float) -> tuple[str, ...]:
    info = view.info
    return (
        info.node_id,
        _format_node_status(view),
        info.host,
        f"{view.node_holds.cpus_used:g} of {info.cpus:g}",
        f"{format_size(view.node_holds.memory_used_bytes)} of {format_size(info.memory_total_bytes)}",
        f"{format_duration(now - info.last_heartbeat)} ago" if info.last_heartbeat else "-",
        "; ".join(filter(None, (_format_drain_state(view), info.status_reason))),
    )


def _format_node_status(view: NodeView) -> str:
    """Format the status; that of a healthy node that accepts no jobs is its drain state."""
    from genie.model.node import NodeStatus

    if view.info.status is NodeStatus.HEALTHY and view.drained:
        state, jobs_left = _format_drain_state(view).partition(":")[0], count_jobs_left(view)
        return f"{state}, {format_count(jobs_left, 'job')} left" if jobs_left else state
    return view.info.status.value


def _format_drain_state(view: NodeView) -> str:
    """Format the stored `draining: REASON`, which is `drained: REASON` once no job is left on the node."""
    state, colon, reason = view.drained.partition(":")
    return view.drained if view.node_holds.holds or not state else f"drained{colon}{reason}"


def _gpu_row(view: NodeView, gpu: GPUInfo) -> tuple[str, ...]:
    return (
        view.info.node_id,
        str(gpu.gpu_id),
        gpu.name,
        format_size(gpu.memory_total_bytes),
        _format_used_memory(gpu) if view.info.last_heartbeat else "-",
        "-" if gpu.utilization_pct is None else f"{gpu.utilization_pct:.0f}%",
        "-" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} C",
        _format_jobs_on_gpu(view.node_holds, gpu) if gpu.available else f"unavailable: {gpu.reason}",
    )


def _format_used_memory(gpu: GPUInfo) -> str:
    used = format_size(gpu.memory_used_bytes)
    return (
        f"{used} ({format_size(gpu.memory_outside_bytes)} by other processes)"
        if gpu.memory_outside_bytes
        else used
    )


def _format_jobs_on_gpu(node_holds: NodeHolds, gpu: GPUInfo) -> str:
    holds = [hold for hold in node_holds.holds if gpu.gpu_id in hold.gpu_ids]
    return ", ".join(f"{hold.job_id} ({hold.gpu_milli / 10:g}%)" for hold in holds) or "-"


def _format_nonzero_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
