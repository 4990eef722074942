"""Client modules import on macOS: without Linux-only APIs and without torch.

A child process simulates macOS: it removes the Linux-only APIs, then imports the client modules. Third-party
packages are imported before that, because they have different files on macOS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forkserver import ForkServer
from tests.house.repository_files import ROOT, python_files

# One child per module, so that import order hides nothing; the modules of the command line share one.
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

# Imported once before children are forked; neither Genie nor torch.
THIRD_PARTIES = (
    *("asyncio", "concurrent.futures", "ctypes", "logging.handlers", "multiprocessing.connection", "sqlite3"),
    *("ssl", "cryptography.x509", "msgspec", "pathspec", "psutil", "rich.console", "rich.progress"),
    *("rich.table", "typer", "uvloop"),
)

SIMULATE_MACOS = '''
import ctypes
import fcntl, os, resource, select, signal, socket, subprocess, sys, tempfile, time

LINUX_ONLY = {
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
for module, names in LINUX_ONLY.items():
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


RunChild = Callable[..., str]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(preload=THIRD_PARTIES)
    yield server
    server.close()


@pytest.fixture
def run_code_in_child(server: ForkServer, tmp_path: Path) -> RunChild:
    """Runs code in a child with warnings as errors and returns its output."""
    env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}

    def run(code: str) -> str:
        done = server.run(["-W", "error", "-c", code], timeout=60, cwd=ROOT, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    return run


@pytest.mark.parametrize("modules", CLIENT_MODULES, ids=lambda modules: modules.partition(",")[0])
def test_client_module_imports_without_linux(modules: str, run_code_in_child: RunChild) -> None:
    run_code_in_child(f"{SIMULATE_MACOS}\nimport {modules}")


def test_every_public_name_loads_without_linux(run_code_in_child: RunChild) -> None:
    run_code_in_child(f"{SIMULATE_MACOS}\nimport genie\nfor name in genie.__all__: getattr(genie, name)")


def test_torch_device_imports_without_linux(run_code_in_child: RunChild) -> None:
    """Imports the backend explicitly, which torch loads only on first use."""
    run_code_in_child(f"import torch\n{SIMULATE_MACOS}\nimport genie.device, genie.device.backend")


def test_command_line_lists_its_commands_without_linux(run_code_in_child: RunChild) -> None:
    code = f"{SIMULATE_MACOS}\nfrom genie.cli import main\nsys.exit(main(['--help']))"
    output = run_code_in_child(code)
    missing = [name for name in ("up", "status", "submit", "logs") if name not in output.split()]
    assert missing == [], output


@pytest.mark.parametrize("module", ["genie", "genie.cli"])
def test_importing_genie_does_not_load_torch(module: str, run_code_in_child: RunChild) -> None:
    code = f"import sys, {module}\nprint(sorted({{'torch', 'numpy', 'grpc'}} & set(sys.modules)))"
    assert run_code_in_child(code).strip() == "[]"


def test_simulated_macos_has_no_linux_apis(run_code_in_child: RunChild) -> None:
    run_code_in_child(f"{SIMULATE_MACOS}\nassert not hasattr(os, 'eventfd') and not hasattr(select, 'epoll')")
