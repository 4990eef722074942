"""A python3 for test nodes that creates environments quickly: their pip is a link to an existing one.

`python3 -m venv` unpacks and compiles pip each time, which takes most of a setup. The rest of the environment
is created by venv, and pip is real. Tests marked `long` use venv itself.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.grid.testbed import SshNode
from tests.needs import require_distribution

_PYTHON = """#!/bin/sh
if [ "$1 $2" != "-m venv" ]; then exec {python} "$@"; fi
shift 2
{python} -m venv --without-pip "$@" || exit
for folder; do :; done
for site in "$folder"/lib/python3*/site-packages; do ln -sfn {pip} "$site/pip" || exit; done
printf '#!/bin/sh\\nexec "%s" -m pip "$@"\\n' "$folder/bin/python" > "$folder/bin/pip"
chmod 755 "$folder/bin/pip"
"""


class QuickVenv:
    """The pip that the environments share, in a directory visible on all nodes."""

    def __init__(self, folder: Path) -> None:
        # Not found through the import system, because setuptools then prints a warning.
        pip = require_distribution("pip").locate_file("pip")
        self._pip = folder / "pip"
        shutil.copytree(Path(str(pip)), self._pip, ignore=shutil.ignore_patterns("__pycache__"))

    def install(self, node: SshNode, name: str = "python3") -> None:
        """Install the fast Python on a node."""
        path = node.bin / name
        path.write_text(_PYTHON.format(python="/usr/bin/python3", pip=self._pip))
        path.chmod(0o755)


@pytest.fixture(scope="session")
def quick_venv(tmp_path_factory: pytest.TempPathFactory) -> QuickVenv:
    return QuickVenv(tmp_path_factory.mktemp("pip"))
