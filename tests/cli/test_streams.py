"""Unwritable output and arguments that are not text are readable errors, never tracebacks."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from genie.cli import output

GENIE = [sys.executable, "-m", "genie"]


def _run_genie(*arguments: str | bytes, **how: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GENIE, *arguments], text=True, timeout=60, **how)  # type: ignore[call-overload, no-any-return]


def test_argument_that_is_not_utf8_is_named() -> None:
    done = _run_genie("submit", "--", b"\xff", capture_output=True)
    assert done.returncode == 2
    assert "argument 3 is not UTF-8 text" in done.stderr
    assert "internal error" not in done.stderr


def test_closed_standard_output_prints_no_error() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$0" -m genie config show >&-', sys.executable],
        text=True,
        timeout=60,
        stderr=subprocess.PIPE,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full (Linux)")
def test_full_disk_is_reported() -> None:
    with Path("/dev/full").open("w") as full:
        done = _run_genie("config", "show", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert "could not write the output: No space left" in done.stderr
    assert "internal error" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full (Linux)")
@pytest.mark.parametrize(("arguments", "code"), [(("config", "show"), 0), (("--nope",), 2)])
def test_closed_standard_error_does_not_change_the_exit_code(arguments: tuple[str, ...], code: int) -> None:
    script = (
        "import sys; from genie.cli import main, output; "
        "output.print_message('x'); sys.exit(main(sys.argv[1:]))"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], timeout=60, stdout=subprocess.DEVNULL, stderr=full
        )
    assert done.returncode == code


def test_progress_on_a_closed_terminal_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    terminal = os.fdopen(theirs, "w")
    monkeypatch.setattr(sys, "stderr", terminal)
    line = output.ProgressLine()
    os.close(ours)
    line("sending", 1, 2)
    line.close()
    with pytest.raises(OSError, match="Input/output error"):
        terminal.close()


def test_long_argument_is_truncated_in_errors() -> None:
    done = _run_genie("x" * 100_000, capture_output=True)
    assert done.returncode == 2
    assert "no such command 'xxx" in done.stderr
    assert len(done.stderr) < 1000
