"""Blocking calls off the event loop: thread names, timeouts, no queueing behind a stuck call."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from genie.errors import HardwareError
from genie.processes.call_thread import CallThread, DaemonPool
from tests.waiting import until


@pytest.fixture
def call_thread() -> Iterator[CallThread]:
    made = CallThread("genie-test")
    yield made
    made.close()


async def test_calls_run_on_one_thread_with_the_given_name(call_thread: CallThread) -> None:
    names = {
        await call_thread.call(lambda: threading.current_thread().name, what="x", timeout_s=5)
        for _ in range(3)
    }
    assert names == {"genie-test_0"}


async def test_call_raises_the_error_of_the_work(call_thread: CallThread) -> None:
    with pytest.raises(ZeroDivisionError):
        await call_thread.call(lambda: 1 / 0, what="x", timeout_s=5)


async def test_call_passes_on_a_timeout_error_of_the_work(call_thread: CallThread) -> None:
    def work() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await call_thread.call(work, what="x", timeout_s=5)


async def test_stuck_call_times_out_and_later_calls_fail_until_it_returns(
    call_thread: CallThread,
) -> None:
    gate = threading.Event()
    with pytest.raises(HardwareError, match=r"reading: no response within 0.01 s"):
        await call_thread.call(gate.wait, what="reading", timeout_s=0.01)
    with pytest.raises(HardwareError, match="an earlier call has not returned"):
        await call_thread.call(lambda: 1, what="reading", timeout_s=60)
    gate.set()

    async def answers() -> bool:
        try:
            return await call_thread.call(lambda: 1, what="reading", timeout_s=5) == 1
        except HardwareError:
            return False

    await until(answers)


async def test_close_joins_the_thread_and_is_idempotent(call_thread: CallThread) -> None:
    await call_thread.call(lambda: None, what="x", timeout_s=5)
    call_thread.close()
    call_thread.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("genie-test")]


async def test_close_does_not_wait_for_a_stuck_call(
    call_thread: CallThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genie.processes.call_thread.CLOSE_TIMEOUT_S", 0.01)
    gate = threading.Event()
    with pytest.raises(HardwareError):
        await call_thread.call(gate.wait, what="x", timeout_s=0.01)
    call_thread.close()
    gate.set()
    await until(lambda: not [one for one in threading.enumerate() if one.name.startswith("genie-test")])


async def test_close_works_after_a_cancelled_call(call_thread: CallThread) -> None:
    gate = threading.Event()
    started = threading.Event()

    def work() -> None:
        started.set()
        gate.wait(10)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(call_thread.call(work, what="x", timeout_s=5))
        await until(started.is_set)
        task.cancel()
    gate.set()
    call_thread.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("genie-test")]


@pytest.mark.parametrize("turns", range(6))
async def test_cancellation_of_a_call_that_arrives_with_its_result_is_not_lost(
    call_thread: CallThread, turns: int
) -> None:
    """Otherwise a polling loop would never end."""
    answered = threading.Event()

    async def reads_forever() -> None:
        await call_thread.call(answered.set, what="x", timeout_s=5)
        await asyncio.Event().wait()

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        task = group.create_task(reads_forever())
        await asyncio.sleep(0)
        assert answered.wait(10), "blocks the loop on purpose, so that the result is queued on it"
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


def test_stuck_call_does_not_keep_the_interpreter_from_exiting() -> None:
    code = """
        import asyncio, threading
        from genie.errors import HardwareError
        from genie.processes.call_thread import CallThread

        async def main():
            try:
                await CallThread("stuck").call(threading.Event().wait, what="x", timeout_s=0.01)
            except HardwareError as error:
                print(error)

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (0, "x: no response within 0.01 s\n"), done.stderr


def test_pool_starts_threads_on_demand_up_to_its_limit() -> None:
    pool = DaemonPool(2, name="genie-test")
    together = threading.Barrier(2)
    both = [pool.submit(together.wait, 5) for _ in range(2)]
    assert sorted(future.result(5) for future in both) == [0, 1]
    names = {future.result(5) for future in [pool.submit(_current_thread_name) for _ in range(8)]}
    assert names <= {"genie-test_0", "genie-test_1"}
    pool.close(timeout_s=5)
    pool.close(timeout_s=5)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(_current_thread_name)


def _current_thread_name() -> str:
    return threading.current_thread().name
