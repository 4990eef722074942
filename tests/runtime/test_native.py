"""The C++ libraries: compiled once, only what changed, by one process at a time, and with words that help."""

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
from genie.runtime import native
from genie.runtime.files import FileLock
from genie.runtime.native import Target, Workshop
from tests.house.sources import ROOT
from tests.needs import require_program

MODULE = """
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


PLAIN_MODULE = """
#include <nanobind/nanobind.h>
NB_MODULE(genie_scheduler, module) { module.attr("value") = 7; }
"""


BARE_LIBRARY = """
extern "C" __attribute__((visibility("default"))) int value() { return 7; }
"""


class Compiler:
    """The real compiler behind a script that writes down which files it is given."""

    def __init__(self, folder: Path) -> None:
        self.real = require_program("c++", package="g++")
        self.path = folder / "counting-c++"
        self._calls = folder / "calls"
        self.becomes(f'exec {self.real} "$@"')

    def becomes(self, script: str) -> None:
        note = f"for word; do case $word in *.cpp) echo $word >> {self._calls};; esac; done"
        self.path.write_text(f"#!/bin/sh\n{note}\n{script}\n")
        self.path.chmod(0o755)

    def compiled(self) -> list[str]:
        """Names of the files compiled since the last call."""
        names = [Path(line).name for line in self._calls.read_text().split()] if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return sorted(names)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    return made


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    """Small sources in the shape of the real ones: they need no header of torch, so they compile at once."""
    sources = tmp_path / "sources" / "torch"
    for name in native.TORCH_LIBRARIES:
        own = sources / name.removeprefix("genie_")
        own.mkdir(parents=True)
        (own / "module.cpp").write_text(MODULE.format(name=name))
        (own / "value.h").write_text('#include "../shared.h"\n')
    (sources / "shared.h").write_text("#define VALUE 7\n")
    (sources / "stream.cpp").write_text("int stream_value() { return 3; }\n")
    plain = tmp_path / "sources" / "scheduler"
    plain.mkdir()
    (plain / "bindings.cpp").write_text(PLAIN_MODULE)
    bare = tmp_path / "sources" / "grid"
    bare.mkdir()
    (bare / "tree.cpp").write_text(BARE_LIBRARY)
    return Workshop(sources.parent, tmp_path / "cache")


def value_in(path: Path) -> int:
    return int(native._loaded("genie_device", path).value)


# --- compiled once, and only what changed -------------------------------------------------------


def test_a_library_is_compiled_once_and_then_found(workshop: Workshop, compiler: Compiler) -> None:
    path = workshop.build("genie_device")
    module = native._loaded("genie_device", path)
    assert (module.value, module.stream) == (7, 3)
    assert compiler.compiled() == ["module.cpp", "stream.cpp"]
    assert workshop.build("genie_device") == path
    assert compiler.compiled() == []


def test_both_libraries_share_what_is_common(workshop: Workshop, compiler: Compiler) -> None:
    workshop.build("genie_device")
    compiler.compiled()
    workshop.build("genie_executor")
    assert compiler.compiled() == ["module.cpp"]


def test_a_library_with_a_c_interface_is_opened_by_ctypes(workshop: Workshop, compiler: Compiler) -> None:
    path = workshop.build("genie_tree")
    assert ctypes.CDLL(str(path)).value() == 7
    assert compiler.compiled() == ["tree.cpp"]


def test_the_schedulers_library_needs_no_torch(
    workshop: Workshop, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> Target:
        raise NativeBuildError("there is no torch")

    monkeypatch.setattr(Target, "installed", absent)
    path = workshop.build("genie_scheduler")
    assert native._loaded("genie_scheduler", path).value == 7
    assert compiler.compiled() == ["bindings.cpp", "nb_combined.cpp"]
    assert workshop.build("genie_scheduler") == path
    assert compiler.compiled() == []


def test_without_nanobind_the_error_says_what_to_install(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nanobind", None)
    with pytest.raises(NativeBuildError, match="pip install nanobind"):
        workshop.build("genie_scheduler")


def test_a_changed_file_is_compiled_and_no_other(workshop: Workshop, compiler: Compiler) -> None:
    workshop.build("genie_device")
    compiler.compiled()
    (workshop.sources / "torch" / "stream.cpp").write_text("int stream_value() { return 4; }\n")
    assert native._loaded("genie_device", workshop.build("genie_device")).stream == 4
    assert compiler.compiled() == ["stream.cpp"]


def test_a_changed_header_reaches_those_who_include_it(workshop: Workshop, compiler: Compiler) -> None:
    workshop.build("genie_device")
    compiler.compiled()
    (workshop.sources / "torch" / "shared.h").write_text("#define VALUE 8\n")  # included by value.h
    assert value_in(workshop.build("genie_device")) == 8
    assert compiler.compiled() == ["module.cpp"]


def test_going_back_to_an_earlier_text_needs_no_compiler(workshop: Workshop, compiler: Compiler) -> None:
    first = workshop.build("genie_device")
    (workshop.sources / "torch" / "shared.h").write_text("#define VALUE 8\n")
    workshop.build("genie_device")
    compiler.path.unlink()
    (workshop.sources / "torch" / "shared.h").write_text("#define VALUE 7\n")
    assert workshop.build("genie_device") == first


@pytest.mark.parametrize(
    "change", [{"torch_version": "2.99"}, {"soabi": "cpython-399"}, {"cxx11_abi": False}]
)
def test_another_torch_or_python_has_another_library(
    workshop: Workshop, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    installed = Target.installed()
    first = workshop.build("genie_device")
    compiler.compiled()
    other = dataclasses.replace(installed, **change)  # type: ignore[arg-type]
    monkeypatch.setattr(Target, "installed", lambda: other)
    assert workshop.build("genie_device") != first
    assert compiler.compiled() == ["module.cpp", "stream.cpp"]


def test_another_compiler_compiles_anew(
    workshop: Workshop, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = workshop.build("genie_device")
    path.unlink()
    workshop.build("genie_device")
    assert compiler.compiled() == ["module.cpp", "stream.cpp"]  # linked again from what was there
    path.unlink()
    monkeypatch.setenv("CXX", f"{compiler.path} -DOTHER")
    workshop.build("genie_device")
    assert compiler.compiled() == ["module.cpp", "stream.cpp"]


def test_a_file_that_changes_while_it_is_compiled_is_not_kept(workshop: Workshop, compiler: Compiler) -> None:
    header = workshop.sources / "torch" / "shared.h"
    compiler.becomes(f'{compiler.real} "$@" || exit; echo "#define VALUE 9" > {header}')
    with pytest.raises(NativeBuildError, match=r"module\.cpp or a header of it was changed"):
        workshop.build("genie_device")
    compiler.becomes(f'exec {compiler.real} "$@"')
    assert value_in(workshop.build("genie_device")) == 9
    header.write_text("#define VALUE 7\n")
    assert value_in(workshop.build("genie_device")) == 7


def test_old_libraries_and_objects_go(
    workshop: Workshop, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_LIBRARIES_KEPT", 2)
    monkeypatch.setattr(native, "_OBJECTS_KEPT", 3)
    made = []
    for number in range(4):
        (workshop.sources / "torch" / "shared.h").write_text(f"#define VALUE {number}\n")
        made.append(workshop.build("genie_device"))
        for age, path in enumerate(reversed(made)):  # file times may be as coarse as a build is quick
            if path.exists():
                os.utime(path, (1e9 - age, 1e9 - age))
    other = workshop.build("genie_executor")
    assert [path.exists() for path in (*made, other)] == [False, False, True, True, True]
    kept = [{path.stem for path in workshop.cache.glob(f"objects/*.{kind}")} for kind in ("o", "txt")]
    assert len(kept[0]) == 3
    assert kept[0] == kept[1]


def test_an_object_without_what_the_compiler_said_of_it_is_made_again(
    workshop: Workshop, compiler: Compiler
) -> None:
    workshop.build("genie_device").unlink()
    for said in workshop.cache.glob("objects/*.txt"):
        said.unlink()
    compiler.compiled()
    assert value_in(workshop.build("genie_device")) == 7
    assert compiler.compiled() == ["module.cpp", "stream.cpp"]


# --- one process at a time ----------------------------------------------------------------------

BUILD = """
import sys
from pathlib import Path
from genie.runtime.native import Workshop
print(Workshop(Path(sys.argv[1]), Path(sys.argv[2])).build("genie_device"))
"""


def test_of_two_processes_one_compiles_and_the_other_finds_it(workshop: Workshop, compiler: Compiler) -> None:
    command = [sys.executable, "-c", BUILD, str(workshop.sources), str(workshop.cache)]
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(subprocess.run, command, capture_output=True, text=True, timeout=80) for _ in range(2)
        ]
        done = [run.result() for run in runs]
    assert [run.stderr for run in done] == ["", ""]
    assert done[0].stdout == done[1].stdout != ""
    assert compiler.compiled() == ["module.cpp", "stream.cpp"]


def test_what_a_killed_build_left_is_removed(workshop: Workshop, compiler: Compiler) -> None:
    left = workshop.cache / "making-left"
    left.mkdir(parents=True)
    (left / "half.o").write_bytes(b"half")
    workshop.build("genie_device")
    assert sorted(path.name for path in workshop.cache.iterdir() if path.is_dir()) == ["objects"]


# --- what goes wrong ----------------------------------------------------------------------------


def test_an_error_of_the_compiler_is_shown_with_the_place_of_the_log(
    workshop: Workshop, compiler: Compiler
) -> None:
    (workshop.sources / "torch" / "stream.cpp").write_text("int stream_value() { return nothing; }\n")
    with pytest.raises(
        NativeBuildError, match=r"stream\.cpp:1:\d+: error: .*nothing.* was not declared"
    ) as raised:
        workshop.build("genie_device")
    log = workshop.cache / "genie_device.log"
    assert f"the whole log is {log}" in str(raised.value)
    assert "nothing" in log.read_text()
    assert list(workshop.cache.glob("*.so")) == []
    compiler.compiled()
    (workshop.sources / "torch" / "stream.cpp").write_text("int stream_value() { return 0; }\n")
    workshop.build("genie_device")
    assert "stream.cpp" in compiler.compiled()


def test_an_error_of_the_linker_is_shown(workshop: Workshop, compiler: Compiler) -> None:
    refuse = 'case "$*" in *-shared*) echo "ld: error: cannot find -lc10"; exit 1;; esac'
    compiler.becomes(f'{refuse}; exec {compiler.real} "$@"')
    with pytest.raises(NativeBuildError, match="cannot find -lc10"):
        workshop.build("genie_device")


def test_missing_headers_of_python_are_named(workshop: Workshop, compiler: Compiler) -> None:
    source = workshop.sources / "torch" / "device" / "module.cpp"
    source.write_text(source.read_text().replace("<Python.h>", "<no/such/Python.h>"))
    with pytest.raises(NativeBuildError, match="python3-dev; Fedora: python3-devel"):
        workshop.build("genie_device")


def test_without_a_compiler_the_error_says_what_to_install(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeBuildError) as raised:
        workshop.build("genie_device")
    for words in ("no C++ compiler", "g++ python3-dev", "gcc-c++ python3-devel", "works without it"):
        assert words in str(raised.value)
    monkeypatch.setenv("CXX", "/no/such/compiler -m64")
    with pytest.raises(NativeBuildError, match="CXX names '/no/such/compiler -m64', which is not there"):
        workshop.build("genie_device")


def test_a_library_that_does_not_load_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "genie_device-1.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeBuildError, match=rf"{broken} cannot be loaded: .*remove {tmp_path}"):
        native._loaded("genie_device", broken)


def test_sources_that_are_not_there_are_an_error(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match="no sources of genie_device"):
        Workshop(tmp_path / "nowhere", workshop.cache).build("genie_device")


@pytest.mark.parametrize("in_the_way", ["cache", "cache/objects"])
def test_a_cache_that_cannot_be_written_is_an_error(
    workshop: Workshop, compiler: Compiler, tmp_path: Path, in_the_way: str
) -> None:
    (tmp_path / in_the_way).parent.mkdir(exist_ok=True)
    (tmp_path / in_the_way).write_text("a file is in the way")
    with pytest.raises(NativeBuildError, match=rf"compiling in {workshop.cache} failed: .*check free space"):
        workshop.build("genie_device")


def test_one_does_not_wait_for_ever_for_another(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workshop.cache.mkdir()
    held = FileLock.try_take(workshop.cache / "lock")
    assert held is not None
    monkeypatch.setattr(native, "_WAIT_S_MAX", 0.0)
    with (
        caplog.at_level(logging.INFO, logger="genie"),
        pytest.raises(NativeBuildError, match=rf"end process {os.getpid()} and try again"),
    ):
        workshop.build("genie_device")
    assert f"waiting for process {os.getpid()}, which compiles in {workshop.cache}" in caplog.messages
    held.release()


# --- what people see ----------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_build_is_announced_and_shown_on_a_terminal(
    workshop: Workshop,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, logger="genie"):
        workshop.build("genie_device")
    version = Target.installed().torch_version
    assert f"compiling the torch device for torch {version} (once, about a minute)" in caplog.messages
    shown = terminal.getvalue()
    assert "the torch device: 0 of 2 files" in shown and "2 of 2 files" in shown
    assert shown.endswith("\r\033[K")


def test_without_a_terminal_nothing_is_drawn(
    workshop: Workshop, compiler: Compiler, capfd: pytest.CaptureFixture[str]
) -> None:
    workshop.build("genie_device")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("outcome", ["built", "broken", "no compiler"])
def test_the_command_builds_all_and_says_why_it_cannot(
    workshop: Workshop,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcome: str,
) -> None:
    monkeypatch.setattr(Workshop, "of_this_installation", lambda: workshop)
    if outcome == "broken":
        (workshop.sources / "torch" / "stream.cpp").write_text("nonsense\n")
    if outcome == "no compiler":
        monkeypatch.setenv("CXX", "/no/such/compiler")
    code = native.main()
    assert code == {"built": 0, "broken": 1, "no compiler": native.NO_COMPILER_EXIT_CODE}[outcome]
    assert len(list(workshop.cache.glob("*.so"))) == (4 if outcome == "built" else 0)
    assert {"built": "", "broken": "stream.cpp:1", "no compiler": "apt install g++"}[
        outcome
    ] in capsys.readouterr().err


def test_one_library_can_be_built_alone(
    workshop: Workshop, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Workshop, "of_this_installation", lambda: workshop)
    assert native.main(["genie_executor"]) == 0
    assert [path.name.partition("-")[0] for path in workshop.cache.glob("*.so")] == ["genie_executor"]


def test_a_library_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        native.main(["genie_toaster"])
    assert "there is no library 'genie_toaster'" in capsys.readouterr().err


# --- the real ones ------------------------------------------------------------------------------


def test_in_a_checkout_nothing_depends_on_the_home_directory() -> None:
    workshop = Workshop.of_this_installation()
    assert (workshop.sources, workshop.cache) == (ROOT / "native", ROOT / "build" / "native")


@pytest.mark.parametrize("name", [each for each in native.LIBRARIES if each not in native.BARE_LIBRARIES])
def test_a_library_is_one_module_for_the_process(name: native.Library) -> None:
    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(lambda _: native.load(name), range(4)))
    assert all(module is modules[0] for module in modules)


@pytest.mark.parametrize("name", native.LIBRARIES)
def test_our_own_files_compile_without_a_warning(name: native.Library) -> None:
    Workshop.of_this_installation().build(name)
    log = (ROOT / "build" / "native" / f"{name}.log").read_text()
    warnings = [line for line in log.splitlines() if "warning:" in line]
    assert warnings == []


def test_an_installed_package_brings_its_sources(tmp_path: Path) -> None:
    """As pip would: a wheel is built, unpacked elsewhere, and asked where it builds from and into."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=80)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "from genie.runtime import native\n"
        "workshop = native.Workshop.of_this_installation()\n"
        "print(workshop.sources)\nprint(workshop.cache)"
    )
    # Without site: the editable install of this checkout would come first.
    folders = os.pathsep.join([str(tmp_path / "site"), sysconfig.get_path("purelib")])
    environment = {"PYTHONPATH": folders, "XDG_CACHE_HOME": str(tmp_path / "kept")}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    sources, cache = done.stdout.splitlines()
    assert cache == str(tmp_path / "kept" / "genie" / "native")
    assert listed(Path(sources)) == listed(ROOT / "native")


def listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
