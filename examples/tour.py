"""A tour of Genie on this machine (`make run`).

    python examples/tour.py

Starts a cluster in a temporary directory on a free port, runs the first Python example of the README in
another process, submits a job, prints nodes and results, stops the cluster, and checks that no process is
left. Exits with code 0 only if every step succeeds. Settings and files of the user are neither read nor
changed. The README example uses the PyTorch device, which requires a C++ compiler on first use; without one
it is skipped.
"""

from __future__ import annotations

import argparse
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
from genie.errors import GenieError, NativeBuildError
from genie.native import libraries
from genie.supervisor import local_cluster

README = Path(__file__).resolve().parents[1] / "README.md"
STEP_S = 60.0
JOB = "import os; print('hello from a job on', os.uname().nodename)"


class TourError(Exception):
    """A step of the tour failed."""


def log(line: str) -> None:
    print(line, flush=True)


def readme_example() -> str:
    """The first Python example of the README."""
    found = re.search(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    if found is None:
        raise TourError(f"{README} contains no Python example")
    return found[1]


def isolate_settings(folder: Path) -> None:
    """Replaces the settings of the user by those of the tour, for this process and its children."""
    for name in [name for name in os.environ if name.startswith("GENIE_")]:
        del os.environ[name]
    (folder / "config.toml").touch()
    os.environ["GENIE_CONFIG"] = str(folder / "config.toml")
    os.environ["GENIE_STATE_DIR"] = str(folder / "state")
    os.environ["GENIE_LOG_LEVEL"] = "WARNING"


async def run(step: str, *command: str) -> str:
    """Runs one step in another process and prints its output."""
    start_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = bytearray()
    assert process.stdout is not None
    try:
        async with asyncio.timeout(STEP_S):
            while data := await process.stdout.read(1 << 16):
                output += data
            await process.wait()
    except TimeoutError:
        log_output(output)
        raise TourError(f"{step}: timed out after {STEP_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    log(f"{step} ({time.monotonic() - start_s:.1f} s)")
    text = log_output(output)
    if process.returncode != 0:
        raise TourError(f"{step}: exit code {process.returncode}")
    return text


def log_output(output: bytes | bytearray) -> str:
    """Prints the output of a step, indented, and returns it."""
    text = output.decode("utf-8", "replace").rstrip()
    for line in text.splitlines():
        log(f"    {line}")
    return text


async def tour(folder: Path) -> None:
    genie = (sys.executable, "-m", "genie")
    settings = config.load({"controller.port": 0})
    async with local_cluster.run_local_cluster(settings, progress=log) as cluster:
        assert cluster.cluster is not None
        os.environ["GENIE_MASTER_ADDR"] = cluster.cluster.host
        os.environ["GENIE_MASTER_PORT"] = str(cluster.cluster.port)
        await run("the nodes of the cluster", *genie, "nodes")
        await show_device(folder)
        job = ("submit", "--gpus", "1", "--wait", "--", sys.executable, "-c", JOB)
        result = await run("a job on one accelerator", *genie, *job)
        if "hello from a job on" not in result:
            raise TourError("the output of the job is missing")
        await run("all jobs", *genie, "jobs", "--all")


async def show_device(folder: Path) -> None:
    """Runs the example of the README on the PyTorch device; skipped with a reason without a compiler."""
    try:
        libraries.BuildCache.of_this_installation().check_torch_libraries_available()
    except NativeBuildError as error:
        log(f"skipping the PyTorch device: {error.message}")
        log(f"    {error.hint}")
        return
    program = folder / "readme_example.py"
    program.write_text(readme_example(), "utf-8")
    result = await run("the example of the README, in another process", sys.executable, str(program))
    if "1000, 1000" not in result:
        raise TourError("the result of the multiplication is missing")


def remaining_processes(folder: Path) -> list[str]:
    """Processes of the tour: all of them have its folder in their arguments or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            texts = [*process.cmdline(), *process.environ().values()]
            if any(str(folder) in text for text in texts):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        except psutil.Error:
            continue  # ended meanwhile, or of another user
    return found


async def run_tour(folder: Path) -> None:
    """Runs the tour; SIGTERM stops it like Ctrl-C."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await tour(folder)


def main() -> int:
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="genie-tour-") as name:
        folder = Path(name)
        isolate_settings(folder)
        failure = ""
        try:
            asyncio.run(run_tour(folder))
        except (GenieError, TourError, OSError) as error:
            failure = str(error)
        except (KeyboardInterrupt, asyncio.CancelledError):
            failure = "interrupted"
        remaining = remaining_processes(folder)
    log("\n    ".join(["processes are still running:", *remaining]) if remaining else "no process is left")
    if failure or remaining:
        print(f"the tour failed: {failure or 'processes are still running'}", file=sys.stderr)
        return 1
    log(f"the tour took {time.monotonic() - start_s:.1f} s; 'genie up' starts a cluster of your own")
    return 0


if __name__ == "__main__":
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=formatter).parse_args()
    sys.exit(main())
