"""Runs a script in a process of its own, which may not hang: where a failure would take pytest with it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

# Enough for a slow machine to import torch, and far below what an executor may be silent for (600 s).
DEADLINE_S = 120


def run_script(code: str, *args: object) -> None:
    """Fails the test unless the script ends well and in time."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
