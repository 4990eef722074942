"""`python -m genie.controller`: one controller as a process, until SIGTERM or SIGINT.

Says what it does in the log on standard error and nothing on standard output. A failure that
Genie knows ends it with one line and that error's exit code. Not for: starting it in the
background (cluster/local.py).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from genie import config
from genie.controller.admission import check_bind, check_times
from genie.controller.controller import DIRECTORY, Controller
from genie.controller.store.open import open_store
from genie.errors import GenieError, LeadershipError
from genie.runtime import files
from genie.runtime.building import build_ahead, command_for
from genie.runtime.clock import SystemClock
from genie.runtime.network import TcpNetwork
from genie.runtime.placers import why_plain
from genie.runtime.tasks import file_thread, loop_factory, tune_for_serving
from genie.telemetry import log

_log = logging.getLogger("genie.controller")


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    try:
        settings = config.load(_parsed(arguments))
        log.configure(settings.log)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run(settings))
    except GenieError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


async def _run(settings: config.Settings) -> None:
    check_bind(settings.controller)
    check_times(settings.controller)
    clock = SystemClock()
    directory = files.make_private_directory(settings.paths.state_dir / DIRECTORY)
    with _only_one(directory), file_thread("genie-blobs") as offload:
        store = await open_store(settings.controller.store, state_dir=directory, clock=clock)
        try:
            controller = Controller(
                settings.controller,
                state_dir=settings.paths.state_dir,
                store=store,
                network=TcpNetwork(),
                clock=clock,
                name=_own_name(directory),
                offload=offload,
            )
            await _until_signal(controller, compile_ahead=settings.controller.compile_ahead)
        finally:
            await store.close()


async def _until_signal(controller: Controller, *, compile_ahead: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    failure: GenieError | None = None
    tune_for_serving()
    async with asyncio.TaskGroup() as group:

        async def serve() -> None:
            nonlocal failure
            try:
                await controller.run()
            except GenieError as error:
                failure = error
                stop.set()

        serving = group.create_task(serve())
        compiling = group.create_task(compile_beside(controller, is_wanted=compile_ahead))
        await stop.wait()
        _log.info("stopping")
        serving.cancel()
        compiling.cancel()
    if failure is not None:
        raise failure


async def compile_beside(
    controller: Controller, *, is_wanted: bool, command: Sequence[str] = command_for("genie_scheduler")
) -> None:
    """Where the scheduler's library is still to be compiled: says so, and does it. Plain Python decides
    meanwhile."""
    if not (why := why_plain()):
        return
    _log.warning("%s", why)
    if not is_wanted:
        _log.info("'%s' compiles it", shlex.join(("python", *command_for("genie_scheduler")[1:])))
    elif await build_ahead(command, what="the scheduler's library", without="it could not be compiled"):
        controller.use_compiled()


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Two controllers on one state directory would share a name, a CA and a store."""
    lock = files.FileLock.try_take(directory / "controller.lock")
    if lock is None:
        raise LeadershipError(
            f"another controller runs on {directory}",
            hint="stop it with 'genie down', or set GENIE_STATE_DIR to another place",
        )
    try:
        yield
    finally:
        lock.release()


def _own_name(directory: Path) -> str:
    """The same in every life of the controller that owns this directory."""
    path = directory / "name"
    if not path.exists():
        files.write_private(path, os.urandom(8).hex().encode())
    return path.read_text("utf-8").strip()


def _parsed(arguments: list[str] | None) -> dict[str, object]:
    parser = argparse.ArgumentParser(
        prog="python -m genie.controller", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--bind", help="address to listen on")
    parser.add_argument("--port", help="port to listen on; 0 takes a free one")
    parser.add_argument("--store", help="sqlite, sqlite:/PATH, etcd://... or etcds://...")
    parser.add_argument("--state-dir", help="where keys, tokens and the embedded store are")
    parser.add_argument("--tls", choices=("on", "off"), help="off is allowed on loopback only")
    given = vars(parser.parse_args(arguments))
    state_dir = given.pop("state_dir")
    return {f"controller.{key}": value for key, value in given.items()} | {"paths.state_dir": state_dir}


if __name__ == "__main__":
    sys.exit(main())
