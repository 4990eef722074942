"""Compiles and links C++ libraries: all files of all libraries in one pool of compilers, then the links.

Files with the same large headers are compiled as one unit, so that the compiler parses the headers once.
Object files are cached by the hash of their inputs, so an edit recompiles one unit only.

Does not know what a library consists of, nor which process builds (libraries.py).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from genie.errors import NativeBuildError

INSTALL_HINT = (
    "install a C++ compiler (Debian, Ubuntu: apt install g++ python3-dev; Fedora: dnf install gcc-c++ "
    "python3-devel); without it the remote_accelerator device is not available, and scheduling is slower"
)
# A compiler that takes longer counts as hung.
_COMPILE_S_MAX = 1200.0
_ERROR_LINES_SHOWN = 6
# Progress lines in the log of a build without a terminal.
_PROGRESS_LINES = 8
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)

_log = logging.getLogger(__name__)


class Target(Protocol):
    """The platform that a library is compiled for."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def soabi(self) -> str: ...
    def compile_flags(self) -> tuple[str, ...]: ...
    def link_flags(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Unit:
    """Files that are compiled as one translation unit; they share their anonymous namespaces."""

    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    target: Target

    @functools.cached_property
    def key(self) -> str:
        """Hash of everything that the object file depends on, except the compiler."""
        return self.current_key()

    def current_key(self) -> str:
        return _unit_key(self.sources, self.flags, self.target)

    def text_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.sources)

    def arguments(self) -> list[str]:
        *included, last = map(str, self.sources)
        return [*self.flags, *(part for path in included for part in ("-include", path)), "-c", last]

    def __str__(self) -> str:
        return ", ".join(map(str, self.sources))


@dataclass(frozen=True)
class BuildPlan:
    """A library to build: its name, its name in messages, its units and its path."""

    name: str
    title: str
    target: Target
    units: Sequence[Unit]
    library: Path


def content_hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:24]


def output_path(object_path: Path) -> Path:
    """The compiler's output for a unit, cached with its object file so that later builds log it as well."""
    return object_path.with_suffix(".txt")


@dataclass(frozen=True)
class Build:
    """Compiles and links libraries in a temporary folder; complete files are moved to the cache."""

    compiler: Sequence[str]
    plans: Sequence[BuildPlan]
    cache: Path
    folder: Path

    def run(self) -> None:
        for plan in self.plans:
            self._log_path(plan).write_text("", "utf-8")
        (self.cache / "objects").mkdir(exist_ok=True)
        compiler_key = (self._call(["--version"], self.plans), *self.compiler)
        objects = {
            unit: self.cache / "objects" / f"{content_hash(*compiler_key, unit.key)}.o"
            for plan in self.plans
            for unit in plan.units
        }
        missing = {unit: path for unit, path in objects.items() if not _is_complete(path)}
        for unit in objects.keys() - missing.keys():
            printed = output_path(objects[unit]).read_text("utf-8", errors="replace")
            self._append_log(f"{unit}: cached", printed, self._plans_with(unit))
        with ThreadPoolExecutor(_processors(), thread_name_prefix="genie-compile") as pool:
            self._compile_all(missing, pool)
            for path in objects.values():
                mark_used(path)
            list(pool.map(lambda plan: self._link(plan, objects), self.plans))

    def _compile_all(self, missing: Mapping[Unit, Path], pool: ThreadPoolExecutor) -> None:
        """Run one compiler per processor, largest units first. After an error no more are started."""
        progress = _Progress(sum(len(unit.sources) for unit in missing))
        largest_first = sorted(missing, key=Unit.text_bytes, reverse=True)
        running = [pool.submit(self._compile, unit, missing[unit], progress) for unit in largest_first]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            started = [one for one in running if not one.cancel()]
            wait(started)
            progress.end()
        for one in started:
            one.result()

    def _compile(self, unit: Unit, into: Path, progress: _Progress) -> None:
        output = self.folder / into.name
        printed = self._call([*unit.arguments(), "-o", str(output)], self._plans_with(unit))
        if unit.current_key() != unit.key:
            raise NativeBuildError(f"{unit} or a header of it changed during compilation", hint="try again")
        output_path(into).write_text(printed, "utf-8")
        output.replace(into)
        progress.step(len(unit.sources))

    def _link(self, plan: BuildPlan, objects: Mapping[Unit, Path]) -> None:
        linked = self.folder / plan.library.name
        inputs = [str(objects[unit]) for unit in plan.units]
        self._call([*inputs, *plan.target.link_flags(), "-o", str(linked)], [plan])
        linked.replace(plan.library)

    def _call(self, arguments: Sequence[str], plans: Sequence[BuildPlan]) -> str:
        """Run the compiler and return its output, which is also logged. NativeBuildError if it fails."""
        command = [*self.compiler, *arguments]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_COMPILE_S_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NativeBuildError(
                f"compiling {plans[0].title} failed: {command[0]} took more than {_COMPILE_S_MAX:g} s",
                hint="stop other programs on this machine, or set CXX to another compiler",
            ) from error
        except OSError as error:
            raise NativeBuildError(
                f"compiling {plans[0].title} failed: {error}", hint=INSTALL_HINT
            ) from error
        self._append_log(shlex.join(command), done.stdout, plans)
        if done.returncode != 0:
            raise NativeBuildError(
                f"compiling {plans[0].title} for {plans[0].target.name} failed:\n"
                f"{_first_errors(done.stdout) or f'{command[0]} exited with {done.returncode}'}\n"
                f"full log: {self._log_path(plans[0])}",
                hint=_compile_hint(done.stdout),
            )
        return done.stdout

    def _plans_with(self, unit: Unit) -> list[BuildPlan]:
        return [plan for plan in self.plans if unit in plan.units]

    def _log_path(self, plan: BuildPlan) -> Path:
        return self.cache / f"{plan.name}.log"

    def _append_log(self, what: str, printed: str, plans: Iterable[BuildPlan]) -> None:
        for plan in plans:
            with self._log_path(plan).open("a", encoding="utf-8") as log:
                log.write(f"{what}\n{printed}\n")


