"""What follows from the leader's answer to a heartbeat. Pure: values in, actions with reasons out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from genie.model.messages import HeartbeatAck, JobOrder


@dataclass(frozen=True, slots=True)
class Actions:
    """`kill` and `settle` name only what is really here; `heed` is False for a leader that was replaced."""

    heed: bool
    kill: tuple[JobOrder, ...] = ()
    settle: tuple[str, ...] = ()
    why: str = ""


def reconcile(
    ack: HeartbeatAck, *, live: Mapping[str, int], ended: Mapping[str, int], leader_token_seen: int
) -> Actions:
    """`live` and `ended` map job ids to the epochs that this node has.

    An order for another epoch than the one here is about an attempt that is gone, and is left alone.
    """
    if not ack.leading:
        return Actions(heed=False, why="it does not lead")
    if ack.leader_token < leader_token_seen:
        return Actions(heed=False, why=f"leader token {ack.leader_token} is older than {leader_token_seen}")
    return Actions(
        heed=True,
        kill=tuple(order for order in ack.kill if live.get(order.job_id) == order.epoch),
        settle=tuple(order.job_id for order in ack.settled if ended.get(order.job_id) == order.epoch),
    )
