"""A copy of this project as the next minor release might be: one minor version newer, with what releases add.

- its own version, and a further version of the protocol and of the control connections of shims;
- a field in every reply, report and description of a node, which is always sent;
- a constraint of jobs that older releases must not ignore, marked with `since`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from genie.model.release import OWN_RELEASE
from genie.version import __version__

REPOSITORY = Path(__file__).parents[1]
NEXT_VERSION = f"{OWN_RELEASE.major}.{OWN_RELEASE.minor + 1}.0"
NEW_CONSTRAINT = "pods"
_ADDED_FIELD = '    added_in_next_release: str = msgspec.field(default_factory=lambda: "next")\n'
_DESCRIPTIONS = re.compile(r"(?m)^class \w+\((?:Message|Facts|Report\[\w+\]), frozen=True, kw_only=True\):\n")


class NextRelease:
    """A checkout of the next release in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(REPOSITORY / "genie", folder / "genie", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("native", "build", "pyproject.toml"):
            if (REPOSITORY / name).exists():
                (folder / name).symlink_to(REPOSITORY / name)
        self._replace("version.py", f'"{__version__}"', f'"{NEXT_VERSION}"')
        self._replace("runtime/wire.py", "(lowest=1, highest=1)", "(lowest=1, highest=2)")
        self._replace("agent/shim.py", "\nCONTROL_VERSION = 1\n", "\nCONTROL_VERSION = 2\n")
        self._replace(
            "model/job.py",
            "    priority: int = 0\n",
            f'    priority: int = 0\n    {NEW_CONSTRAINT}: Annotated[int, since("{NEXT_VERSION}")] = 0\n',
        )
        self._replace(
            "model/job.py",
            "import msgspec\n",
            "from typing import Annotated\n\nimport msgspec\n\nfrom genie.model.release import since\n",
        )
        for module in ("model/messages/__init__.py", "model/messages/handshake.py", "model/node.py"):
            path = folder / "genie" / module
            changed, count = _DESCRIPTIONS.subn(lambda found: found[0] + _ADDED_FIELD, path.read_text())
            assert count, f"{module} has no replies, reports or descriptions"
            path.write_text(changed)
        self._python = self._make_environment()

    def module_command(self, module: str) -> list[str]:
        """The command of a program of that release, as supervisor/child.py makes it for this one."""
        return [str(self._python), "-P", "-m", module]

    def script_command(self, script: str) -> list[str]:
        return [str(self._python), "-P", "-c", script]

    def _make_environment(self) -> Path:
        """Makes an environment with the packages of this one and the genie of that release, and returns its
        Python. PYTHONPATH is not enough: an editable install may be an import hook, which precedes it."""
        environment = self._folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        (packages,) = environment.glob("lib/python3*/site-packages")
        paths = [str(self._folder), *(path for path in sys.path if path.endswith("site-packages"))]
        (packages / "next_release.pth").write_text("".join(f"{path}\n" for path in paths))
        return environment / "bin" / "python"

    def _replace(self, module: str, before: str, after: str) -> None:
        path = self._folder / "genie" / module
        text = path.read_text()
        assert text.count(before) == 1, f"{module} has {before!r} {text.count(before)} times"
        path.write_text(text.replace(before, after))
