"""Metrics over HTTP: responses, rejected requests, and alerts that fire in a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from genie.errors import UsageError
from genie.grid import metrics_server
from genie.grid.metrics import GridMetrics
from genie.grid.metrics_server import serve_metrics
from tests.grid.testbed import SshTestbed
from tests.house.repository_files import ROOT
from tests.needs import require_program
from tests.ports import free_port
from tests.waiting import until, wait_until

RULES = ROOT / "docs" / "grid" / "alert_rules.yml"


async def send_request(address: tuple[str, int], request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_port_in_use_is_reported_once(tmp_path: Path) -> None:
    async with serve_metrics(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as (_, port):
        with pytest.raises(UsageError) as caught:
            async with serve_metrics(GridMetrics(tmp_path), bind="127.0.0.1", port=port):
                pass
    assert caught.value.message == f"cannot listen on 127.0.0.1 port {port}: Address already in use"


async def test_scrape_returns_current_metrics(tmp_path: Path) -> None:
    metrics = GridMetrics(tmp_path)
    async with serve_metrics(metrics, bind="127.0.0.1", port=0) as address:
        metrics.record_task_changes(ended=[("failed", 1.0)])
        head, _, body = (
            await send_request(address, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        ).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n")
    assert b"Content-Length: %d\r\n" % len(body) in head + b"\r\n"
    assert body.decode() == metrics.text()
    assert 'status="failed"} 1' in body.decode()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", b"404"),
        (b"GET /metrics/../etc/passwd HTTP/1.1", b"404"),
        (b"POST /metrics HTTP/1.1", b"405"),
        (b"nonsense", b"405"),
    ],
)
async def test_requests_other_than_get_metrics_are_rejected(
    tmp_path: Path, request_line: bytes, status: bytes
) -> None:
    async with serve_metrics(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        answer = await send_request(address, request_line + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 " + status)


async def test_head_request_gets_no_body(tmp_path: Path) -> None:
    async with serve_metrics(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        answer = await send_request(address, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")


async def test_oversized_request_is_aborted(tmp_path: Path) -> None:
    async with serve_metrics(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        try:
            answer = await send_request(address, b"GET /metrics HTTP/1.1\r\n" + b"x" * 100_000)
        except ConnectionResetError:
            answer = b""
    assert answer == b""


async def test_idle_client_is_disconnected(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.05)
    async with serve_metrics(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        try:
            assert await send_request(address, b"") == b""
        except ConnectionResetError:
            pass


async def test_connections_above_the_limit_are_aborted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTIONS_MAX", 1)
    async with serve_metrics(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        _, first = await asyncio.open_connection(*address)
        first.write(b"GET")

        async def is_aborted() -> bool:
            try:
                return await send_request(address, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
            except ConnectionResetError:
                return True

        await until(is_aborted, what="an aborted connection")
        first.close()
        await first.wait_closed()


async def test_open_connections_are_aborted_on_exit(tmp_path: Path) -> None:
    async with serve_metrics(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET")
        await writer.drain()
    try:
        assert await asyncio.wait_for(reader.read(), 20) == b""
    except ConnectionResetError:
        pass
    writer.close()


async def test_port_in_use_raises_usage_error(tmp_path: Path) -> None:
    async with serve_metrics(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as (host, port):
        with pytest.raises(UsageError, match=f"127.0.0.1 port {port}"):
            async with serve_metrics(GridMetrics(tmp_path), bind=host, port=port):
                pass


# --- with a real Prometheus -------------------------------------------------------------------


def test_alert_rules_pass_promtool() -> None:
    promtool = require_program("promtool", package="prometheus")
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 rules found" in done.stdout


@contextmanager
def running_process(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        started = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait(20)


@contextmanager
def running_prometheus(folder: Path, target: str) -> Iterator[Callable[[str], Any]]:
    """Run a Prometheus with short intervals; yields a function for API queries.

    The rules are those of docs/grid with shorter durations, so that the test does not take minutes.
    """
    program = require_program("prometheus", package="prometheus")
    rules = re.sub(r"for: \d+m", "for: 200ms", RULES.read_text().replace("[5m]", "[10s]"))
    (folder / "rules.yml").write_text(rules)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 200ms}\n"
        "rule_files: [rules.yml]\n"
        f"scrape_configs: [{{job_name: grid, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    where = f"127.0.0.1:{free_port()}"
    argv = [
        program,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={where}",
    ]

    def ask(path: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://{where}/api/v1/{path}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    with running_process(argv, folder / "prometheus.log"):
        yield ask


@pytest.mark.timeout(180)
def test_alerts_fire_in_a_real_prometheus(own_testbed: SshTestbed, tmp_path: Path, monkeypatch) -> None:
    """gpu2 is unreachable, tasks fail and syncs are slow; gpu1 is healthy and has no alert."""
    state = tmp_path / "state"
    (tmp_path / "grid.yaml").write_text(
        own_testbed.grid_yaml(more="health_check: {timeout: 20, refresh_interval: 1, cpu_weight: 0}\n")
    )
    monkeypatch.setenv("GENIE_GRID_FILE", str(tmp_path / "grid.yaml"))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(own_testbed.ssh_config))
    monkeypatch.setenv("GENIE_STATE_DIR", str(state))
    own_testbed["gpu2"].stop()
    metrics = GridMetrics(state)
    argv = [sys.executable, "-m", "genie", "grid", "metrics", "--serve", "--port", "0", "--json"]
    log = tmp_path / "serve.log"
    with running_process(argv, log):
        wait_until(lambda: b"}" in log.read_bytes(), timeout_s=60, what="the server's address")
        target = re.sub(r"http://(.*)/metrics", r"\1", json.loads(log.read_text())["url"])
        with running_prometheus(tmp_path, target) as ask:

            def firing() -> set[tuple[str, str | None]]:
                metrics.record_task_changes(ended=[("failed", 1.0)])
                metrics.record_sync(25.0)
                found = (ask("alerts") or {"alerts": []})["alerts"]
                return {
                    (alert["labels"]["alertname"], alert["labels"].get("node"))
                    for alert in found
                    if alert["state"] == "firing"
                }

            wanted = {("UnhealthyNode", "gpu2"), ("HighTaskFailureRate", None), ("SlowSync", None)}
            # Alerts are pending again after a scrape that timed out.
            wait_until(lambda: firing() == wanted, timeout_s=90, what="exactly three alerts")
            query = "query?query=grid_node_health_score%7Bnode=%22gpu2%22%7D"
            (score,) = wait_until(lambda: (ask(query) or {}).get("result"), what="the score of gpu2")
            assert score["value"][1] == "+Inf"
