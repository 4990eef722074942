"""The two rules that extend the lease, and the actions that follow from the reply to a heartbeat."""

from __future__ import annotations

from genie.agent.heartbeats import NodeLease, actions_from_heartbeat_reply
from genie.model.messages import HeartbeatAck, JobOrder

LIVE = {"a": 1, "b": 2}
ENDED = {"c": 3}


def make_lease(ttl_s: float = 10.0) -> NodeLease:
    made = NodeLease()
    made.set_ttl(ttl_s)
    return made


def test_lease_is_invalid_before_the_first_acknowledgement() -> None:
    assert not make_lease().is_valid(0.0)


def test_lease_starts_when_the_heartbeat_was_sent() -> None:
    held = make_lease()
    held.extend(sent_at_s=100.0)
    assert held.is_valid(106.9)
    assert not held.is_valid(107.0)


def test_reply_to_an_older_heartbeat_does_not_shorten_the_lease() -> None:
    held = make_lease()
    held.extend(sent_at_s=100.0)
    held.extend(sent_at_s=95.0)
    assert held.expires_at_s == 107.0


def test_lease_is_extended_while_there_is_no_leader() -> None:
    held = make_lease()
    held.extend(sent_at_s=100.0)
    for requested_s in (105.0, 110.0, 115.0):
        held.extend_without_leader(requested_at_s=requested_s)
    assert held.expires_at_s == 122.0


def test_expired_lease_is_not_extended_without_a_leader() -> None:
    held = make_lease()
    held.extend(sent_at_s=100.0)
    # Another controller may have led since 100 and reclaimed jobs.
    held.extend_without_leader(requested_at_s=107.5)
    assert not held.is_valid(107.6)


def test_missing_leader_does_not_create_a_lease() -> None:
    held = make_lease()
    held.extend_without_leader(requested_at_s=1.0)
    assert not held.is_valid(1.1)


def test_grace_period_is_capped_by_the_time_to_live() -> None:
    assert make_lease(10.0).grace_after_lease_expiry_s(5.0) == 1.5
    assert make_lease(10.0).grace_after_lease_expiry_s(1.0) == 1.0


# --- replies ------------------------------------------------------------------------------------


def make_ack(
    *, leading: bool = True, leader_token: int = 5, kill: list[JobOrder], settled: list[JobOrder]
) -> HeartbeatAck:
    return HeartbeatAck(
        leading=leading, leader_token=leader_token, jobs_to_kill=tuple(kill), settled_exits=tuple(settled)
    )


def make_order(job_id: str, epoch: int) -> JobOrder:
    return JobOrder(job_id=job_id, epoch=epoch)


def test_orders_for_local_jobs_become_actions() -> None:
    done = actions_from_heartbeat_reply(
        make_ack(kill=[make_order("a", 1)], settled=[make_order("c", 3)]),
        live_epochs=LIVE,
        ended_epochs=ENDED,
        leader_token_seen=5,
    )
    assert (done.is_leader, done.jobs_to_kill, done.settled_job_ids) == (True, (make_order("a", 1),), ("c",))


def test_orders_for_other_epochs_and_unknown_jobs_are_ignored() -> None:
    orders = [make_order("a", 2), make_order("c", 3), make_order("x", 1)]
    settled = [make_order("c", 2), make_order("a", 1), make_order("x", 1)]
    done = actions_from_heartbeat_reply(
        make_ack(kill=orders, settled=settled), live_epochs=LIVE, ended_epochs=ENDED, leader_token_seen=5
    )
    assert (done.is_leader, done.jobs_to_kill, done.settled_job_ids) == (True, (), ())


def test_reply_of_a_standby_is_ignored() -> None:
    reply = make_ack(leading=False, kill=[make_order("a", 1)], settled=[make_order("c", 3)])
    done = actions_from_heartbeat_reply(reply, live_epochs=LIVE, ended_epochs=ENDED, leader_token_seen=5)
    assert (done.is_leader, done.jobs_to_kill, done.settled_job_ids, done.not_leader_reason) == (
        False,
        (),
        (),
        "it does not lead",
    )


def test_reply_of_a_replaced_leader_is_ignored() -> None:
    reply = make_ack(leader_token=4, kill=[make_order("a", 1)], settled=[make_order("c", 3)])
    done = actions_from_heartbeat_reply(reply, live_epochs=LIVE, ended_epochs=ENDED, leader_token_seen=5)
    assert (done.is_leader, done.jobs_to_kill, done.settled_job_ids) == (False, (), ())
    assert "older than revision 5 of generation 0" in done.not_leader_reason
