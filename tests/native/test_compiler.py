"""A build: units, their order, edits, errors, and progress."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from genie.errors import NativeBuildError
from genie.native import compiler as compiling
from genie.native.libraries import BuildCache
from tests.needs import require_program

FILES = 10


class LoggingCompiler:
    """The real compiler, wrapped by a script that logs the arguments of each call."""

    def __init__(self, folder: Path) -> None:
        self.real = require_program("c++", package="g++")
        self.path = folder / "noting-c++"
        self._calls = folder / "calls"
        self.replace_script("")

    def replace_script(self, script: str) -> None:
        note = f'echo "$*" >> {self._calls}'
        self.path.write_text(f'#!/bin/sh\n{note}\n{script}\nexec {self.real} "$@"\n')
        self.path.chmod(0o755)

    def calls(self, word: str) -> list[str]:
        """Calls so far that have this argument."""
        return [line for line in self._calls.read_text().splitlines() if word in line.split()]

    def forget_calls(self) -> None:
        self._calls.unlink()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoggingCompiler:
    made = LoggingCompiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    return made


@pytest.fixture
def build_cache(tmp_path: Path) -> BuildCache:
    """A torch library of ten files with a common header, and one file without includes."""
    sources = tmp_path / "sources" / "torch"
    (sources / "device").mkdir(parents=True)
    (sources / "common.h").write_text("#pragma once\ninline int three() { return 3; }\n")
    for number in range(FILES):
        text = f'#include "../common.h"\nint size_{number}() {{ return three(); }}\n'
        source_file(sources.parent, number).write_text(text)
    (sources / "stream.cpp").write_text("int stream_value() { return 3; }\n")
    return BuildCache(sources.parent, tmp_path / "cache")


def source_file(sources: Path, number: int) -> Path:
    return sources / "torch" / "device" / f"part{number}.cpp"


def compiled_file_groups(compiler: LoggingCompiler) -> list[list[str]]:
    """The file names of each compilation so far."""
    return [
        [Path(word).name for word in call.split() if word.endswith(".cpp")] for call in compiler.calls("-c")
    ]


def test_library_contains_all_files_of_its_compilation_units(
    build_cache: BuildCache, compiler: LoggingCompiler
) -> None:
    library = build_cache.build("genie_device")
    assert sorted(compiled_file_groups(compiler)) == [
        [f"part{number}.cpp" for number in range(5)],
        [f"part{number}.cpp" for number in range(5, 10)],
        ["stream.cpp"],
    ]
    symbols = subprocess.run(
        [require_program("nm", package="binutils"), str(library)], capture_output=True, text=True, timeout=60
    ).stdout
    assert all(f"size_{number}" in symbols for number in range(FILES)) and "stream_value" in symbols


def test_files_of_several_libraries_are_compiled_in_parallel(
    build_cache: BuildCache, compiler: LoggingCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_usable_processor_count", lambda: 2)
    for name in ("device", "executor"):
        folder = build_cache.source_folder / "torch" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / f"{name}.cpp").write_text(f"int {name}_value() {{ return 3; }}\n")
    (build_cache.source_folder / "torch" / "stream.cpp").unlink()
    # Each of the two waits until both have started, at most ten seconds.
    begun = tmp_path / "begun"
    begun.mkdir()
    wait = f"touch {begun}/$$; n=0; while [ $(ls {begun} | wc -l) -lt 2 ]; do "
    wait += "n=$((n + 1)); [ $n -lt 1000 ] || exit 1; sleep 0.01; done"
    compiler.replace_script(f'case " $* " in *" -c "*) {wait};; esac')
    build_cache.build_all(["genie_device", "genie_executor"])
    assert sorted(compiled_file_groups(compiler)) == [["device.cpp"], ["executor.cpp"]]


def test_edit_recompiles_only_the_compilation_unit_of_the_file(
    build_cache: BuildCache, compiler: LoggingCompiler
) -> None:
    first = build_cache.build("genie_device")
    compiler.forget_calls()
    with source_file(build_cache.source_folder, 7).open("a") as source:
        source.write("// edited\n")
    assert build_cache.build("genie_device") != first
    assert compiled_file_groups(compiler) == [[f"part{number}.cpp" for number in range(5, 10)]]


def test_empty_object_file_is_recompiled(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    library = build_cache.build("genie_device")
    library.unlink()
    for path in build_cache.cache_folder.glob("objects/*.o"):
        path.write_bytes(b"")
    for path in build_cache.cache_folder.glob("objects/*.txt"):
        path.write_bytes(b"\xff")
    compiler.forget_calls()
    build_cache.build("genie_device")
    assert len(compiled_file_groups(compiler)) == 3


def test_hung_compiler_is_reported_with_its_timeout(
    build_cache: BuildCache, compiler: LoggingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_COMPILE_TIMEOUT_S", 0.2)
    compiler.replace_script('case " $* " in *" -c "*) exec sleep 20;; esac')
    with pytest.raises(NativeBuildError, match=r"noting-c\+\+ took more than 0.2 s .*another compiler"):
        build_cache.build("genie_device")


def test_compile_error_names_file_and_line(build_cache: BuildCache, compiler: LoggingCompiler) -> None:
    source_file(build_cache.source_folder, 1).write_text(
        '#include "../common.h"\nint f() { return nothing; }\n'
    )
    with pytest.raises(NativeBuildError, match=r"part1\.cpp:2:\d+: error: .*nothing.* was not declared"):
        build_cache.build("genie_device")


def test_compile_error_stops_the_build(
    build_cache: BuildCache, compiler: LoggingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_usable_processor_count", lambda: 1)
    source_file(build_cache.source_folder, 1).write_text(
        "int f() { return nothing; }\n" + "// so it is first\n" * 50
    )
    with pytest.raises(NativeBuildError, match="part1"):
        build_cache.build("genie_device")
    assert ["stream.cpp"] not in compiled_file_groups(compiler)  # the next may have started, the last has not


def test_largest_compilation_unit_is_compiled_first(
    build_cache: BuildCache, compiler: LoggingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_usable_processor_count", lambda: 1)
    with source_file(build_cache.source_folder, 7).open("a") as source:
        source.write("// text\n" * 1000)
    build_cache.build("genie_device")
    order = compiled_file_groups(compiler)
    assert ("part7.cpp" in order[0], order[-1], len(order)) == (True, ["stream.cpp"], 3)


def test_file_changed_during_compilation_is_recompiled(
    build_cache: BuildCache, compiler: LoggingCompiler
) -> None:
    first = source_file(build_cache.source_folder, 0)
    compiler.replace_script(f'case "$*" in *part0.cpp*) echo "// edited" >> {first};; esac')
    with pytest.raises(NativeBuildError, match=r"part0\.cpp.* changed during compilation"):
        build_cache.build("genie_device")
    compiler.replace_script("")
    compiler.forget_calls()
    build_cache.build("genie_device")
    assert [f"part{number}.cpp" for number in range(5)] in compiled_file_groups(compiler)


def test_progress_is_logged_without_a_terminal(
    build_cache: BuildCache,
    compiler: LoggingCompiler,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "_usable_processor_count", lambda: 1)
    with caplog.at_level(logging.INFO, logger="genie"):
        build_cache.build("genie_device")
    assert [text for text in caplog.messages if "files" in text] == [
        "compiled 5 of 11 files",
        "compiled 10 of 11 files",
    ]
