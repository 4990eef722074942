"""Runs small test suites in child pytest processes with the conftest.py of this repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.house.repository_files import ROOT

SHARED = """
import pytest

def not_here():
    pytest.skip("needs another machine", allow_module_level=True)
"""

WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0")


@dataclass(frozen=True)
class SuiteOutcome:
    status: int
    text: str

    def part(self, heading: str) -> str:
        """Text between this heading and the next."""
        after = self.text.partition(f" {heading} ")[2].partition("\n")[2]
        return after.partition("\n__")[0].partition("\n==")[0]

    def named(self, verdict: str) -> list[str]:
        """Names of the tests that are listed as FAILED or ERROR."""
        return sorted(re.findall(rf"^{verdict} \S+::(\w+)", self.text, re.MULTILINE))


def run_suite(folder: Path, files: dict[str, str], options: tuple[str, ...], **environ: str) -> SuiteOutcome:
    """Runs these files. The temporary folder of the run is `folder`/b."""
    done = subprocess.run(
        write_suite_and_make_command(folder, files, options),
        cwd=folder,
        env=make_suite_environment(folder, **environ),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return SuiteOutcome(done.returncode, done.stdout + done.stderr)


def write_suite_and_make_command(folder: Path, files: dict[str, str], options: Iterable[str]) -> list[str]:
    """Writes the files and returns the command that runs them."""
    for name, code in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)
    (folder / "shared.py").write_text(SHARED)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", *options]
    command += ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += [f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={folder}"]
    return [*command, f"--basetemp={folder / 'b'}", *files]


def make_suite_environment(folder: Path, **environ: str) -> dict[str, str]:
    """Environment of the child, without the variables of this run."""
    own = ("GENIE_", "COV_", "PYTEST_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**clean, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **environ}
