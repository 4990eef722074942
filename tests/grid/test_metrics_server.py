"""The figures over HTTP: what is answered, what is refused, and a real Prometheus whose alerts fire."""

from __future__ import annotations

import asyncio
import json
import re
import socket
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
from genie.grid.metrics_server import serving
from tests.grid.bed import Bed
from tests.house.sources import ROOT
from tests.needs import require_program
from tests.waiting import until, wait_until

RULES = ROOT / "docs" / "grid" / "alert_rules.yml"


async def ask(address: tuple[str, int], request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_scrape_gets_the_figures_of_now(tmp_path: Path) -> None:
    metrics = GridMetrics(tmp_path)
    async with serving(metrics, bind="127.0.0.1", port=0) as address:
        metrics.task_finished("failed", 1.0)
        head, _, body = (await ask(address, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")).partition(
            b"\r\n\r\n"
        )
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
async def test_anything_else_is_refused(tmp_path: Path, request_line: bytes, status: bytes) -> None:
    async with serving(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        answer = await ask(address, request_line + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 " + status)


async def test_head_has_no_body(tmp_path: Path) -> None:
    async with serving(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        answer = await ask(address, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")


async def test_a_request_without_end_is_cut(tmp_path: Path) -> None:
    async with serving(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        try:
            answer = await ask(address, b"GET /metrics HTTP/1.1\r\n" + b"x" * 100_000)
        except ConnectionResetError:
            answer = b""
    assert answer == b""


async def test_a_client_that_says_nothing_is_cut(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.05)
    async with serving(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        try:
            assert await ask(address, b"") == b""
        except ConnectionResetError:
            pass


async def test_more_clients_than_allowed_are_turned_away(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTIONS_MAX", 1)
    async with serving(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        _, first = await asyncio.open_connection(*address)
        first.write(b"GET")

        async def turned_away() -> bool:
            try:
                return await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
            except ConnectionResetError:
                return True

        await until(turned_away, what="a refusal")
        first.close()
        await first.wait_closed()


async def test_leaving_cuts_clients_that_are_still_there(tmp_path: Path) -> None:
    async with serving(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET")
        await writer.drain()
    try:
        assert await asyncio.wait_for(reader.read(), 20) == b""
    except ConnectionResetError:
        pass
    writer.close()


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    async with serving(GridMetrics(tmp_path), bind="127.0.0.1", port=0) as (host, port):
        with pytest.raises(UsageError, match=f"127.0.0.1 port {port}"):
            async with serving(GridMetrics(tmp_path), bind=host, port=port):
                pass


# --- with a real Prometheus -------------------------------------------------------------------


def test_the_rules_are_right_in_promtools_eyes() -> None:
    promtool = require_program("promtool", package="prometheus")
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 rules found" in done.stdout


@contextmanager
def process(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
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
def prometheus(folder: Path, target: str) -> Iterator[Callable[[str], Any]]:
    """A Prometheus that scrapes and judges five times a second. Gives a way to ask its API.

    The rules are those of docs/grid with shorter times: minutes would have to pass otherwise.
    """
    program = require_program("prometheus", package="prometheus")
    rules = re.sub(r"for: \d+m", "for: 200ms", RULES.read_text().replace("[5m]", "[10s]"))
    (folder / "rules.yml").write_text(rules)
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms, evaluation_interval: 200ms}\n"
        "rule_files: [rules.yml]\n"
        f"scrape_configs: [{{job_name: grid, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
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

    with process(argv, folder / "prometheus.log"):
        yield ask


@pytest.mark.timeout(180)
def test_the_alerts_fire_in_a_real_prometheus(own_bed: Bed, tmp_path: Path, monkeypatch) -> None:
    """gpu2 is not there, tasks fail and syncs are slow; gpu1 is well, and no alert names it."""
    state = tmp_path / "state"
    (tmp_path / "grid.yaml").write_text(
        own_bed.grid_yaml(more="health_check: {timeout: 20, refresh_interval: 1, cpu_weight: 0}\n")
    )
    monkeypatch.setenv("GENIE_GRID_FILE", str(tmp_path / "grid.yaml"))
    monkeypatch.setenv("GENIE_GRID_SSH_CONFIG", str(own_bed.ssh_config))
    monkeypatch.setenv("GENIE_STATE_DIR", str(state))
    own_bed["gpu2"].stop()
    metrics = GridMetrics(state)
    argv = [sys.executable, "-m", "genie", "grid", "metrics", "--serve", "--port", "0", "--json"]
    log = tmp_path / "serve.log"
    with process(argv, log):
        wait_until(lambda: b"}" in log.read_bytes(), timeout_s=60, what="the server's address")
        target = re.sub(r"http://(.*)/metrics", r"\1", json.loads(log.read_text())["url"])
        with prometheus(tmp_path, target) as ask:

            def firing() -> set[tuple[str, str | None]]:
                metrics.task_finished("failed", 1.0)
                metrics.sync_finished(25.0)
                found = (ask("alerts") or {"alerts": []})["alerts"]
                return {
                    (alert["labels"]["alertname"], alert["labels"].get("node"))
                    for alert in found
                    if alert["state"] == "firing"
                }

            wanted = {("UnhealthyNode", "gpu2"), ("HighTaskFailureRate", None), ("SlowSync", None)}
            wait_until(lambda: firing() >= wanted, timeout_s=90, what="three alerts")
            assert firing() == wanted
            (score,) = ask("query?query=grid_node_health_score%7Bnode=%22gpu2%22%7D")["result"]
            assert score["value"][1] == "+Inf"
