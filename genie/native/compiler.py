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

COMPILER_INSTALL_HINT = (
    "install a C++ compiler (Debian, Ubuntu: apt install g++ python3-dev; Fedora: dnf install gcc-c++ "
    "python3-devel); without it the remote_accelerator device is not available, and scheduling is slower"
)
# A compiler that takes longer counts as hung.
_COMPILE_TIMEOUT_S = 1200.0
_ERROR_LINES_IN_MESSAGE = 6
# Progress lines in the log of a build without a terminal.
_PROGRESS_LINES_MAX = 8
_INCLUDE_DIRECTIVE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)

_log = logging.getLogger(__name__)


class TargetPlatform(Protocol):
    """The platform that a library is compiled for."""

    @property
    def display_name(self) -> str:
        """For messages, such as "torch 2.13.0"."""

    @property
    def dependency_version(self) -> str: ...
    @property
    def soabi(self) -> str: ...
    def compile_flags(self) -> tuple[str, ...]: ...
    def link_flags(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class TranslationUnit:
    """Files that are compiled as one translation unit; they share their anonymous namespaces."""

    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    target: TargetPlatform

    @functools.cached_property
    def cache_key(self) -> str:
        """Hash of everything that the object file depends on, except the compiler."""
        return self.compute_cache_key()

    def compute_cache_key(self) -> str:
        return _translation_unit_key(self.sources, self.flags, self.target)

    def source_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.sources)

    def compiler_arguments(self) -> list[str]:
        *included, last = map(str, self.sources)
        return [*self.flags, *(part for path in included for part in ("-include", path)), "-c", last]

    def __str__(self) -> str:
        return ", ".join(map(str, self.sources))


@dataclass(frozen=True)
class BuildPlan:
    """A library to build: its name, its name in messages, its units and its path."""

    name: str
    display_name: str
    target: TargetPlatform
    units: Sequence[TranslationUnit]
    library_path: Path


def content_hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:24]


def compiler_messages_path(object_path: Path) -> Path:
    """The compiler's output for a unit, cached with its object file so that later builds log it as well."""
    return object_path.with_suffix(".txt")


@dataclass(frozen=True)
class LibraryBuild:
    """Compiles and links libraries in a temporary folder; complete files are moved to the cache."""

    compiler_command: Sequence[str]
    plans: Sequence[BuildPlan]
    cache_folder: Path
    temporary_folder: Path

    def run(self) -> None:
        for plan in self.plans:
            self._build_log_path(plan).write_text("", "utf-8")
        (self.cache_folder / "objects").mkdir(exist_ok=True)
        compiler_key = (self._run_compiler(["--version"], self.plans), *self.compiler_command)
        objects = {
            unit: self.cache_folder / "objects" / f"{content_hash(*compiler_key, unit.cache_key)}.o"
            for plan in self.plans
            for unit in plan.units
        }
        missing = {unit: path for unit, path in objects.items() if not _is_complete_object(path)}
        for unit in objects.keys() - missing.keys():
            printed = compiler_messages_path(objects[unit]).read_text("utf-8", errors="replace")
            self._append_to_build_logs(f"{unit}: cached", printed, self._plans_containing(unit))
        with ThreadPoolExecutor(_usable_processor_count(), thread_name_prefix="genie-compile") as pool:
            self._compile_units(missing, pool)
            for path in objects.values():
                update_last_used_time(path)
            list(pool.map(lambda plan: self._link_library(plan, objects), self.plans))

    def _compile_units(self, missing: Mapping[TranslationUnit, Path], pool: ThreadPoolExecutor) -> None:
        """Run one compiler per processor, largest units first. After an error no more are started."""
        progress = _CompileProgress(sum(len(unit.sources) for unit in missing))
        largest_first = sorted(missing, key=TranslationUnit.source_bytes, reverse=True)
        running = [pool.submit(self._compile_unit, unit, missing[unit], progress) for unit in largest_first]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            started = [one for one in running if not one.cancel()]
            wait(started)
            progress.clear_line()
        for one in started:
            one.result()

    def _compile_unit(self, unit: TranslationUnit, into: Path, progress: _CompileProgress) -> None:
        output = self.temporary_folder / into.name
        printed = self._run_compiler(
            [*unit.compiler_arguments(), "-o", str(output)], self._plans_containing(unit)
        )
        if unit.compute_cache_key() != unit.cache_key:
            raise NativeBuildError(
                f"{unit} or one of its headers changed during compilation", hint="try again"
            )
        compiler_messages_path(into).write_text(printed, "utf-8")
        output.replace(into)
        progress.add_compiled_files(len(unit.sources))

    def _link_library(self, plan: BuildPlan, objects: Mapping[TranslationUnit, Path]) -> None:
        linked = self.temporary_folder / plan.library_path.name
        inputs = [str(objects[unit]) for unit in plan.units]
        self._run_compiler([*inputs, *plan.target.link_flags(), "-o", str(linked)], [plan])
        linked.replace(plan.library_path)

    def _run_compiler(self, arguments: Sequence[str], plans: Sequence[BuildPlan]) -> str:
        """Run the compiler and return its output, which is also logged. NativeBuildError if it fails."""
        command = [*self.compiler_command, *arguments]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NativeBuildError(
                f"compiling {plans[0].display_name} failed: {command[0]} took more than "
                f"{_COMPILE_TIMEOUT_S:g} s",
                hint="stop other programs on this machine, or set CXX to another compiler",
            ) from error
        except OSError as error:
            raise NativeBuildError(
                f"compiling {plans[0].display_name} failed: {error}", hint=COMPILER_INSTALL_HINT
            ) from error
        self._append_to_build_logs(shlex.join(command), done.stdout, plans)
        if done.returncode != 0:
            raise NativeBuildError(
                f"compiling {plans[0].display_name} for {plans[0].target.display_name} failed:\n"
                f"{_first_error_lines(done.stdout) or f'{command[0]} exited with {done.returncode}'}\n"
                f"full log: {self._build_log_path(plans[0])}",
                hint=_hint_for_compiler_output(done.stdout),
            )
        return done.stdout

    def _plans_containing(self, unit: TranslationUnit) -> list[BuildPlan]:
        return [plan for plan in self.plans if unit in plan.units]

    def _build_log_path(self, plan: BuildPlan) -> Path:
        return self.cache_folder / f"{plan.name}.log"

    def _append_to_build_logs(self, what: str, printed: str, plans: Iterable[BuildPlan]) -> None:
        for plan in plans:
            with self._build_log_path(plan).open("a", encoding="utf-8") as log:
                log.write(f"{what}\n{printed}\n")


