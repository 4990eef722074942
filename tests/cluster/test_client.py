"""Following a log over a failing connection, and uploads that are lost."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from genie import config
from genie.cluster import client as client_module
from genie.cluster.client import ClusterClient, open_client
from genie.errors import DeadlineError, GenieError, UnreachableError
from genie.model.job import JobSpec
from genie.model.messages import ReadLog
from tests.cluster.small_controller import SmallController
from tests.controller.running_controller import running_controller


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


async def test_upload_that_a_new_leader_does_not_have_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = tmp_path / "work"
    workdir.mkdir()
    (workdir / "input.txt").write_text("data")
    upload, uploads = ClusterClient._upload_blob, 0

    async def lose_first_upload(self: ClusterClient, *arguments: Any) -> None:
        nonlocal uploads
        uploads += 1
        if uploads > 1:
            await upload(self, *arguments)

    monkeypatch.setattr(ClusterClient, "_upload_blob", lose_first_upload)
    async with running_controller(tmp_path) as one:
        settings = config.load({"paths.state_dir": one.state_dir})
        async with open_client(settings) as client:
            job = await client.submit(JobSpec(name="job", command=("true",)), workdir=workdir)
            assert job.spec.workdir is not None
    assert uploads == 2
