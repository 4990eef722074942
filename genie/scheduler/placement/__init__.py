"""Which GPUs of which node a request gets: the heart of the scheduler, twice.

`protocol.py` says what a placer does; `genie_scheduler` (native/scheduler, built by runtime/native.py) does
it fast, and `plain.py` does the same in plain Python, with its policies in `published.py` and `supply.py`. A
property test holds the two equal. Whoever uses a placer passes the loaded library in: nothing is loaded here.
"""

from __future__ import annotations
