"""The configuration of an executor: round trip and validation."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from genie.errors import ConfigError, GenieError, TlsError
from genie.executor.__main__ import main
from genie.processes import executor_config
from genie.processes.executor_config import ExecutorConfig

VALID_FIELDS: dict[str, object] = {"job_id": "job-1", "endpoint_path": "/nowhere", "ticket_sha256": "0" * 64}


def write_config(folder: Path, **changes: object) -> Path:
    path = folder / "config"
    path.write_text(json.dumps(VALID_FIELDS | changes))
    return path


def test_config_is_read_as_written_and_private(tmp_path: Path) -> None:
    config = ExecutorConfig(
        job_id="job-1", endpoint_path="/nowhere", ticket_sha256="ab" * 32, vendor="nvidia", device_index=3
    )
    executor_config.write(tmp_path / "config", config)
    assert executor_config.read(tmp_path / "config") == config
    assert stat.S_IMODE((tmp_path / "config").stat().st_mode) == 0o600
    assert config.device == "cuda:3"


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"vendor": "abacus"}, ConfigError, "vendor"),
        ({"ticket_sha256": "short"}, ConfigError, "ticket_sha256"),
        ({"ticket_sha256": "Z" * 64}, ConfigError, "ticket_sha256"),
        ({"port": 70000}, ConfigError, "port"),
        ({"threads": -1}, ConfigError, "threads"),
        ({"idle_s": "soon"}, ConfigError, "idle_s"),
        ({"colour": "red"}, ConfigError, "colour"),
        ({"listen_host": "0.0.0.0"}, TlsError, "TLS"),
        ({"listen_host": "gpu-box"}, TlsError, "TLS"),
        ({"certificate_path": "/a"}, TlsError, "key_path"),
        ({"ca_path": "/a"}, TlsError, "ca_path"),
    ],
)
def test_invalid_value_is_named(
    tmp_path: Path, changes: dict[str, object], error: type[GenieError], named: str
) -> None:
    with pytest.raises(error, match=named):
        executor_config.read(write_config(tmp_path, **changes))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_does_not_require_tls(tmp_path: Path, host: str) -> None:
    assert executor_config.read(write_config(tmp_path, listen_host=host)).listen_host == host


def test_failed_start_prints_reason_and_hint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["--config", str(tmp_path / "missing")]) == ConfigError.exit_code
    assert main(["--config", str(write_config(tmp_path, listen_host="0.0.0.0"))]) == TlsError.exit_code
    assert "could not read" in caplog.text
    assert "requires TLS" in caplog.text
