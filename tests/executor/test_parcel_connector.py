"""Connecting to another executor checks its certificate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.errors import DeviceUnavailableError, NothingListensError, TlsError
from genie.executor.parcel_connector import ParcelConnector
from genie.processes.executor_config import ExecutorConfig
from genie.runtime import device_protocol, tls
from tests.executor.thread import ThreadedExecutor, executor_on_a_thread

NAME = tls.executor_certificate_name("job-1")


@pytest.fixture(scope="module")
def authority() -> tls.CertificateAuthority:
    return tls.CertificateAuthority.create(now=time.time())


@pytest.fixture
def executor(tmp_path: Path, authority: tls.CertificateAuthority) -> Iterator[ThreadedExecutor]:
    key, csr = tls.new_key_and_csr()
    (tmp_path / "key").write_bytes(key)
    (tmp_path / "certificate").write_text(authority.issue(csr, name=NAME, days=1, now=time.time()))
    settings = {"certificate_path": str(tmp_path / "certificate"), "key_path": str(tmp_path / "key")}
    with executor_on_a_thread(server_name=NAME, **settings) as executor:
        yield executor


def make_connector(tmp_path: Path, ca_pem: str | None) -> ParcelConnector:
    path = tmp_path / "ca"
    if ca_pem is not None:
        path.write_text(ca_pem)
    config = ExecutorConfig(job_id="job-2", endpoint_path="", ticket_sha256="", ca_path=str(path))
    return ParcelConnector(config)


def test_connects_to_an_executor_of_the_cluster(
    tmp_path: Path, authority: tls.CertificateAuthority, executor: ThreadedExecutor
) -> None:
    with pytest.raises(DeviceUnavailableError, match="no session"):
        make_connector(tmp_path, authority.ca_pem)("127.0.0.1", executor.port, NAME, 1, "a token")


def test_certificate_of_another_executor_is_rejected(
    tmp_path: Path, authority: tls.CertificateAuthority, executor: ThreadedExecutor
) -> None:
    for name in (tls.executor_certificate_name("job-3"), ""):
        with pytest.raises(TlsError):
            make_connector(tmp_path, authority.ca_pem)("127.0.0.1", executor.port, name, 1, "x")


def test_certificate_of_another_cluster_is_rejected(tmp_path: Path, executor: ThreadedExecutor) -> None:
    other = tls.CertificateAuthority.create(now=time.time())
    with pytest.raises(TlsError):
        make_connector(tmp_path, other.ca_pem)("127.0.0.1", executor.port, NAME, 1, "x")


@pytest.mark.parametrize("ca_pem", [None, "", "not a certificate", "\u00e4"])
def test_connection_without_ca_certificate_is_refused(tmp_path: Path, ca_pem: str | None) -> None:
    with pytest.raises(TlsError, match="CA"):
        make_connector(tmp_path, ca_pem)("127.0.0.1", 9, NAME, 1, "x")


def test_refused_loopback_connection_hints_at_another_machine(tmp_path: Path) -> None:
    with executor_on_a_thread() as gone:
        port = gone.port
    config = ExecutorConfig(job_id="job-2", endpoint_path="", ticket_sha256="")
    alone = ParcelConnector(config)
    with pytest.raises(NothingListensError, match="another machine"):
        alone("127.0.0.1", port, "", 1, device_protocol.make_fetch_token("x", 1))
