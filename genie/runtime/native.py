"""The C++ libraries: compiled for the torch and the Python that are installed, kept, loaded.

A library of the torch device fits one torch, one Python and one ABI, and the scheduler's one Python, so none
is shipped: the sources are, and the first use compiles them, once. `python -m genie.runtime.native` does that
ahead of time. Objects are kept by the hash of what they are made of, so an edited file costs its own
compilation and no other.

Not for: what the libraries do (native/), and anything but torch's own libraries to link with.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeAlias, get_args

from genie import config
from genie.errors import NativeBuildError
from genie.runtime.files import FileLock, lock_holder

Library: TypeAlias = Literal["genie_device", "genie_executor", "genie_scheduler", "genie_tree"]
LIBRARIES: tuple[Library, ...] = get_args(Library)
TORCH_LIBRARIES: tuple[Library, ...] = ("genie_device", "genie_executor")
"""Those that are made for one torch; the others do without."""
BARE_LIBRARIES: tuple[Library, ...] = ("genie_tree",)
"""Those with a C interface, which know nothing of Python: build() gives the file, ctypes opens it."""

NO_COMPILER_EXIT_CODE = 69
"""Of `python -m genie.runtime.native`: nothing is wrong with the sources, so a Makefile may go on."""

_COMPILERS = ("c++", "g++", "clang++")
# Warnings are on for our own files only; others' headers come in as system headers.
_COMPILE = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# Decisions must not depend on the processor: no fused multiplication and addition, which rounds otherwise.
_SCHEDULER_COMPILE = ("-O3", "-DNDEBUG", "-ffp-contract=off")
_NANOBIND_COMPILE = (
    "-O2",
    "-DNDEBUG",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-w",
)
_TORCH_LIBRARIES = ("torch", "torch_cpu", "c10", "torch_python")
_INSTALL_HINT = (
    "install a C++ compiler (Debian, Ubuntu: apt install g++ python3-dev; Fedora: dnf install gcc-c++ "
    "python3-devel); everything but the remote_accelerator device works without it, and decisions are slower"
)
# A hung compiler, or a process that holds the lock and does nothing.
_COMPILE_S_MAX = 1200.0
_WAIT_S_MAX = 2400.0
_WAIT_STEP_S = 0.1
# Kept for other versions of torch and Python, and for going back and forth between two edits.
_LIBRARIES_KEPT = 4
_OBJECTS_KEPT = 100
_ERROR_LINES_SHOWN = 6
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)

_log = logging.getLogger(__name__)
_loading = threading.Lock()
_libraries: dict[Library, ModuleType] = {}


def load(name: Library) -> ModuleType:
    """The library as a module, one for the whole process; compiled now when it is not in the cache.

    Imports torch for a library of the torch device. NativeBuildError when there is no compiler, or when
    compiling or loading fails.
    """
    assert name not in BARE_LIBRARIES, "it is no module"
    with _loading:
        if name not in _libraries:
            _libraries[name] = _loaded(name, Workshop.of_this_installation().build(name))
        return _libraries[name]


def find_compiler() -> list[str] | None:
    """The command that compiles C++: $CXX, else the first of the usual names; None when there is none."""
    chosen = shlex.split(config.cxx() or "")
    if chosen:
        return chosen if shutil.which(chosen[0]) else None
    return next(([path] for name in _COMPILERS if (path := shutil.which(name))), None)


def no_compiler() -> str:
    """How it came that find_compiler() found none."""
    chosen = config.cxx()
    return f"CXX names {chosen!r}, which is not there" if chosen else "there is no C++ compiler"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a library is compiled for. Two targets never share a library."""

    torch_version: str
    torch_folder: Path
    cxx11_abi: bool
    python_include: str
    soabi: str

    @classmethod
    def installed(cls) -> Target:
        try:
            import torch
        except ImportError as error:
            raise NativeBuildError(
                f"the torch device needs PyTorch, and importing it failed: {error}",
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
    def name(self) -> str:
        return f"torch {self.torch_version}"

    @property
    def version(self) -> str:
        """Of what is compiled in besides Python."""
        return self.torch_version

    def compile_flags(self) -> tuple[str, ...]:
        include = self.torch_folder / "include"
        folders = (str(include), str(include / "torch" / "csrc" / "api" / "include"), self.python_include)
        flags = ("-O2", *_COMPILE, f"-D_GLIBCXX_USE_CXX11_ABI={int(self.cxx11_abi)}")
        return flags + tuple(part for folder in folders for part in ("-isystem", folder))

    def link_flags(self) -> tuple[str, ...]:
        folder = self.torch_folder / "lib"
        flags: tuple[str, ...] = ("-shared", f"-L{folder}", f"-Wl,-rpath,{folder}")
        if sys.platform == "darwin":
            flags += ("-undefined", "dynamic_lookup")  # Python itself is not linked to
        else:
            # torch's own. A compiler that links another one in would give us two, and streams then crash.
            flags += ("-l:libstdc++.so.6",)
        return (*flags, *(f"-l{name}" for name in _TORCH_LIBRARIES), "-ldl")


@dataclass(frozen=True, kw_only=True)
class PlainTarget:
    """What a library without torch is compiled for: a Python, and the nanobind whose sources go into it."""

    nanobind_version: str
    nanobind_folder: Path
    python_include: str
    soabi: str

    @classmethod
    def installed(cls) -> PlainTarget:
        try:
            import nanobind
        except ImportError as error:
            raise NativeBuildError(
                f"the scheduler's library needs nanobind, and importing it failed: {error}",
                hint="pip install nanobind",
            ) from error
        return cls(
            nanobind_version=str(nanobind.__version__),
            nanobind_folder=Path(nanobind.__file__).parent,
            python_include=sysconfig.get_path("include"),
            soabi=str(sysconfig.get_config_var("SOABI")),
        )

    @property
    def name(self) -> str:
        return f"Python {platform.python_version()}"

    @property
    def version(self) -> str:
        return self.nanobind_version

    def compile_flags(self) -> tuple[str, ...]:
        return (*_SCHEDULER_COMPILE, *_COMPILE, *self._includes("-isystem"))

    def nanobind_unit(self) -> _Unit:
        """All of nanobind in one file."""
        source = self.nanobind_folder / "src" / "nb_combined.cpp"
        return _Unit(source, (*_NANOBIND_COMPILE, *self._includes("-I")), self)

    def link_flags(self) -> tuple[str, ...]:
        return ("-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()))

    def _includes(self, flag: str) -> tuple[str, ...]:
        folders = [self.nanobind_folder / "include", self.nanobind_folder / "ext" / "robin_map" / "include"]
        return tuple(part for folder in (*map(str, folders), self.python_include) for part in (flag, folder))


@dataclass(frozen=True, kw_only=True)
class BareTarget:
    """What a library without Python is compiled for: this kind of machine."""

    soabi: str = f"{sys.platform}-{platform.machine()}"
    version: str = ""

    @property
    def name(self) -> str:
        return f"{platform.machine()} machines"

    def compile_flags(self) -> tuple[str, ...]:
        # Nodes with older compilers make it, too.
        return ("-O2", *_COMPILE, "-std=c++17", "-fno-exceptions", "-fno-rtti")

    def link_flags(self) -> tuple[str, ...]:
        return ("-shared",)


@dataclass(frozen=True)
class Workshop:
    """A folder of sources and a folder for what is made of them."""

    sources: Path
    cache: Path

    @classmethod
    def of_this_installation(cls) -> Workshop:
        """In a checkout both are in it, whoever's HOME it is; otherwise the package and the user's cache."""
        package = Path(__file__).resolve().parents[1]
        root = package.parent
        if (root / "pyproject.toml").is_file() and (root / "native").is_dir():
            return cls(root / "native", root / "build" / "native")
        return cls(package / "_native", config.cache_home() / "genie" / "native")

    def build(self, name: Library) -> Path:
        """The library's file, compiled if need be. One process compiles; others wait and find it done."""
        plan = self._plan(name)
        if plan.library.is_file():
            _mark_used(plan.library)
            return plan.library
        try:
            with self._locked(plan.library):
                if not plan.library.is_file():
                    self._compile(plan)
        except OSError as error:
            raise NativeBuildError(
                f"compiling in {self.cache} failed: {error}", hint="check free space and permissions"
            ) from error
        return plan.library

    def is_built(self, name: Library) -> bool:
        return self._plan(name).library.is_file()

    def check_usable(self) -> None:
        """NativeBuildError when a library for torch is neither there nor can be made. Compiles nothing."""
        for plan in map(self._plan, TORCH_LIBRARIES):
            if not plan.library.is_file():
                _compiler_for(plan)

    def _plan(self, name: Library) -> _Plan:
        """What the library is made of. Its key leaves out the compiler: what is there needs none."""
        if name in BARE_LIBRARIES:
            target = BareTarget()
            own = _own_files(self.sources / "grid", name)
            units = [_Unit(path, target.compile_flags(), target) for path in own]
        else:
            units = self._torch_units(name) if name in TORCH_LIBRARIES else self._plain_units(name)
        return self._plan_of(name, units)

    def _plan_of(self, name: Library, units: list[_Unit]) -> _Plan:
        target = units[0].target
        key = _hash(*target.link_flags(), *(unit.key for unit in units))
        return _Plan(name, target, units, library=self.cache / f"{name}-{key}.so")

    def _torch_units(self, name: Library) -> list[_Unit]:
        folder, target = self.sources / "torch", Target.installed()
        flags = target.compile_flags()
        named = (*flags, f"-DTORCH_EXTENSION_NAME={name}")
        shared = [_Unit(path, flags, target) for path in sorted(folder.glob("stream*.cpp"))]
        own = _own_files(folder / name.removeprefix("genie_"), name)
        return shared + [_Unit(path, named, target) for path in own]

    def _plain_units(self, name: Library) -> list[_Unit]:
        target = PlainTarget.installed()
        flags = target.compile_flags()
        own = _own_files(self.sources / name.removeprefix("genie_"), name)
        return [target.nanobind_unit(), *(_Unit(path, flags, target) for path in own)]

    @contextlib.contextmanager
    def _locked(self, wanted: Path) -> Iterator[None]:
        """Holds the cache's lock; also comes back, without it, when the wanted library has appeared."""
        self.cache.mkdir(parents=True, exist_ok=True)
        path = self.cache / "lock"
        lock = FileLock.try_take(path)
        if lock is None:
            _log.info("waiting for process %s, which compiles in %s", lock_holder(path), self.cache)
        deadline = time.monotonic() + _WAIT_S_MAX
        while lock is None and not wanted.is_file():
            if time.monotonic() > deadline:
                raise NativeBuildError(
                    f"another process has been compiling in {self.cache} for {_WAIT_S_MAX:g} s",
                    hint=f"end process {lock_holder(path)} and try again",
                )
            time.sleep(_WAIT_STEP_S)
            lock = FileLock.try_take(path)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _compile(self, plan: _Plan) -> None:
        compiler = _compiler_for(plan)
        _log.info("compiling %s for %s (once, about a minute)", plan.what, plan.target.name)
        for left in self.cache.glob("making-*"):  # of a process that was killed: the lock is ours
            shutil.rmtree(left, ignore_errors=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="making-", dir=self.cache) as folder:
            _Making(compiler, plan, self.cache, Path(folder)).run()
        _log.info("compiled %s in %.0f s", plan.what, time.monotonic() - started)
        _keep_newest(self.cache.glob(f"{plan.name}-*.so"), _LIBRARIES_KEPT)
        _keep_newest(self.cache.glob("objects/*.o"), _OBJECTS_KEPT)


@dataclass(frozen=True)
class _Unit:
    """One file to compile."""

    source: Path
    flags: tuple[str, ...]
    target: Target | PlainTarget | BareTarget

    @functools.cached_property
    def key(self) -> str:
        """Of all that its object depends on but the compiler."""
        return self.current_key()

    def current_key(self) -> str:
        contents = [f"{path.name}\0{text}" for path, text in _with_includes(self.source).items()]
        return _hash(self.target.version, self.target.soabi, *self.flags, *contents)


@dataclass(frozen=True)
class _Plan:
    name: Library
    target: Target | PlainTarget | BareTarget
    units: Sequence[_Unit]
    library: Path

    @property
    def what(self) -> str:
        part = self.name.removeprefix("genie_")
        return f"the torch {part}" if self.name in TORCH_LIBRARIES else f"the {part}'s library"


def _own_files(folder: Path, name: Library) -> list[Path]:
    found = sorted(folder.glob("*.cpp"))
    if not found:
        raise NativeBuildError(f"there are no sources of {name} in {folder}", hint="install Genie again")
    return found


def _compiler_for(plan: _Plan) -> list[str]:
    compiler = find_compiler()
    if compiler is None:
        raise NativeBuildError(
            f"{plan.what} has to be compiled once for {plan.target.name}, and {no_compiler()}",
            hint=_INSTALL_HINT,
        )
    return compiler


@dataclass(frozen=True)
class _Making:
    """One build, in a folder of its own; what is whole is moved to the cache."""

    compiler: Sequence[str]
    plan: _Plan
    cache: Path
    folder: Path

    def run(self) -> None:
        self.log.write_text("", "utf-8")
        (self.cache / "objects").mkdir(exist_ok=True)
        made_with = (self._call(["--version"]), *self.compiler)
        objects = {
            unit: self.cache / "objects" / f"{_hash(*made_with, unit.key)}.o" for unit in self.plan.units
        }
        missing = {
            unit: path for unit, path in objects.items() if not (path.is_file() and _said(path).is_file())
        }
        for unit in objects.keys() - missing.keys():
            self._note(f"{unit.source}: compiled before", _said(objects[unit]).read_text("utf-8"))
        self._compile_all(missing)
        for path in objects.values():
            _mark_used(path)
        linked = self.folder / self.plan.library.name
        inputs = [str(path) for path in objects.values()]
        self._call([*inputs, *self.plan.target.link_flags(), "-o", str(linked)])
        linked.replace(self.plan.library)

    @property
    def log(self) -> Path:
        return self.cache / f"{self.plan.name}.log"

    def _compile_all(self, missing: Mapping[_Unit, Path]) -> None:
        progress = _Progress(self.plan.what, len(missing))
        with ThreadPoolExecutor(_processors(), thread_name_prefix="genie-compile") as pool:
            made = [pool.submit(self._compile, unit, path, progress) for unit, path in missing.items()]
            wait(made, return_when=FIRST_EXCEPTION)
            pool.shutdown(cancel_futures=True)
        progress.end()
        for one in made:
            if not one.cancelled():
                one.result()

    def _compile(self, unit: _Unit, into: Path, progress: _Progress) -> None:
        made = self.folder / into.name
        said = self._call([*unit.flags, "-c", str(unit.source), "-o", str(made)])
        if unit.current_key() != unit.key:
            raise NativeBuildError(
                f"{unit.source} or a header of it was changed while it was compiled", hint="try again"
            )
        _said(into).write_text(said, "utf-8")
        made.replace(into)
        progress.step()

    def _call(self, arguments: Sequence[str]) -> str:
        """What the compiler says. Everything goes to the log; an error of it is a NativeBuildError."""
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
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeBuildError(
                f"compiling {self.plan.what} failed: {error}", hint=_INSTALL_HINT
            ) from error
        self._note(shlex.join(command), done.stdout)
        if done.returncode != 0:
            raise NativeBuildError(
                f"compiling {self.plan.what} for {self.plan.target.name} failed:\n"
                f"{_first_errors(done.stdout) or f'{command[0]} ended with {done.returncode}'}\n"
                f"the whole log is {self.log}",
                hint=_hint_for(done.stdout),
            )
        return done.stdout

    def _note(self, what: str, said: str) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"{what}\n{said}\n")


class _Progress:
    """One line on a terminal, rewritten in place; nothing anywhere else."""

    def __init__(self, what: str, files: int) -> None:
        self._what = what
        self._files = files
        self._done = 0
        self._lock = threading.Lock()
        self._shown = files > 0 and sys.stderr is not None and sys.stderr.isatty()
        self._write()

    def step(self) -> None:
        with self._lock:
            self._done += 1
            self._write()

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def _write(self) -> None:
        if self._shown:
            sys.stderr.write(f"\r\033[K  compiling {self._what}: {self._done} of {self._files} files")
            sys.stderr.flush()


def _loaded(name: Library, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise NativeBuildError(
            f"{path} cannot be loaded: {error}", hint=f"remove {path.parent} and try again"
        ) from error
    return module


def _with_includes(source: Path) -> dict[Path, str]:
    """The text of a file and of every file of ours that it includes, directly or not."""
    found: dict[Path, str] = {}
    todo = [source.resolve()]
    while todo:
        path = todo.pop()
        if path in found or not path.is_file():  # the compiler says better what is missing
            continue
        found[path] = path.read_text("utf-8")
        todo += [(path.parent / name).resolve() for name in _INCLUDE.findall(found[path])]
    return dict(sorted(found.items()))


def _said(object_path: Path) -> Path:
    """What the compiler said of a file, kept with its object: a warning is not gone with the first build."""
    return object_path.with_suffix(".txt")


def _first_errors(text: str) -> str:
    lines = text.splitlines()
    errors = [line for line in lines if "error:" in line or "undefined reference" in line]
    return "\n".join((errors or lines)[:_ERROR_LINES_SHOWN])


def _hint_for(text: str) -> str:
    if "Python.h" in text:
        return "install Python's headers (Debian, Ubuntu: python3-dev; Fedora: python3-devel)"
    return "Genie needs a compiler that knows C++20 (GCC 11, Clang 14 or newer) and torch 2.11 to 2.13"


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:24]


def _mark_used(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        pass  # a cache of another user: then its owner decides what is old


def _keep_newest(paths: Iterable[Path], count: int) -> None:
    for old in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)[count:]:
        old.unlink(missing_ok=True)  # whoever has it loaded keeps it
        _said(old).unlink(missing_ok=True)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main(arguments: Sequence[str] = ()) -> int:
    """Builds every library now, or those that are named. 0 when all are there."""
    parser = argparse.ArgumentParser(
        prog="python -m genie.runtime.native", description="Compiles what is missing of the C++ libraries."
    )
    parser.add_argument("libraries", nargs="*", metavar="library", help=f"of {', '.join(LIBRARIES)}")
    wanted = parser.parse_args(arguments).libraries or list(LIBRARIES)
    unknown = [name for name in wanted if name not in LIBRARIES]
    if unknown:
        parser.error(f"there is no library {unknown[0]!r}")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    workshop = Workshop.of_this_installation()
    for name in wanted:
        try:
            workshop.build(name)
        except NativeBuildError as error:
            sys.stderr.write(f"{error}\n")
            return NO_COMPILER_EXIT_CODE if find_compiler() is None else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
