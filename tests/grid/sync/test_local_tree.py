"""The local folder: the engine that scans it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from genie.grid.remote import tree
from genie.grid.sync.local_tree import load_local_engine
from genie.native import libraries
from tests.needs import require_program


def test_python_engine_is_used_if_the_library_lacks_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, empty = require_program("c++", package="g++"), tmp_path / "empty.so"
    subprocess.run([compiler, "-shared", "-x", "c++", "/dev/null", "-o", str(empty)], check=True, timeout=60)
    monkeypatch.setattr(libraries.BuildCache, "build", lambda *_: empty)
    load_local_engine.cache_clear()
    try:
        assert type(load_local_engine()) is tree.PlainEngine
    finally:
        load_local_engine.cache_clear()
