"""The controller's database: one protocol, two engines (sqlite.py embedded, etcd.py for HA).

Both have a single, monotonically increasing revision. A transaction compares revisions and
applies all of its operations or none; keys can be attached to a lease; a watch replays changes
from a revision. `tests/controller/store/` runs one contract test against every engine. The
meaning of the keys is defined by ledger, membership and election.
"""

from __future__ import annotations

from genie.controller.store.protocol import (
    Compare,
    Delete,
    KeyValue,
    MeasurableStore,
    Put,
    RangeResult,
    Snapshot,
    SnapshotStore,
    SpaceUsage,
    Store,
    TxnResult,
    WatchEvent,
)

__all__ = [
    "Compare",
    "Delete",
    "KeyValue",
    "MeasurableStore",
    "Put",
    "RangeResult",
    "Snapshot",
    "SnapshotStore",
    "SpaceUsage",
    "Store",
    "TxnResult",
    "WatchEvent",
]
