"""Following a log over a failing connection."""

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
async def test_log_error_is_raised_immediately_without_follow(
    controller: SmallController, error: GenieError
) -> None:
    controller.refusals[ReadLog] = error
    async with asyncio.timeout(30), open_client(_load_settings()) as client:
        with pytest.raises(type(error)):
            [data async for data in client.follow_log("j-1", follow=False)]
    assert controller.count(ReadLog) == 1


@pytest.mark.parametrize("error", [DeadlineError("no answer"), UnreachableError("the node is away")])
async def test_followed_log_is_retried_until_the_timeout(
    controller: SmallController, error: GenieError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LOG_RETRY_TIMEOUT_S", 0.5)
    controller.refusals[ReadLog] = error
    async with asyncio.timeout(30), open_client(_load_settings()) as client:
        with pytest.raises(type(error)):
            [data async for data in client.follow_log("j-1")]
    assert controller.count(ReadLog) > 1


def _load_settings() -> config.Settings:
    return config.load({"paths.state_dir": Path(os.environ["GENIE_STATE_DIR"])})
