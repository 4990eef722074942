"""`python -m genie` is the same as `genie`."""

from __future__ import annotations

import sys

from genie.cli import main

if __name__ == "__main__":
    sys.exit(main())
