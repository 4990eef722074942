"""A real executor, listener and session, on a thread of the test process, which starts and ends quickly.

The memory limit is not applied to the process. For tests of the process itself (exit, being killed), use
process.py.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from genie.executor import accelerator
from genie.executor.listener import ExecutorListener
from genie.executor.session import ClientSession
from genie.native import genie_executor
from genie.processes.executor_config import ExecutorConfig
from tests.executor.process import TICKET

TIMEOUT_S = 30.0


class ThreadedExecutor:
    def __init__(self, config: ExecutorConfig) -> None:
        self._listener = ExecutorListener(config)
        self.port = self._listener.port
        self.session = ClientSession(self._listener, config)
        opened = accelerator.prepare_accelerator(msgspec.structs.replace(config, memory_bytes_max=0))
        self._listener.start(opened, genie_executor.Stream)
        self._thread = threading.Thread(target=self._serve, name="executor-on-a-thread")
        self._thread.start()

    def _serve(self) -> None:
        client = self._listener.wait_for_client(TIMEOUT_S)
        if client is not None:
            self.session.serve(client)

    def disconnect_client(self) -> None:
        """Close the connection; the client may reconnect."""
        self._listener.disconnect_client()

    def stop(self) -> None:
        """Close the connection and stop listening, as if the process had ended."""
        self._listener.close()

    @property
    def ended(self) -> bool:
        """Whether the session has ended and its memory is freed."""
        return not self._thread.is_alive()

    def end(self) -> None:
        self._listener.close()
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
