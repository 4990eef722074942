"""Seeded simulation: stand-ins for the world that the real controller and agent code runs against.

Not for: production. Nothing outside tests, benchmarks and simulations imports it.
"""

from __future__ import annotations
