"""Looking at the cluster: status and nodes. Reads only.

Not for: starting and stopping it (cluster_commands.py).
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from genie.cli import output
from genie.cli.app import AsJson, Invocation, app, command
from genie.cli.quantities import duration_text, size_text

if TYPE_CHECKING:
    from genie.config import Settings
    from genie.model.allocation import NodeLedger
    from genie.model.messages import NodeView, StatusReply
    from genie.model.node import GPUInfo

_NODE_COLUMNS = ("node", "status", "address", "cpus held", "reserved", "heard", "reason")
_NODE_SPARE = ("address", "heard", "cpus held")
_GPU_COLUMNS = ("node", "gpu", "accelerator", "memory", "used", "load", "temp", "held by")
_GPU_SPARE = ("temp", "load")


@command(app, "status", example="genie status --json")
def status(invocation: Invocation, *, as_json: AsJson = False) -> None:
    """Show the cluster in a few lines: its controller, store, nodes, accelerators and jobs."""
    reply, where = asyncio.run(_fetch_status(invocation.load_settings()))
    if as_json:
        output.write_json({"address": where} | output.as_object(reply))
        return
    facts = [
        ("address", where),
        ("cluster", reply.cluster_id or "-"),
        ("version", reply.version),
        *([("leader", reply.leader)] if reply.leading else standby_facts(reply)),
        ("store", f"{reply.store}{'' if reply.store_ok else ' (does not answer)'}"),
        ("up for", duration_text(time.time() - reply.started_at)),
    ]
    if reply.leading:  # a standby does not know the rest
        facts += [
            ("nodes", _counted(reply.nodes)),
            ("accelerators", f"{reply.gpus_free} free of {reply.gpus_total}"),
            ("jobs", _counted(reply.jobs)),
            ("clients", str(reply.clients)),
            ("policy", reply.policy_fault or reply.policy),
        ]
    output.write_facts(facts)


def standby_facts(reply: StatusReply) -> list[tuple[str, str]]:
    """What a controller that does not lead is, and where to go instead."""
    there = f" (genie status --address {reply.leader})" if reply.leader else ""
    return [("role", "standby"), ("leader", f"{reply.leader or 'none at present'}{there}")]


@command(app, "nodes", example="genie nodes")
def nodes(invocation: Invocation, *, as_json: AsJson = False) -> None:
    """List the machines of the cluster and their accelerators, and who holds them."""
    views = asyncio.run(_fetch_nodes(invocation.load_settings()))
    if as_json:
        output.write_json({"nodes": [output.as_object(view) for view in views]})
        return
    write_nodes(views)


def write_nodes(views: tuple[NodeView, ...]) -> None:
    """The node table and the accelerator table, as `genie up` shows them, too."""
    if not views:
        output.say("no nodes; add one with 'genie join'")
        return
    _write_node_table(views, now=time.time())
    rows = [_gpu_row(view, gpu) for view in views for gpu in view.info.gpus]
    if rows:
        output.write_line("")
        output.write_table(_GPU_COLUMNS, rows, spare=_GPU_SPARE)


def _write_node_table(views: tuple[NodeView, ...], *, now: float) -> None:
    """With racks and labels where any node has them."""
    places: dict[str, list[str]] = {
        "rack": [view.info.rack for view in views],
        "labels": [", ".join(f"{key}={value}" for key, value in view.info.labels.items()) for view in views],
    }
    places = {name: texts for name, texts in places.items() if any(texts)}
    rows = [_node_row(view, now=now) for view in views]
    # Before the reason, which is last because the last column may be wrapped.
    *columns, last = _NODE_COLUMNS
    output.write_table(
        (*columns, *places, last),
        [
            (*row[:-1], *(texts[place] or "-" for texts in places.values()), row[-1])
            for place, row in enumerate(rows)
        ],
        spare=_NODE_SPARE,
    )


async def _fetch_status(settings: Settings) -> tuple[StatusReply, str]:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        return await client.status(), client.where


async def _fetch_nodes(settings: Settings) -> tuple[NodeView, ...]:
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        return await client.nodes()


def _node_row(view: NodeView, *, now: float) -> tuple[str, ...]:
    info = view.info
    return (
        info.node_id,
        info.status.value,
        info.host,
        f"{view.ledger.cpus_used:g} of {info.cpus:g}",
        f"{size_text(view.ledger.memory_used_bytes)} of {size_text(info.memory_total_bytes)}",
        f"{duration_text(now - info.last_heartbeat)} ago",
        "; ".join(filter(None, (view.drained, info.status_reason))),
    )


def _gpu_row(view: NodeView, gpu: GPUInfo) -> tuple[str, ...]:
    return (
        view.info.node_id,
        str(gpu.gpu_id),
        gpu.name,
        size_text(gpu.memory_total_bytes),
        _used_text(gpu),
        "-" if gpu.utilization_pct is None else f"{gpu.utilization_pct:.0f}%",
        "-" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} C",
        _holders(view.ledger, gpu) if gpu.available else f"not available: {gpu.reason}",
    )


def _used_text(gpu: GPUInfo) -> str:
    used = size_text(gpu.memory_used_bytes)
    return f"{used} ({size_text(gpu.memory_outside_bytes)} outside)" if gpu.memory_outside_bytes else used


def _holders(ledger: NodeLedger, gpu: GPUInfo) -> str:
    holds = [hold for hold in ledger.holds if gpu.gpu_id in hold.gpu_ids]
    return ", ".join(f"{hold.job_id} ({hold.gpu_milli / 10:g}%)" for hold in holds) or "-"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
