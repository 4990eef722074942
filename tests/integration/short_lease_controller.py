"""The real controller with leases of sessions of a few seconds, so that tests can wait for their end."""

from __future__ import annotations

import sys

from genie.controller import __main__
from genie.controller.jobs import sessions

LEASE_S = 6.0

if __name__ == "__main__":
    sessions.LEASE_S_MIN = sessions.LEASE_S_MAX = LEASE_S
    sys.exit(__main__.main())
