"""What heartbeats mean for a node: until when its jobs may run, and which orders the reply contains. Pure.

The controller reclaims the jobs of an unresponsive node after the node's time to live plus a grace period,
so the node must end them earlier: the lease lasts a fraction of the time to live (model/failover.py). It is
extended (a) when the leader acknowledges a heartbeat, from the time that the heartbeat was sent, and (b) when
every controller replied that it does not lead, from the time of the first request: only a leader reclaims
jobs, and a new leader first grants every node its full time to live. So restarting the controller never ends
jobs, but a network partition does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from genie.model.failover import LEASE_TTL_SHARE
from genie.model.fencing import describe_token
from genie.model.messages import HeartbeatAck, JobOrder

DEADMAN_GRACE_TTL_SHARE_MAX = 0.15
"""Maximum grace period after the lease has expired, as a fraction of the time to live."""


class NodeLease:
    """Times are those of the node's monotonic clock."""

    def __init__(self) -> None:
        self.ttl_s = 0.0
        self.expires_at_s = float("-inf")

    def set_ttl(self, ttl_s: float) -> None:
        """Applies from the next extension."""
        self.ttl_s = ttl_s

    def extend(self, *, sent_at_s: float) -> None:
        """Rule (a). Never shortens the lease."""
        self.expires_at_s = max(self.expires_at_s, sent_at_s + LEASE_TTL_SHARE * self.ttl_s)

    def extend_without_leader(self, *, requested_at_s: float) -> None:
        """Rule (b). An expired lease stays expired: another controller may have led in between."""
        if requested_at_s <= self.expires_at_s:
            self.extend(sent_at_s=requested_at_s)

    def is_valid(self, now_s: float) -> bool:
        return now_s < self.expires_at_s

    def has_expired(self, now_s: float) -> bool:
        """False before it begins: an adopted job may have a dead-man timer that has not expired."""
        return float("-inf") < self.expires_at_s <= now_s

    def grace_after_lease_expiry_s(self, configured_s: float) -> float:
        """The grace period after the lease has expired, capped so that jobs end within the time to live."""
        return min(configured_s, DEADMAN_GRACE_TTL_SHARE_MAX * self.ttl_s)


@dataclass(frozen=True, slots=True)
class HeartbeatActions:
    """`jobs_to_kill` and `settled_job_ids` contain only jobs of this node; `is_leader` is False for a
    replaced leader."""

    is_leader: bool
    jobs_to_kill: tuple[JobOrder, ...] = ()
    settled_job_ids: tuple[str, ...] = ()
    not_leader_reason: str = ""


def actions_from_heartbeat_reply(
    ack: HeartbeatAck,
    *,
    live_epochs: Mapping[str, int],
    ended_epochs: Mapping[str, int],
    leader_token_seen: int,
) -> HeartbeatActions:
    """`live_epochs` and `ended_epochs` map job IDs to epochs. Orders for another epoch are ignored."""
    if not ack.leading:
        return HeartbeatActions(is_leader=False, not_leader_reason="it does not lead")
    if ack.leader_token < leader_token_seen:
        return HeartbeatActions(
            is_leader=False,
            not_leader_reason=f"its leader token, {describe_token(ack.leader_token)}, is older than "
            f"{describe_token(leader_token_seen)}",
        )
    return HeartbeatActions(
        is_leader=True,
        jobs_to_kill=tuple(
            order for order in ack.jobs_to_kill if live_epochs.get(order.job_id) == order.epoch
        ),
        settled_job_ids=tuple(
            order.job_id for order in ack.settled_exits if ended_epochs.get(order.job_id) == order.epoch
        ),
    )
