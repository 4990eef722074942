"""Caches the results of a node filter: it is called once for each job class and node, not in every pass.

Does not check what a node lacks (request.py) or guard a user's filter (policies.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import msgspec

from genie.scheduler.request import JobRequest, NodeFacts

NodeFilter: TypeAlias = Callable[[JobRequest, NodeFacts], str]
"""Returns why jobs of this job class may not run on the node; empty if they may. The request is
JobRequest.placement_fields, without name, times, priority and requested nodes; the node is passed as if it
were open."""

CACHED_FILTER_REQUESTS_MAX = 64
"""Filter requests with cached results; the least recently used is dropped."""


class NodeFilterCache:
    def __init__(self, node_filter: NodeFilter | None = None) -> None:
        self._node_filter = node_filter
        self._reasons_by_filter_request: OrderedDict[JobRequest, dict[str, str]] = OrderedDict()

    def to_filter_request(self, request: JobRequest) -> JobRequest | None:
        """Return the argument of the filter; None without a filter."""
        if self._node_filter is None:
            return None
        return msgspec.structs.replace(
            request.placement_fields, shape=replace(request.shape, nodes=frozenset(), gpu_ids=())
        )

    def why_node_excluded(self, filter_request: JobRequest | None, facts: NodeFacts) -> str:
        if self._node_filter is None or filter_request is None:
            return ""
        reasons = self._reasons_by_filter_request.setdefault(filter_request, {})
        self._reasons_by_filter_request.move_to_end(filter_request)
        if len(self._reasons_by_filter_request) > CACHED_FILTER_REQUESTS_MAX:
            self._reasons_by_filter_request.popitem(last=False)
        if facts.node_id not in reasons:
            reasons[facts.node_id] = self._node_filter(filter_request, without_volatile_facts(facts))
        return reasons[facts.node_id]

    def forget_node(self, node_id: str) -> None:
        """Drop the results for a node that changed or was removed."""
        for reasons in self._reasons_by_filter_request.values():
            reasons.pop(node_id, None)


def without_volatile_facts(facts: NodeFacts) -> NodeFacts:
    """Return the node without what changes from minute to minute."""
    return replace(facts, blocked_reason="", blocked_gpus=frozenset(), memory_used_outside_cluster_mib=())
