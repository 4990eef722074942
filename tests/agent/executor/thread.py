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
from genie.agent.executor.session import ClientSession
from genie.runtime import native
from tests.agent.executor.process import TICKET

TIMEOUT_S = 30.0


class ThreadedExecutor:
    def __init__(self, config: ExecutorConfig) -> None:
        library = native.load("genie_executor")
        self._door = Door(config)
        self.port = self._door.port
        self.session = ClientSession(library, self._door, config)
        facts = accelerator.prepare(msgspec.structs.replace(config, memory_bytes_max=0))
        self._door.open(facts, library.Stream)
        self._thread = threading.Thread(target=self._serve, name="executor-on-a-thread")
        self._thread.start()

    def _serve(self) -> None:
        arrival = self._door.wait_client(TIMEOUT_S)
        if arrival is not None:
            self.session.serve(arrival)

    def cut(self) -> None:
        """Drops the connection; the client may come back."""
        self._door.cut()

    def hang_up(self) -> None:
        """As if it had died: the connection is gone, and nothing listens any more."""
        self._door.close()

    @property
    def ended(self) -> bool:
        """Whether the session is over and everything in it freed."""
        return not self._thread.is_alive()

    def end(self) -> None:
        self._door.close()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the executor did not end with its client"


@contextmanager
def executor_on_a_thread(**settings: object) -> Iterator[ThreadedExecutor]:
    ticket = hashlib.sha256(TICKET.encode()).hexdigest()
    values: dict[str, object] = {"job_id": "job-1", "endpoint_path": "unused", "ticket_sha256": ticket}
    config = ExecutorConfig(**(values | settings))  # type: ignore[arg-type]
    executor = ThreadedExecutor(config)
    try:
        yield executor
    finally:
        executor.end()
