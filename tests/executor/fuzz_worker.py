"""Runs the fuzzer's cases against sessions of the executor library; started by fuzz.py.

Reads a job from each line of stdin. On the CPU it runs in a forked process, because importing torch takes
longer than most jobs. Writes a line before each batch of cases: if the process dies, that batch contains the
cause.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import random
import struct
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from genie.executor.session import ALLOWED_OPS
from genie.native import libraries
from tests.executor import client as wire
from tests.executor.client import Client, ErrorReply, RecordKind, ServedSession, Tensor, record, u32, u64
from tests.executor.fuzz_calls import (
    DEVICE,
    GENERATOR,
    UNDEFINED,
    Call,
    Case,
    TensorSpec,
    Value,
    allowed_schemas,
    cases_of,
    integer_values,
)

MARK = "@fuzz"
PLACEMENTS = {"none": 0, "end": 1, "begin": 2}
PRELOADED = "guard_pages" in os.environ.get("LD_PRELOAD", "")
_QUOTA_BYTES = 1 << 28
_TEMPLATES_MAX = 60_000
_INTEGER_FORMATS = {"int64": "q", "int32": "i", "int8": "b", "uint8": "B"}


class FuzzSession:
    """A session that the cases run in."""

    def __init__(self, device: str) -> None:
        native = libraries.load("genie_executor").Session(device, _QUOTA_BYTES, sorted(ALLOWED_OPS))
        self._session = ServedSession(native)
        self._client = Client(self._session.connect())
        self._templates = 0

    def run(self, cases: Sequence[Case]) -> ErrorReply | None:
        """Return the first error. ConnectionError if the session ended."""
        records: list[bytes] = []
        for case in cases:
            records += self._records_of(case)
        try:
            self._client.send(*records)
            error = self._client.sync()
        except OSError as error_:
            raise ConnectionError(str(error_)) from error_
        if self._client.fatal_error is not None:
            raise ConnectionError(self._client.fatal_error.message)
        return error

    def call(self, call: Call) -> ErrorReply | None:
        """Return the error of a call."""
        return self.run([Case("", call, len(allowed_schemas()[call.op].returns))])

    def close(self) -> None:
        self._client.close()
        self._session.wait_end()
        self._session.native.close()

    def _records_of(self, case: Case) -> list[bytes]:
        rng = random.Random(case.name)
        setup: list[bytes] = []
        storages: list[int] = []
        arguments = [self._argument(value, rng, setup, storages) for value in case.call.arguments]
        self._templates = self._templates % _TEMPLATES_MAX + 1
        # Predicting nothing discards the outputs.
        body = wire.template_body(f"aten::{case.call.op}", arguments, [None] * case.return_count)
        data = b"".join(wire.encode_argument(argument)[1] for argument in arguments)
        return [
            *setup,
            record(RecordKind.DEFINE_TEMPLATE, self._templates, u32(len(body)) + body),
            record(RecordKind.OP, self._templates, data),
            record(RecordKind.DROP_TEMPLATE, self._templates),
            *(record(RecordKind.FREE, 0, u32(storage)) for storage in storages),
        ]

    def _argument(self, value: Value, rng: random.Random, setup: list[bytes], storages: list[int]) -> Any:
        match value:
            case TensorSpec():
                tensor = self._tensor(value, rng, setup)
                storages.append(tensor.storage)
                return tensor
            case list():
                return [self._argument(item, rng, setup, storages) for item in value]
        if value is UNDEFINED:
            return wire.UNDEFINED
        if value is DEVICE:
            return wire.DEVICE
        return wire.Generator(0) if value is GENERATOR else value

    def _tensor(self, spec: TensorSpec, rng: random.Random, setup: list[bytes]) -> Tensor:
        tensor = Tensor(self._client.new_storage(), spec.shape, spec.dtype, spec.strides)
        item_bytes = wire.DTYPES[spec.dtype][1]
        span = 0
        if spec.element_count:
            steps = zip(spec.shape, tensor.effective_strides(), strict=True)
            span = 1 + sum((size - 1) * stride for size, stride in steps)
        setup.append(record(RecordKind.ALLOCATE, 0, u32(tensor.storage) + u64(span * item_bytes)))
        if span:
            data = _content(spec, span, rng)
            view = wire.encode_view(Tensor(tensor.storage, (span,), spec.dtype))
            setup.append(record(RecordKind.PUT, 1, view + u64(len(data)) + data))
        return tensor


def _content(spec: TensorSpec, count: int, rng: random.Random) -> bytes:
    match spec.dtype:
        case "int64" | "int32" | "int8" | "uint8":
            values = integer_values(spec, rng)
            values = (*values, *([0] * count))[:count]
            return struct.pack(f"<{count}{_INTEGER_FORMATS[spec.dtype]}", *values)
        case "bool":
            return bytes(rng.randrange(2) for _ in range(count))
        case "bfloat16":
            return b"".join(struct.pack("<f", rng.random())[2:] for _ in range(count))
        case "complex64" | "complex128":
            count *= 2
    form = {"float16": "e", "float32": "f", "float64": "d", "complex64": "f", "complex128": "d"}[spec.dtype]
    return struct.pack(f"<{count}{form}", *(rng.random() for _ in range(count)))


@dataclass(frozen=True)
class Job:
    """What to run in one process; a line on stdin."""

    seed: int = 0
    variants: int = 1
    ops: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    device: str = "cpu"
    placement: str = "none"
    first: int = 0
    last: int = 0
    batch: int = 1
    explain: bool = False

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Job:
        values = json.loads(line)
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


@cache
def _cases(seed: int, variants: int, ops: tuple[str, ...]) -> list[Case]:
    return cases_of(seed, variants=variants, ops=ops)


def _run_job(job: Job) -> None:
    torch.set_num_threads(1)
    cases = _cases(job.seed, job.variants, job.ops)
    session = FuzzSession(job.device)
    _set_placement(job.placement)
    for start in range(job.first, job.last + 1, job.batch):
        _write("batch", start)
        batch = [case for case in cases[start : start + job.batch] if case.call.op not in job.left_out]
        try:
            error = session.run(batch)
        except ConnectionError as reason:
            _write("ended", str(reason).replace("\n", " "))
            os._exit(1)
        if job.explain:
            print(*(f"{case.name} {case.call}" for case in batch), error, sep="\n", flush=True)
    _set_placement("none")
    session.close()
    _write("done")


def _write(*words: object) -> None:
    print(MARK, *words, flush=True)


def _set_placement(name: str) -> None:
    if not PRELOADED:
        return
    if not ctypes.CDLL(None).guard_set_placement(PLACEMENTS[name]):
        raise SystemExit("guard pages are not available")


def _run_in_fork(job: Job) -> None:
    _cases(job.seed, job.variants, job.ops)  # before the fork: every job of a seed needs them
    child = os.fork()
    if child == 0:
        try:
            _run_job(job)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(70)  # the threads of the session would keep the process alive
    _write("started", child)
    _, status = os.waitpid(child, 0)
    _write("exit", os.waitstatus_to_exitcode(status))


def main() -> None:
    libraries.load("genie_executor")
    for line in sys.stdin:
        job = Job.from_line(line)
        if job.device == "cpu":
            _run_in_fork(job)
        else:  # a process that has used CUDA cannot fork
            _run_job(job)
            break


if __name__ == "__main__":
    main()
