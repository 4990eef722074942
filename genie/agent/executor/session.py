"""Answers one client, request by request, until it leaves.

An op that fails is an answer; a broken stream is the end. Not for: who the client is (door.py).
"""

from __future__ import annotations

import ctypes
import logging

import torch

from genie.agent.executor.config import ExecutorConfig
from genie.agent.executor.ops import OpRunner
from genie.agent.executor.tensors import TensorTable
from genie.errors import (
    FrameTooLargeError,
    GenieError,
    OpRefusedError,
    ProtocolError,
    RemoteOpError,
    TransportError,
)
from genie.runtime import opwire

_log = logging.getLogger(__name__)

_FRAME_TIMEOUT_S = 60.0
"""For a frame that has begun. Between frames a client may think as long as it likes."""
_LAST_WORDS_S = 1.0
_MESSAGE_CHARACTERS_MAX = 4000


class Session:
    """One client's tensors and random numbers. `serve` returns when the client is gone."""

    def __init__(self, channel: opwire.Channel, config: ExecutorConfig) -> None:
        self._channel = channel
        self._device = torch.device(config.device)
        self._tensors = TensorTable(self._device, bytes_max=config.memory_bytes_max)
        self._ops = OpRunner(self._tensors, self._device)
        self._expected = 1

    def serve(self) -> None:
        """The last frames, an error among them, reach the client before the connection is closed."""
        try:
            # Autograd is the client's; nothing here records.
            with torch.inference_mode():
                while self._serve_one():
                    pass
        except TransportError as error:
            _log.warning("the session ends: %s", error)
            self._say_goodbye(error)
        finally:
            self._tensors.clear()
            self._channel.finish(timeout_s=_LAST_WORDS_S)

    def _serve_one(self) -> bool:
        received = self._channel.receive_request(timeout_s=_FRAME_TIMEOUT_S, wait_s=None)
        if received is None:
            return False
        sequence, request = received
        if sequence != self._expected:
            raise ProtocolError(f"request {sequence} came where {self._expected} was due")
        self._expected = (self._expected + 1) % opwire.SEQUENCE_MODULUS
        op = request.op if isinstance(request, opwire.RunOp) else ""
        try:
            self._answer(sequence, request)
        except TransportError:
            raise
        except Exception as error:  # the boundary of a request: whatever an op raises goes to the client
            _log.info("request %d (%s) failed", sequence, op or type(request).__name__, exc_info=True)
            self._send(sequence, _as_message(error, op, self._ops.count if op else sequence))
            return not _is_fatal(error)
        return True

    def _answer(self, sequence: int, request: opwire.Request) -> None:
        match request:
            case opwire.RunOp():
                self._run(sequence, request)
            case opwire.Upload():
                self._upload(sequence, request)
            case opwire.Download():
                self._download(sequence, request)
            case opwire.Free():
                self._tensors.free(request.handles)
            case opwire.Stats():
                self._send(sequence, self._counters())
            case opwire.Seed():
                self._generator().manual_seed(request.value)
                self._send(sequence, opwire.Done())
            case opwire.GetRngState():
                self._send(sequence, opwire.RngState(_bytes_of(self._generator().get_state())))
            case opwire.SetRngState():
                self._generator().set_state(torch.frombuffer(bytearray(request.state), dtype=torch.uint8))
                self._send(sequence, opwire.Done())
            case opwire.Synchronize():
                self._synchronize()
                self._send(sequence, opwire.Done())
            case opwire.Open():
                raise ProtocolError("the session is open already")

    def _run(self, sequence: int, request: opwire.RunOp) -> None:
        result = self._ops.run(request)
        try:
            frame = opwire.encode(sequence, result)
        except FrameTooLargeError as error:
            self._ops.forget_latest()
            raise OpRefusedError(f"the op gives too many results to be sent: {error.message}") from error
        self._channel.send_frames(frame, timeout_s=_FRAME_TIMEOUT_S)

    def _upload(self, sequence: int, request: opwire.Upload) -> None:
        target = self._tensors.get(request.handle)
        meta = self._tensors.describe(request.handle)
        if (meta.dtype, meta.shape) != (request.dtype, request.shape):
            raise OpRefusedError(
                f"tensor {request.handle} is {meta.dtype} {meta.shape}; "
                f"{request.dtype} {request.shape} cannot be put there"
            )
        direct = target.device.type == "cpu" and target.is_contiguous() and not _is_lazy(target)
        if not direct:  # an expanded tensor is larger than its storage
            self._tensors.check_room(opwire.size_bytes(meta.dtype, meta.shape))
        staged = target if direct else torch.empty(target.shape, dtype=target.dtype, device="cpu")
        self._send(sequence, opwire.Ready())
        self._channel.receive_data(sequence, _memory_of(staged), timeout_s=_FRAME_TIMEOUT_S)
        if staged is not target:
            target.copy_(staged)
        self._send(sequence, opwire.Done())

    def _download(self, sequence: int, request: opwire.Download) -> None:
        source = self._tensors.get(request.handle)
        meta = self._tensors.describe(request.handle)
        if not source.is_contiguous():
            self._tensors.check_room(opwire.size_bytes(meta.dtype, meta.shape))
        plain = source.resolve_conj().resolve_neg().cpu().contiguous()
        self._send(sequence, opwire.Content(dtype=meta.dtype, shape=meta.shape))
        self._channel.send_data(sequence, _memory_of(plain), timeout_s=_FRAME_TIMEOUT_S)

    def _counters(self) -> opwire.Counters:
        return opwire.Counters(
            tensors=len(self._tensors),
            bytes_allocated=self._tensors.bytes_allocated,
            bytes_allocated_peak=self._tensors.bytes_allocated_peak,
            bytes_max=self._tensors.bytes_max,
            ops=self._ops.count,
        )

    def _generator(self) -> torch.Generator:
        """The process serves one client, so the device's default generator is that client's own."""
        if self._device.type == "cuda":
            return torch.cuda.default_generators[self._device.index]
        if self._device.type == "xpu":
            return torch.xpu.default_generators[self._device.index]
        return torch.default_generator

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _send(self, sequence: int, reply: opwire.Reply) -> None:
        self._channel.send(sequence, reply, timeout_s=_FRAME_TIMEOUT_S)

    def _say_goodbye(self, error: TransportError) -> None:
        try:
            self._channel.send(
                self._expected, _as_message(error, "", self._expected), timeout_s=_LAST_WORDS_S
            )
        except TransportError:
            pass  # the usual case: the connection itself is what broke


def _as_message(error: Exception, op: str, number: int) -> opwire.Error:
    if _is_out_of_memory(error):
        code = opwire.OUT_OF_MEMORY
    else:
        code = error.code if isinstance(error, GenieError) else RemoteOpError.code
    text = str(error) if isinstance(error, GenieError | RuntimeError) else f"{type(error).__name__}: {error}"
    return opwire.Error(code=code, message=text[:_MESSAGE_CHARACTERS_MAX], op=op, number=number)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU allocator has no type of its own for this.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def _is_fatal(error: Exception) -> bool:
    """After an error of the accelerator itself its context is poisoned: a fresh process is needed."""
    return isinstance(error, torch.AcceleratorError)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied. The tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(_memory_of(tensor.contiguous()))
