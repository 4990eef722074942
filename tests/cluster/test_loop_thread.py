"""The session's own loop: work from other threads always gets an answer, and the end is in order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from genie.cluster.loop_thread import LoopThread
from genie.errors import NotInitializedError


class Main:
    """A main coroutine that waits, and says when it ended."""

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
def main() -> Main:
    return Main()


@pytest.fixture
def thread(main: Main) -> Iterator[LoopThread]:
    made = LoopThread(name="test-loop")
    made.start(main)
    assert main.running.wait(5)
    yield made
    made.cancel()
    assert made.join(timeout_s=5)
    assert made.finished.done()


def test_work_of_other_threads_runs_on_the_loop(thread: LoopThread) -> None:
    async def name() -> str:
        return threading.current_thread().name

    assert thread.submit(name).result(5) == "test-loop"


def test_an_error_goes_to_who_handed_the_work_in_and_no_further(thread: LoopThread) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def work() -> int:
        return 1

    with pytest.raises(ZeroDivisionError):
        thread.submit(fail).result(5)
    assert thread.submit(work).result(5) == 1


def test_work_under_way_at_the_end_is_cancelled_and_its_owner_told(thread: LoopThread, main: Main) -> None:
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            main.ended.append("work")

    future = thread.submit(work)
    assert begun.wait(5)
    thread.call_soon(main.stop.set)
    with pytest.raises(NotInitializedError, match="ended"):
        future.result(5)
    thread.finished.result(5)
    assert main.ended == ["main", "work"]


def test_work_handed_in_after_the_end_is_refused_at_once(thread: LoopThread) -> None:
    thread.cancel()
    thread.finished.result(5)

    async def work() -> None:
        raise AssertionError("it must not run")

    with pytest.raises(NotInitializedError):
        thread.submit(work).result(0)
    thread.call_soon(lambda: pytest.fail("it must not run"))


def test_many_threads_handing_work_in_while_it_ends_all_get_an_answer(thread: LoopThread) -> None:
    answers: list[str] = []

    async def work() -> str:
        return "done"

    def hand_in() -> None:
        for _ in range(50):
            try:
                answers.append(thread.submit(work).result(5))
            except NotInitializedError:
                answers.append("ended")

    users = [threading.Thread(target=hand_in) for _ in range(8)]
    for user in users:
        user.start()
    thread.cancel()
    for user in users:
        user.join(10)
    assert len(answers) == 400
    assert set(answers) <= {"done", "ended"}


def test_threads_of_blocking_calls_are_gone_with_the_loop(thread: LoopThread) -> None:
    async def block() -> str:
        return await asyncio.to_thread(lambda: threading.current_thread().name)

    name = thread.submit(block).result(5)
    thread.cancel()
    thread.finished.result(5)
    assert name not in [other.name for other in threading.enumerate()]


def test_a_call_that_is_stuck_does_not_keep_the_interpreter_from_ending() -> None:
    code = """
        import asyncio, threading
        from genie.cluster.loop_thread import LoopThread

        async def main():
            await asyncio.to_thread(threading.Event().wait)

        LoopThread(name="stuck").start(main)
        print("over")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


def test_cancelling_again_does_not_cut_the_cleaning_up_short() -> None:
    steps: list[str] = []
    cleaning = threading.Event()

    async def main() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaning.set()
            await asyncio.to_thread(cancelled_again.wait, 5)
            steps.append("clean")

    cancelled_again = threading.Event()
    thread = LoopThread(name="test-loop")
    thread.start(main)
    begun = threading.Event()
    thread.call_soon(begun.set)
    assert begun.wait(5)
    thread.cancel()
    assert cleaning.wait(5)
    thread.cancel()
    thread.call_soon(cancelled_again.set)
    thread.finished.result(5)
    assert thread.join(timeout_s=5)
    assert steps == ["clean"]
