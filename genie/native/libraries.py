"""The C++ libraries: compiled for the installed torch and Python, cached, and loaded.

A library of the torch device works with one version of torch, Python and C++ ABI, the scheduler's with one
version of Python. So Genie ships sources, and the first use compiles them, once. `python -m genie.native`
does that ahead of time.

Does not run compilers (compiler.py).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import logging
import platform
import shlex
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeAlias, get_args

from genie import config
from genie.errors import NativeBuildError
from genie.native.compiler import (
    COMPILER_INSTALL_HINT,
    BuildPlan,
    LibraryBuild,
    TranslationUnit,
    compiler_messages_path,
    content_hash,
    update_last_used_time,
)
from genie.processes.files import FileLock, read_lock_holder_pid

LibraryName: TypeAlias = Literal["genie_device", "genie_executor", "genie_scheduler", "genie_tree"]
LIBRARIES: tuple[LibraryName, ...] = get_args(LibraryName)
TORCH_LIBRARIES: tuple[LibraryName, ...] = ("genie_device", "genie_executor")
"""Libraries that are linked to torch."""
STANDALONE_LIBRARIES: tuple[LibraryName, ...] = ("genie_tree",)
"""Libraries with a C interface, without Python: build() returns the file, ctypes opens it."""

NO_COMPILER_EXIT_CODE = 69
"""Exit code of `python -m genie.native` without a compiler: a Makefile may continue."""

_COMPILER_NAMES = ("c++", "g++", "clang++")
# Warnings are enabled for project files only; other headers are included as system headers.
_COMPILE_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# Scheduling must not depend on the processor: no fused multiply-add, which rounds differently.
_SCHEDULER_COMPILE_FLAGS = ("-O3", "-DNDEBUG", "-ffp-contract=off")
_NANOBIND_COMPILE_FLAGS = (
    "-O2",
    "-DNDEBUG",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-w",
)
_TORCH_LINK_LIBRARIES = ("torch", "torch_cpu", "c10", "torch_python")
# Another process that holds the lock longer counts as hung.
_BUILD_LOCK_TIMEOUT_S = 2400.0
_BUILD_LOCK_POLL_INTERVAL_S = 0.1
# Cached for other versions of torch and Python, and for switching between branches.
_CACHED_BUILDS_PER_LIBRARY_MAX = 4
_CACHED_OBJECTS_MAX = 100
# Files of a torch library per unit. With more, an edit takes longer, and the first build hardly less.
_FILES_PER_TRANSLATION_UNIT = 8

_log = logging.getLogger(__name__)
_load_lock = threading.Lock()
_loaded_libraries: dict[LibraryName, ModuleType] = {}


def load(name: LibraryName) -> ModuleType:
    """Return the library as a module, one per process; compiles it if it is not in the cache.

    Code imports genie.native.genie_device, genie_executor and genie_scheduler instead, which are typed.
    Imports torch for a library of the torch device. NativeBuildError if there is no compiler, or compiling or
    loading fails.
    """
    assert name not in STANDALONE_LIBRARIES, "not a Python module"
    with _load_lock:
        if name not in _loaded_libraries:
            _loaded_libraries[name] = _load_module(name, BuildCache.of_this_installation().build(name))
        return _loaded_libraries[name]


def find_compiler() -> list[str] | None:
    """The command of the C++ compiler: $CXX, else the first of the usual names; None if there is none."""
    try:
        chosen = shlex.split(config.cxx_command() or "")
    except ValueError:  # unbalanced quotation marks
        return None
    if chosen:
        return chosen if shutil.which(chosen[0]) else None
    return next(([path] for name in _COMPILER_NAMES if (path := shutil.which(name))), None)


def missing_compiler_reason() -> str:
    """Why find_compiler() returned None, for messages."""
    chosen = config.cxx_command()
    return f"CXX names {chosen!r}, which was not found" if chosen else "there is no C++ compiler"


@dataclass(frozen=True, kw_only=True)
class TorchPlatform:
    """The torch, Python and ABI that a library is compiled for."""

    torch_version: str
    torch_folder: Path
    cxx11_abi: bool
    python_include: str
    soabi: str

    @classmethod
    def from_installation(cls) -> TorchPlatform:
        try:
            import torch
        except ImportError as error:
            raise NativeBuildError(
                f"the torch device needs PyTorch, which could not be imported: {error}",
                hint="pip install 'genie-gpu[torch]'",
            ) from error
        return cls(
            torch_version=str(torch.__version__),
            torch_folder=Path(torch.__file__).parent,
            cxx11_abi=bool(torch._C._GLIBCXX_USE_CXX11_ABI),
            python_include=sysconfig.get_path("include"),
            soabi=str(sysconfig.get_config_var("SOABI")),
        )

    @property
    def display_name(self) -> str:
        return f"torch {self.torch_version}"

    @property
    def dependency_version(self) -> str:
        """Version of the dependency that is compiled in."""
        return self.torch_version

    def compile_flags(self) -> tuple[str, ...]:
        include = self.torch_folder / "include"
        folders = (str(include), str(include / "torch" / "csrc" / "api" / "include"), self.python_include)
        flags = ("-O2", *_COMPILE_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(self.cxx11_abi)}")
        return flags + tuple(part for folder in folders for part in ("-isystem", folder))

    def link_flags(self) -> tuple[str, ...]:
        folder = self.torch_folder / "lib"
        flags: tuple[str, ...] = ("-shared", f"-L{folder}", f"-Wl,-rpath,{folder}")
        if sys.platform == "darwin":
            flags += ("-undefined", "dynamic_lookup")  # Python is resolved at load time
        else:
            # The same one as torch: with a second libstdc++ in the process, iostreams crash.
            flags += ("-l:libstdc++.so.6",)
        return (*flags, *(f"-l{name}" for name in _TORCH_LINK_LIBRARIES), "-ldl")


@dataclass(frozen=True, kw_only=True)
class NanobindPlatform:
    """The Python and nanobind versions that a library without torch is compiled for."""

    nanobind_version: str
    nanobind_folder: Path
    python_include: str
    soabi: str

    @classmethod
    def from_installation(cls) -> NanobindPlatform:
        try:
            import nanobind
        except ImportError as error:
            raise NativeBuildError(
                f"the scheduler's library needs nanobind, which could not be imported: {error}",
                hint="pip install nanobind",
            ) from error
        return cls(
            nanobind_version=str(nanobind.__version__),
            nanobind_folder=Path(nanobind.__file__).parent,
            python_include=sysconfig.get_path("include"),
            soabi=str(sysconfig.get_config_var("SOABI")),
        )

    @property
    def display_name(self) -> str:
        return f"Python {platform.python_version()}"

    @property
    def dependency_version(self) -> str:
        return self.nanobind_version

    def compile_flags(self) -> tuple[str, ...]:
        return (*_SCHEDULER_COMPILE_FLAGS, *_COMPILE_FLAGS, *self._include_flags("-isystem"))

    def nanobind_unit(self) -> TranslationUnit:
        """nanobind's sources, which it combines in one file."""
        source = self.nanobind_folder / "src" / "nb_combined.cpp"
        return TranslationUnit((source,), (*_NANOBIND_COMPILE_FLAGS, *self._include_flags("-I")), self)

    def link_flags(self) -> tuple[str, ...]:
        return ("-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()))

    def _include_flags(self, flag: str) -> tuple[str, ...]:
        folders = [self.nanobind_folder / "include", self.nanobind_folder / "ext" / "robin_map" / "include"]
        return tuple(part for folder in (*map(str, folders), self.python_include) for part in (flag, folder))


@dataclass(frozen=True, kw_only=True)
class StandalonePlatform:
    """The machine type that a library without Python is compiled for."""

    soabi: str = f"{sys.platform}-{platform.machine()}"
    dependency_version: str = ""

    @property
    def display_name(self) -> str:
        return f"{platform.machine()} machines"

    def compile_flags(self) -> tuple[str, ...]:
        # Grid nodes compile it as well, with older compilers.
        return ("-O2", *_COMPILE_FLAGS, "-std=c++17", "-fno-exceptions", "-fno-rtti")

    def link_flags(self) -> tuple[str, ...]:
        return ("-shared",)


@dataclass(frozen=True)
class BuildCache:
    """The source folder, and the cache of compiled libraries."""

    source_folder: Path
    cache_folder: Path

    @classmethod
    def of_this_installation(cls) -> BuildCache:
        """In a checkout: native/ and build/native; otherwise the package's sources and the user's cache."""
        package = Path(__file__).resolve().parents[1]
        root = package.parent
        if (root / "pyproject.toml").is_file() and (root / "native").is_dir():
            return cls(root / "native", root / "build" / "native")
        return cls(package / "_native", config.cache_home() / "genie" / "native")

    def build(self, name: LibraryName) -> Path:
        """Return the library's file, compiling it if needed. One process compiles; others wait for it."""
        return self.build_all([name])[0]

    def build_all(self, names: Sequence[LibraryName]) -> list[Path]:
        """Return the files of several libraries, compiled together. After an error none is replaced."""
        plans = [self._make_plan(name) for name in names]
        for plan in plans:
            if plan.library_path.is_file():
                update_last_used_time(plan.library_path)
        try:
            if _unbuilt_plans(plans):
                with self._hold_cache_lock(plans):
                    self._build_libraries(_unbuilt_plans(plans))
        except OSError as error:
            raise NativeBuildError(
                f"compiling in {self.cache_folder} failed: {error}", hint="check free space and permissions"
            ) from error
        return [plan.library_path for plan in plans]

    def is_built(self, name: LibraryName) -> bool:
        return self._make_plan(name).library_path.is_file()

    def check_torch_libraries_available(self) -> None:
        """NativeBuildError if a torch library is neither built nor can be. Compiles nothing."""
        for plan in map(self._make_plan, TORCH_LIBRARIES):
            if not plan.library_path.is_file():
                _require_compiler(plan)

    def _make_plan(self, name: LibraryName) -> BuildPlan:
        """The build plan. Its key does not include the compiler: a built library needs none."""
        if name in STANDALONE_LIBRARIES:
            target = StandalonePlatform()
            own = _find_sources(self.source_folder / "grid", name)
            units = [TranslationUnit((path,), target.compile_flags(), target) for path in own]
        else:
            units = self._torch_units(name) if name in TORCH_LIBRARIES else self._nanobind_units(name)
        return self._make_plan_of_units(name, units)

    def _make_plan_of_units(self, name: LibraryName, units: list[TranslationUnit]) -> BuildPlan:
        target = units[0].target
        part = name.removeprefix("genie_")
        title = f"the torch {part}" if name in TORCH_LIBRARIES else f"the {part}'s library"
        key = content_hash(*target.link_flags(), *(unit.cache_key for unit in units))
        return BuildPlan(name, title, target, units, library_path=self.cache_folder / f"{name}-{key}.so")

    def _torch_units(self, name: LibraryName) -> list[TranslationUnit]:
        folder, target = self.source_folder / "torch", TorchPlatform.from_installation()
        flags = target.compile_flags()
        own_flags = (*flags, f"-DTORCH_EXTENSION_NAME={name}")
        shared = [
            TranslationUnit(files, flags, target)
            for files in _group_files_into_units(sorted(folder.glob("stream*.cpp")))
        ]
        own = _find_sources(folder / name.removeprefix("genie_"), name)
        return shared + [TranslationUnit(files, own_flags, target) for files in _group_files_into_units(own)]

    def _nanobind_units(self, name: LibraryName) -> list[TranslationUnit]:
        target = NanobindPlatform.from_installation()
        flags = target.compile_flags()
        own = _find_sources(self.source_folder / name.removeprefix("genie_"), name)
        return [target.nanobind_unit(), *(TranslationUnit((path,), flags, target) for path in own)]

    @contextlib.contextmanager
    def _hold_cache_lock(self, plans: Sequence[BuildPlan]) -> Iterator[None]:
        """Hold the cache's lock; continue without it once another process has built the libraries."""
        self.cache_folder.mkdir(parents=True, exist_ok=True)
        path = self.cache_folder / "lock"
        lock = FileLock.try_acquire(path)
        if lock is None:
            _log.info(
                "waiting for process %s, which is compiling in %s",
                read_lock_holder_pid(path),
                self.cache_folder,
            )
        deadline = time.monotonic() + _BUILD_LOCK_TIMEOUT_S
        while lock is None and _unbuilt_plans(plans):
            if time.monotonic() > deadline:
                raise NativeBuildError(
                    f"another process has been compiling in {self.cache_folder} for "
                    f"{_BUILD_LOCK_TIMEOUT_S:g} s",
                    hint=f"end process {read_lock_holder_pid(path)} and try again",
                )
            time.sleep(_BUILD_LOCK_POLL_INTERVAL_S)
            lock = FileLock.try_acquire(path)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _build_libraries(self, plans: Sequence[BuildPlan]) -> None:
        if not plans:
            return
        compiler = _require_compiler(plans[0])
        for plan in plans:
            _log.info(
                "compiling %s for %s (once, about a minute)", plan.display_name, plan.target.display_name
            )
        for stale in self.cache_folder.glob("making-*"):  # of a killed process: this one holds the lock
            shutil.rmtree(stale, ignore_errors=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="making-", dir=self.cache_folder) as folder:
            LibraryBuild(compiler, plans, self.cache_folder, Path(folder)).run()
        names = ", ".join(plan.display_name for plan in plans)
        _log.info("compiled %s in %.0f s", names, time.monotonic() - started)
        for plan in plans:
            _delete_all_but_newest(
                self.cache_folder.glob(f"{plan.name}-*.so"), _CACHED_BUILDS_PER_LIBRARY_MAX
            )
        _delete_all_but_newest(self.cache_folder.glob("objects/*.o"), _CACHED_OBJECTS_MAX)


def _unbuilt_plans(plans: Iterable[BuildPlan]) -> list[BuildPlan]:
    return [plan for plan in plans if not plan.library_path.is_file()]


def _find_sources(folder: Path, name: LibraryName) -> list[Path]:
    found = sorted(folder.glob("*.cpp"))
    if not found:
        raise NativeBuildError(f"no sources of {name} in {folder}", hint="reinstall Genie")
    return found


def _group_files_into_units(files: Sequence[Path]) -> list[tuple[Path, ...]]:
    """As few groups as possible, of about equal size."""
    count = -(-len(files) // _FILES_PER_TRANSLATION_UNIT)
    ends = [len(files) * number // count for number in range(1, count + 1)]
    return [tuple(files[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _require_compiler(plan: BuildPlan) -> list[str]:
    compiler = find_compiler()
    if compiler is None:
        raise NativeBuildError(
            f"{plan.display_name} must be compiled once for {plan.target.display_name}, and "
            f"{missing_compiler_reason()}",
            hint=COMPILER_INSTALL_HINT,
        )
    return compiler


def _load_module(name: LibraryName, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise NativeBuildError(
            f"could not load {path}: {error}", hint=f"remove {path.parent} and try again"
        ) from error
    return module


def _delete_all_but_newest(paths: Iterable[Path], count: int) -> None:
    for old in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[count:]:
        old.unlink(missing_ok=True)  # processes that have loaded it keep it
        compiler_messages_path(old).unlink(missing_ok=True)
