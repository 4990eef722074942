"""The client's side runs on a laptop: importing it needs nothing that only Linux has, and not torch.

There is no Mac at hand, so a child process plays one: what macOS lacks is taken away, then the client's
modules are imported. Third parties come first, because theirs are other files on a Mac.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.sources import ROOT, python_files

# One child each where the order of imports could hide a lack; the command line's parts share one.
CLIENT_MODULES = (
    "genie",
    "genie.cluster",
    "genie.cluster.client",
    "genie.cluster.init",
    "genie.cluster.session",
    ", ".join(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in python_files("genie/cli")
        if path.name != "__init__.py"
    ),
)

PLAY_MACOS = '''
import asyncio, concurrent.futures, ctypes, logging.handlers, multiprocessing.connection, sqlite3, ssl
import cryptography.x509, msgspec, pathspec, psutil, rich.console, rich.progress, rich.table, typer, uvloop
import fcntl, os, resource, select, signal, socket, subprocess, sys, tempfile, time

LACKING = {
    os: """eventfd eventfd_read eventfd_write memfd_create sched_getaffinity sched_setaffinity pidfd_open
        pipe2 setns unshare getrandom copy_file_range splice posix_fadvise posix_fallocate fdatasync waitid
        getresuid setresuid getxattr setxattr P_PIDFD O_TMPFILE O_PATH O_DIRECT""",
    select: "epoll EPOLLIN EPOLLOUT EPOLLET",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR",
    socket: """AF_PACKET AF_NETLINK AF_VSOCK SO_PEERCRED SCM_CREDENTIALS SO_BINDTODEVICE SOCK_CLOEXEC
        SOCK_NONBLOCK TCP_KEEPIDLE TCP_QUICKACK TCP_USER_TIMEOUT TCP_CORK MSG_ZEROCOPY""",
    resource: "prlimit",
    fcntl: "F_ADD_SEALS F_SEAL_WRITE F_SETPIPE_SZ F_OFD_SETLK",
    time: "CLOCK_BOOTTIME CLOCK_TAI",
}
for module, names in LACKING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in ("spwd", "ossaudiodev"):
    sys.modules[name] = None

class NoLibc(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name and ".so" in str(name):
            raise OSError(f"dlopen({name}): no such file")
        super().__init__(name, *args, **kwargs)

ctypes.CDLL = NoLibc
sys.platform = "darwin"
'''


def run_child(code: str, tmp_path: Path) -> str:
    script = tmp_path / "child.py"
    script.write_text(code)
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("modules", CLIENT_MODULES, ids=lambda modules: modules.partition(",")[0])
def test_a_client_module_imports_without_linux(modules: str, tmp_path: Path) -> None:
    run_child(f"{PLAY_MACOS}\nimport {modules}", tmp_path)


def test_every_public_name_loads_without_linux(tmp_path: Path) -> None:
    run_child(f"{PLAY_MACOS}\nimport genie\nfor name in genie.__all__: getattr(genie, name)", tmp_path)


def test_the_torch_device_imports_without_linux(tmp_path: Path) -> None:
    """The backend is what registers the device; it loads when torch asks for it, so it is named here."""
    run_child(f"import torch\n{PLAY_MACOS}\nimport genie.device, genie.device.backend", tmp_path)


def test_the_command_line_lists_its_commands_without_linux(tmp_path: Path) -> None:
    code = f"{PLAY_MACOS}\nfrom genie.cli import main\nsys.exit(main(['--help']))"
    shown = run_child(code, tmp_path)
    missing = [name for name in ("up", "status", "submit", "logs") if name not in shown.split()]
    assert missing == [], shown


@pytest.mark.parametrize("module", ["genie", "genie.cli"])
def test_importing_does_not_load_torch(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}\nprint(sorted({{'torch', 'numpy', 'grpc'}} & set(sys.modules)))"
    assert run_child(code, tmp_path).strip() == "[]"


def test_the_played_laptop_really_lacks_what_linux_has(tmp_path: Path) -> None:
    run_child(f"{PLAY_MACOS}\nassert not hasattr(os, 'eventfd') and not hasattr(select, 'epoll')", tmp_path)
