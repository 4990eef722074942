"""The compiler of recorded graphs: what it does when it cannot begin, and when it takes too long.

What it compiles is tested through the device, in tests/device/test_inductor.py.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from genie.agent.executor import accelerator, inductor
from genie.agent.executor.inductor import Compiled, Compiler
from genie.errors import OpRefusedError

LIMIT_BYTES = 1_000_000


class Memory:
    """Of this process, as it would be told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data_bytes = 500
        self.limit_bytes = LIMIT_BYTES
        monkeypatch.setattr(accelerator, "data_bytes", lambda: self.data_bytes)
        monkeypatch.setattr(resource, "getrlimit", lambda what: (self.limit_bytes, -1))
        monkeypatch.setattr(resource, "setrlimit", self.set_limit)

    def set_limit(self, what: int, limits: tuple[int, int]) -> None:
        self.limit_bytes = limits[0]


def test_a_thread_that_cannot_start_is_told_and_the_next_graph_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    compiler = Compiler(device="cpu", folder=tmp_path)
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):
        with pytest.raises(OpRefusedError, match="can't start new thread"):
            compiler.compile([], [], {}, lambda: None)


def test_after_the_limit_the_session_grows_on_its_own_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch)
    compiler = Compiler(device="cpu", folder=tmp_path)
    entered, go_on = threading.Event(), threading.Event()
    seen: list[BaseException] = []

    def compile_slowly(
        compiler: Compiler,
        steps: Sequence[object],
        wanted: object,
        sizes: object,
        allowance: inductor._Allowance,
    ) -> Compiled:
        with allowance:
            assert memory.limit_bytes > LIMIT_BYTES + 10
            memory.data_bytes += 10
            entered.set()
            assert go_on.wait(60)
        try:
            with allowance:
                pass
        except OpRefusedError as error:
            seen.append(error)
        return Compiled(None, [], [])

    def meanwhile() -> None:
        assert entered.wait(60)
        monkeypatch.setattr(inductor, "COMPILE_S_MAX", -1.0)

    monkeypatch.setattr(Compiler, "_compile", compile_slowly)
    monkeypatch.setattr(inductor, "_MEANWHILE_S", 0.01)
    with pytest.raises(OpRefusedError, match="took longer"):
        compiler.compile([], [], {}, meanwhile)
    assert memory.limit_bytes == LIMIT_BYTES + 10
    with pytest.raises(OpRefusedError, match="still being compiled"):
        compiler.compile([], [], {}, meanwhile)
    memory.data_bytes += 1000  # tensors of the session
    go_on.set()
    assert compiler._last is not None
    compiler._last.result(timeout=60)
    assert memory.limit_bytes == LIMIT_BYTES + 10
    assert len(seen) == 1
