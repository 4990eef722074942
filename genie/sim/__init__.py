"""Seeded simulation: stand-ins for the world that the real controller and agent code runs against.

`traces.py` reads workloads of real clusters, `synthetic.py` makes some up, `replay.py` plays one to a placer.
`workload.py` has jobs that come, run and go, `events.py` runs them through the scheduler, `measures.py` says
what came of it and `plots.py` draws it.
Not for: production. Nothing outside tests, benchmarks and simulations imports it.
"""

from __future__ import annotations
