"""Installs the same Python environment on all nodes, REMOTE_ROOT/grid_env (`grid-cli setup`).

`read_environment_spec()` validates the request; a node whose installed specification matches it is not
changed. Wheels can be uploaded to nodes without internet access.

Does not run on the nodes (remote/environment.py does).
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
from genie.grid.grid_file import GridFile, ProgressCallback
from genie.grid.ssh.login_shell import check_login_shell
from genie.grid.ssh.pool import NodeConnection, SshPool
from genie.processes.tasks import run_all_concurrently, unwrapped_task_group
from genie.telemetry.log import redact

DEFAULT_PACKAGES = ("ray[default]", "torch", "numpy")
"""Packages that `grid-cli setup` installs by default."""
INSTALL_TIMEOUT_S = 3600.0
_INSPECT_TIMEOUT_S = 60.0
_UPLOAD_TIMEOUT_S = 120.0
_REPLY_TIMEOUT_MARGIN_S = 30.0
_PROGRESS_INTERVAL_S = 1.0
_UPLOAD_PART_BYTES = 4 << 20
_SETUP_LOG_PATH = ".grid/setup/setup.log"
_PACKAGES_MAX = 1000
_WHEELS_MAX = 2000
_REQUIREMENTS_BYTES_MAX = 1 << 20
_UNSUPPORTED_REQUIREMENT_PATTERN = re.compile(
    r"\s*(--requirement|--constraint|--editable|--find-links|-r|-c|-e|-f|\.{1,2}/|file:)"
)


@dataclass(frozen=True)
class EnvironmentSpec:
    """The requested environment. `wheels` are (name, SHA-256, local path)."""

    requirements: str = ""
    packages: tuple[str, ...] = ()
    python: str = "python3"
    system_packages: bool = False
    wheels: tuple[tuple[str, str, Path], ...] = ()

    def to_installed_spec(self, python_version: str) -> dict[str, Any]:
        """Equal for two specs that install the same with the same Python."""
        request = repr(
            (
                self.requirements,
                sorted(self.packages),
                self.system_packages,
                sorted((name, sha) for name, sha, _ in self.wheels),
            )
        )
        return {"asked": hashlib.sha256(request.encode()).hexdigest(), "python": python_version}


@dataclass(frozen=True)
class SetupReport:
    """Result for one node. `state` is 'installed', 'unchanged', 'failed' or 'unreachable'.

    `exit_code` is that of the error, 0 without error.
    """

    node: str
    state: str
    python: str = ""
    packages: int = 0
    error: str = ""
    hint: str = ""
    exit_code: int = 0


def read_environment_spec(
    *,
    requirements: Path | None,
    packages: Sequence[str] = (),
    python: str = "python3",
    system_packages: bool = False,
    wheels: Path | None = None,
) -> EnvironmentSpec:
    """Read and validate the request. Raises UsageError with the option or line."""
    if not re.fullmatch(r"[A-Za-z0-9_~/][^\0\n]{0,499}", python):
        raise UsageError(f"--python {python!r} is not allowed", hint="pass the path of a Python on the nodes")
    return EnvironmentSpec(
        requirements=_read_requirements(requirements) if requirements is not None else "",
        packages=validate_packages(packages),
        python=python,
        system_packages=system_packages,
        wheels=_read_wheels(wheels) if wheels is not None else (),
    )


def default_packages(wheels: Path | None) -> tuple[str, ...]:
    """Return DEFAULT_PACKAGES; with a wheel directory only those in it, because pip uses no index then."""
    if wheels is None:
        return DEFAULT_PACKAGES
    available = {_normalize_package_name(path.name.partition("-")[0]) for path in _list_wheel_files(wheels)}
    return tuple(
        each for each in DEFAULT_PACKAGES if _normalize_package_name(each.partition("[")[0]) in available
    )


def _normalize_package_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def validate_packages(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments for pip. Raises UsageError for a package that pip would parse as an option."""
    if len(packages) > _PACKAGES_MAX:
        raise UsageError(f"too many packages: the limit is {_PACKAGES_MAX}")
    for package in packages:
        if not re.fullmatch(r"[A-Za-z0-9][^\0\n]{0,499}", package):
            raise UsageError(
                f"--package {package!r} is not allowed", hint="use a form like 'ray[default]==2.60.0'"
            )
    return tuple(packages)