class _Progress:
    """One line on a terminal, redrawn in place; without a terminal a few lines in the log."""

    def __init__(self, files: int) -> None:
        self._files = files
        self._done = 0
        self._lock = threading.Lock()
        self._step = max(5, -(-files // _PROGRESS_LINES))
        self._is_terminal = files > 0 and sys.stderr is not None and sys.stderr.isatty()
        self._draw()

    def step(self, files: int) -> None:
        with self._lock:
            steps_before = self._done // self._step
            self._done += files
            self._draw()
            if not self._is_terminal and self._done // self._step > steps_before and self._done < self._files:
                _log.info("compiled %d of %d files", self._done, self._files)

    def end(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def _draw(self) -> None:
        if self._is_terminal:
            sys.stderr.write(f"\r\033[K  compiling: {self._done} of {self._files} files")
            sys.stderr.flush()


def _is_complete(object_path: Path) -> bool:
    """False for an empty file, which a power failure may leave: linkers accept it as an empty script."""
    return object_path.is_file() and object_path.stat().st_size > 0 and output_path(object_path).is_file()


def mark_used(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        pass  # the cache of another user, who evicts its files


def _unit_key(sources: Sequence[Path], flags: Sequence[str], target: Target) -> str:
    contents = [f"{path.name}\0{text}" for source in sources for path, text in _with_includes(source).items()]
    return content_hash(target.version, target.soabi, *flags, *contents)


def _with_includes(source: Path) -> dict[Path, str]:
    """The text of a file and of all project files that it includes, directly or indirectly."""
    found: dict[Path, str] = {}
    pending = [source.resolve()]
    while pending:
        path = pending.pop()
        if path in found or not path.is_file():  # the compiler reports missing files
            continue
        found[path] = path.read_text("utf-8")
        pending += [(path.parent / name).resolve() for name in _INCLUDE.findall(found[path])]
    return dict(sorted(found.items()))


def _first_errors(text: str) -> str:
    lines = text.splitlines()
    errors = [line for line in lines if "error:" in line or "undefined reference" in line]
    return "\n".join((errors or lines)[:_ERROR_LINES_SHOWN])


def _compile_hint(text: str) -> str:
    if "Python.h" in text:
        return "install Python's headers (Debian, Ubuntu: python3-dev; Fedora: python3-devel)"
    return "Genie needs a C++20 compiler (GCC 11, Clang 14 or newer) and torch 2.11 to 2.13"


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
