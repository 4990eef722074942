"""Runs tests as an ordinary user on a simulated machine with only the packages that CONTRIBUTING.md requires.

Inside a mount namespace, all programs are hidden except those of Debian's essential packages and of python3,
python3-venv, python3-dev, make, g++ and their dependencies; the user owns the clone (a copy) and nothing
else. Nothing outside the namespace changes, except a temporary folder, which is removed.

    .venv/bin/python .ci/bare.py                      the tests that are not long of the files that
                                                      tests/house/declared_requirements.py selects, after
                                                      its long files
    .venv/bin/python .ci/bare.py tests/grid -k pool   these arguments of pytest instead

Fails if a test fails, if one is skipped without a declared requirement, if a skipped test was slow, or if no
test of a selected folder passed. Requires root, unshare and dpkg.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USER, UID = "tester", 54321
INSTALLED = ("python3", "python3-venv", "python3-dev", "make", "g++")
# Essential, but tests must declare them: some containers do not have them.
ALSO_HIDDEN = ("unshare", "nsenter")
BIN_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
NOT_COPIED = (".venv", ".git", "__pycache__", ".*_cache", ".hypothesis")
# A skipped test that takes longer has waited for a missing requirement.
SKIP_S_MAX = 5.0
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0")
MS_BIND = 4096


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        return run_inside(Path(sys.argv[2]), sys.argv[3:])
    if os.geteuid() != 0 or shutil.which("unshare") is None or not Path("/var/lib/dpkg/status").exists():
        print("the bare run requires root, unshare and dpkg", file=sys.stderr)
        return 1
    # subprocess.run then kills unshare, and with it all processes of its namespace.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if sys.argv[1:]:
        return bare_run(sys.argv[1:])
    files = selected_files()
    # Long tests first: all of them may be skipped, and the log should end with the run that executed tests.
    return bare_run(["-m", "long", *WORKERS, *selected_files("--long")]) or bare_run(
        ["-m", "not long", *WORKERS, *files], folders={str(Path(file).parent) for file in files}
    )


def bare_run(arguments: list[str], folders: Iterable[str] = ()) -> int:
    """Runs pytest with these arguments; at least one test must pass in each of `folders`."""
    with tempfile.TemporaryDirectory(prefix="genie-bare-") as name:
        folder = Path(name)
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["--propagation", "private", sys.executable, __file__, "--inside", name, *arguments]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        report = folder / "home" / "report.xml"
        if status != 0 or not report.exists():
            return status or 1
        return check(report, folders)


def selected_files(*options: str) -> list[str]:
    command = [str(ROOT / ".venv" / "bin" / "python"), "-m", "tests.house.declared_requirements", *options]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


# --- the namespace ----------------------------------------------------------------------------


def run_inside(folder: Path, arguments: list[str]) -> int:
    """Process 1 of the namespaces: sets them up and runs pytest as the user."""
    folder.chmod(0o755)
    home = folder / "home"
    home.mkdir()
    (home / "tmp").mkdir()
    copy = folder / "clone"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    (copy / ".venv").mkdir()
    for path in (home, *home.rglob("*"), copy, *copy.rglob("*")):
        os.chown(path, UID, UID, follow_symlinks=False)
    python = Path(sys.base_prefix if sys.prefix != sys.base_prefix else _base_prefix())
    hidden = programs_to_hide()
    _make_reachable([ROOT, python], folder / "kept")
    _bind(ROOT / ".venv", copy / ".venv")
    _bind(copy, ROOT, recursive=True)
    _add_user(folder, home)
    empty = folder / "empty"
    empty.touch(mode=0o444)
    for program in hidden:
        _bind(empty, program)
    command = [str(ROOT / ".venv" / "bin" / "python"), "-m", "pytest", "-p", "no:cacheprovider"]
    command += [f"--junitxml={home}/report.xml", "-o", "junit_family=xunit1", *arguments]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home / "tmp"), "CI": "1"}
    env |= {"USER": USER, "LOGNAME": USER, "LANG": "C.UTF-8", "TERM": os.environ.get("TERM", "dumb")}
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, user=UID, group=UID, extra_groups=[])
    return done.returncode


def _base_prefix() -> str:
    command = [str(ROOT / ".venv" / "bin" / "python"), "-c", "import sys; print(sys.base_prefix)"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _make_reachable(paths: Iterable[Path], kept: Path) -> None:
    """Replaces inaccessible parent folders of `paths` by accessible empty ones."""
    blocked = {path: folder for path in paths if (folder := _inaccessible_parent(path)) is not None}
    copies = {path: kept / str(number) for number, path in enumerate(blocked)}
    for path, kept_path in copies.items():
        kept_path.mkdir(parents=True)
        _bind(path, kept_path, recursive=True)
    for folder in set(blocked.values()):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder)], check=True)
    for path, kept_path in copies.items():
        path.mkdir(parents=True)
        _bind(kept_path, path, recursive=True)


def _inaccessible_parent(path: Path) -> Path | None:
    return next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)


def _add_user(folder: Path, home: Path) -> None:
    for name, line in {
        "passwd": f"{USER}:x:{UID}:{UID}::{home}:/bin/sh\n",
        "group": f"{USER}:x:{UID}:\n",
    }.items():
        (folder / name).write_text(Path("/etc", name).read_text() + line)
        (folder / name).chmod(0o644)
        _bind(folder / name, Path("/etc", name))
    assert pwd.getpwuid(UID).pw_name == USER


def _bind(source: Path, target: Path, *, recursive: bool = False) -> None:
    """Like `mount --bind`, without starting a process."""
    flags = MS_BIND | (0x4000 if recursive else 0)
    if ctypes.CDLL(None, use_errno=True).mount(os.fsencode(source), os.fsencode(target), None, flags, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


# --- hidden programs --------------------------------------------------------------------------


def programs_to_hide() -> list[Path]:
    """Programs that a machine with only INSTALLED does not have."""
    status = Path("/var/lib/dpkg/status").read_text()
    kept = {Path(path).resolve() for path in _files_of(_with_dependencies(status))}
    found = {path.resolve() for folder in BIN_FOLDERS for path in Path(folder).iterdir()}
    return sorted(path for path in found if path.is_file() and (path not in kept or path.name in ALSO_HIDDEN))


def _with_dependencies(status: str) -> set[str]:
    packages: dict[str, dict[str, str]] = {}
    providers: dict[str, list[str]] = {}
    for block in status.split("\n\n"):
        fields = dict(re.findall(r"^([\w-]+): (.*)$", block, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            packages[fields["Package"]] = fields
            for name in _names(fields.get("Provides", "")):
                providers.setdefault(name, []).append(fields["Package"])
    todo = [name for name, fields in packages.items() if fields.get("Priority") == "required"]
    todo += [name for name, fields in packages.items() if fields.get("Essential") == "yes"]
    todo += INSTALLED
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        fields = packages.get(name, {})
        todo += _names(f"{fields.get('Depends', '')}, {fields.get('Pre-Depends', '')}")
        todo += [] if name in packages else providers.get(name, [])
    return found & set(packages)


def _names(relations: str) -> Iterator[str]:
    """Package names of a field such as `Depends`, without versions and architectures."""
    for relation in re.split(r"[,|]", relations):
        if relation.strip():
            yield re.split(r"[ (:]", relation.strip())[0]


def _files_of(packages: Iterable[str]) -> Iterator[str]:
    info = Path("/var/lib/dpkg/info")
    for name in packages:
        for path in (*info.glob(f"{name}.list"), *info.glob(f"{name}:*.list")):
            yield from (line for line in path.read_text().splitlines() if "bin/" in line)


# --- the result -------------------------------------------------------------------------------


def check(report: Path, folders: Iterable[str]) -> int:
    """Checks that skips are declared and fast, and that a test passed in each of `folders`."""
    wrong = []
    passed = skipped = 0
    without_pass = set(folders) - {"tests/gpu"}
    for case in ET.parse(report).getroot().iter("testcase"):
        file = case.get("file") or ""
        reason = case.find("skipped")
        if reason is None or reason.get("type") == "pytest.xfail":
            passed += 1
            without_pass.discard(str(Path(file).parent))
            continue
        skipped += 1
        message = (reason.get("message") or "").removeprefix("Skipped: ")
        if not message.startswith("needs "):
            wrong.append(f"{file}::{case.get('name')}: skipped without a declared requirement: {message}")
        if float(case.get("time") or 0) > SKIP_S_MAX:
            wrong.append(f"{file}::{case.get('name')}: took {case.get('time')} s to be skipped")
    wrong += [f"{folder}: no test passed" for folder in sorted(without_pass)]
    print(f"bare: {passed} passed, {len(wrong)} failed, {skipped} skipped", *wrong, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
