"""Limits on requests that wait: for output, for a change of a job, or for an agent that reads a log.

Without limits, the waits of one tenant use up the requests that a node or a controller can have in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from genie.errors import OverloadedError

WAITS_OF_TENANT_MAX = 512
WAITS_OF_NODE_MAX = 192
"""Waits for output of one node: far below rpc.TRUSTED_IN_FLIGHT_MAX, because launches and kills use the same
connection."""
WAITS_OF_TENANT_ON_NODE_MAX = 64
READS_OF_NODE_MAX = 128
"""Reads of logs of one node that do not wait for output."""
READS_OF_TENANT_ON_NODE_MAX = 32

_RETRY_AFTER_S = 1.0


class OpenWaits:
    """Counts open waits. Each context holds one until it ends and yields whether the limits allow it."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, ...]] = Counter()

    def wait_of(self, tenant: str, *, node_id: str = "") -> AbstractContextManager[bool]:
        limits: dict[tuple[str, ...], int] = {("wait", tenant): WAITS_OF_TENANT_MAX}
        if node_id:
            limits |= {
                ("wait on", node_id): WAITS_OF_NODE_MAX,
                ("wait on", node_id, tenant): WAITS_OF_TENANT_ON_NODE_MAX,
            }
        return self._hold(limits)

    def read_of(self, tenant: str, *, node_id: str) -> AbstractContextManager[bool]:
        return self._hold(
            {
                ("read", node_id): READS_OF_NODE_MAX,
                ("read", node_id, tenant): READS_OF_TENANT_ON_NODE_MAX,
            }
        )

    @contextmanager
    def _hold(self, limits: dict[tuple[str, ...], int]) -> Iterator[bool]:
        if any(self._counts[key] >= limit for key, limit in limits.items()):
            yield False
            return
        self._counts.update(limits.keys())
        try:
            yield True
        finally:
            for key in limits:
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]


def too_many(what: str) -> OverloadedError:
    return OverloadedError(f"too many {what} are open", retry_after_s=_RETRY_AFTER_S)
