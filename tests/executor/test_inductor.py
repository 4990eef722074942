"""The compiler of recorded graphs: failure to start, and timeout.

tests/device/test_inductor.py tests what it compiles.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from genie.errors import OpRefusedError
from genie.executor import accelerator, inductor
from genie.executor.inductor import CompiledGraph, InductorCompiler

LIMIT_BYTES = 1_000_000


class FakeProcessMemory:
    """Fake memory usage and limit of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data_segment_bytes = 500
        self.limit_bytes = LIMIT_BYTES
        monkeypatch.setattr(accelerator, "data_segment_bytes", lambda: self.data_segment_bytes)
        monkeypatch.setattr(resource, "getrlimit", lambda what: (self.limit_bytes, -1))
        monkeypatch.setattr(resource, "setrlimit", self.set_limit)

    def set_limit(self, what: int, limits: tuple[int, int]) -> None:
        self.limit_bytes = limits[0]


def test_thread_start_failure_is_reported_and_next_graph_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    compiler = InductorCompiler(device="cpu", folder=tmp_path)
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):
        with pytest.raises(OpRefusedError, match="can't start new thread"):
            compiler.compile([], [], {}, lambda: None)


def test_memory_after_compile_timeout_counts_towards_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = FakeProcessMemory(monkeypatch)
    compiler = InductorCompiler(device="cpu", folder=tmp_path)
    entered, resume = threading.Event(), threading.Event()
    seen: list[BaseException] = []

    def compile_slowly(
        compiler: InductorCompiler,
        steps: Sequence[object],
        wanted: object,
        sizes: object,
        allowance: inductor._CompilationMemoryAllowance,
    ) -> CompiledGraph:
        with allowance:
            assert memory.limit_bytes > LIMIT_BYTES + 10
            memory.data_segment_bytes += 10
            entered.set()
            assert resume.wait(60)
        try:
            with allowance:
                pass
        except OpRefusedError as error:
            seen.append(error)
        return CompiledGraph(None, [], [])

    def keep_alive() -> None:
        assert entered.wait(60)
        monkeypatch.setattr(inductor, "COMPILE_TIMEOUT_S", -1.0)

    monkeypatch.setattr(InductorCompiler, "_compile", compile_slowly)
    monkeypatch.setattr(inductor, "_CLIENT_KEEP_ALIVE_INTERVAL_S", 0.01)
    with pytest.raises(OpRefusedError, match="took longer"):
        compiler.compile([], [], {}, keep_alive)
    assert memory.limit_bytes == LIMIT_BYTES + 10
    with pytest.raises(OpRefusedError, match="still being compiled"):
        compiler.compile([], [], {}, keep_alive)
    memory.data_segment_bytes += 1000  # tensors of the session
    resume.set()
    assert compiler._last_compilation is not None
    compiler._last_compilation.result(timeout=60)
    assert memory.limit_bytes == LIMIT_BYTES + 10
    assert len(seen) == 1
