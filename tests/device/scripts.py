"""Runs a script in a separate process with a timeout, for failures that would crash pytest."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests import forkserver
from tests.executor.process import PRELOADED

# Enough for a slow machine to import torch, and far below the op timeout (600 s).
DEADLINE_S = 120


def run_script(code: str, *args: object, fresh: bool = False) -> None:
    """Fails the test unless the script exits with 0 in time. `fresh`: in a new interpreter."""
    arguments = ["-c", textwrap.dedent(code), *map(str, args)]
    if fresh:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    else:
        done = forkserver.get_shared_server(*PRELOADED).run(arguments, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