class _CompileProgress:
    """One line on a terminal, redrawn in place; without a terminal a few lines in the log."""

    def __init__(self, files: int) -> None:
        self._file_count = files
        self._compiled_count = 0
        self._lock = threading.Lock()
        self._files_per_log_line = max(5, -(-files // _PROGRESS_LINES_MAX))
        self._draws_on_terminal = files > 0 and sys.stderr is not None and sys.stderr.isatty()
        self._draw_line()

    def add_compiled_files(self, count: int) -> None:
        with self._lock:
            steps_before = self._compiled_count // self._files_per_log_line
            self._compiled_count += count
            self._draw_line()
            if (
                not self._draws_on_terminal
                and self._compiled_count // self._files_per_log_line > steps_before
                and self._compiled_count < self._file_count
            ):
                _log.info("compiled %d of %d files", self._compiled_count, self._file_count)

    def clear_line(self) -> None:
        if self._draws_on_terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def _draw_line(self) -> None:
        if self._draws_on_terminal:
            sys.stderr.write(f"\r\033[K  compiling: {self._compiled_count} of {self._file_count} files")
            sys.stderr.flush()


def _is_complete_object(object_path: Path) -> bool:
    """False for an empty file, which a power failure may leave: linkers accept it as an empty script."""
    return (
        object_path.is_file()
        and object_path.stat().st_size > 0
        and compiler_messages_path(object_path).is_file()
    )


def update_last_used_time(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        pass  # the cache of another user, who evicts its files


def _translation_unit_key(sources: Sequence[Path], flags: Sequence[str], target: TargetPlatform) -> str:
    contents = [
        f"{path.name}\0{text}" for source in sources for path, text in _read_with_includes(source).items()
    ]
    return content_hash(target.dependency_version, target.soabi, *flags, *contents)


def _read_with_includes(source: Path) -> dict[Path, str]:
    """The text of a file and of all project files that it includes, directly or indirectly."""
    found: dict[Path, str] = {}
    pending = [source.resolve()]
    while pending:
        path = pending.pop()
        if path in found or not path.is_file():  # the compiler reports missing files
            continue
        found[path] = path.read_text("utf-8")
        pending += [(path.parent / name).resolve() for name in _INCLUDE_DIRECTIVE.findall(found[path])]
    return dict(sorted(found.items()))


def _first_error_lines(text: str) -> str:
    lines = text.splitlines()
    errors = [line for line in lines if "error:" in line or "undefined reference" in line]
    return "\n".join((errors or lines)[:_ERROR_LINES_IN_MESSAGE])


def _hint_for_compiler_output(text: str) -> str:
    if "Python.h" in text:
        return "install Python's headers (Debian, Ubuntu: python3-dev; Fedora: python3-devel)"
    return "Genie needs a C++20 compiler (GCC 11, Clang 14 or newer) and torch 2.11 to 2.13"


def _usable_processor_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
