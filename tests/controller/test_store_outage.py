"""A controller without its store: it answers that it does not lead, makes no decisions, and resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from genie.controller.store.etcd import EtcdStore
from genie.errors import (
    GenieError,
    NotLeaderError,
    StoreAccessError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from genie.model.job import JobState
from genie.model.messages.handshake import Join
from genie.model.tenant import TokenKind
from genie.runtime import rpc, tls
from genie.runtime.credentials import Access, connect_authenticated
from genie.runtime.network import TcpNetwork
from genie.sim.store import MemoryStore
from tests.controller.running_controller import Client, RunningController, running_controller
from tests.controller.store.etcd_security import Authority, change_password, enable_logins
from tests.controller.store.etcd_server import EtcdServer
from tests.waiting import until

_AGENT_TIMEOUT_S = 3.0
"""Longer than the reply takes even on a busy machine, and shorter than the timeout of the store, 5 s."""


async def test_standby_replies_that_it_does_not_lead_while_its_store_hangs(tmp_path: Path) -> None:
    async with running_controller(tmp_path / "1", name="one") as one:
        node = await one.join("n1")
        hanging = await MemoryStore.open(clock=one.clock)
        hanging.set_hanging(True)
        starting = RunningController(one.config, tmp_path / "2", one.clock, hanging, name="two")
        async with asyncio.TaskGroup() as group:
            started = group.create_task(starting.start())
            await until(lambda: starting.controller is not None and starting.controller.port)
            with pytest.raises(NotLeaderError, match="does not lead"):
                await _connect(Access("127.0.0.1", starting.port, node.token, node.tls))
            hanging.set_hanging(False)
            await started
        await starting.stop()
        await hanging.close()


async def test_standby_replies_that_it_does_not_lead_while_etcd_is_stopped(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    one_store, two_store = await EtcdStore.open(etcd.url), await EtcdStore.open(etcd.url)
    async with (
        running_controller(tmp_path / "1", store=one_store, name="one") as one,
        running_controller(tmp_path / "2", store=two_store, name="two") as two,
    ):
        known, unknown = await one.join("n1"), await one.join("n2")
        await _connect(Access("127.0.0.1", two.port, known.token, known.tls))
        etcd.suspend()
        with pytest.raises(NotLeaderError, match="does not lead"):
            await _connect(Access("127.0.0.1", two.port, unknown.token, unknown.tls))
        assert not await _connect(Access("127.0.0.1", two.port, known.token, known.tls)), "a cached token"
        etcd.resume()


async def test_rejected_login_freezes_decisions_until_it_is_fixed(
    etcd: EtcdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    password = tmp_path / "password"
    password.write_text("first")
    await enable_logins(etcd, users=("root",), password="first")
    store = await EtcdStore.open(f"{etcd.url}?user=root&password_file={password}")
    async with (
        running_controller(tmp_path / "1", store=store, leader_ttl_s=3.0) as one,
        one.client() as owner,
        one.agent() as agent,
    ):
        job = await owner.submit(gpus=1)
        await agent.start_next()
        await change_password(etcd, user="root", old="first", new="second")
        await _check_frozen_then_resumed(
            one, owner, job.job_id, reason="rejected user 'root'", fix=lambda: password.write_text("second")
        )
    assert _logged_outages(caplog) == ["StoreAccessError"]


@pytest.mark.parametrize("kind", [StoreAccessError, StoreFullError, StoreCorruptError, StoreError])
async def test_only_the_owner_sees_details_of_the_store(kind: type[StoreError], tmp_path: Path) -> None:
    async with (
        running_controller(tmp_path) as one,
        one.client() as owner,
        one.client(await one.token(TokenKind.USER, tenant="red")) as user,
    ):
        join_token = await one.token(TokenKind.JOIN)
        commit = one.store.commit

        async def fail(*arguments: object, **settings: object) -> object:
            raise kind(
                "etcd at 10.0.0.7:2379 rejected user 'root'", hint="check the password in /secret/file"
            )

        one.store.commit = fail  # type: ignore[method-assign, assignment]
        errors = [await _error_of(user.submit()), await _error_of(_join(one, join_token))]
        of_owner = await _error_of(owner.submit())
        one.store.commit = commit  # type: ignore[method-assign]
    for error in errors:
        assert isinstance(error, StoreUnavailableError if kind is StoreAccessError else kind)
        assert "its store" in error.message
        assert not any(detail in str(error) for detail in ("10.0.0.7", "root", "/secret"))
    assert "10.0.0.7" in str(of_owner)


def test_agent_retries_while_the_store_rejects_the_controller() -> None:
    assert StoreAccessError.retryable


async def _join(one: RunningController, token: str) -> None:
    access = await one.access(token)
    async with rpc.dial(one.network, access.host, access.port, tls=access.tls, timeout_s=10) as peer:
        request = Join(token=token, requested_node_id="n9", csr_pem=tls.new_key_and_csr()[1])
        await peer.call(request, timeout_s=10)


async def _error_of(call: Coroutine[object, object, object]) -> GenieError:
    with pytest.raises(GenieError) as caught:
        await call
    return caught.value


async def test_failed_tls_handshake_freezes_decisions_until_it_is_fixed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trusted, other = Authority(tmp_path, "trusted"), Authority(tmp_path, "other")
    server = EtcdServer(tmp_path / "etcd", scheme="https", options=trusted.server_options())
    server.start()

    def restart(authority: Authority) -> None:
        server.stop()
        server.options = authority.server_options()
        server.start()

    try:
        store = await EtcdStore.open(f"{server.url}?ca={trusted.ca}")
        async with (
            running_controller(tmp_path / "1", store=store, leader_ttl_s=3.0) as one,
            one.client() as owner,
            one.agent() as agent,
        ):
            job = await owner.submit(gpus=1)
            await agent.start_next()
            restart(other)
            await _check_frozen_then_resumed(
                one, owner, job.job_id, reason="TLS handshake", fix=lambda: restart(trusted)
            )
    finally:
        server.stop()
    assert _logged_outages(caplog).count("StoreAccessError") == 1


async def _check_frozen_then_resumed(
    one: RunningController, owner: Client, job_id: str, *, reason: str, fix: Callable[[], object]
) -> None:
    async def is_frozen() -> bool:
        status = await owner.status()
        return not status.leading and not status.store_ok and reason in status.store_reason

    await until(is_frozen, what="the status shows why the store does not respond")
    with pytest.raises(StoreUnavailableError, match="its store is unavailable"):
        await owner.submit()
    assert (await owner.job(job_id)).state is JobState.RUNNING
    fix()

    async def leads() -> bool:
        status = await owner.status()
        return status.leading and status.store_ok and not status.store_reason

    await until(leads, what="the controller leads again")
    await owner.submit()
    assert (await owner.job(job_id)).state is JobState.RUNNING


def _logged_outages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The types of the errors that were logged as an outage of the store."""
    return [
        type(record.args[0]).__name__
        for record in caplog.records
        if "no decisions are made" in record.msg and record.args
    ]


async def _connect(access: Access) -> bool:
    """Send Hello; return whether the controller leads."""
    async with connect_authenticated(TcpNetwork(), access, timeout_s=_AGENT_TIMEOUT_S, program="agent") as (
        _,
        welcome,
    ):
        return welcome.leading
