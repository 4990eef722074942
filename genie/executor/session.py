"""Serves one client over one or several connections, until it closes the session or does not reconnect.

The op stream is served in C++ (native/torch/executor); authentication is in listener.py.
"""

from __future__ import annotations

import logging
from enum import Enum
from pathlib import Path
from typing import Any

from genie.errors import TransportError
from genie.executor.listener import ExecutorListener, PendingClient
from genie.executor.op_libraries import load_op_libraries
from genie.executor.parcel_connector import ParcelConnector
from genie.native import genie_executor
from genie.processes.executor_config import ExecutorConfig

_log = logging.getLogger(__name__)

# One name per line, without overloads. Not allowed: ops on files, pinned and shared memory, other devices,
# autograd state, sparse, nested and quantized layouts, and indexing without bounds checks. An op that a later
# torch adds is refused until it has been reviewed.
ALLOWED_OPS = frozenset(Path(__file__).with_name("allowed_ops.txt").read_text("ascii").split())


class CudaGraphCapture:
    """Captures CUDA graphs on the serving thread."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._graph: Any = None  # Any: torch.cuda.CUDAGraph is untyped
        self._reserved_bytes_before_capture = 0

    def use_capture_stream(self) -> None:
        """Use a separate stream on this thread: the default stream cannot be captured."""
        stream = self._torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._torch.cuda.set_stream(stream)

    def begin(self) -> None:
        self._torch.cuda.synchronize(self._device)
        self._reserved_bytes_before_capture = self._torch.cuda.memory_reserved(self._device)
        self._graph = self._torch.cuda.CUDAGraph()
        self._graph.capture_begin(capture_error_mode="thread_local")

    def end(self) -> tuple[Any, int]:
        """Return the graph and the size of its memory pool."""
        self._graph.capture_end()
        # A capture allocates from a new pool, so all of its memory is newly reserved.
        return self._graph, max(
            0, self._torch.cuda.memory_reserved(self._device) - self._reserved_bytes_before_capture
        )

    def abort(self) -> None:
        """Raises if the device has failed."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            pass  # repeats the error of the capture
        self._graph = None
        self._torch.cuda.synchronize(self._device)

    def replay(self, graph: Any) -> None:
        graph.replay()


class SessionOutcome(Enum):
    """How a session has ended."""

    CLOSED = "closed"
    CLIENT_LOST = "lost"
    FAILED = "fatal"
    """The client violated the protocol, or the accelerator failed."""


class ClientSession:
    """The tensors and generators of one client."""

    def __init__(self, listener: ExecutorListener, config: ExecutorConfig) -> None:
        self.is_memory_freed = False
        self._listener = listener
        self._resume_timeout_s = config.resume_s
        self._is_on_cpu = config.device == "cpu"
        self._cuda_capture = CudaGraphCapture(config.device) if config.device.startswith("cuda") else None
        self._parcel_connector = ParcelConnector(config)
        # Imported late: it imports torch.
        from genie.executor.inductor import InductorCompiler

        self._compiler = InductorCompiler(
            device=config.device, folder=Path(config.endpoint_path).with_name("inductor")
        )
        self._native_session = genie_executor.Session(
            config.device,
            config.memory_bytes_max,
            sorted(ALLOWED_OPS | load_op_libraries(config.op_libraries)),
            spin_us=config.spin_us,
            capture=self._cuda_capture,
            connect=self._parcel_connector,
            compiler=self._compiler,
        )
        listener.set_parcel_sender(self._send_parcel_until_acknowledged)

    def serve(self, client: PendingClient) -> SessionOutcome:
        """Return when the session has ended; its memory is freed if `is_memory_freed`.

        Otherwise the accelerator may have failed, and nothing was freed, because that may fail too. The
        process must exit without cleanup.
        """
        if self._cuda_capture is not None:
            self._cuda_capture.use_capture_stream()
        end = SessionOutcome.CLIENT_LOST
        try:
            end = SessionOutcome(self._serve_until_session_ends(client))
        finally:
            self._parcel_connector.close()
            self._compiler.close()
            if end is not SessionOutcome.FAILED or self._is_on_cpu:
                self._native_session.close()
                self.is_memory_freed = True
        return end

    def stats(self) -> dict[str, int]:
        """Memory and counters of the session. Thread-safe."""
        return self._native_session.stats()

    def _send_parcel_until_acknowledged(self, number: int, stream: genie_executor.Stream) -> bool:
        return self._native_session.send_parcel_until_acknowledged(number, stream)

    def _serve_until_session_ends(self, client: PendingClient) -> str:
        current: PendingClient | None = client
        while current is not None:
            outcome = self._serve_connection(current)
            if outcome != "lost":
                _log.info("session of %s ended: %s", current.peer, outcome)
                return outcome
            _log.info(
                "lost the connection to %s; waiting %g s for a reconnect",
                current.peer,
                self._resume_timeout_s,
            )
            if self._native_session.frames_received == 0:
                self._listener.allow_new_session()  # the client may not have received its session key
            current = self._listener.wait_for_client(self._resume_timeout_s)
        _log.warning("the client did not reconnect; freeing its tensors")
        return "lost"

    def _serve_connection(self, client: PendingClient) -> str:
        try:
            stream = self._listener.accept_client(
                client, frames_received=self._native_session.frames_received
            )
        except TransportError as error:
            _log.warning("%s disconnected during the handshake: %s", client.peer, error)
            return "lost"
        try:
            return self._native_session.serve(stream, client.request.replies_received)
        except ConnectionError as error:  # replaced by a newer connection of the client
            _log.info("the connection to %s was replaced: %s", client.peer, error)
            return "lost"
        finally:
            stream.close()
