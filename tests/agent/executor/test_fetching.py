"""An executor connects to another only where it can be sure who that is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.agent.executor.config import ExecutorConfig
from genie.agent.executor.fetching import Fetcher
from genie.errors import NothingListensError, TlsError, TokenRefusedError
from genie.runtime import native, opwire, tls
from tests.agent.executor.thread import ThreadedExecutor, executor_on_a_thread

NAME = tls.executor_name("job-1")


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


def fetcher(tmp_path: Path, ca_pem: str | None) -> Fetcher:
    path = tmp_path / "ca"
    if ca_pem is not None:
        path.write_text(ca_pem)
    config = ExecutorConfig(job_id="job-2", endpoint_path="", ticket_sha256="", ca_path=str(path))
    return Fetcher(native.load("genie_executor"), config)


def test_an_executor_of_the_cluster_is_spoken_to(
    tmp_path: Path, authority: tls.CertificateAuthority, executor: ThreadedExecutor
) -> None:
    with pytest.raises(TokenRefusedError):
        fetcher(tmp_path, authority.ca_pem)("127.0.0.1", executor.port, NAME, 1, "not the token")


def test_another_executor_than_the_one_that_is_named_is_not(
    tmp_path: Path, authority: tls.CertificateAuthority, executor: ThreadedExecutor
) -> None:
    for name in (tls.executor_name("job-3"), ""):
        with pytest.raises(TlsError):
            fetcher(tmp_path, authority.ca_pem)("127.0.0.1", executor.port, name, 1, "x")


def test_nor_is_one_of_another_cluster(tmp_path: Path, executor: ThreadedExecutor) -> None:
    other = tls.CertificateAuthority.create(now=time.time())
    with pytest.raises(TlsError):
        fetcher(tmp_path, other.ca_pem)("127.0.0.1", executor.port, NAME, 1, "x")


@pytest.mark.parametrize("ca_pem", [None, "", "not a certificate", "\u00e4"])
def test_without_a_ca_to_check_by_nothing_is_connected_to(tmp_path: Path, ca_pem: str | None) -> None:
    with pytest.raises(TlsError, match="CA"):
        fetcher(tmp_path, ca_pem)("127.0.0.1", 9, NAME, 1, "x")


def test_where_nobody_listens_on_loopback_the_other_reason_is_named(tmp_path: Path) -> None:
    with executor_on_a_thread() as gone:
        port = gone.port
    config = ExecutorConfig(job_id="job-2", endpoint_path="", ticket_sha256="")
    alone = Fetcher(native.load("genie_executor"), config)
    with pytest.raises(NothingListensError, match="another machine"):
        alone("127.0.0.1", port, "", 1, opwire.fetch_token("x", 1))
