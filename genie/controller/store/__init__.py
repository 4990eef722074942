"""The cluster's memory: one protocol, two engines (sqlite.py embedded, etcd.py for HA).

Both keep a single, ever growing revision; a transaction compares revisions and applies
all of its operations or none; keys can hang on a lease; a watch replays from a revision.
`tests/controller/store/` holds every engine to one contract. Not for: what the keys mean
(ledger, membership, election know that).
"""

from __future__ import annotations

from genie.controller.store.protocol import (
    Compare,
    Delete,
    KeyValue,
    Put,
    RangeResult,
    Store,
    TxnResult,
    WatchEvent,
)

__all__ = ["Compare", "Delete", "KeyValue", "Put", "RangeResult", "Store", "TxnResult", "WatchEvent"]
