"""Following a log over a connection that fails: how long it is tried again, and when not at all."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from genie import config
from genie.cluster import client as client_module
from genie.cluster.client import open_client
from genie.errors import DeadlineError, GenieError, UnreachableError
from genie.model.messages import ReadLog
from tests.cluster.small_controller import SmallController


@pytest.mark.parametrize("error", [DeadlineError("no answer"), UnreachableError("the node is away")])
async def test_a_log_that_cannot_be_read_is_an_error_at_once_where_nobody_follows(
    controller: SmallController, error: GenieError
) -> None:
    controller.refusals[ReadLog] = error
    async with asyncio.timeout(10), open_client(_settings()) as client:
        with pytest.raises(type(error)):
            [data async for data in client.follow_log("j-1", follow=False)]
    assert controller.count(ReadLog) == 1


@pytest.mark.parametrize("error", [DeadlineError("no answer"), UnreachableError("the node is away")])
async def test_a_log_that_is_followed_is_asked_for_again_but_not_for_ever(
    controller: SmallController, error: GenieError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LOG_PATIENCE_S", 0.5)
    controller.refusals[ReadLog] = error
    async with asyncio.timeout(10), open_client(_settings()) as client:
        with pytest.raises(type(error)):
            [data async for data in client.follow_log("j-1")]
    assert controller.count(ReadLog) > 1


def _settings() -> config.Settings:
    return config.load({"paths.state_dir": Path(os.environ["GENIE_STATE_DIR"])})
