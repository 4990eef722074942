"""Seeded simulation of clusters and workloads. Imported only by tests, benchmarks and `genie sim`.

Fault simulation: `cluster.py` runs the real controllers and agents on a simulated network, clock and store;
`faults/` injects faults and `invariants.py` checks invariants.

Scheduling simulation: `workloads/` reads traces and generates workloads, `events.py` runs jobs
through the scheduler, `replay.py` places requests that never end, `metrics.py` and `plots.py` evaluate.
"""

from __future__ import annotations
