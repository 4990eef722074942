"""The state of the cluster as the scheduler sees it: nodes, allocations, and dry runs on them."""

from __future__ import annotations
