"""Chooses the node and GPUs of a request. Implemented twice, with equal results.

`protocol.py` defines a placer. `genie_scheduler` (native/scheduler, built by native/libraries.py) is the fast
implementation, `python_placer.py` the reference in Python, with policies in `baseline_policies.py` and
`supply_policy.py`. A property test compares the two. Callers pass the library in: nothing is loaded here.
"""

from __future__ import annotations
