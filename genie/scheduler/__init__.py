"""Decides which job goes where. Pure: values in, decisions with their reasons out.

What a controller uses today: `decision.py` has what goes in and out and the protocol of a scheduler, `fit.py`
whether and where one job fits, `fifo.py` the scheduler behind the protocol.
What takes its place, and the simulator uses: `scheduler.py` decides, over `request.py` (what is asked for and
what there is), `book.py` (who holds what), `order.py`, `quota.py`, `victims.py`, `migration.py`, `pins.py`
(jobs that name their GPUs), and `placement/`, which chooses among many nodes; `policies.py` and `filters.py`
are for what users write; `explain.py` says why a job waits.
Not for: carrying a decision out.
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
