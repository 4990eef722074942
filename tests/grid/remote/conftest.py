"""Fixtures: fake command-line tools of a node."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from genie.grid.remote import health, nvml


@pytest.fixture
def fake_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Write fake tools as shell scripts; PATH contains nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}")
    monkeypatch.setattr(health, "_EXTRA_PROGRAM_FOLDERS", ())
    monkeypatch.setattr(health, "_KERNEL_LOG", health._KernelLog())
    monkeypatch.setattr(health, "_THREAD_AND_DEADLINE_BY_PART", {})
    monkeypatch.setattr(nvml, "NVML_LIBRARY_NAME", str(folder / "no-such-library.so"))
    nvml.close_library()

    def write(name: str, line: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{line}\n")
        path.chmod(0o755)
        return path

    yield write
    nvml.close_library()
    if health._KERNEL_LOG.file_descriptor >= 0:
        os.close(health._KERNEL_LOG.file_descriptor)
