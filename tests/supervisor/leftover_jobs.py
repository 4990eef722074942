"""Processes of jobs whose agent has ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from genie.agent.leftovers import JOB_DIR_VARIABLE


@contextmanager
def run_job(node_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    job_dir = node_dir / "jobs" / "j-1"
    job_dir.mkdir(parents=True)
    with subprocess.Popen(
        ["sleep", "1000"], env={**os.environ, JOB_DIR_VARIABLE: str(job_dir)}, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
