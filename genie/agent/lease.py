"""How long this node may keep its jobs running without hearing that it still holds them. Pure.

The controller gives away what a silent node held after its time to live and a grace. So a node
must be done before: at 0.7 of that time after it last knew better. It knows better when (a) the
leader acknowledged a heartbeat, counted from when that was sent, or (b) every controller said that
it does not lead, counted from when the first was asked: only a leader gives things away, and a new
one grants every node a full period first. A restarting controller thus never disturbs jobs, while
a cut link does.
"""

from __future__ import annotations

DEADMAN_SHARE = 0.7
DEADMAN_GRACE_SHARE = 0.15
"""Of the time to live, at most, between SIGTERM and SIGKILL once the lease is over."""


class Lease:
    """Times are of the node's monotonic clock."""

    def __init__(self) -> None:
        self.ttl_s = 0.0
        self.until_s = float("-inf")

    def acknowledged(self, *, sent_at_s: float) -> None:
        """Rule (a). Never shortens."""
        self.until_s = max(self.until_s, sent_at_s + DEADMAN_SHARE * self.ttl_s)

    def nobody_leads(self, *, asked_since_s: float) -> None:
        """Rule (b). A lease that has run out stays so: somebody may have led in between."""
        if asked_since_s <= self.until_s:
            self.acknowledged(sent_at_s=asked_since_s)

    def is_good(self, now_s: float) -> bool:
        return now_s < self.until_s

    def grace_s(self, wished_s: float) -> float:
        """Between SIGTERM and SIGKILL at the end of the lease: all must be over within the time to live."""
        return min(wished_s, DEADMAN_GRACE_SHARE * self.ttl_s)
