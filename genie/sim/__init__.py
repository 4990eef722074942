"""Seeded simulation: stand-ins for the world that the real controller and agent code runs against.

`traces.py` reads workloads of real clusters, `synthetic.py` makes one up, `replay.py` plays one to a placer.
Not for: production. Nothing outside tests, benchmarks and simulations imports it.
"""

from __future__ import annotations
