"""Tests of the store engines. A package, so that one etcd can serve the whole folder (see conftest.py)."""

from __future__ import annotations
