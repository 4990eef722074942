"""Builds and configures the fake NVML library, and reads it through the real pynvml.

The library must be installed before pynvml loads it, so a separate process reads it (reader_process.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from genie.hardware import ProbeResult
from genie.model.node import GPUInfo

SOURCE = Path(__file__).with_name("nvml.c")
ROOT = Path(__file__).parents[3]


def compile_fake_nvml(compiler: str, folder: Path) -> Path:
    """Compiles the library into `folder` with the file name that pynvml loads."""
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [
            compiler,
            "-std=c11",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-o",
            library,
            SOURCE,
        ],
        check=True,
    )
    return library


class FakeNvml:
    """A process with the fake library. Its GPUs are those of the last call of `script`."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._state = folder / "nvml.state"
        self._errors = (folder / "stderr").open("w+b")
        self.script()
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(library.parent),
            "FAKE_NVML_STATE": str(self._state),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.nvml.reader_process"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def script(self, *lines: str) -> None:
        """Replaces the state of the fake; nvml.c documents the lines."""
        fresh = self._state.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in lines), "ascii")
        fresh.rename(self._state)

    def read(self, held: Iterable[int] = ()) -> tuple[GPUInfo, ...]:
        """Reads an Inventory with 1 CPU accelerator that stays open, as in an agent.

        The process has jobs on the GPUs in `held`.
        """
        return msgspec.json.decode(self._send(" ".join(["read", *map(str, held)])), type=tuple[GPUInfo, ...])

    def job_pid(self) -> int:
        """PID of a process of a job."""
        return msgspec.json.decode(self._send("job_pid"), type=int)

    def probe(self) -> list[ProbeResult]:
        return msgspec.json.decode(self._send("probe"), type=list[ProbeResult])

    def no_nvidia_gpu_reason(self) -> str:
        return msgspec.json.decode(self._send("no_nvidia_gpu_reason"), type=str)

    def close(self) -> None:
        self._process.communicate(timeout=10)
        self._errors.close()

    def _send(self, command: str) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            self._errors.seek(0)
            raise AssertionError(self._errors.read().decode(errors="replace"))
        return reply
