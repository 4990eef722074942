"""Logs each change of the status of a node once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from genie.model.node import NodeInfo, NodeStatus

_log = logging.getLogger(__name__)


class NodeStatusLog:
    def __init__(self) -> None:
        self._logged_status_by_node: dict[str, NodeStatus] = {}

    def log_changes(self, nodes: Iterable[NodeInfo]) -> None:
        for node in nodes:
            if self._logged_status_by_node.get(node.node_id) != node.status:
                self._logged_status_by_node[node.node_id] = node.status
                reason = f": {node.status_reason}" if node.status_reason else ""
                _log.info("node %s is %s%s", node.node_id, node.status, reason)
