"""A tour of Genie on this machine, which is what `make run` shows.

    python examples/tour.py

Starts a cluster in a temporary directory on a free port, runs the first lines of the README against it
from another process, submits a job, shows the nodes and the results, stops everything, and looks whether
any process was left. Ends with 0 only if all of that went well. Nothing of yours is read or changed.
The README's lines use the PyTorch device, which needs a C++ compiler once; without one they are left out.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from genie import config
from genie.cluster import local
from genie.errors import GenieError, NativeBuildError
from genie.runtime import native

README = Path(__file__).resolve().parents[1] / "README.md"
STEP_S = 60.0
JOB = "import os; print('a job on', os.uname().nodename, 'in', os.path.basename(os.getcwd()))"


class TourError(Exception):
    """A step did not give what it should."""


def say(line: str) -> None:
    print(line, flush=True)


def snippet() -> str:
    """The first Python lines of the README: what a reader would try first."""
    found = re.search(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    if found is None:
        raise TourError(f"{README} has no Python in it")
    return found[1]


def leave_the_users_settings_alone(folder: Path) -> None:
    """From here on this process and its children see no settings but those of the tour."""
    for name in [name for name in os.environ if name.startswith("GENIE_")]:
        del os.environ[name]
    (folder / "config.toml").touch()
    os.environ["GENIE_CONFIG"] = str(folder / "config.toml")
    os.environ["GENIE_STATE_DIR"] = str(folder / "state")
    os.environ["GENIE_LOG_LEVEL"] = "WARNING"


async def run(what: str, *command: str) -> str:
    """Runs one step in a process of its own, and shows what it prints."""
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(STEP_S):
            said, _ = await process.communicate()
    except TimeoutError:
        raise TourError(f"{what} took more than {STEP_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = said.decode("utf-8", "replace").rstrip()
    say(f"{what} ({time.monotonic() - began_s:.1f} s)")
    for line in text.splitlines():
        say(f"    {line}")
    if process.returncode != 0:
        raise TourError(f"{what} ended with exit code {process.returncode}")
    return text


async def tour(folder: Path) -> None:
    genie = (sys.executable, "-m", "genie")
    settings = config.load({"controller.port": 0})
    async with local.up(settings, progress=say) as cluster:
        assert cluster.cluster is not None
        os.environ["GENIE_MASTER_ADDR"] = cluster.cluster.host
        os.environ["GENIE_MASTER_PORT"] = str(cluster.cluster.port)
        await run("the nodes of the cluster", *genie, "nodes")
        await show_device(folder)
        job = ("submit", "--gpus", "1", "--wait", "--", sys.executable, "-c", JOB)
        result = await run("a job on one accelerator", *genie, *job)
        if "a job on" not in result:
            raise TourError("the output of the job did not come back")
        await run("the jobs so far", *genie, "jobs", "--all")


async def show_device(folder: Path) -> None:
    """The part that needs a compiler, once. Where there is none, that is said, and the tour goes on."""
    try:
        native.Workshop.of_this_installation().check_usable()
    except NativeBuildError as error:
        say(f"the PyTorch device is left out: {error.message}")
        say(f"    {error.hint}")
        return
    program = folder / "snippet.py"
    program.write_text(snippet(), "utf-8")
    result = await run("the lines of the README, from another process", sys.executable, str(program))
    if "1000, 1000" not in result:
        raise TourError("the result of the multiplication did not come back")


def processes_left(folder: Path) -> list[str]:
    """Everything that was started for the tour carries its folder in its arguments or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            told = [*process.cmdline(), *process.environ().values()]
            if any(str(folder) in text for text in told):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        except psutil.Error:
            continue  # gone meanwhile, or somebody else's
    return found


async def guided(folder: Path) -> None:
    """The tour; SIGTERM ends it in order, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await tour(folder)


def main() -> int:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="genie-tour-") as name:
        folder = Path(name)
        leave_the_users_settings_alone(folder)
        failure = ""
        try:
            asyncio.run(guided(folder))
        except (GenieError, TourError, OSError) as error:
            failure = str(error)
        except (KeyboardInterrupt, asyncio.CancelledError):
            failure = "interrupted"
        left = processes_left(folder)
    say("no process is left" if not left else "processes are left:\n    " + "\n    ".join(left))
    if failure or left:
        print(f"the tour failed: {failure or 'processes are left'}", file=sys.stderr)
        return 1
    say(f"the tour took {time.monotonic() - began_s:.1f} s; 'genie up' starts a cluster of your own")
    return 0


if __name__ == "__main__":
    sys.exit(main())
