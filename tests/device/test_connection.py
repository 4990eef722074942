"""Timeouts of opening a connection to an executor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from genie.device import connection
from genie.device.connection import ExecutorAddress, ExecutorLink
from genie.native import executor_stream
from genie.runtime import device_protocol


class SlowExecutor:
    """Takes `busy_timeout_s` to reply; records the timeout of the TLS shutdown after that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, busy_timeout_s: float) -> None:
        self.now = 1000.0
        self.busy_timeout_s = busy_timeout_s
        self.timeouts_s: list[float] = []
        monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(executor_stream, "connect", lambda *_, **__: SimpleNamespace(close=lambda: None))
        monkeypatch.setattr(device_protocol, "open_session", self.enter)
        monkeypatch.setattr(executor_stream, "downgrade_if_plaintext", self.shut_down_tls)

    def enter(self, *_: Any, **__: Any) -> device_protocol.Opened:
        self.now += self.busy_timeout_s
        return device_protocol.Opened("cpu", "fake", 1, "job-1", "0", session_key="key", plaintext=True)

    def shut_down_tls(self, stream: Any, *, timeout_s: float, **_: Any) -> Any:
        self.timeouts_s.append(timeout_s)
        return stream


LINK = ExecutorAddress(host="127.0.0.1", port=1, server_name="", ticket="ticket")


@pytest.mark.parametrize(
    ("answer_timeout_s", "remaining_s"), [(None, 10), (100, 110)], ids=["open", "resume"]
)
def test_open_gives_each_step_the_remaining_time(
    answer_timeout_s: float | None, remaining_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = SlowExecutor(monkeypatch, busy_timeout_s=20)
    ExecutorLink(LINK, "node-1").open_session(timeout_s=30, answer_timeout_s=answer_timeout_s)
    assert executor.timeouts_s == [remaining_s]
