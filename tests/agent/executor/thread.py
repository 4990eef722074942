"""A real executor, door and session, on a thread of the test's process: quick to start and to end.

Its memory limit is not set on the process, which is the tests' own. For what only a process shows (how it
ends, being killed), use process.py.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from genie.agent.executor import accelerator
from genie.agent.executor.config import ExecutorConfig
from genie.agent.executor.door import Door
from genie.agent.executor.session import Session
from tests.agent.executor.process import TICKET

TIMEOUT_S = 30.0


class ThreadedExecutor:
    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._door = Door(config)
        self.port = self._door.port
        self._door.open(accelerator.prepare(msgspec.structs.replace(config, memory_bytes_max=0)))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        client = self._door.wait_client(TIMEOUT_S)
        if client is not None:
            self.client = client
            Session(client, self._config).serve()

    def hang_up(self) -> None:
        """As if it had died."""
        self.client.close()

    def end(self) -> None:
        self._door.close()
        if hasattr(self, "client"):
            self.client.close()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the executor did not end with its client"


@contextmanager
def executor_on_a_thread(**settings: object) -> Iterator[ThreadedExecutor]:
    ticket = hashlib.sha256(TICKET.encode()).hexdigest()
    config = ExecutorConfig(job_id="job-1", endpoint_path="unused", ticket_sha256=ticket, **settings)  # type: ignore[arg-type]
    executor = ThreadedExecutor(config)
    try:
        yield executor
    finally:
        executor.end()
