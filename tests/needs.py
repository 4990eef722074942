"""What a test needs from the machine, and what the person who runs the tests has asked for.

A test that needs a program or module says so here; without it the test is skipped and listed at the
end of the run, or fails when GENIE_TEST_REQUIRE_ALL=1. Not for: settings of Genie itself.
"""

from __future__ import annotations

import importlib
import os
import shutil
from types import ModuleType

import pytest

from genie.errors import NativeBuildError
from genie.runtime import native

# Read at import: conftest.py hides every GENIE_* variable from the tests themselves.
REQUIRE_ALL = os.environ.get("GENIE_TEST_REQUIRE_ALL", "") == "1"
# Address of a running cluster that integration tests use instead of starting their own.
SERVER: str | None = os.environ.get("GENIE_TEST_SERVER") or None

# Debian keeps daemons where an ordinary user's PATH does not look.
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")


def require_program(name: str, *, package: str) -> str:
    """The program's path; skips the test when it is not installed. `package` is Debian's name for it."""
    path = shutil.which(name) or shutil.which(name, path=os.pathsep.join(_SYSTEM_FOLDERS))
    if path is None:
        pytest.skip(f"needs {name} (Debian: {package})")
    return path


def require_module(name: str, *, package: str) -> ModuleType:
    """The imported module; skips the test when it is missing. `package` is what pip calls it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # it is there, but something that it imports is not
        pytest.skip(f"needs the module {name} (pip: {package})")


def native_library(name: native.Library) -> ModuleType:
    """One of Genie's C++ libraries; skips the whole file where it is not built and nothing can build it."""
    try:
        return native.load(name)
    except NativeBuildError:
        if native.find_compiler() is not None:
            raise
        pytest.skip("needs a C++ compiler (Debian: g++)", allow_module_level=True)
