"""Serves one client, over as many connections as it takes, until it leaves or does not come back.

What is inside a connection is C++ (native/torch/executor). Not for: who the client is (door.py).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from genie.agent.executor.config import ExecutorConfig
from genie.agent.executor.door import Arrival, Door, Stream
from genie.agent.executor.fetching import Fetcher
from genie.errors import TransportError

_log = logging.getLogger(__name__)

# One name a line, without overloads. Left out on purpose: files, pinned and shared memory, other devices,
# autograd's bookkeeping, sparse, nested and quantized layouts, and indexing that trusts its indices. An op
# that a later torch adds is refused until someone has looked at it.
ALLOWED_OPS = frozenset(Path(__file__).with_name("allowed_ops.txt").read_text("ascii").split())


class CudaCapture:
    """Takes down what is sent to a CUDA device as a graph, for the thread that serves."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._graph: Any = None  # Any: torch.cuda.CUDAGraph is untyped
        self._reserved_before = 0

    def use_stream(self) -> None:
        """Work of this thread goes through a stream of its own: the default one cannot be taken down."""
        stream = self._torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._torch.cuda.set_stream(stream)

    def begin(self) -> None:
        self._torch.cuda.synchronize(self._device)
        self._reserved_before = self._torch.cuda.memory_reserved(self._device)
        self._graph = self._torch.cuda.CUDAGraph()
        self._graph.capture_begin(capture_error_mode="thread_local")

    def end(self) -> tuple[Any, int]:
        """The graph, and the bytes that it keeps to itself for as long as it lives."""
        self._graph.capture_end()
        # What is taken meanwhile comes from a pool that begins empty, so all of it is new to the process.
        return self._graph, max(0, self._torch.cuda.memory_reserved(self._device) - self._reserved_before)

    def abandon(self) -> None:
        """Raises when the device does not work any more."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            pass  # it says again what went wrong while it was taken down
        self._graph = None
        self._torch.cuda.synchronize(self._device)

    def replay(self, graph: Any) -> None:
        graph.replay()


class ClientSession:
    """One client's tensors and random numbers. `library` is genie_executor."""

    def __init__(self, library: Any, door: Door, config: ExecutorConfig) -> None:  # Any: compiled
        self._door = door
        self._resume_s = config.resume_s
        self._on_cpu = config.device == "cpu"
        self._capture = CudaCapture(config.device) if config.device.startswith("cuda") else None
        self._fetcher = Fetcher(library, config)
        # Late: it imports torch.
        from genie.agent.executor.inductor import Compiler

        self._compiler = Compiler(
            device=config.device, folder=Path(config.endpoint_path).with_name("inductor")
        )
        self._native = library.Session(
            config.device,
            config.memory_bytes_max,
            sorted(ALLOWED_OPS),
            spin_us=config.spin_us,
            capture=self._capture,
            fetch=self._fetcher,
            compiler=self._compiler,
        )
        door.send_fetches_to(self._deliver)

    def serve(self, arrival: Arrival) -> bool:
        """Returns when the client is gone for good. Everything it had is freed then.

        False: the accelerator may have failed, and nothing was freed, because even that may not work. The
        process has to end, without tidying up.
        """
        if self._capture is not None:
            self._capture.use_stream()
        outcome = "lost"
        try:
            outcome = self._serve_all(arrival)
        finally:
            self._fetcher.close()
            self._compiler.close()
            sound = outcome != "fatal" or self._on_cpu
            if sound:
                self._native.close()
        return sound

    def stats(self) -> dict[str, int]:
        """What the client holds, from any thread."""
        return dict(self._native.stats())

    def _deliver(self, number: int, stream: Stream) -> bool:
        return bool(self._native.deliver(number, stream))

    def _serve_all(self, arrival: Arrival) -> str:
        here: Arrival | None = arrival
        while here is not None:
            outcome = self._serve_one(here)
            if outcome != "lost":
                _log.info("the session of %s has ended: %s", here.peer, outcome)
                return outcome
            _log.info("lost the connection to %s; it may come back within %g s", here.peer, self._resume_s)
            if self._native.frames_received == 0:
                self._door.vacate()  # it may never have heard its key
            here = self._door.wait_client(self._resume_s)
        _log.warning("the client did not come back; its tensors are freed")
        return "lost"

    def _serve_one(self, arrival: Arrival) -> str:
        try:
            stream = self._door.welcome(arrival, frames_received=self._native.frames_received)
        except TransportError as error:
            _log.warning("%s left before it was let in: %s", arrival.peer, error)
            return "lost"
        try:
            return str(self._native.serve(stream, arrival.request.replies_received))
        except ConnectionError as error:  # another connection of the client has replaced it just now
            _log.info("the connection to %s was replaced: %s", arrival.peer, error)
            return "lost"
        finally:
            stream.close()
