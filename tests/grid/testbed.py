"""A testbed of real SSH servers: each node is an sshd in its own mount and UTS namespaces.

A node has its own address (127.0.77.N), host key, home directory, host name, and fake nvidia-smi; with a fake
NVML (tests/fakes/nvml) also a driver library that returns the same values. Processes of a node are found by
their namespace and killed with it. A test that creates a testbed is skipped without root, permission to
create namespaces, or Debian's openssh-server.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import asyncssh

from tests.needs import require_namespaces, require_program
from tests.ports import free_port

KEX = "curve25519-sha256,curve25519-sha256@libssh.org"
"""The default key exchange of OpenSSH costs 0.1 s of CPU time per connection."""
_START_TIMEOUT_S = 20.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NVIDIA_SMI = """#!/bin/sh
# Prints the lines of a file for any --query-gpu; fails without the file.
if [ -e "{folder}/smi-hangs" ]; then exec sleep 3600; fi
case $1 in *throttle*) lines=reasons.csv ;; *) lines=gpus.csv ;; esac
while read -r line; do echo "$line"; done < "{folder}/$lines"
"""
_NVML_KEYS = ("name", "uuid", "memory_total", "memory_used", "utilization", "temperature", "ecc")
"""Names of the columns after the index in the fake NVML."""
_NVML_ERRORS = {"[Unknown Error]": "!999"}
_NOT_SUPPORTED = "!3"
_LOST = "!15"


class SshNode:
    """One server. `name` is its alias in the testbed's ssh_config and its host name."""

    def __init__(
        self, folder: Path, *, number: int, port: int, kept: Sequence[Path] = (), nvml: Path | None = None
    ) -> None:
        self._sshd = require_program("sshd", package="openssh-server")
        self.folder = folder
        self._nvml = nvml
        self.name = f"gpu{number}"
        self.address = f"127.0.77.{number}"
        self.port = port
        self.home = folder / "home"
        self.bin = folder / "bin"
        self.kept = [path for path in kept if path.is_relative_to("/root")]
        self.login_shell: Path | None = None
        """Login shell of root on this node from the next start on; None is that of this machine."""
        self.path = f"{self.bin}:{_PATH}"
        """PATH of a login; set by `prepare`."""
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self, authorized: Path) -> None:
        self.home.mkdir(parents=True)
        self.bin.mkdir()
        (self.folder / "lib").mkdir()
        self.nvml(self._nvml)
        self.write_host_key()
        self.gpus(0)
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress {self.address}\nHostKey {self.folder}/host_key\n"
            f"PidFile {self.folder}/sshd.pid\nAuthorizedKeysFile {authorized}\nKexAlgorithms {KEX}\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            "UsePAM no\nUseDNS no\nStrictModes no\nPrintMotd no\nPrintLastLog no\nMaxStartups 500\n"
            f"MaxSessions 100\nSubsystem sftp internal-sftp\nSetEnv PATH={self.path} "
            f"LD_LIBRARY_PATH={self.folder}/lib FAKE_NVML_STATE={self.folder}/nvml.state\n"
        )

    def write_host_key(self) -> None:
        """Write a new key. A running server uses the old one until it is restarted."""
        key = asyncssh.generate_private_key("ssh-ed25519")
        path = self.folder / "host_key"
        path.write_bytes(key.export_private_key())
        path.chmod(0o600)
        self.public_key = key.export_public_key().decode().strip()

    def nvml(self, library: Path | None) -> None:
        """Install the driver library. None installs an empty file that cannot be loaded, which also hides a
        real one of this machine."""
        path = self.folder / "lib" / "libnvidia-ml.so.1"
        path.unlink(missing_ok=True)
        if library is None:
            path.touch()
        else:
            path.symlink_to(library)

    def gpus(self, count: int, *, lines: Sequence[str] = (), reasons: Sequence[str] = ()) -> None:
        """Set the GPUs of nvidia-smi and NVML; 0 removes nvidia-smi. `lines` replaces the default output.

        `reasons` are lines of a GPU index and its throttle reasons as a hexadecimal mask.
        """
        program = self.bin / "nvidia-smi"
        program.unlink(missing_ok=True)
        if not count and not lines:
            return
        default = [
            f"{i}, NVIDIA H100 80GB HBM3, GPU-{self.name}-{i}, 81559, {i * 1000}, {i * 7}, {30 + i}, 0"
            for i in range(count)
        ]
        (self.folder / "gpus.csv").write_text("\n".join([*(lines or default), ""]))
        (self.folder / "reasons.csv").write_text("\n".join([*reasons, ""]))
        self.nvml_state(convert_to_nvml_state(lines or default, reasons))
        program.write_text(_NVIDIA_SMI.format(folder=self.folder))
        program.chmod(0o755)

    def nvml_state(self, lines: Sequence[str]) -> None:
        """Replace the state of NVML only."""
        temporary = self.folder / "nvml.new"
        temporary.write_text("\n".join([*lines, ""]))
        temporary.rename(self.folder / "nvml.state")

    def start(self, *, before: str = "") -> None:
        """Start the server. `before` is a shell command line that runs in the node's namespace first."""
        targets = [(path, self.home / path.relative_to("/root")) for path in self.kept]
        binds = "".join(f"mkdir -p {target} && mount --bind {path} {target} && " for path, target in targets)
        if self.login_shell is not None:
            binds += f"{self._passwd(self.login_shell)} && "
        script = (
            f"hostname {self.name} && {binds}mount --rbind {self.home} /root && {before or 'true'} && "
            f"exec {self._sshd} -D -e -f {self.folder}/sshd_config 2>>{self.folder}/sshd.log"
        )
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _passwd(self, shell: Path) -> str:
        known = Path("/etc/passwd").read_text()
        passwd = self.folder / "passwd"
        passwd.write_text(re.sub(r"^(root:.*:)[^:]*$", rf"\1{shell}", known, flags=re.MULTILINE))
        return f"mount --bind {passwd} /etc/passwd"

    def wait_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((self.address, self.port), 1) as probe,
            ):
                if probe.recv(4) == b"SSH-":
                    return
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name} did not start: {(self.folder / 'sshd.log').read_text()}")
            time.sleep(0.005)

    def stop(self) -> None:
        """Kill the server and all processes in its namespace."""
        process, self._process = self._process, None
        if process is None:
            return
        self._signal_all(process.pid, signal.SIGSTOP)  # none can start another while they are killed
        for pid in self._pids(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)

    def restart(self, *, before: str = "") -> None:
        self.stop()
        self.start(before=before)
        self.wait_ready()

    def kill_connections(self) -> None:
        """Kill all connections without a disconnect message; the server keeps listening."""
        for pid in self._sessions():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Stop all processes of the node with SIGSTOP, so that it does not respond."""
        assert self._process is not None
        pids = self._signal_all(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _signal_all(self, root: int, number: signal.Signals) -> set[int]:
        """Signal all processes of the node, including those that are started meanwhile. Return their PIDs."""
        signalled: set[int] = set()
        while new := set(self._pids(root)) - signalled:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled |= new
        return signalled

    def run(self, command: str) -> str:
        """Run a shell command line in the node's namespaces, as root."""
        assert self._process is not None
        done = subprocess.run(
            ["nsenter", f"--target={self._process.pid}", "--mount", "--uts", "sh", "-c", command],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def processes(self, text: str) -> list[int]:
        """Return the PIDs on the node whose command line contains `text`."""
        assert self._process is not None
        found = []
        for pid in self._pids(self._process.pid):
            with contextlib.suppress(OSError):
                if text.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "):
                    found.append(pid)
        return found

    def _sessions(self) -> list[int]:
        assert self._process is not None
        found = []
        for pid in self._pids(self._process.pid):
            with contextlib.suppress(OSError):
                if pid != self._process.pid and Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                    found.append(pid)
        return found

    def _pids(self, root: int) -> list[int]:
        try:
            space = Path(f"/proc/{root}/ns/mnt").readlink()
        except OSError:
            return []
        if space == Path("/proc/self/ns/mnt").readlink():
            return [root]  # unshare has not created the namespace yet
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "ns/mnt").readlink() == space:
                    found.append(int(entry.name))
        return found


