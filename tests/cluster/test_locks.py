"""genie.lock() in sessions of this process, with a real controller on a thread of its own."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import genie
from genie.cluster import init
from genie.errors import DeadlineError, GenieError, LockLostError, NotInitializedError, UsageError
from genie.model.lock import LOCK_RENEWALS_PER_TTL
from tests.cluster.locking_controller import LockingController
from tests.waiting import until, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "coordination" / "distributed_locks.py"
EXAMPLE_LINES_MAX = 80
TTL_S = 1.0
"""The shortest one."""


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LockingController]:
    with LockingController(tmp_path / "cluster") as started:
        assert started.running is not None
        monkeypatch.setenv("GENIE_MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("GENIE_MASTER_PORT", str(started.running.port))
        monkeypatch.setenv("GENIE_TOKEN", (started.running.state_dir / "owner.token").read_text())
        yield started
        init.shutdown_blocking()


# --- asynchronous code ------------------------------------------------------------------------


async def test_a_lock_is_held_for_the_block(controller: LockingController) -> None:
    state = await genie.init()
    async with genie.lock("checkpoint") as lock:
        assert lock.is_held
        lock.check_held()
        (view,) = await asyncio.to_thread(controller.list_locks)
        assert (view.name, view.fencing_token) == ("checkpoint", lock.fencing_token)
        assert state.session_id in view.holder and str(os.getpid()) in view.holder
        assert f"held, fencing token {lock.fencing_token}" in repr(lock)
    assert not lock.is_held
    assert await asyncio.to_thread(controller.list_locks) == []
    with pytest.raises(UsageError, match="'checkpoint' is not held"):
        lock.check_held()


async def test_tasks_exclude_each_other_and_get_rising_tokens(controller: LockingController) -> None:
    await genie.init()
    tokens: list[int] = []
    inside = 0

    async def work() -> None:
        nonlocal inside
        async with genie.lock("shared") as lock:
            inside += 1
            assert inside == 1
            tokens.append(lock.fencing_token)
            await asyncio.sleep(0)
            inside -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(work())
    assert len(tokens) == 8
    assert tokens == sorted(set(tokens))


async def test_waiting_for_a_held_lock_times_out_with_its_holder(controller: LockingController) -> None:
    await genie.init()
    await asyncio.to_thread(controller.hold_as_another_client, "l")
    assert not await genie.lock("l").try_acquire()
    with pytest.raises(DeadlineError, match=r"'l' within 0\.2 s: another client holds it"):
        await genie.lock("l").acquire(timeout_s=0.2)
    with pytest.raises(DeadlineError):
        async with genie.lock("l", timeout_s=0.1):
            pytest.fail("the lock is held")


async def test_a_cancelled_acquisition_stops_waiting(controller: LockingController) -> None:
    await genie.init()
    await asyncio.to_thread(controller.hold_as_another_client, "l")
    lock = genie.lock("l")
    waiting = asyncio.create_task(lock.acquire())
    await until(lambda: _waiting_count(controller, 1))
    waiting.cancel()
    await asyncio.wait({waiting})
    await until(lambda: _waiting_count(controller, 0))
    await asyncio.to_thread(controller.break_lock, "l")
    await lock.acquire()
    assert lock.is_held
    await lock.release()


async def _waiting_count(controller: LockingController, count: int) -> bool:
    return [view.waiting for view in await asyncio.to_thread(controller.list_locks)] == [count]


async def test_a_block_is_cancelled_when_its_lock_is_lost(controller: LockingController) -> None:
    await genie.init()
    losses: list[LockLostError] = []
    with pytest.raises(LockLostError, match="genie lock release --force"):
        async with genie.lock("l", ttl_s=TTL_S, on_lost=losses.append):
            await asyncio.to_thread(controller.break_lock, "l")
            await asyncio.Event().wait()
    await until(lambda: losses)
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling(), "the cancellation ended with the block"


async def test_an_error_of_a_block_is_not_replaced_by_the_loss(controller: LockingController) -> None:
    await genie.init()
    lock = genie.lock("l", ttl_s=TTL_S)
    with pytest.raises(ValueError, match="own error"):
        async with lock:
            try:
                await asyncio.to_thread(controller.break_lock, "l")
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ValueError("own error") from None
    with pytest.raises(LockLostError):
        lock.check_held()


async def test_an_outage_longer_than_the_lease_loses_the_lock(controller: LockingController) -> None:
    await genie.init()
    with pytest.raises(LockLostError, match="lease"):
        async with genie.lock("l", ttl_s=TTL_S) as lock:
            await asyncio.to_thread(controller.run, lambda running: running.stop())
            await asyncio.Event().wait()
    assert not lock.is_held
    await asyncio.to_thread(controller.run, lambda running: running.start())


async def test_a_lock_survives_a_restart_of_the_controller(controller: LockingController) -> None:
    await genie.init()
    async with genie.lock("l", ttl_s=20.0) as lock:
        await asyncio.to_thread(controller.run, lambda running: running.restart())
        assert not await asyncio.to_thread(controller.hold_as_another_client, "l")
        assert lock.is_held
    token = await asyncio.to_thread(controller.hold_as_another_client, "l")
    assert token > lock.fencing_token


async def test_a_lock_is_not_reentrant(controller: LockingController) -> None:
    await genie.init()
    lock = genie.lock("l")
    async with lock:
        with pytest.raises(UsageError, match="locks are not reentrant"):
            await lock.acquire()
        assert not await genie.lock("l").try_acquire()
    assert await lock.try_acquire()
    await lock.release()
    with pytest.raises(UsageError, match="'l' is not held"):
        await lock.release()


async def test_the_end_of_the_session_releases_its_locks(controller: LockingController) -> None:
    await genie.init()
    lock = genie.lock("l")
    await lock.acquire()
    await genie.shutdown()
    assert not lock.is_held
    with pytest.raises(LockLostError, match="the session has ended"):
        lock.check_held()
    assert await asyncio.to_thread(controller.list_locks) == []
    with pytest.raises(NotInitializedError):
        await lock.acquire()


def test_a_block_that_outlives_the_session_has_lost_its_lock(controller: LockingController) -> None:
    genie.connect()
    with pytest.raises(LockLostError, match="the session has ended"), genie.lock("l"):
        genie.disconnect()


async def test_a_waiting_acquisition_ends_with_the_session(controller: LockingController) -> None:
    await genie.init()
    await asyncio.to_thread(controller.hold_as_another_client, "l")
    waiting = asyncio.create_task(genie.lock("l").acquire())
    await until(lambda: _waiting_count(controller, 1))
    await genie.shutdown()
    with pytest.raises(NotInitializedError, match="the session has ended"):
        await waiting
    assert await _waiting_count(controller, 0)


async def test_arguments_are_checked(controller: LockingController) -> None:
    with pytest.raises(NotInitializedError):
        genie.lock("l")
    await genie.init()
    for call in (
        lambda: genie.lock("a/b"),
        lambda: genie.lock("l", ttl_s=0.5),
        lambda: genie.lock("l", timeout_s=-1.0),
        lambda: genie.lock("l", timeout_s=float("nan")),
        lambda: genie.lock("l").fencing_token,
    ):
        with pytest.raises(UsageError):
            call()


# --- synchronous code -------------------------------------------------------------------------


def wait_until_renewed(controller: LockingController, name: str, *, renewals: int) -> None:
    """Wait until the lease has been extended that often while this function was polling."""
    expires_in_s = math.inf
    renewals_left = renewals

    def is_renewed_often_enough() -> bool:
        nonlocal expires_in_s, renewals_left
        (view,) = [view for view in controller.list_locks() if view.name == name]
        renewals_left -= view.expires_in_s > expires_in_s
        expires_in_s = view.expires_in_s
        return renewals_left <= 0

    wait_until(is_renewed_often_enough)


def test_synchronous_code_may_block_for_longer_than_the_lease(controller: LockingController) -> None:
    with genie.session(), genie.lock("l", ttl_s=TTL_S) as lock:
        # The thread of the session renews the lease.
        wait_until_renewed(controller, "l", renewals=2 * LOCK_RENEWALS_PER_TTL + 1)
        assert lock.is_held
        assert not controller.hold_as_another_client("l")
    assert controller.list_locks() == []


def test_synchronous_code_waits_and_times_out(controller: LockingController) -> None:
    with genie.session():
        controller.hold_as_another_client("l")
        lock = genie.lock("l")
        assert not lock.try_acquire_blocking()
        with pytest.raises(DeadlineError, match="another client holds it"):
            lock.acquire_blocking(timeout_s=0.2)
        controller.break_lock("l")
        assert lock.try_acquire_blocking()
        lock.release_blocking()


def test_a_synchronous_block_raises_at_its_end_when_the_lock_was_lost(controller: LockingController) -> None:
    with genie.session():
        with pytest.raises(LockLostError), genie.lock("l", ttl_s=TTL_S) as lock:
            controller.break_lock("l")
            wait_until(lambda: not lock.is_held)
            with pytest.raises(LockLostError):
                lock.check_held()
        with pytest.raises(ValueError, match="own error"), genie.lock("l", ttl_s=TTL_S) as lock:
            controller.break_lock("l")
            wait_until(lambda: not lock.is_held)
            raise ValueError("own error")


def test_a_forked_child_does_not_hold_the_lock(controller: LockingController) -> None:
    with genie.session(), genie.lock("l") as lock:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                lock.release_blocking()
                result = b"released"
            except GenieError:
                result = b"held" if lock.is_held else b"not held"
            os.write(write_end, result)
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read_end, 100) == b"not held"
        os.close(read_end)
        os.close(write_end)
        assert lock.is_held


# --- processes --------------------------------------------------------------------------------


def start_locked_command(ttl_s: float, script: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "genie",
        "lock",
        "run",
        "l",
        "--ttl",
        f"{ttl_s}s",
        "--",
        "sh",
        "-c",
        script,
    ]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_commands_under_a_lock_run_one_after_the_other(controller: LockingController, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"echo begin $GENIE_LOCK_TOKEN >> {log}; sleep 0.1; echo end $GENIE_LOCK_TOKEN >> {log}"
    running = [start_locked_command(15.0, script) for _ in range(3)]
    assert [process.communicate(timeout=60)[1].count("Error") for process in running] == [0, 0, 0]
    assert [process.returncode for process in running] == [0, 0, 0]
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [word for word, _ in lines] == ["begin", "end"] * 3
    tokens = [int(token) for _, token in lines]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 3


def test_a_command_is_ended_after_its_holder_was_paused_for_too_long(
    controller: LockingController, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    process = start_locked_command(1.0, f"touch {started}; exec sleep 60")
    wait_until(started.exists)
    os.kill(process.pid, signal.SIGSTOP)
    token = wait_until(lambda: controller.hold_as_another_client("l"), what="the lease has expired")
    os.kill(process.pid, signal.SIGCONT)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "lost lock 'l' (fencing token" in messages
    assert token > int(messages.partition("fencing token ")[2].partition(")")[0])


# --- the example ------------------------------------------------------------------------------


def test_the_example_shows_that_storage_rejects_a_stale_token(controller: LockingController) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["first: has the lock", "second: has the lock", "second: wrote"]
    assert lines[3].startswith("first: the write was rejected: token ")
    assert lines[4].startswith("first: lost lock 'distributed-locks-example'")
    assert lines[5:] == ["storage: written by second"]
    assert len(EXAMPLE.read_text().splitlines()) <= EXAMPLE_LINES_MAX