def _read_requirements(path: Path) -> str:
    try:
        with _expand_user(path).open("rb") as file:
            data = file.read(_REQUIREMENTS_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(
            f"could not read the requirements file {path}: {error.strerror}", hint="check --requirements"
        ) from None
    if len(data) > _REQUIREMENTS_BYTES_MAX:
        raise UsageError(f"{path} is larger than {_REQUIREMENTS_BYTES_MAX} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    for number, line in enumerate(text.splitlines(), 1):
        if found := _UNSUPPORTED_REQUIREMENT_PATTERN.match(line):
            # Do not quote the line: its URL may contain a token.
            what = f"option {found[1]}" if found[1].startswith("-") else "a local path"
            raise UsageError(
                f"{path}:{number}: {what} is not supported in requirements for nodes",
                hint="list packages, repositories as 'NAME @ git+https://...'; --wheels uploads local files",
            )
    return text


def _expand_user(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        raise UsageError(
            f"{path} cannot be read: no home directory for {path.parts[0]!r}", hint="pass an absolute path"
        ) from None


def _read_wheels(folder: Path) -> tuple[tuple[str, str, Path], ...]:
    return tuple((path.name, _file_sha256(path), path) for path in _list_wheel_files(folder))


def _list_wheel_files(folder: Path) -> list[Path]:
    if not _expand_user(folder).is_dir():
        raise UsageError(f"--wheels {str(folder)!r} is not a directory", hint="give a directory with wheels")
    found = sorted(
        path
        for path in _expand_user(folder).iterdir()
        if path.is_file() and path.name.endswith((".whl", ".tar.gz")) and not path.name.startswith((".", "-"))
    )
    if not found:
        raise UsageError(f"no wheels in {folder}", hint="download them: pip download -d DIR PACKAGE")
    if len(found) > _WHEELS_MAX:
        raise UsageError(f"{len(found)} wheels in {folder}: the limit is {_WHEELS_MAX}")
    return found


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class EnvironmentSetup:
    """Installs an environment on nodes, concurrently. `requester` is shown to others while the setup runs."""

    def __init__(self, pool: SshPool, file: GridFile, *, requester: str = "") -> None:
        self._pool = pool
        self._grid_file = file
        self._requester = requester
        self._setup_slots = asyncio.Semaphore(file.ssh.pool_size)

    async def run(
        self,
        spec: EnvironmentSpec,
        nodes: Sequence[str] = (),
        *,
        again: bool = False,
        on_progress: ProgressCallback = lambda _node, _text: None,
    ) -> list[SetupReport]:
        """Return one report per node; a node that fails does not stop the others.

        `again` installs even if the specification is installed.
        """
        names = [self._grid_file.node(name).name for name in nodes] or [
            node.name for node in self._grid_file.nodes
        ]

        async def set_up_node(name: str) -> SetupReport:
            try:
                async with self._setup_slots, self._pool.connect(name) as link:
                    return await self._set_up_node(link, spec, again=again, on_progress=on_progress)
            except GenieError as error:
                state = "unreachable" if error.exit_code == TransportError.exit_code else "failed"
                # pip prints URLs of the requirements, which may contain passwords.
                text, hint = redact(error.message), redact(error.hint or _setup_error_hint(error, name))
                return SetupReport(name, state, error=text, hint=hint, exit_code=error.exit_code)

        return await run_all_concurrently(map(set_up_node, names))

    async def _set_up_node(
        self, link: NodeConnection, spec: EnvironmentSpec, *, again: bool, on_progress: ProgressCallback
    ) -> SetupReport:
        if not link.has_helper:
            await check_login_shell(link, timeout_s=_INSPECT_TIMEOUT_S)
            raise NodeRefusedError(f"node {link.name} has no usable python3", reason="missing")
        args = {"root": self._grid_file.remote_root, "python": spec.python}
        found, _ = await link.call("environment.inspect", args, timeout_s=_INSPECT_TIMEOUT_S)
        stamp = spec.to_installed_spec(str(found["version"]))
        if found["stamp"] == stamp and not again:
            on_progress(link.name, "already installed")
            return SetupReport(link.name, "unchanged", python=found["version"])
        await self._upload_missing_wheels(link, spec, found["wheels"], on_progress)
        on_progress(link.name, f"installing with Python {found['version']}")
        answer = await self._install_environment(link, spec, {**args, "stamp": stamp}, on_progress)
        on_progress(link.name, f"done, {answer['packages']} packages")
        return SetupReport(
            link.name, "installed", python=str(found["version"]), packages=int(answer["packages"])
        )

    async def _upload_missing_wheels(
        self,
        link: NodeConnection,
        spec: EnvironmentSpec,
        uploaded: Mapping[str, str],
        on_progress: ProgressCallback,
    ) -> None:
        missing = [each for each in spec.wheels if uploaded.get(each[0]) != each[1]]
        for number, (name, sha256, path) in enumerate(missing, 1):
            on_progress(link.name, f"uploading {name} ({number} of {len(missing)})")
            size, upload = path.stat().st_size, secrets.token_hex(8)
            with path.open("rb") as file:
                for offset in range(0, max(size, 1), _UPLOAD_PART_BYTES):
                    part = file.read(_UPLOAD_PART_BYTES)
                    args = {
                        "root": self._grid_file.remote_root,
                        "name": name,
                        "sha256": sha256,
                        "upload": upload,
                        "offset": offset,
                        "last": offset + _UPLOAD_PART_BYTES >= size,
                    }
                    await link.call("environment.put_wheel", args, part, timeout_s=_UPLOAD_TIMEOUT_S)

    async def _install_environment(
        self,
        link: NodeConnection,
        spec: EnvironmentSpec,
        args: Mapping[str, Any],
        on_progress: ProgressCallback,
    ) -> Mapping[str, Any]:
        request = {
            **args,
            "packages": list(spec.packages),
            "wheels": bool(spec.wheels),
            "system_packages": spec.system_packages,
            "timeout_s": INSTALL_TIMEOUT_S,
            "who": self._requester,
        }

        found: Mapping[str, Any] = {}
        async with unwrapped_task_group() as tasks:
            progress = tasks.create_task(self._show_install_progress(link, on_progress))
            try:
                blob = spec.requirements.encode()
                found, _ = await link.call(
                    "environment.install",
                    request,
                    blob,
                    timeout_s=INSTALL_TIMEOUT_S + _REPLY_TIMEOUT_MARGIN_S,
                )
            finally:
                progress.cancel()
        return found

    async def _show_install_progress(self, link: NodeConnection, on_progress: ProgressCallback) -> None:
        """Show the last line of the log whenever it changes, until cancelled."""
        shown = ""
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            with contextlib.suppress(GenieError):  # the installation reports the same error
                args = {"root": self._grid_file.remote_root}
                answer, _ = await link.call("environment.progress", args, timeout_s=_INSPECT_TIMEOUT_S)
                if answer["line"] and answer["line"] != shown:
                    shown = str(answer["line"])
                    on_progress(link.name, redact(shown)[:200])


def _setup_error_hint(error: GenieError, node: str) -> str:
    text = error.message.lower()
    reason = getattr(error, "reason", "")
    if reason == "locked":
        tail = f"grid-cli run --node {node} 'tail {_SETUP_LOG_PATH}'"
        return f"wait for it to finish, then retry; progress: {tail}"
    if reason == "venv" or "no module named venv" in text or "ensurepip" in text:
        return "on Debian and Ubuntu: apt install python3-venv"
    offline = ("name resolution", "connection", "network is unreachable", "proxyerror", "timed out")
    if reason == "pip" and any(each in text for each in offline):
        return "for nodes without internet access: pip download -d DIR ..., then --wheels DIR"
    return ""
