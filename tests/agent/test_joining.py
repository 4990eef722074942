"""Joining a cluster and the files of the node identity."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from genie.agent.identity import (
    find_node_dir,
    list_node_dirs,
    read_identity,
    renew_certificate_if_due_and_get_wait_s,
    write_identity,
)
from genie.agent.joining import join_cluster
from genie.errors import (
    NameInvalidError,
    NothingListensError,
    NotLeaderError,
    TlsError,
    TokenMissingError,
    TokenRefusedError,
    UsageError,
)
from genie.model.names import parse_endpoint
from genie.model.tenant import TokenKind
from genie.processes import files
from genie.processes.tasks import run_inline
from genie.runtime import tls
from genie.runtime.network import TcpNetwork
from tests.fakes.clock import FakeClock
from tests.fakes.controller import HOST, FakeController
from tests.waiting import until


class _PowerLoss(BaseException):
    """Ends the code under test as a power loss does: nothing handles it."""


class PowerLossSimulator:
    """Cuts the power after a number of file operations below a directory: later ones do not happen, and the
    ends of files that were not synchronized are lost."""

    _OPERATIONS = ("fsync", "mkdir", "rename", "replace", "unlink", "rmdir")

    def __init__(self, directory: Path, *, steps: int) -> None:
        self._directory = directory
        self._steps_left = steps
        self._synchronized = {path.stat().st_ino for path in directory.rglob("*")}
        self._patch = pytest.MonkeyPatch()
        self.has_failed = False

    def __enter__(self) -> PowerLossSimulator:
        for name in self._OPERATIONS:
            self._patch.setattr(os, name, partial(self._count_and_call, getattr(os, name)))
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        self._patch.undo()
        if not isinstance(error, _PowerLoss):
            return False
        for path in self._directory.rglob("*"):
            if path.is_file() and path.stat().st_ino not in self._synchronized:
                os.truncate(path, path.stat().st_size // 2)
        return True

    def _count_and_call(self, operation: Callable[..., object], target: int | Path, *rest: Any) -> None:
        path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else Path(target)
        if path.is_relative_to(self._directory):
            if self._steps_left == 0 or self.has_failed:
                self.has_failed = True
                raise _PowerLoss
            self._steps_left -= 1
        operation(target, *rest)
        if isinstance(target, int):
            self._synchronized.add(os.fstat(target).st_ino)


async def try_join(fake: FakeController, state_dir: Path, *, token: str, node_id: str = "n1") -> Path:
    return await join_cluster(
        HOST, fake.port, token, state_dir=state_dir, requested_node_id=node_id, network=TcpNetwork()
    )


async def test_join_writes_the_node_identity(tmp_path: Path) -> None:
    async with FakeController(tmp_path / "c", use_tls=True).listening() as fake:
        node_dir = await try_join(fake, tmp_path / "s", token=str(fake.token(TokenKind.JOIN)))
        access = read_identity(node_dir)
    assert node_dir == tmp_path / "s" / "agents" / "n1"
    assert (access.host, access.port, access.token.kind) == (HOST, fake.port, TokenKind.NODE)
    assert access.tls is not None
    assert {path.stat().st_mode & 0o777 for path in node_dir.iterdir()} == {0o600}


async def test_power_loss_while_joining_again_leaves_the_previous_or_the_new_identity(tmp_path: Path) -> None:
    """Never the key of one and the certificate of the other."""
    async with (
        FakeController(tmp_path / "c1", use_tls=True).listening() as before,
        FakeController(tmp_path / "c2", use_tls=True).listening() as after,
    ):
        found: list[str] = []
        for steps in range(100):
            state_dir = tmp_path / f"s{steps}"
            node_dir = await try_join(before, state_dir, token=str(before.token(TokenKind.JOIN)))
            files.write_private(node_dir / "fence.json", b'{"leader_token": 7}')
            with PowerLossSimulator(node_dir, steps=steps) as power:
                await try_join(after, state_dir, token=str(after.token(TokenKind.JOIN)))
            assert list_node_dirs(state_dir) == [node_dir]
            access = read_identity(node_dir)
            is_new = access.token.pin == after.authority.fingerprint
            assert access.port == (after.port if is_new else before.port)
            assert (node_dir / "fence.json").exists() != is_new
            found.append("new" if is_new else "previous")
            if not power.has_failed:
                break
    assert not power.has_failed
    assert found == sorted(found, reverse=True)
    assert set(found) == {"previous", "new"}


async def test_power_loss_while_joining_leaves_a_node_or_none(tmp_path: Path) -> None:
    async with FakeController(tmp_path / "c", use_tls=True).listening() as fake:
        for steps in range(100):
            state_dir = tmp_path / f"s{steps}"
            with PowerLossSimulator(state_dir / "agents" / "n1", steps=steps) as power:
                await try_join(fake, state_dir, token=str(fake.token(TokenKind.JOIN)))
            for node_dir in list_node_dirs(state_dir):
                assert read_identity(node_dir).port == fake.port
            if not power.has_failed:
                break
    assert list_node_dirs(state_dir) == [state_dir / "agents" / "n1"]


async def test_two_processes_may_finish_an_interrupted_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync_and_let_the_other_process_finish(descriptor: int) -> None:
        with contextlib.suppress(OSError):  # as long as it is not empty
            (tmp_path / "s" / "agents" / "n1" / "identity.next").rmdir()

    monkeypatch.setattr(os, "fsync", sync_and_let_the_other_process_finish)
    async with FakeController(tmp_path / "c", use_tls=True).listening() as fake:
        node_dir = await try_join(fake, tmp_path / "s", token=str(fake.token(TokenKind.JOIN)))
        assert read_identity(node_dir).port == fake.port


async def test_join_token_is_not_sent_to_another_cluster(tmp_path: Path) -> None:
    async with FakeController(tmp_path / "c", use_tls=True).listening() as fake:
        other = FakeController(tmp_path / "other", use_tls=True)
        with pytest.raises(TlsError, match="another fingerprint"):
            await try_join(fake, tmp_path / "s", token=str(other.token(TokenKind.JOIN)))
        assert fake.joins == []
    assert not (tmp_path / "s" / "agents").exists()


async def test_join_with_expired_token_writes_nothing(tmp_path: Path) -> None:
    fake = FakeController(tmp_path / "c", use_tls=True, join_error=TokenRefusedError("token x has expired"))
    async with fake.listening():
        with pytest.raises(TokenRefusedError, match="has expired"):
            await try_join(fake, tmp_path / "s", token=str(fake.token(TokenKind.JOIN)))
    assert not (tmp_path / "s" / "agents").exists()


@pytest.mark.parametrize("kind", [TokenKind.OWNER, TokenKind.USER, TokenKind.NODE])
async def test_join_requires_a_join_token(
    tmp_path: Path, controller: FakeController, kind: TokenKind
) -> None:
    with pytest.raises(TokenRefusedError, match=f"{kind.with_article} token cannot be used to join"):
        await try_join(controller, tmp_path / "s", token=str(controller.token(kind)))


async def test_invalid_node_id_is_rejected_before_anything_is_sent(
    tmp_path: Path, controller: FakeController
) -> None:
    with pytest.raises(NameInvalidError):
        await try_join(
            controller, tmp_path / "s", token=str(controller.token(TokenKind.JOIN)), node_id="../x"
        )
    assert controller.joins == []


async def test_join_fails_if_nothing_listens(tmp_path: Path, controller: FakeController) -> None:
    token = str(controller.token(TokenKind.JOIN))
    with pytest.raises(NothingListensError):
        await join_cluster(HOST, 1, token, state_dir=tmp_path, requested_node_id="n1", network=TcpNetwork())


async def test_join_asks_again_while_the_named_leader_cannot_be_reached(tmp_path: Path) -> None:
    fake, clock = FakeController(tmp_path / "c", use_tls=True), FakeClock()
    async with fake.listening():
        stale = f"{HOST}:1"
        fake.join_error = NotLeaderError.naming_leader("this controller is a standby", leader=stale)
        async with asyncio.TaskGroup() as group:
            joining = group.create_task(
                join_cluster(
                    *(HOST, fake.port, str(fake.token(TokenKind.JOIN))),
                    state_dir=tmp_path / "s",
                    requested_node_id="n1",
                    network=TcpNetwork(),
                    clock=clock,
                )
            )
            await until(lambda: clock.is_sleeping, what="the named leader cannot be reached")
            fake.join_error = None
            await clock.advance(1)
        assert read_identity(joining.result()).port == fake.port


async def test_join_fails_at_the_deadline_if_the_named_leader_cannot_be_reached(tmp_path: Path) -> None:
    fake, clock = FakeController(tmp_path / "c", use_tls=True), FakeClock()
    async with fake.listening():
        fake.join_error = NotLeaderError.naming_leader("this controller is a standby", leader=f"{HOST}:1")
        joining = asyncio.ensure_future(
            join_cluster(
                *(HOST, fake.port, str(fake.token(TokenKind.JOIN))),
                state_dir=tmp_path / "s",
                requested_node_id="n1",
                network=TcpNetwork(),
                timeout_s=10,
                clock=clock,
            )
        )
        await until(lambda: clock.is_sleeping, what="the named leader cannot be reached")
        await clock.advance(10)
        with pytest.raises((NotLeaderError, NothingListensError)):
            await joining


def test_read_identity_requires_a_token(tmp_path: Path) -> None:
    with pytest.raises(TokenMissingError, match="has no node token"):
        read_identity(tmp_path)


def test_node_without_tls_connects_only_to_loopback(tmp_path: Path) -> None:
    fake = FakeController(tmp_path / "c")
    write_identity(
        tmp_path / "n1",
        token=str(fake.token(TokenKind.NODE)),
        certificate_pem="",
        key_pem=b"",
        ca_pem="",
        controller=("10.0.0.1", 5555),
    )
    with pytest.raises(TlsError, match="is not a loopback address"):
        read_identity(tmp_path / "n1")
    assert read_identity(tmp_path / "n1", controller=("127.0.0.1", 1)).port == 1


def test_find_node_dir_returns_the_only_or_the_named_node(tmp_path: Path) -> None:
    with pytest.raises(TokenMissingError, match="contains no node"):
        find_node_dir(tmp_path, None)
    files.write_private(tmp_path / "agents" / "a" / "node.token", b"")
    assert find_node_dir(tmp_path, None).name == "a"
    files.write_private(tmp_path / "agents" / "b" / "node.token", b"")
    with pytest.raises(UsageError, match="several nodes: a, b"):
        find_node_dir(tmp_path, None)
    assert find_node_dir(tmp_path, "b").name == "b"


async def test_interrupted_renewal_is_finished_at_the_next_start(tmp_path: Path) -> None:
    async with FakeController(tmp_path / "c", use_tls=True).listening() as fake:
        node_dir = await try_join(fake, tmp_path / "s", token=str(fake.token(TokenKind.JOIN)))
        key, csr = tls.new_key_and_csr()
        files.write_private(node_dir / "node.key.next", key)
        read_identity(node_dir)  # the certificate has not changed yet: the old key is the right one
        assert not (node_dir / "node.key.next").exists()
        files.write_private(node_dir / "node.key.next", key)
        signed = fake.authority.issue(csr, name=tls.node_certificate_name("n1"), days=1, now=0)
        files.write_private(node_dir / "node.pem", signed.encode())
        read_identity(node_dir)  # it has changed: the new key is
        assert (node_dir / "node.key").read_bytes() == key


async def test_fresh_certificate_is_not_renewed(tmp_path: Path) -> None:
    async with FakeController(tmp_path / "c", use_tls=True).listening() as fake:
        node_dir = await try_join(fake, tmp_path / "s", token=str(fake.token(TokenKind.JOIN)))
    start, end = tls.validity_period((node_dir / "node.pem").read_text())
    now = (start + end) / 2 - 5
    renewed = renew_certificate_if_due_and_get_wait_s(
        node_dir, None, now=now, timeout_s=1, offload=run_inline
    )  # type: ignore[arg-type]
    assert await renewed == pytest.approx(5)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("gpu-box:5556", ("gpu-box", 5556)),
        ("gpu-box", ("gpu-box", 5555)),
        ("[::1]:9", ("::1", 9)),
        ("::1", ("::1", 5555)),
        ("[::1]", ("::1", 5555)),
    ],
)
def test_parse_endpoint_reads_an_address(text: str, address: tuple[str, int]) -> None:
    assert parse_endpoint(text, port=5555) == address


@pytest.mark.parametrize("text", ["", ":1", "a:0", "a:65536", "a:b", "1.2.3.4:1:1"])
def test_parse_endpoint_rejects_an_invalid_address(text: str) -> None:
    with pytest.raises(UsageError, match="address"):
        parse_endpoint(text, port=5555)
