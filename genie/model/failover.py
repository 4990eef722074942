"""The bounds of a failover, and the timeouts that follow from them. Pure.

The dead-man time of a job must be at least the time in which its agent finds the next leader after the
machine of the leader has vanished (docs/decisions/0024-failover-bounds.md). Each bound is named here, and
the timeouts are derived from them, never the other way round.
"""

from __future__ import annotations

HELLO_READY_TIMEOUT_S = 0.25
"""How long the reply to Hello waits until a controller that starts knows whether it leads."""
TOKEN_READ_TIMEOUT_S = 0.5
"""How long the reply to Hello waits for the store, which a controller that does not lead must ask."""
