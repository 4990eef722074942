"""Machines of a fault run as network namespaces on one bridge, in a sandbox that the kernel removes.

    sys.exit(run_in_sandbox(["-m", "tests.faults.run", "--inside"]))     # outside: starts the sandbox
    sys.exit(run_as_init(main))                                          # inside: the first process
    network = MachineNetwork.create()                                    # inside
    address = network.add_machine("s1")

The sandbox is a namespace of each kind: network, process, mount. When its first process ends, for whatever
reason, the kernel kills all processes in it and removes its bridge, its machines and its file systems, so
that nothing is left on the host. Addresses are in 10.231.0.0/24, which exists only inside the sandbox.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

BRIDGE = "faults"
OWN_ADDRESS = "10.231.0.1"
"""Address of the fault run itself, on the bridge: of its clients."""
PROGRAMS = {
    "ip": "iproute2",
    "nft": "nftables",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
"""Programs that a sandbox requires, with their Debian packages."""
_SYSTEM_FOLDERS = "/usr/sbin:/sbin"
_NAMED_NAMESPACES = Path("/run/netns")
_FIRST_MACHINE_NUMBER = 11
_COMMAND_TIMEOUT_S = 30.0
_ETCD_PEER_PORT = 2380


def find_missing_programs() -> list[str]:
    """What a sandbox requires and this machine does not have, each with its Debian package."""
    path = f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}"
    return [
        f"{name} (Debian: {package})"
        for name, package in PROGRAMS.items()
        if shutil.which(name, path=path) is None
    ]


def run_in_sandbox(python_arguments: Sequence[str]) -> int:
    """Runs Python with these arguments as the first process of a new sandbox; returns its exit code."""
    namespaces = ["--net", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child=KILL"]
    # The sandbox also ends when this process is killed.
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, sys.executable, "-P"]
    command += python_arguments
    environ = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}"}
    with subprocess.Popen(command, env=environ) as process:
        try:
            return process.wait()
        except BaseException:
            process.kill()
            raise


def run_as_init(main: Callable[[], int]) -> int:
    """Runs `main` in a child process and returns its exit code. This process, the first one of the sandbox,
    waits for every process whose parent has ended, as an init does."""
    child = os.fork()
    if child == 0:
        os._exit(_run_and_flush(main))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: os.kill(child, received))
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            return os.waitstatus_to_exitcode(status) % 256


def _run_and_flush(main: Callable[[], int]) -> int:
    try:
        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # a process boundary
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class MachineNetwork:
    """One bridge with a machine at each port. Create it inside a sandbox only."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        """Address of each machine, by name."""

    @classmethod
    def create(cls) -> MachineNetwork:
        """Sets up the bridge with OWN_ADDRESS."""
        _NAMED_NAMESPACES.mkdir(parents=True, exist_ok=True)
        run_command("mount", "-t", "tmpfs", "none", str(_NAMED_NAMESPACES))
        run_command("ip", "link", "set", "lo", "up")
        run_command("ip", "link", "add", BRIDGE, "type", "bridge")
        run_command("ip", "addr", "add", f"{OWN_ADDRESS}/24", "dev", BRIDGE)
        run_command("ip", "link", "set", BRIDGE, "up")
        return cls()

    def add_machine(self, name: str) -> str:
        """Adds a machine with an interface on the bridge, and returns its address."""
        address = f"10.231.0.{_FIRST_MACHINE_NUMBER + len(self.addresses)}"
        port = _bridge_port_of(name)
        run_command("ip", "netns", "add", name)
        run_command("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        run_command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run_command("ip", "-n", name, "link", "set", device, "up")
        run_command("ip", "link", "set", port, "master", BRIDGE, "up")
        self._run_nft(name, "add table ip faults")
        hook = "{ type filter hook input priority 0; }"
        self._run_nft(name, f"add chain ip faults input {hook}")
        self.addresses[name] = address
        return address

    def command_prefix(self, name: str) -> list[str]:
        """What to put before a command so that it runs on the machine."""
        return ["nsenter", f"--net={_NAMED_NAMESPACES / name}", "--"]

    def list_processes(self, name: str) -> list[int]:
        """Process IDs of all processes on the machine, by their network namespace."""
        wanted = (_NAMED_NAMESPACES / name).stat().st_ino
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and (entry / "ns" / "net").stat().st_ino == wanted:
                    found.append(int(entry.name))
            except OSError:  # it has ended
                continue
        return found

    # --- faults of the network ------------------------------------------------------------------

    def unplug(self, name: str) -> None:
        """Removes the machine from the bridge: silence in both directions, and its own link stays up."""
        run_command("ip", "link", "set", _bridge_port_of(name), "nomaster")

    def plug_in(self, name: str) -> None:
        run_command("ip", "link", "set", _bridge_port_of(name), "master", BRIDGE)

    def drop_packets(self, *, source: str, target: str, etcd_peers_only: bool = False) -> None:
        """Drops what `target` receives from `source`. The other direction still works."""
        ports = f"tcp dport {_ETCD_PEER_PORT} " if etcd_peers_only else ""
        self._add_drop_rule(target, f"ip saddr {self.addresses[source]} {ports}drop")
        if etcd_peers_only:
            self._add_drop_rule(target, f"ip saddr {self.addresses[source]} tcp sport {_ETCD_PEER_PORT} drop")

    def drop_packets_at_random(self, target: str, *, percent: int) -> None:
        """Drops this share of all packets that `target` receives from other machines."""
        self._add_drop_rule(target, f'iifname "eth0" numgen random mod 100 < {percent} drop')

    def heal(self) -> None:
        """Ends all faults of the network."""
        for name in self.addresses:
            self.plug_in(name)
            self._run_nft(name, "flush chain ip faults input")

    def _add_drop_rule(self, name: str, rule: str) -> None:
        self._run_nft(name, f"add rule ip faults input {rule}")

    def _run_nft(self, name: str, statement: str) -> None:
        run_command(*self.command_prefix(name), "nft", statement)


def _bridge_port_of(name: str) -> str:
    """Name of the machine's interface on the bridge."""
    return f"to-{name}"


def run_command(*arguments: str) -> None:
    """Runs a short command; raises an error with its output if it fails."""
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} failed: {(done.stderr or done.stdout).strip()}")
