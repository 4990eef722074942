"""The event loop thread: submitted work always completes, also when the loop ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from genie.cluster.lifecycle.loop_thread import LoopThread
from genie.errors import NotInitializedError


class MainCoroutine:
    """A main coroutine that waits and records its end."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.ended: list[str] = []
        self.stop = asyncio.Event()

    async def __call__(self) -> None:
        self.running.set()
        try:
            await self.stop.wait()
        finally:
            self.ended.append("main")


@pytest.fixture
def main_coroutine() -> MainCoroutine:
    return MainCoroutine()


@pytest.fixture
def loop_thread(main_coroutine: MainCoroutine) -> Iterator[LoopThread]:
    made = LoopThread(name="test-loop")
    made.start(main_coroutine)
    assert main_coroutine.running.wait(20)
    yield made
    made.cancel_main_task()
    assert made.join(timeout_s=20)
    assert made.finished.done()


def test_submitted_work_runs_on_the_loop(loop_thread: LoopThread) -> None:
    async def get_thread_name() -> str:
        return threading.current_thread().name

    assert loop_thread.submit(get_thread_name).result(20) == "test-loop"


def test_error_of_submitted_work_is_set_on_its_future(loop_thread: LoopThread) -> None:
    async def raise_error() -> None:
        raise ZeroDivisionError

    async def return_one() -> int:
        return 1

    with pytest.raises(ZeroDivisionError):
        loop_thread.submit(raise_error).result(20)
    assert loop_thread.submit(return_one).result(20) == 1


def test_running_work_is_cancelled_at_the_end(loop_thread: LoopThread, main_coroutine: MainCoroutine) -> None:
    begun = threading.Event()

    async def wait_until_cancelled() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            main_coroutine.ended.append("work")

    future = loop_thread.submit(wait_until_cancelled)
    assert begun.wait(20)
    loop_thread.call_soon(main_coroutine.stop.set)
    with pytest.raises(NotInitializedError, match="ended"):
        future.result(20)
    loop_thread.finished.result(20)
    assert main_coroutine.ended == ["main", "work"]


def test_work_submitted_after_the_end_is_rejected(loop_thread: LoopThread) -> None:
    loop_thread.cancel_main_task()
    loop_thread.finished.result(20)

    async def fail_if_run() -> None:
        raise AssertionError("it must not run")

    with pytest.raises(NotInitializedError):
        loop_thread.submit(fail_if_run).result(0)
    loop_thread.call_soon(lambda: pytest.fail("it must not run"))


def test_all_futures_complete_when_the_loop_ends(loop_thread: LoopThread) -> None:
    answers: list[str] = []

    async def return_done() -> str:
        return "done"

    def submit_work_repeatedly() -> None:
        for _ in range(50):
            try:
                answers.append(loop_thread.submit(return_done).result(20))
            except NotInitializedError:
                answers.append("ended")

    users = [threading.Thread(target=submit_work_repeatedly) for _ in range(8)]
    for user in users:
        user.start()
    loop_thread.cancel_main_task()
    for user in users:
        user.join(60)
    assert len(answers) == 400
    assert set(answers) <= {"done", "ended"}


def test_threads_of_blocking_calls_end_with_the_loop(loop_thread: LoopThread) -> None:
    async def run_blocking_call_and_get_thread_name() -> str:
        return await asyncio.to_thread(lambda: threading.current_thread().name)

    name = loop_thread.submit(run_blocking_call_and_get_thread_name).result(20)
    loop_thread.cancel_main_task()
    loop_thread.finished.result(20)
    assert name not in [other.name for other in threading.enumerate()]


def test_stuck_call_does_not_keep_the_interpreter_from_exiting() -> None:
    code = """
        import asyncio, threading
        from genie.cluster.lifecycle.loop_thread import LoopThread

        async def main():
            await asyncio.to_thread(threading.Event().wait)

        LoopThread(name="stuck").start(main)
        print("over")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


def test_second_cancel_does_not_interrupt_the_cleanup() -> None:
    steps: list[str] = []
    cleaning = threading.Event()

    async def main_with_slow_cleanup() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaning.set()
            await asyncio.to_thread(cancelled_again.wait, 5)
            steps.append("clean")

    cancelled_again = threading.Event()
    thread = LoopThread(name="test-loop")
    thread.start(main_with_slow_cleanup)
    begun = threading.Event()
    thread.call_soon(begun.set)
    assert begun.wait(20)
    thread.cancel_main_task()
    assert cleaning.wait(20)
    thread.cancel_main_task()
    thread.call_soon(cancelled_again.set)
    thread.finished.result(20)
    assert thread.join(timeout_s=20)
    assert steps == ["clean"]
