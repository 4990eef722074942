"""What a filter said of nodes, kept: it is asked once for a kind of jobs and a node, not in every decision.

Not for: what a node lacks (request.py), fencing a user's filter (policies.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import msgspec

from genie.scheduler.request import NodeFacts, Request

Filter: TypeAlias = Callable[[Request, NodeFacts], str]
"""Why jobs of this kind may not go on the node; empty when they may. It is given Request.kind, which has no
name, time or priority, with no wish for a node; and the node as it is when it is open."""

KINDS_MAX = 64
"""Of jobs, whose answers are known at a time; those asked for longest ago make room."""


class Filters:
    def __init__(self, allowed: Filter | None = None) -> None:
        self._allowed = allowed
        self._known: OrderedDict[Request, dict[str, str]] = OrderedDict()

    def kind(self, request: Request) -> Request | None:
        """What the answers depend on; None when there is no filter."""
        if self._allowed is None:
            return None
        return msgspec.structs.replace(
            request.kind, shape=replace(request.shape, nodes=frozenset(), gpu_ids=())
        )

    def why_not(self, kind: Request | None, facts: NodeFacts) -> str:
        if self._allowed is None or kind is None:
            return ""
        answers = self._known.setdefault(kind, {})
        self._known.move_to_end(kind)
        if len(self._known) > KINDS_MAX:
            self._known.popitem(last=False)
        if facts.node_id not in answers:
            answers[facts.node_id] = self._allowed(kind, as_open(facts))
        return answers[facts.node_id]

    def forget(self, node_id: str) -> None:
        """It is another one now, or gone."""
        for answers in self._known.values():
            answers.pop(node_id, None)


def as_open(facts: NodeFacts) -> NodeFacts:
    """What does not change from one minute to the next."""
    return replace(facts, closed="", closed_gpus=frozenset(), memory_outside_mib=())
