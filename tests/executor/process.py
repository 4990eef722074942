"""Starts a real executor process for a test, and kills it at the end.

It is forked from a process that has imported torch; `fresh=True` starts an interpreter, as the agent does.
The output goes to a file, not to a pipe, which a stuck process could keep open. Also used by tests/device
and tests/gpu.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from genie.processes import executor_config
from genie.processes.executor_config import ExecutorConfig
from tests import forkserver
from tests.forkserver import ForkedProcess
from tests.waiting import wait_until

TICKET = "a ticket for tests"
# Shared with the scripts of tests/device, so that there is one helper process for both.
PRELOADED = (
    "torch",
    "genie.executor.accelerator",
    "genie.executor.session",
    "genie.device.backend",
)
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0


@dataclass
class ExecutorProcess:
    process: subprocess.Popen[bytes] | ForkedProcess
    config: ExecutorConfig
    folder: Path
    port: int = 0

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the executor ended early:\n{self.output()}"
            return Path(self.config.endpoint_path).exists()

        wait_until(ready, timeout_s=_START_TIMEOUT_S, what="the executor to be ready")
        self.port = json.loads(Path(self.config.endpoint_path).read_bytes())["port"]

    def wait_end(self, timeout_s: float = _END_TIMEOUT_S) -> int:
        return self.process.wait(timeout_s)

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_END_TIMEOUT_S)


def start_executor(folder: Path, *, fresh: bool = False, **settings: object) -> ExecutorProcess:
    """Start without waiting, so that several can start at once: call wait_ready()."""
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, object] = {
        "job_id": "job-1",
        "endpoint_path": str(folder / "endpoint"),
        "ticket_sha256": hashlib.sha256(TICKET.encode()).hexdigest(),
        "threads": 1,
        "idle_s": 120.0,
    }
    config = ExecutorConfig(**(values | settings))  # type: ignore[arg-type]
    executor_config.write(folder / "config", config)
    arguments = ["-m", "genie.executor", "--config", str(folder / "config")]
    with (folder / "output").open("wb") as output:
        process = _start(arguments, output, fresh=fresh or config.vendor != "cpu")
    return ExecutorProcess(process, config, folder)


def _start(arguments: list[str], output: BinaryIO, *, fresh: bool) -> subprocess.Popen[bytes] | ForkedProcess:
    if fresh:
        return subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    return forkserver.get_shared_server(*PRELOADED).popen(
        arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )


@contextmanager
def running_executor(folder: Path, **settings: object) -> Iterator[ExecutorProcess]:
    executor = start_executor(folder, **settings)
    try:
        executor.wait_ready()
        yield executor
    finally:
        executor.kill()
