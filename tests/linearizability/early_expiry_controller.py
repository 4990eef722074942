"""The real controller with a defect: a new leader treats leases that it did not grant as expired."""

from __future__ import annotations

import sys

from genie.controller import __main__
from genie.controller.locks.lock_table import LockTable
from genie.model.lock import LockRecord


def get_granted_deadline_s(self: LockTable, row: LockRecord) -> float:
    return self._lease_deadline_s_by_token.get(row.fencing_token, 0.0)


if __name__ == "__main__":
    LockTable._lease_deadline_s = get_granted_deadline_s  # type: ignore[method-assign]
    sys.exit(__main__.main())
