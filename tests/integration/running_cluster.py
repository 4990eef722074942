"""A running cluster for tests: its address and token, and clients of it.

cluster_processes.py starts controller and agents individually.
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
from genie.cluster.lifecycle.loop_thread import LoopThread
from genie.config import Settings
from genie.errors import GenieError
from genie.model.job import JobSpec, Resources
from genie.runtime.credentials import OWNER_TOKEN_FILE
from genie.supervisor import local_cluster
from genie.supervisor.local_cluster import Supervisor
from tests import needs

START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RunningCluster:
    """Address and token of a cluster. `state_dir` is that of a client, not of the cluster."""

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
        return config.load(arguments | config.cluster_settings_from_arguments(cluster))

    def environ(self) -> dict[str, str]:
        """Environment of a client process of this cluster."""
        return {
            **os.environ,
            "GENIE_MASTER_ADDR": self.host,
            "GENIE_MASTER_PORT": str(self.port),
            "GENIE_TOKEN": self.token,
            "GENIE_STATE_DIR": str(self.state_dir),
        }

    def configure_for_this_process(self, patch: pytest.MonkeyPatch) -> None:
        """Configures this cluster for sessions of this process."""
        for name, value in self.environ().items():
            if name.startswith("GENIE_"):
                patch.setenv(name, value)

    def run_client(self, code: str, *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a client in a separate process; unclosed resources are reported on standard error."""
        return subprocess.run(
            [sys.executable, "-W", "default::ResourceWarning", "-c", textwrap.dedent(code)],
            env=self.environ() | {"GENIE_LOG_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )


class StartedCluster:
    """A separate cluster with its own event loop thread, which a test may block or break."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.supervisor: Supervisor | None = None
        self._thread = LoopThread(name="test-cluster")
        self._ready = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> StartedCluster:
        self._thread.start(self._main)
        self._thread.finished.add_done_callback(lambda _: self._ready.set())
        assert self._ready.wait(START_TIMEOUT_S)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *ignored: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Idempotent."""
        self._thread.cancel_main_task()
        assert self._thread.join(timeout_s=60)

    async def _main(self) -> None:
        try:
            async with local_cluster.run_local_cluster(
                self.settings, progress=lambda _line: None, timeout_s=START_TIMEOUT_S
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


def make_python_job(code: str, *, name: str = "test", gpus: int = 0, node_id: str = "") -> JobSpec:
    """A job that runs this Python code, which may use only the standard library."""
    # Another machine does not have the interpreter of these tests.
    python = sys.executable if needs.SERVER is None else "python3"
    return JobSpec(
        name=name,
        command=(python, "-u", "-c", textwrap.dedent(code)),
        resources=Resources(gpus=gpus),
        node_id=node_id,
    )