class SshTestbed:
    """Several nodes, a client key that all of them accept, and the files for OpenSSH and the grid.

    `kept` are directories of this machine that stay visible on all nodes, even below /root. `nvml` is the
    compiled fake NVML; without it nodes only have nvidia-smi.
    """

    def __init__(
        self, folder: Path, *, count: int, kept: Sequence[Path] = (), nvml: Path | None = None
    ) -> None:
        require_namespaces("mount", "uts")
        require_program("nsenter", package="util-linux")
        self.folder = folder
        self.key = folder / "id_ed25519"
        self.ssh_config = folder / "ssh_config"
        self.known_hosts = folder / "known_hosts"
        port = free_port()
        self.nodes = [
            SshNode(folder / f"node{n}", number=n, port=port, kept=kept, nvml=nvml)
            for n in range(1, count + 1)
        ]

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        key = asyncssh.generate_private_key("ssh-ed25519")
        self.key.write_bytes(key.export_private_key())
        self.key.chmod(0o600)
        authorized = self.folder / "authorized_keys"
        authorized.write_bytes(key.export_public_key())
        try:
            for node in self.nodes:
                node.prepare(authorized)
                node.start()
            self.write_known_hosts()
            self.write_ssh_config()
            for node in self.nodes:
                node.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, name: str) -> SshNode:
        return next(node for node in self.nodes if node.name == name)

    def write_known_hosts(self, *, without: Sequence[str] = ()) -> None:
        self.known_hosts.write_text(
            "".join(
                f"[{node.address}]:{node.port} {node.public_key}\n"
                for node in self.nodes
                if node.name not in without
            )
        )

    def write_ssh_config(self, *, ports: dict[str, int] | None = None, more: str = "") -> None:
        """`ports` overrides the port of some nodes, for a proxy."""
        self.ssh_config.write_text(
            "".join(
                f"Host {node.name}\n  HostName {node.address}\n"
                f"  Port {(ports or {}).get(node.name, node.port)}\n"
                for node in self.nodes
            )
            + f"Host *\n  User root\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  KexAlgorithms {KEX}\n{more}"
        )

    def grid_yaml(self, *, nodes: Sequence[str] | None = None, more: str = "") -> str:
        names = nodes if nodes is not None else [node.name for node in self.nodes]
        return "nodes:\n" + "".join(f"  - {name}\n" for name in names) + more


def convert_to_nvml_state(lines: Sequence[str], reasons: Sequence[str] = ()) -> list[str]:
    """Convert lines of nvidia-smi to the state of the fake NVML. An invalid line becomes a lost GPU."""
    found = [f"count={len(lines)}"]
    for index, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split(",")]
        if not cells[0].isdigit():
            found.append(f"{index}.handle={_LOST}")
            continue
        cells += [""] * (1 + len(_NVML_KEYS) - len(cells))
        for key, cell in zip(_NVML_KEYS, cells[1:], strict=True):
            found.append(f"{index}.{key}={_convert_to_nvml_value(key, cell)}")
    for index, mask in (line.split(",") for line in reasons):
        found.append(f"{index.strip()}.clocks={int(mask, 16)}")
    return found


def _convert_to_nvml_value(key: str, cell: str) -> str:
    if cell.isdigit():
        return str(int(cell) << 20) if key.startswith("memory") else cell
    return cell if key in ("name", "uuid") else _NVML_ERRORS.get(cell, _NOT_SUPPORTED)
