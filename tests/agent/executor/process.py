"""Starts a real executor process for a test and ends it for sure.

Its output goes to a file, never to a pipe that a stuck process could hold open; it ends by itself when no
client comes. Used by the executor's own tests, by tests/device and by tests/gpu.
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

from genie.agent.executor import config as executor_config
from genie.agent.executor.config import ExecutorConfig
from tests.waiting import wait_until

TICKET = "a ticket for tests"
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0


@dataclass
class ExecutorProcess:
    process: subprocess.Popen[bytes]
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


def start_executor(folder: Path, **settings: object) -> ExecutorProcess:
    """Not ready yet, so that several can start at once: call wait_ready()."""
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
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "genie.agent.executor", "--config", str(folder / "config")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return ExecutorProcess(process, config, folder)


@contextmanager
def running_executor(folder: Path, **settings: object) -> Iterator[ExecutorProcess]:
    executor = start_executor(folder, **settings)
    try:
        executor.wait_ready()
        yield executor
    finally:
        executor.kill()
