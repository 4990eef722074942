"""Short programs that must behave the same on a remote device as on a local device of the same kind."""

from __future__ import annotations
