"""Decides which job goes where. Pure: values in, decisions with their reasons out.

`decision.py` has what goes in and out and the protocol of a scheduler, `fit.py` whether and where
one job fits, `fifo.py` the first scheduler behind the protocol, `placement/` the index and the policies that
choose among many nodes. Not for: carrying a decision out.
"""

from __future__ import annotations

from genie.scheduler.decision import ClusterView, Decision, NodeState, Place, Scheduler, Wait
from genie.scheduler.fifo import FifoScheduler
from genie.scheduler.fit import check_possible

__all__ = [
    "ClusterView",
    "Decision",
    "FifoScheduler",
    "NodeState",
    "Place",
    "Scheduler",
    "Wait",
    "check_possible",
]
