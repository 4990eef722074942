"""Requirements of tests: programs, modules, root, namespaces.

A test or fixture calls a function of this file before anything slow. If the requirement is not met, the test
is skipped and listed with the reason at the end of the run; with GENIE_TEST_REQUIRE_ALL=1 it fails.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from genie.errors import NativeBuildError
from genie.native import libraries
from genie.processes import cgroups

# Read at import: conftest.py removes all GENIE_* variables from the environment of the tests.
REQUIRE_ALL = os.environ.get("GENIE_TEST_REQUIRE_ALL", "") == "1"
# Address of a running cluster that integration tests use instead of starting their own.
SERVER: str | None = os.environ.get("GENIE_TEST_SERVER") or None

# Debian installs daemons in folders that are not on the PATH of ordinary users.
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")


def require_program(name: str, *, package: str) -> str:
    """Path of the program; skips the test if it is not installed. `package` is its Debian package."""
    path = shutil.which(name) or shutil.which(name, path=os.pathsep.join(_SYSTEM_FOLDERS))
    if path is None:
        pytest.skip(f"needs {name} (Debian: {package})")
    return path


def require_root() -> None:
    """Skips the test if it does not run as root."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


def require_namespaces(*kinds: str) -> None:
    """Skips the test if it does not run as root with permission for these namespaces.

    `kinds` are options of unshare without the dashes: "mount", "uts", "net".
    """
    require_root()
    program = require_program("unshare", package="util-linux")
    if not _can_unshare(program, kinds):
        pytest.skip(f"needs permission to create namespaces ({', '.join(kinds)})")


@functools.cache
def _can_unshare(program: str, kinds: tuple[str, ...]) -> bool:
    command = [program, *(f"--{kind}" for kind in kinds), "true"]
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0


def require_cgroup(name: str, hierarchy: str) -> str:
    """The path of a control group that can be created in this hierarchy: "v2", or a controller of version 1.

    Skips the test if there is none.
    """
    for parent in cgroups.own_control_groups():
        is_v2 = (Path(parent) / "cgroup.controllers").exists()
        if (hierarchy == "v2") if is_v2 else (Path(parent).name == hierarchy):
            path = cgroups.find_usable(name, [parent])
            if path is not None:
                return path
    pytest.skip(f"needs permission to create control groups ({hierarchy})")


def require_module(name: str, *, package: str) -> ModuleType:
    """The imported module; skips the test if it is missing. `package` is its name for pip."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module exists, but one of its imports is missing
        pytest.skip(f"needs the module {name} (pip: {package})")


def require_distribution(name: str) -> importlib.metadata.Distribution:
    """Metadata of an installed package; skips the test if it is missing. Does not import it."""
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs the package {name} (pip: {name})")


def native_library(name: libraries.LibraryName) -> ModuleType:
    """One of the C++ libraries of Genie; skips the whole file if it is not built and there is no compiler."""
    try:
        return libraries.load(name)
    except NativeBuildError:
        if libraries.find_compiler() is not None:
            raise
        pytest.skip("needs a C++ compiler (Debian: g++)", allow_module_level=True)
