"""Fetches the list of nodes page by page: that of a large cluster does not fit into one reply."""

from __future__ import annotations

from genie.model.messages import ListNodes, NodesReply, NodeView
from genie.runtime.controller_connection import ControllerConnection


async def fetch_nodes(
    connection: ControllerConnection, first: NodesReply | None = None, *, timeout_s: float
) -> tuple[NodeView, ...]:
    """Returns all nodes, by ID. `first`: the first page, if the caller has it. `timeout_s`: of each page."""
    reply = first or await connection.call(ListNodes(), timeout_s=timeout_s)
    views = list(reply.nodes)
    while reply.more and reply.nodes:
        reply = await connection.call(ListNodes(after_node_id=views[-1].info.node_id), timeout_s=timeout_s)
        views += reply.nodes
    return tuple(views)
