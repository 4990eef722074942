"""The C++ libraries: cached builds, incremental compilation, locking between processes, and error
messages."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import logging
import os
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from genie.errors import NativeBuildError
from genie.native import compiler as compiling
from genie.native import libraries
from genie.native.__main__ import main
from genie.native.libraries import BuildCache, TorchPlatform
from genie.processes.files import FileLock
from tests.house.repository_files import ROOT
from tests.needs import require_program

TORCH_MODULE_SOURCE = """
#include <Python.h>
#include "value.h"
int stream_value();
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_{name}() {{
  static PyModuleDef definition{{PyModuleDef_HEAD_INIT, "{name}", nullptr, -1, nullptr, nullptr, nullptr,
                                 nullptr, nullptr}};
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "value", VALUE);
  PyModule_AddIntConstant(module, "stream", stream_value());
  return module;
}}
"""


NANOBIND_MODULE_SOURCE = """
#include <nanobind/nanobind.h>
NB_MODULE(genie_scheduler, module) { module.attr("value") = 7; }
"""


STANDALONE_LIBRARY_SOURCE = """
extern "C" __attribute__((visibility("default"))) int value() { return 7; }
"""


class LoggingCompiler:
    """The real compiler, wrapped by a script that logs the files it compiles."""

    def __init__(self, folder: Path) -> None:
        self.real = require_program("c++", package="g++")
        self.path = folder / "counting-c++"
        self._calls = folder / "calls"
        self.replace_script(f'exec {self.real} "$@"')

    def replace_script(self, script: str) -> None:
        note = f"for word; do case $word in *.cpp) echo $word >> {self._calls};; esac; done"
        self.path.write_text(f"#!/bin/sh\n{note}\n{script}\n")
        self.path.chmod(0o755)

    def compiled_files(self) -> list[str]:
        """Names of the files compiled since the last call."""
        names = [Path(line).name for line in self._calls.read_text().split()] if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return sorted(names)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoggingCompiler:
    made = LoggingCompiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    return made


@pytest.fixture
def build_cache(tmp_path: Path) -> BuildCache:
    """Small sources with the structure of the real ones, but without torch headers, so that they compile
    fast."""
    sources = tmp_path / "sources" / "torch"
    for name in libraries.TORCH_LIBRARIES:
        own = sources / name.removeprefix("genie_")
        own.mkdir(parents=True)
        (own / "module.cpp").write_text(TORCH_MODULE_SOURCE.format(name=name))
        (own / "value.h").write_text('#include "../shared.h"\n')
    (sources / "shared.h").write_text("#define VALUE 7\n")
    (sources / "stream.cpp").write_text("int stream_value() { return 3; }\n")
    plain = tmp_path / "sources" / "scheduler"
    plain.mkdir()
    (plain / "bindings.cpp").write_text(NANOBIND_MODULE_SOURCE)
    bare = tmp_path / "sources" / "grid"
    bare.mkdir()
    (bare / "tree.cpp").write_text(STANDALONE_LIBRARY_SOURCE)
    return BuildCache(sources.parent, tmp_path / "cache")


def load_module_value(path: Path) -> int:
    return int(libraries._load_module("genie_device", path).value)


# --- cache and incremental builds ---------------------------------------------------------------


def test_library_is_compiled_once_and_cached(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    path = build_cache.build("genie_device")
    module = libraries._load_module("genie_device", path)
    assert (module.value, module.stream) == (7, 3)
    assert compiler.compiled_files() == ["module.cpp", "stream.cpp"]
    assert build_cache.build("genie_device") == path
    assert compiler.compiled_files() == []


def test_torch_libraries_share_common_objects(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    build_cache.build("genie_device")
    compiler.compiled_files()
    build_cache.build("genie_executor")
    assert compiler.compiled_files() == ["module.cpp"]


def test_c_library_is_loadable_by_ctypes(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    path = build_cache.build("genie_tree")
    assert ctypes.CDLL(str(path)).value() == 7
    assert compiler.compiled_files() == ["tree.cpp"]


@pytest.mark.long("compiles nanobind")
def test_scheduler_library_does_not_need_torch(
    build_cache: BuildCache, compiler: LoggingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> TorchPlatform:
        raise NativeBuildError("there is no torch")

    monkeypatch.setattr(TorchPlatform, "from_installation", absent)
    path = build_cache.build("genie_scheduler")
    assert libraries._load_module("genie_scheduler", path).value == 7
    assert compiler.compiled_files() == ["bindings.cpp", "nb_combined.cpp"]
    assert build_cache.build("genie_scheduler") == path
    assert compiler.compiled_files() == []


def test_missing_nanobind_error_says_what_to_install(
    build_cache: BuildCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nanobind", None)
    with pytest.raises(NativeBuildError, match="pip install nanobind"):
        build_cache.build("genie_scheduler")


def test_only_changed_file_is_recompiled(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    build_cache.build("genie_device")
    compiler.compiled_files()
    (build_cache.source_folder / "torch" / "stream.cpp").write_text("int stream_value() { return 4; }\n")
    assert libraries._load_module("genie_device", build_cache.build("genie_device")).stream == 4
    assert compiler.compiled_files() == ["stream.cpp"]


def test_changed_header_recompiles_its_includers(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    build_cache.build("genie_device")
    compiler.compiled_files()
    (build_cache.source_folder / "torch" / "shared.h").write_text("#define VALUE 8\n")  # included by value.h
    assert load_module_value(build_cache.build("genie_device")) == 8
    assert compiler.compiled_files() == ["module.cpp"]


def test_reverted_edit_uses_the_cache(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    first = build_cache.build("genie_device")
    (build_cache.source_folder / "torch" / "shared.h").write_text("#define VALUE 8\n")
    build_cache.build("genie_device")
    compiler.path.unlink()
    (build_cache.source_folder / "torch" / "shared.h").write_text("#define VALUE 7\n")
    assert build_cache.build("genie_device") == first


@pytest.mark.parametrize(
    "change", [{"torch_version": "2.99"}, {"soabi": "cpython-399"}, {"cxx11_abi": False}]
)
def test_library_depends_on_torch_and_python_version(
    build_cache: BuildCache,
    compiler: LoggingCompiler,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, object],
) -> None:
    installed = TorchPlatform.from_installation()
    first = build_cache.build("genie_device")
    compiler.compiled_files()
    other = dataclasses.replace(installed, **change)  # type: ignore[arg-type]
    monkeypatch.setattr(TorchPlatform, "from_installation", lambda: other)
    assert build_cache.build("genie_device") != first
    assert compiler.compiled_files() == ["module.cpp", "stream.cpp"]


def test_change_of_the_compiler_recompiles(
    build_cache: BuildCache, compiler: LoggingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_cache.build("genie_device")
    path.unlink()
    build_cache.build("genie_device")
    assert compiler.compiled_files() == ["module.cpp", "stream.cpp"]  # linked again from cached objects
    path.unlink()
    monkeypatch.setenv("CXX", f"{compiler.path} -DOTHER")
    build_cache.build("genie_device")
    assert compiler.compiled_files() == ["module.cpp", "stream.cpp"]


def test_file_changed_during_compilation_is_not_cached(
    build_cache: BuildCache, compiler: LoggingCompiler
) -> None:
    header = build_cache.source_folder / "torch" / "shared.h"
    compiler.replace_script(f'{compiler.real} "$@" || exit; echo "#define VALUE 9" > {header}')
    with pytest.raises(NativeBuildError, match=r"module\.cpp or one of its headers changed"):
        build_cache.build("genie_device")
    compiler.replace_script(f'exec {compiler.real} "$@"')
    assert load_module_value(build_cache.build("genie_device")) == 9
    header.write_text("#define VALUE 7\n")
    assert load_module_value(build_cache.build("genie_device")) == 7


def test_old_libraries_and_objects_are_evicted(
    build_cache: BuildCache, compiler: LoggingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_CACHED_BUILDS_PER_LIBRARY_MAX", 2)
    monkeypatch.setattr(libraries, "_CACHED_OBJECTS_MAX", 3)
    made = []
    for number in range(4):
        (build_cache.source_folder / "torch" / "shared.h").write_text(f"#define VALUE {number}\n")
        made.append(build_cache.build("genie_device"))
        for age, path in enumerate(reversed(made)):  # file times may be too coarse for fast builds
            if path.exists():
                os.utime(path, (1e9 - age, 1e9 - age))
    other = build_cache.build("genie_executor")
    assert [path.exists() for path in (*made, other)] == [False, False, True, True, True]
    kept = [
        {path.stem for path in build_cache.cache_folder.glob(f"objects/*.{kind}")} for kind in ("o", "txt")
    ]
    assert len(kept[0]) == 3
    assert kept[0] == kept[1]


def test_object_without_recorded_compiler_output_is_recompiled(
    build_cache: BuildCache, compiler: LoggingCompiler
) -> None:
    build_cache.build("genie_device").unlink()
    for output in build_cache.cache_folder.glob("objects/*.txt"):
        output.unlink()
    compiler.compiled_files()
    assert load_module_value(build_cache.build("genie_device")) == 7
    assert compiler.compiled_files() == ["module.cpp", "stream.cpp"]


# --- one process at a time ----------------------------------------------------------------------

BUILD_SCRIPT = """
import sys
from pathlib import Path
from genie.native.libraries import BuildCache
print(BuildCache(Path(sys.argv[1]), Path(sys.argv[2])).build("genie_device"))
"""


def test_two_processes_compile_once(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    command = [
        sys.executable,
        "-c",
        BUILD_SCRIPT,
        str(build_cache.source_folder),
        str(build_cache.cache_folder),
    ]
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(subprocess.run, command, capture_output=True, text=True, timeout=80) for _ in range(2)
        ]
        done = [run.result() for run in runs]
    assert [run.stderr for run in done] == ["", ""]
    assert done[0].stdout == done[1].stdout != ""
    assert compiler.compiled_files() == ["module.cpp", "stream.cpp"]


def test_leftovers_of_a_killed_build_are_removed(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    left = build_cache.cache_folder / "making-left"
    left.mkdir(parents=True)
    (left / "half.o").write_bytes(b"half")
    build_cache.build("genie_device")
    assert sorted(path.name for path in build_cache.cache_folder.iterdir() if path.is_dir()) == ["objects"]


# --- errors -------------------------------------------------------------------------------------


def test_compiler_error_is_shown_with_log_path(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    (build_cache.source_folder / "torch" / "stream.cpp").write_text(
        "int stream_value() { return nothing; }\n"
    )
    with pytest.raises(
        NativeBuildError, match=r"stream\.cpp:1:\d+: error: .*nothing.* was not declared"
    ) as raised:
        build_cache.build("genie_device")
    log = build_cache.cache_folder / "genie_device.log"
    assert f"full log: {log}" in str(raised.value)
    assert "nothing" in log.read_text()
    assert list(build_cache.cache_folder.glob("*.so")) == []
    compiler.compiled_files()
    (build_cache.source_folder / "torch" / "stream.cpp").write_text("int stream_value() { return 0; }\n")
    build_cache.build("genie_device")
    assert "stream.cpp" in compiler.compiled_files()


def test_linker_error_is_shown(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    refuse = 'case "$*" in *-shared*) echo "ld: error: cannot find -lc10"; exit 1;; esac'
    compiler.replace_script(f'{refuse}; exec {compiler.real} "$@"')
    with pytest.raises(NativeBuildError, match="cannot find -lc10"):
        build_cache.build("genie_device")


def test_missing_python_headers_are_reported(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    source = build_cache.source_folder / "torch" / "device" / "module.cpp"
    source.write_text(source.read_text().replace("<Python.h>", "<no/such/Python.h>"))
    with pytest.raises(NativeBuildError, match="python3-dev; Fedora: python3-devel"):
        build_cache.build("genie_device")


def test_missing_compiler_error_says_what_to_install(
    build_cache: BuildCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeBuildError) as raised:
        build_cache.build("genie_device")
    for words in ("no C++ compiler", "g++ python3-dev", "gcc-c++ python3-devel", "is not available"):
        assert words in str(raised.value)
    monkeypatch.setenv("CXX", "c++ '")
    with pytest.raises(NativeBuildError, match=r"""CXX names "c\+\+ '", which was not found"""):
        build_cache.build("genie_device")
    monkeypatch.setenv("CXX", "/no/such/compiler -m64")
    with pytest.raises(NativeBuildError, match="CXX names '/no/such/compiler -m64', which was not found"):
        build_cache.build("genie_device")


def test_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "genie_device-1.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeBuildError, match=rf"could not load {broken}: .*remove {tmp_path}"):
        libraries._load_module("genie_device", broken)


def test_missing_sources_are_an_error(build_cache: BuildCache, tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match="no sources of genie_device"):
        BuildCache(tmp_path / "nowhere", build_cache.cache_folder).build("genie_device")


@pytest.mark.parametrize("in_the_way", ["cache", "cache/objects"])
def test_unwritable_cache_is_an_error(
    build_cache: BuildCache, compiler: LoggingCompiler, tmp_path: Path, in_the_way: str
) -> None:
    (tmp_path / in_the_way).parent.mkdir(exist_ok=True)
    (tmp_path / in_the_way).write_text("a file is in the way")
    with pytest.raises(
        NativeBuildError, match=rf"compiling in {build_cache.cache_folder} failed: .*check free space"
    ):
        build_cache.build("genie_device")


def test_wait_for_another_build_has_a_timeout(
    build_cache: BuildCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_cache.cache_folder.mkdir()
    held = FileLock.try_acquire(build_cache.cache_folder / "lock")
    assert held is not None
    monkeypatch.setattr(libraries, "_BUILD_LOCK_TIMEOUT_S", 0.0)
    with (
        caplog.at_level(logging.INFO, logger="genie"),
        pytest.raises(NativeBuildError, match=rf"end process {os.getpid()} and try again"),
    ):
        build_cache.build("genie_device")
    assert (
        f"waiting for process {os.getpid()}, which is compiling in {build_cache.cache_folder}"
        in caplog.messages
    )
    held.release()


# --- progress output ----------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_build_shows_progress_on_a_terminal(
    build_cache: BuildCache,
    compiler: LoggingCompiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, logger="genie"):
        build_cache.build("genie_device")
    version = TorchPlatform.from_installation().torch_version
    assert f"compiling the torch device for torch {version} (once, about a minute)" in caplog.messages
    shown = terminal.getvalue()
    assert "compiling: 0 of 2 files" in shown and "2 of 2 files" in shown
    assert shown.endswith("\r\033[K")


def test_build_draws_nothing_without_a_terminal(
    build_cache: BuildCache, compiler: LoggingCompiler, capfd: pytest.CaptureFixture[str]
) -> None:
    build_cache.build("genie_device")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("outcome", ["built", "broken", "no compiler"])
@pytest.mark.long("compiles libraries for real")
def test_command_builds_all_libraries_or_reports_the_reason(
    build_cache: BuildCache,
    compiler: LoggingCompiler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: str,
) -> None:
    monkeypatch.setattr(BuildCache, "of_this_installation", lambda: build_cache)
    if outcome == "broken":
        (build_cache.source_folder / "torch" / "stream.cpp").write_text("nonsense\n")
    if outcome == "no compiler":
        monkeypatch.setenv("CXX", "/no/such/compiler")
    code = main()
    assert code == {"built": 0, "broken": 1, "no compiler": libraries.NO_COMPILER_EXIT_CODE}[outcome]
    assert len(list(build_cache.cache_folder.glob("*.so"))) == (4 if outcome == "built" else 0)
    assert {"built": "", "broken": "stream.cpp:1", "no compiler": "apt install g++"}[
        outcome
    ] in capsys.readouterr().err


def test_interrupted_build_prints_one_line(
    build_cache: BuildCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BuildCache, "of_this_installation", lambda: build_cache)
    monkeypatch.setattr(compiling.LibraryBuild, "run", raise_keyboard_interrupt)
    assert main(["genie_executor"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; finished object files are kept"


def raise_keyboard_interrupt(_build: compiling.LibraryBuild) -> None:
    raise KeyboardInterrupt


def test_single_library_can_be_built(
    build_cache: BuildCache, compiler: LoggingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BuildCache, "of_this_installation", lambda: build_cache)
    assert main(["genie_executor"]) == 0
    assert [path.name.partition("-")[0] for path in build_cache.cache_folder.glob("*.so")] == [
        "genie_executor"
    ]


def test_unknown_library_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["genie_toaster"])
    assert "unknown library 'genie_toaster'" in capsys.readouterr().err


# --- the real libraries -------------------------------------------------------------------------


def test_build_cache_of_a_checkout_is_inside_the_checkout() -> None:
    build_cache = BuildCache.of_this_installation()
    assert (build_cache.source_folder, build_cache.cache_folder) == (
        ROOT / "native",
        ROOT / "build" / "native",
    )


@pytest.mark.parametrize(
    "name", [each for each in libraries.LIBRARIES if each not in libraries.STANDALONE_LIBRARIES]
)
def test_library_is_loaded_once_per_process(name: libraries.LibraryName) -> None:
    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(lambda _: libraries.load(name), range(4)))
    assert all(module is modules[0] for module in modules)


@pytest.mark.parametrize("name", libraries.LIBRARIES)
def test_project_files_compile_without_warnings(name: libraries.LibraryName) -> None:
    BuildCache.of_this_installation().build(name)
    log = (ROOT / "build" / "native" / f"{name}.log").read_text()
    warnings = [line for line in log.splitlines() if "warning:" in line]
    assert warnings == []


def test_installed_package_contains_sources(tmp_path: Path) -> None:
    """As pip does: builds a wheel, unpacks it, and reads its source and cache folders."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=80)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "from genie.native import libraries\n"
        "build_cache = libraries.BuildCache.of_this_installation()\n"
        "print(build_cache.source_folder)\nprint(build_cache.cache_folder)"
    )
    # Without site: the editable install of this checkout would take precedence.
    folders = os.pathsep.join([str(tmp_path / "site"), sysconfig.get_path("purelib")])
    environment = {"PYTHONPATH": folders, "XDG_CACHE_HOME": str(tmp_path / "kept")}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    sources, cache = done.stdout.splitlines()
    assert cache == str(tmp_path / "kept" / "genie" / "native")
    assert list_files(Path(sources)) == list_files(ROOT / "native")


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
