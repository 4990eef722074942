"""Opening a connection to an executor: how long each step of it may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from genie.device import connection
from genie.device.connection import ExecutorAddress, ExecutorLink
from genie.runtime import opstream, opwire


class Executor:
    """Takes `busy_s` to answer; notes how long is waited for the end of TLS after that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, busy_s: float) -> None:
        self.now = 1000.0
        self.busy_s = busy_s
        self.waits_s: list[float] = []
        monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(opstream, "connect", lambda *_, **__: SimpleNamespace(close=lambda: None))
        monkeypatch.setattr(opwire, "enter", self.enter)
        monkeypatch.setattr(opstream, "agreed", self.agree)
        monkeypatch.setattr(connection, "_library", lambda: None)

    def enter(self, *_: Any, **__: Any) -> opwire.Opened:
        self.now += self.busy_s
        return opwire.Opened("cpu", "fake", 1, "job-1", "0", session_key="key", bare=True)

    def agree(self, stream: Any, *, timeout_s: float, **_: Any) -> Any:
        self.waits_s.append(timeout_s)
        return stream


LINK = ExecutorAddress(host="127.0.0.1", port=1, server_name="", ticket="ticket")


@pytest.mark.parametrize(
    ("answer_timeout_s", "left_s"), [(None, 10), (100, 110)], ids=["opened", "resumed, where it may be busy"]
)
def test_every_step_of_opening_has_what_is_left(
    answer_timeout_s: float | None, left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Executor(monkeypatch, busy_s=20)
    ExecutorLink(LINK, "node-1").open(timeout_s=30, answer_timeout_s=answer_timeout_s)
    assert executor.waits_s == [left_s]
