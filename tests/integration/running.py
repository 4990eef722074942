"""A running cluster as the tests see it: where it is, how to get in, how to run a client of it.

Not for: controller and agents one by one (machine.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from genie import config
from genie.cluster import local
from genie.cluster.local import Supervisor
from genie.cluster.loop_thread import LoopThread
from genie.config import Settings
from genie.errors import GenieError
from genie.model.job import JobSpec, Resources
from genie.runtime.credentials import OWNER_TOKEN_FILE
from tests import needs

START_S = 60.0


@dataclass(frozen=True)
class RunningCluster:
    """`state_dir` is a client's, not the cluster's: what is found there is only what a client has."""

    host: str
    port: int
    token: str
    state_dir: Path

    def settings(self, **cluster: object) -> Settings:
        arguments: dict[str, object] = {
            "cluster.master_addr": self.host,
            "cluster.master_port": self.port,
            "cluster.token": self.token,
            "paths.state_dir": self.state_dir,
        }
        return config.load(arguments | config.cluster_arguments(cluster))

    def environ(self) -> dict[str, str]:
        """For a process that is a client of this cluster."""
        return {
            **os.environ,
            "GENIE_MASTER_ADDR": self.host,
            "GENIE_MASTER_PORT": str(self.port),
            "GENIE_TOKEN": self.token,
            "GENIE_STATE_DIR": str(self.state_dir),
        }

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Makes it the cluster of this process's sessions."""
        for name, value in self.environ().items():
            if name.startswith("GENIE_"):
                patch.setenv(name, value)

    def run_client(self, code: str, *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """A client in a process of its own; what it leaves open shows on standard error."""
        return subprocess.run(
            [sys.executable, "-W", "default::ResourceWarning", "-c", textwrap.dedent(code)],
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )


class StartedCluster:
    """A cluster of a test's own, on a loop of its own, so that the test may block or break it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.supervisor: Supervisor | None = None
        self._thread = LoopThread(name="test-cluster")
        self._ready = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> StartedCluster:
        self._thread.start(self._main)
        self._thread.finished.add_done_callback(lambda _: self._ready.set())
        assert self._ready.wait(START_S)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *ignored: object) -> None:
        self._thread.cancel()
        assert self._thread.join(timeout_s=60)

    async def _main(self) -> None:
        try:
            async with local.up(
                self.settings, progress=lambda _line: None, timeout_s=START_S
            ) as self.supervisor:
                self._ready.set()
                await self.supervisor.wait()
        except GenieError as error:
            self._failure = error

    @property
    def running(self) -> RunningCluster:
        assert self.supervisor is not None
        assert self.supervisor.cluster is not None
        state_dir = self.settings.paths.state_dir
        token = (state_dir / OWNER_TOKEN_FILE).read_text("utf-8").strip()
        where = self.supervisor.cluster
        return RunningCluster(where.host, where.port, token, state_dir)

    @property
    def pids(self) -> dict[str, int]:
        assert self.supervisor is not None
        return self.supervisor.pids


def python_job(code: str, *, name: str = "test", gpus: int = 0, node_id: str = "") -> JobSpec:
    """A job that runs this Python code, which needs nothing but the standard library."""
    # On another machine the interpreter of these tests is not there.
    python = sys.executable if needs.SERVER is None else "python3"
    return JobSpec(
        name=name,
        command=(python, "-u", "-c", textwrap.dedent(code)),
        resources=Resources(gpus=gpus),
        node_id=node_id,
    )
