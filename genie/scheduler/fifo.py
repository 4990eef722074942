"""First in, first out, best fit: the scheduler until there is a better one behind the same protocol.

A job that has to wait holds back every job that came after it, so that a large job is never
overtaken for ever. One exception: a job that is pinned to accelerators or to a node waits for
those only, and holds nobody back. Not for: priorities, fair shares, gangs, preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from genie.model.job import Job
from genie.model.node import NodeInfo
from genie.scheduler.decision import ClusterView, Decision, NodeState, Place, Wait
from genie.scheduler.fit import Fit, find_fit, hold_of, wish_texts

_NODES_NAMED = 3


class FifoScheduler:
    def decide(self, queue: Sequence[Job], cluster: ClusterView, now: float) -> list[Decision]:
        nodes = dict(cluster.nodes)
        decisions: list[Decision] = []
        head: Job | None = None
        for job in queue:
            if head is not None and not job.spec.node_id:
                decisions.append(Wait(job.job_id, f"behind {head.job_id}, which came first and waits"))
                continue
            decision = _decide_one(job, nodes, cluster)
            decisions.append(decision)
            if isinstance(decision, Place):
                nodes[decision.node_id] = _with_hold(nodes[decision.node_id], job, decision)
            elif not job.spec.node_id:
                head = job
        return decisions


def _decide_one(job: Job, nodes: dict[str, NodeState], cluster: ClusterView) -> Decision:
    if not nodes:
        return Wait(job.job_id, "no node has joined the cluster yet")
    considered = [nodes[job.spec.node_id]] if job.spec.node_id in nodes else list(nodes.values())
    answers = [(node.info, find_fit(job, node, cluster)) for node in considered]
    fits = [(fit.rank, node, fit) for node, fit in answers if isinstance(fit, Fit)]
    if not fits:
        return Wait(job.job_id, _why_nowhere(job, answers, cluster))
    _, node, fit = min(fits, key=lambda item: item[0])
    where = f"node {node.node_id}" + _accelerators(fit.gpu_ids)
    return Place(job.job_id, node.node_id, fit.gpu_ids, f"best fit of {len(fits)}: {where}")


def _why_nowhere(job: Job, answers: list[tuple[NodeInfo, Fit | str]], cluster: ClusterView) -> str:
    asked = wish_texts(job.spec, cluster)
    named = [f"{node.node_id}: {why}" for node, why in answers[:_NODES_NAMED]]
    left = len(answers) - _NODES_NAMED
    more = f"; and {left} more node{'' if left == 1 else 's'}" if left > 0 else ""
    wanted = f"needs {', '.join(asked)} on one node; " if asked else ""
    return f"{wanted}{'; '.join(named)}{more}"


def _with_hold(node: NodeState, job: Job, decision: Place) -> NodeState:
    hold = hold_of(job, decision.gpu_ids, epoch=0, incarnation=node.info.incarnation)
    return replace(node, ledger=node.ledger.with_hold(hold))


def _accelerators(gpu_ids: tuple[int, ...]) -> str:
    if not gpu_ids:
        return ""
    return f", accelerator{'' if len(gpu_ids) == 1 else 's'} {', '.join(map(str, gpu_ids))}"
