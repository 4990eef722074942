"""Which running jobs to stop or move so that a queued one can start."""

from __future__ import annotations
