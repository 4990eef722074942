"""`setup`: the same Python environment on all nodes, REMOTE_ROOT/grid_env, with the packages asked for.

`wish()` turns what was asked for into one value with a stamp; a node whose stamp is the same is left as
it is. Wheels can be sent along for nodes without a network.

Not for: what runs on the nodes (remote/environment.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genie.errors import GenieError, NodeRefusedError, TransportError, UsageError
from genie.grid.grid_file import GridFile, Say
from genie.grid.login_shell import check_login_shell
from genie.grid.ssh_pool import Link, SshPool
from genie.runtime.tasks import all_of

INSTALL_S = 3600.0
_LOOK_S = 60.0
_PUT_S = 120.0
_MARGIN_S = 30.0
_PROGRESS_S = 1.0
_PART_BYTES = 4 << 20
_LOG = ".grid/setup/setup.log"
_PACKAGES_MAX = 1000
_WHEELS_MAX = 2000
_REQUIREMENTS_BYTES_MAX = 1 << 20
_ELSEWHERE = re.compile(r"\s*(-r|-c|-e|--requirement|--constraint|--editable|-f|--find-links|\.{1,2}/|file:)")


@dataclass(frozen=True)
class Wish:
    """What every node is to have. `wheels` are files of this machine by name, with their hashes."""

    requirements: str = ""
    packages: tuple[str, ...] = ()
    python: str = "python3"
    system_packages: bool = False
    wheels: tuple[tuple[str, str, Path], ...] = ()

    def stamp(self, python_version: str) -> dict[str, Any]:
        """Equal for two wishes that would install the same with the same Python."""
        asked = repr(
            (
                self.requirements,
                sorted(self.packages),
                self.system_packages,
                sorted((name, sha) for name, sha, _ in self.wheels),
            )
        )
        return {"asked": hashlib.sha256(asked.encode()).hexdigest(), "python": python_version}


@dataclass(frozen=True)
class SetupReport:
    """One node. `state` is 'installed', 'unchanged', 'failed' or 'unreachable'.

    `exit_code` is that of the error, 0 where there is none.
    """

    node: str
    state: str
    python: str = ""
    packages: int = 0
    error: str = ""
    hint: str = ""
    exit_code: int = 0


def wish(
    *,
    requirements: Path | None,
    packages: Sequence[str] = (),
    python: str = "python3",
    system_packages: bool = False,
    wheels: Path | None = None,
) -> Wish:
    """Reads and checks what is asked for. Raises UsageError that names the option or the line."""
    if not re.fullmatch(r"[A-Za-z0-9_~/][^\0\n]{0,499}", python):
        raise UsageError(f"--python {python!r} is not allowed", hint="give a program of the nodes")
    return Wish(
        requirements=_read_requirements(requirements) if requirements is not None else "",
        packages=checked_packages(packages),
        python=python,
        system_packages=system_packages,
        wheels=_read_wheels(wheels) if wheels is not None else (),
    )


def checked_packages(packages: Sequence[str]) -> tuple[str, ...]:
    """As pip is given them. Raises UsageError for what it would take for an option."""
    if len(packages) > _PACKAGES_MAX:
        raise UsageError(f"at most {_PACKAGES_MAX} packages can be given")
    for package in packages:
        if not re.fullmatch(r"[A-Za-z0-9][^\0\n]{0,499}", package):
            raise UsageError(
                f"--package {package!r} is not allowed", hint="give a name, as in 'ray[default]==2.60.0'"
            )
    return tuple(packages)


def _read_requirements(path: Path) -> str:
    try:
        data = path.expanduser().read_bytes()
        text = data.decode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    if len(data) > _REQUIREMENTS_BYTES_MAX:
        raise UsageError(f"{path} is larger than {_REQUIREMENTS_BYTES_MAX} bytes")
    for number, line in enumerate(text.splitlines(), 1):
        if _ELSEWHERE.match(line):
            raise UsageError(
                f"{path}:{number}: {line.strip()[:80]!r} names a file that the nodes do not have",
                hint="list packages only; --wheels sends files along",
            )
    return text


def _read_wheels(folder: Path) -> tuple[tuple[str, str, Path], ...]:
    if not folder.expanduser().is_dir():
        raise UsageError(f"--wheels {folder} is not a directory")
    found = sorted(
        path
        for path in folder.expanduser().iterdir()
        if path.is_file() and path.name.endswith((".whl", ".tar.gz")) and not path.name.startswith((".", "-"))
    )
    if not found:
        raise UsageError(f"there are no wheels in {folder}", hint="'pip download -d DIR PACKAGE' fills it")
    if len(found) > _WHEELS_MAX:
        raise UsageError(f"there are {len(found)} wheels in {folder}; at most {_WHEELS_MAX} are sent")
    return tuple((path.name, _sha256(path), path) for path in found)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Setup:
    """Brings a wish to the nodes, side by side. `who` is told to others who come meanwhile."""

    def __init__(self, pool: SshPool, file: GridFile, *, who: str = "") -> None:
        self._pool = pool
        self._file = file
        self._who = who
        self._places = asyncio.Semaphore(file.ssh.pool_size)

    async def run(
        self,
        wanted: Wish,
        nodes: Sequence[str] = (),
        *,
        again: bool = False,
        say: Say = lambda _node, _text: None,
    ) -> list[SetupReport]:
        """One report for each node, in the order of the file; a node that fails does not stop the others.

        `again` installs also where the stamp says that all is there.
        """
        names = [self._file.node(name).name for name in nodes] or [node.name for node in self._file.nodes]

        async def one(name: str) -> SetupReport:
            try:
                async with self._places, self._pool.use(name) as link:
                    return await self._one(link, wanted, again=again, say=say)
            except GenieError as error:
                state = "unreachable" if error.exit_code == TransportError.exit_code else "failed"
                hint = error.hint or _hint(error, name)
                return SetupReport(name, state, error=error.message, hint=hint, exit_code=error.exit_code)

        return await all_of(map(one, names))

    async def _one(self, link: Link, wanted: Wish, *, again: bool, say: Say) -> SetupReport:
        if not link.has_helper:
            await check_login_shell(link, timeout_s=_LOOK_S)
            raise NodeRefusedError(f"node {link.name} has no usable python3", reason="missing")
        args = {"root": self._file.remote_root, "python": wanted.python}
        found, _ = await link.call("environment.look", args, timeout_s=_LOOK_S)
        stamp = wanted.stamp(str(found["version"]))
        if found["stamp"] == stamp and not again:
            say(link.name, "already has it")
            return SetupReport(link.name, "unchanged", python=found["version"])
        await self._send_wheels(link, wanted, found["wheels"], say)
        say(link.name, f"installing with Python {found['version']}")
        answer = await self._install(link, wanted, {**args, "stamp": stamp}, say)
        say(link.name, f"done, {answer['packages']} packages")
        return SetupReport(
            link.name, "installed", python=str(found["version"]), packages=int(answer["packages"])
        )

    async def _send_wheels(self, link: Link, wanted: Wish, there: Mapping[str, str], say: Say) -> None:
        missing = [each for each in wanted.wheels if there.get(each[0]) != each[1]]
        for number, (name, sha256, path) in enumerate(missing, 1):
            say(link.name, f"sending {name} ({number} of {len(missing)})")
            size, upload = path.stat().st_size, secrets.token_hex(8)
            with path.open("rb") as file:
                for offset in range(0, max(size, 1), _PART_BYTES):
                    part = file.read(_PART_BYTES)
                    args = {
                        "root": self._file.remote_root,
                        "name": name,
                        "sha256": sha256,
                        "upload": upload,
                        "offset": offset,
                        "last": offset + _PART_BYTES >= size,
                    }
                    await link.call("environment.put_wheel", args, part, timeout_s=_PUT_S)

    async def _install(
        self, link: Link, wanted: Wish, args: Mapping[str, Any], say: Say
    ) -> Mapping[str, Any]:
        whole = {
            **args,
            "packages": list(wanted.packages),
            "wheels": bool(wanted.wheels),
            "system_packages": wanted.system_packages,
            "timeout_s": INSTALL_S,
            "who": self._who,
        }

        found: Mapping[str, Any] = {}
        failure: GenieError | None = None
        async with asyncio.TaskGroup() as tasks:
            showing = tasks.create_task(self._show(link, say))
            try:
                blob = wanted.requirements.encode()
                found, _ = await link.call(
                    "environment.install", whole, blob, timeout_s=INSTALL_S + _MARGIN_S
                )
            except GenieError as error:  # raised outside of the group, which would wrap it
                failure = error
            finally:
                showing.cancel()
        if failure is not None:
            raise failure
        return found

    async def _show(self, link: Link, say: Say) -> None:
        """Tells the last line of the log whenever it is another one, until it is cancelled."""
        shown = ""
        while True:
            await asyncio.sleep(_PROGRESS_S)
            with contextlib.suppress(GenieError):  # the installation itself will say so
                args = {"root": self._file.remote_root}
                told, _ = await link.call("environment.progress", args, timeout_s=_LOOK_S)
                if told["line"] and told["line"] != shown:
                    shown = str(told["line"])
                    say(link.name, shown[:200])


def _hint(error: GenieError, node: str) -> str:
    text = error.message.lower()
    reason = getattr(error, "reason", "")
    if reason == "locked":
        see = f"grid-cli run --node {node} 'tail {_LOG}'"
        return f"it goes on without its connection; {see} shows how far it is; try again when it has ended"
    if reason == "venv" or "no module named venv" in text or "ensurepip" in text:
        return "on Debian and Ubuntu: apt install python3-venv"
    offline = ("name resolution", "connection", "network is unreachable", "proxyerror", "timed out")
    if reason == "pip" and any(each in text for each in offline):
        return "a node without a network takes wheels from here: 'pip download -d DIR ...', then --wheels DIR"
    return ""
