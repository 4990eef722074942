"""The controller's in-memory copy of the store (tables.py), and the only path for writes (ledger.py)."""

from __future__ import annotations

from genie.controller.ledger.ledger import Ledger
from genie.controller.ledger.tables import (
    CLUSTER_KEY,
    COUNTER_KEY_PREFIX,
    EPOCH_COUNTER,
    RESTORE_MARK_KEY,
    TABLES_AGE_S_MAX,
    LedgerTable,
    LedgerTables,
    TableBeingLoaded,
    read_cluster_record,
)
from genie.controller.ledger.transaction import Transaction, request_gossip_key_change

__all__ = [
    "CLUSTER_KEY",
    "COUNTER_KEY_PREFIX",
    "EPOCH_COUNTER",
    "RESTORE_MARK_KEY",
    "TABLES_AGE_S_MAX",
    "Ledger",
    "LedgerTable",
    "LedgerTables",
    "TableBeingLoaded",
    "Transaction",
    "read_cluster_record",
    "request_gossip_key_change",
]
