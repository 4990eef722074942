"""The fake NVML from a test's side: build it, script it, and read it through the real pynvml.

The library can only be put in place before pynvml looks for it, so the reading happens in a process
of its own (serve.py). Not for: deciding what a right reading is (tests/hardware/inventory_contract.py).
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


def build(compiler: str, folder: Path) -> Path:
    """Compiles the library into `folder`, under the name that pynvml looks for."""
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
    """One process with the fake in place. The machine has the GPUs that `script` last said."""

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
            [sys.executable, "-m", "tests.fakes.nvml.serve"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def script(self, *lines: str) -> None:
        """Replaces the whole state; the lines are described in nvml.c."""
        fresh = self._state.with_suffix(".new")
        fresh.write_text("".join(f"{line}\n" for line in lines), "ascii")
        fresh.rename(self._state)

    def read(self, held: Iterable[int] = ()) -> tuple[GPUInfo, ...]:
        """A reading of one Inventory that stays open, as an agent keeps it, with 1 CPU accelerator.

        Its process has jobs on the GPUs in `held`.
        """
        return msgspec.json.decode(self._asked(" ".join(["read", *map(str, held)])), type=tuple[GPUInfo, ...])

    def job_pid(self) -> int:
        """A process of a job of that process."""
        return msgspec.json.decode(self._asked("job_pid"), type=int)

    def probe(self) -> list[ProbeResult]:
        return msgspec.json.decode(self._asked("probe"), type=list[ProbeResult])

    def absent_reason(self) -> str:
        return msgspec.json.decode(self._asked("absent_reason"), type=str)

    def close(self) -> None:
        self._process.communicate(timeout=10)
        self._errors.close()

    def _asked(self, command: str) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            raise AssertionError(self._errors.read().decode(errors="replace"))
        return answer
