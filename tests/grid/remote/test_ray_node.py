"""Environment variables of `ray start` on a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from genie.grid.remote import ray_node

ARGS = {"cluster": "c1", "node": "gpu1", "namespace": "default", "log_level": "info", "loopback": False}


def test_python_next_to_ray_is_first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/opt/other/bin:/home/ada/ray/bin")
    env = ray_node._make_ray_environment(str(tmp_path), {**ARGS, "ray": "/home/ada/ray/bin/ray"})
    assert env["PATH"].split(":")[0] == "/home/ada/ray/bin"
