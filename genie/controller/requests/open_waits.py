"""Limits on requests that wait: for output, for a change of a job, or for an agent that reads a log.

Without limits, the waits of one tenant use up the requests that a node or a controller can have in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from genie.errors import OverloadedError

WAITS_PER_TENANT_MAX = 512
WAITS_PER_NODE_MAX = 192
"""Waits for output of one node: far below rpc.CLUSTER_PEER_REQUESTS_IN_FLIGHT_MAX, because launches and
kills use the same connection."""
WAITS_PER_TENANT_AND_NODE_MAX = 64
LOG_READS_PER_NODE_MAX = 128
"""Reads of logs of one node that do not wait for output."""
LOG_READS_PER_TENANT_AND_NODE_MAX = 32

_WAIT_RETRY_AFTER_S = 1.0


class OpenWaits:
    """Counts open waits. Each context holds one until it ends and yields whether the limits allow it."""

    def __init__(self) -> None:
        self._open_counts: Counter[tuple[str, ...]] = Counter()

    def try_open_wait(self, tenant: str, *, node_id: str = "") -> AbstractContextManager[bool]:
        limits: dict[tuple[str, ...], int] = {("wait", tenant): WAITS_PER_TENANT_MAX}
        if node_id:
            limits |= {
                ("wait on", node_id): WAITS_PER_NODE_MAX,
                ("wait on", node_id, tenant): WAITS_PER_TENANT_AND_NODE_MAX,
            }
        return self._count_while_open_if_allowed(limits)

    def try_open_log_read(self, tenant: str, *, node_id: str) -> AbstractContextManager[bool]:
        return self._count_while_open_if_allowed(
            {
                ("read", node_id): LOG_READS_PER_NODE_MAX,
                ("read", node_id, tenant): LOG_READS_PER_TENANT_AND_NODE_MAX,
            }
        )

    @contextmanager
    def _count_while_open_if_allowed(self, limits: dict[tuple[str, ...], int]) -> Iterator[bool]:
        if any(self._open_counts[key] >= limit for key, limit in limits.items()):
            yield False
            return
        self._open_counts.update(limits.keys())
        try:
            yield True
        finally:
            for key in limits:
                self._open_counts[key] -= 1
                if not self._open_counts[key]:
                    del self._open_counts[key]


def too_many_open_error(plural_noun: str) -> OverloadedError:
    return OverloadedError(f"too many {plural_noun} are open", retry_after_s=_WAIT_RETRY_AFTER_S)
