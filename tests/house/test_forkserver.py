"""A process of the fork server behaves like a new interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.forkserver import ForkServer

TIMEOUT_S = 30.0

DESCRIBE = """
import json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd(), "name": __name__,
    "first path": sys.path[0], "main": sys.modules["__main__"].__dict__ is globals(),
    "signals": {n.name: str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
    "threads": threading.active_count(), "descriptors": sorted(os.listdir("/proc/self/fd")),
}))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(preload=["psutil"])
    yield server
    server.close()


def test_forked_script_has_the_same_environment_as_in_a_new_interpreter(
    server: ForkServer, tmp_path: Path
) -> None:
    arguments = ["-c", DESCRIBE, "one", "2"]
    env = os.environ | {"MARK": "x y"}
    forked = server.run(arguments, timeout=TIMEOUT_S, env=env, cwd=tmp_path)
    fresh = subprocess.run(
        [sys.executable, *arguments], env=env, cwd=tmp_path, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert forked.stderr == ""
    forked_state, fresh_state = (json.loads(done.stdout) for done in (forked, fresh))
    for added in ("LC_CTYPE",):  # set by an interpreter without a locale
        forked_state["env"].pop(added, None), fresh_state["env"].pop(added, None)
    assert forked_state == fresh_state


def test_script_file_runs_as_main_program(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(DESCRIBE)
    for arguments in ([], ["--flag", "x"]):
        done = server.run([str(tmp_path / "shown.py"), *arguments], timeout=TIMEOUT_S)
        result = json.loads(done.stdout)
        assert (result["argv"], result["first path"]) == (
            [str(tmp_path / "shown.py"), *arguments],
            str(tmp_path),
        )
        assert (result["name"], result["main"]) == ("__main__", True)


def test_module_runs_as_main_program_with_its_arguments(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(DESCRIBE)
    done = server.run(["-m", "shown", "--flag"], timeout=TIMEOUT_S, cwd=tmp_path)
    result = json.loads(done.stdout)
    assert (result["name"], result["argv"]) == ("__main__", [str(tmp_path / "shown.py"), "--flag"])


def test_modules_are_preloaded_and_processes_share_no_state(server: ForkServer) -> None:
    code = "import sys; assert 'psutil' in sys.modules; assert not hasattr(sys, 'mark'); sys.mark = 1"
    assert [server.run(["-c", code], timeout=TIMEOUT_S).returncode for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("code", "returncode", "words"),
    [
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no way')", 1, "no way"),
        ("import os; os._exit(3)", 3, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("import atexit, sys; atexit.register(lambda: sys.stderr.write('ended'))", 0, "ended"),
    ],
)
def test_forked_script_exits_like_a_new_interpreter(
    server: ForkServer, code: str, returncode: int, words: str
) -> None:
    done = server.run(["-c", code], timeout=TIMEOUT_S)
    assert done.returncode == returncode
    assert words in done.stderr


def test_warning_options_are_applied(server: ForkServer) -> None:
    code = "import warnings; warnings.warn('old', DeprecationWarning)"
    done = server.run(["-W", "error::DeprecationWarning", "-c", code], timeout=TIMEOUT_S)
    assert done.returncode == 1


def test_streams_and_descriptors_are_inherited(server: ForkServer, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    copy = "import os, sys; os.write(int(sys.argv[1]), sys.stdin.buffer.read())"
    code = f"{copy}; print('out', flush=True); os.write(2, b'err')"
    with (tmp_path / "output").open("wb") as output:
        process = server.popen(
            ["-c", code, str(writing)],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, pass_fds=[writing],
        )  # fmt: skip
    os.close(writing)
    assert process.stdin is not None
    process.stdin.write(b"text")
    process.stdin.close()
    with os.fdopen(reading, "rb") as received:
        assert received.read() == b"text"
    assert process.wait(TIMEOUT_S) == 0
    assert (tmp_path / "output").read_text().split() == ["out", "err"]


def test_pipes_are_read_completely_and_the_context_manager_kills(server: ForkServer) -> None:
    both = "import sys; sys.stdout.write('o' * 200000); sys.stderr.write('e' * 200000)"
    pipe = subprocess.PIPE
    with server.popen(["-c", both], stdout=pipe, stderr=pipe) as process:
        assert process.communicate(timeout=TIMEOUT_S) == (b"o" * 200000, b"e" * 200000)
        assert process.returncode == 0
    with server.popen(["-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=0.1)
    assert process.returncode == -signal.SIGKILL


def test_start_new_session_creates_a_session(server: ForkServer) -> None:
    code = "import os, sys; sys.exit(os.getsid(0) != os.getpid())"
    for alone in (True, False):
        process = server.popen(["-c", code], start_new_session=alone, **devnull_streams())
        assert process.wait(TIMEOUT_S) == int(not alone)


def test_process_is_killed_on_timeout(server: ForkServer) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        server.run(["-c", "import time; time.sleep(600)"], timeout=0.1)
    assert not psutil.Process(server.pid).children()


def test_signals_reach_the_process_but_sigint_does_not_end_the_server(server: ForkServer) -> None:
    process = server.popen(["-c", "import time; time.sleep(600)"], **devnull_streams())
    os.kill(server.pid, signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == -signal.SIGTERM
    assert server.run(["-c", "pass"], timeout=TIMEOUT_S).returncode == 0


def test_close_kills_running_processes() -> None:
    server = ForkServer(preload=[])
    process = server.popen(["-c", "import time; time.sleep(600)"], **devnull_streams())
    child = psutil.Process(process.pid)
    server.close()
    assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert not child.is_running()


def devnull_streams() -> dict[str, int]:
    return {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def test_processes_are_new_interpreters_if_a_preloaded_module_has_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "starts_a_thread.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer(preload=["starts_a_thread"])
    try:
        result = "'starts_a_thread' in sys.modules, os.environ['MARK'], os.getcwd(), *sys.argv"
        code = f"import os, sys; print({result})"
        env = os.environ | {"MARK": "x"}
        done = server.run(["-c", code, "one"], timeout=TIMEOUT_S, env=env, cwd=tmp_path)
    finally:
        server.close()
    assert (done.stdout, done.returncode) == (f"False x {tmp_path} -c one\n", 0), done.stderr
