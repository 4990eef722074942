"""What a heartbeat's answer makes the agent do."""

from __future__ import annotations

from genie.agent.reconcile import reconcile
from genie.model.messages import HeartbeatAck, JobOrder

LIVE = {"a": 1, "b": 2}
ENDED = {"c": 3}


def ack(
    *, leading: bool = True, leader_token: int = 5, kill: list[JobOrder], settled: list[JobOrder]
) -> HeartbeatAck:
    return HeartbeatAck(leading=leading, leader_token=leader_token, kill=tuple(kill), settled=tuple(settled))


def order(job_id: str, epoch: int) -> JobOrder:
    return JobOrder(job_id=job_id, epoch=epoch)


def test_orders_for_what_is_here_are_carried_out() -> None:
    done = reconcile(
        ack(kill=[order("a", 1)], settled=[order("c", 3)]), live=LIVE, ended=ENDED, leader_token_seen=5
    )
    assert (done.heed, done.kill, done.settle) == (True, (order("a", 1),), ("c",))


def test_orders_for_other_attempts_and_unknown_jobs_are_left_alone() -> None:
    orders = [order("a", 2), order("c", 3), order("x", 1)]
    settled = [order("c", 2), order("a", 1), order("x", 1)]
    done = reconcile(ack(kill=orders, settled=settled), live=LIVE, ended=ENDED, leader_token_seen=5)
    assert (done.heed, done.kill, done.settle) == (True, (), ())


def test_nothing_is_done_for_one_that_does_not_lead() -> None:
    told = ack(leading=False, kill=[order("a", 1)], settled=[order("c", 3)])
    done = reconcile(told, live=LIVE, ended=ENDED, leader_token_seen=5)
    assert (done.heed, done.kill, done.settle, done.why) == (False, (), (), "it does not lead")


def test_nothing_is_done_for_a_leader_that_was_replaced() -> None:
    told = ack(leader_token=4, kill=[order("a", 1)], settled=[order("c", 3)])
    done = reconcile(told, live=LIVE, ended=ENDED, leader_token_seen=5)
    assert (done.heed, done.kill, done.settle) == (False, (), ())
    assert "older than 5" in done.why
