"""Compares benchmarks of this folder with those of another revision: `make bench-compare BASE=REF`.

    python benchmarks/compare.py BASE [--bench benchmarks/bench_x.py ...] [--rounds 5] [--json] [-- ARGUMENTS]

Checks BASE out under build/compare, compiles its libraries there, and runs each benchmark in turn in both
folders, in alternating order. BASE uses the packages of this folder's .venv if it locks the same versions,
else an environment of its own. For each figure: the medians of both, and the median and range of the ratios
new/base of the rounds. A figure is slower if its median ratio is worse than the threshold and no round was
better than BASE; it is not judged if neither its unit nor its goal defines whether more or less is better.
Exits with code 1 if a figure is slower, 2 if a benchmark could not be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import report

FAST_BENCHMARKS = tuple(Path("benchmarks", f"bench_{name}.py") for name in ("init", "scheduler", "store"))
"""Benchmarks compared by default: those that take less than a minute per round."""
RATIO_THRESHOLD = 1.05
DEFAULT_ROUNDS = 5
BENCHMARK_TIMEOUT_S = 1800.0
_LESS_IS_BETTER_UNITS = {"us", "ms", "s", "MiB"}
CHECKOUTS_KEPT = 3


class CompareError(Exception):
    """A revision cannot be built, or a benchmark cannot be run."""


@dataclass(frozen=True)
class Revision:
    """One of the two revisions: its folder, and the Python and environment that run its benchmarks."""

    name: str
    folder: Path
    python: Path
    environment: dict[str, str]

    def run_benchmark(self, bench: Path, arguments: Sequence[str]) -> dict[str, dict[str, object]]:
        """The figures of one run, by name."""
        if not (self.folder / bench).is_file():
            raise CompareError(f"{bench} does not exist in {self.name}")
        print(f"{self.name}: {bench}", file=sys.stderr)
        code, out = self.run_python([str(self.folder / bench), "--json", *arguments])
        if code not in (0, 1):  # 1: a goal of the benchmark was missed
            raise CompareError(f"{bench} of {self.name} failed with exit code {code}")
        found = [json.loads(line) for line in out.splitlines()]
        return {figure["name"]: figure for figure in found}

    def run_python(self, arguments: Sequence[str]) -> tuple[int, str]:
        process = subprocess.Popen(
            [str(self.python), *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            out, _ = process.communicate(timeout=BENCHMARK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise CompareError(
                f"{arguments[0]} of {self.name} took more than {BENCHMARK_TIMEOUT_S:g} s"
            ) from None
        finally:
            if process.poll() is None:  # SIGTERM first, so that it ends its own children
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=20)
                process.kill()
                process.wait()
        return process.returncode, out


def compare(
    base: Revision, new: Revision, bench: Path, *, rounds: int, arguments: Sequence[str], threshold: float
) -> list[report.Figure]:
    pairs: dict[str, list[tuple[float, float]]] = {}
    goals: dict[str, dict[str, object]] = {}
    for number in range(rounds):
        order = (base, new) if number % 2 == 0 else (new, base)  # neither side always runs second
        found = {side.name: side.run_benchmark(bench, arguments) for side in order}
        goals |= found[new.name]
        for name in found[base.name].keys() & found[new.name].keys():
            pair = (_figure_value(found[base.name][name]), _figure_value(found[new.name][name]))
            pairs.setdefault(name, []).append(pair)
    for name in sorted(goals.keys() - pairs.keys()):
        print(f"{name}: not measured by {base.name}", file=sys.stderr)
    return [
        _compare_figure(f"{bench.stem.removeprefix('bench_')}.{name}", goals[name], pairs[name], threshold)
        for name in goals
        if name in pairs
    ]


def _figure_value(figure: dict[str, object]) -> float:
    value = figure["value"]
    assert isinstance(value, int | float)
    return float(value)


def _compare_figure(
    name: str, figure: dict[str, object], pairs: Sequence[tuple[float, float]], threshold: float
) -> report.Figure:
    ratios = [new / base for base, new in pairs if base and new]
    direction = _better_direction(str(figure["unit"]), str(figure["goal"] or ""))
    middle = statistics.median(ratios) if ratios else None
    goal, slower = None, False
    if direction == "more":
        goal = f"median ratio >= {1 / threshold:.3g} or best round >= 1"
        slower = middle is not None and middle < 1 / threshold and max(ratios) < 1
    elif direction == "less":
        goal = f"median ratio <= {threshold:g} or best round <= 1"
        slower = middle is not None and middle > threshold and min(ratios) > 1
    return report.Figure(
        name=name,
        value=round(statistics.median(new for _, new in pairs), 3),
        unit=str(figure["unit"]),
        baseline=round(statistics.median(base for base, _ in pairs), 3),
        ratio=None if middle is None else round(middle, 3),
        spread=(round(min(ratios), 3), round(max(ratios), 3)) if ratios else None,
        goal=goal,
        ok=not slower,
    )


def _better_direction(unit: str, goal: str) -> Literal["more", "less"] | None:
    """Whether more or less is better; None if neither unit nor goal defines it, as for a percentage. Such a
    figure is printed but not judged."""
    if unit.endswith("/s") or goal.startswith(("value >=", "ratio >=")):
        return "more"
    if unit in _LESS_IS_BETTER_UNITS or goal.startswith(("value <=", "ratio <=")):
        return "less"
    return None


def open_current_revision(root: Path) -> Revision:
    return Revision("new", root, Path(sys.executable), dict(os.environ))


def check_out_base(root: Path, revision: str) -> Revision:
    """Checks the revision out and prepares its packages."""
    commit = _run_git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
    if not commit:
        raise CompareError(f"{revision!r} is not a revision of {root}")
    folder = root / "build" / "compare" / commit[:12]
    if not (folder / ".git").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _run_git(root, "clone", "--quiet", "--shared", "--no-checkout", str(root), str(folder))
    _run_git(folder, "checkout", "--quiet", "--force", "--detach", commit)
    os.utime(folder)
    _remove_old_checkouts(folder.parent)
    name = f"base {commit[:12]}"
    if locked_versions(root) == locked_versions(folder):
        _copy_reusable_objects(root, folder)
        return Revision(name, folder, _link_environment(folder), dict(os.environ))
    return Revision(name, folder, _install_environment(folder), dict(os.environ))


def compile_libraries(side: Revision) -> None:
    for module in ("genie.native", "genie.runtime.native"):  # the second in older revisions
        path = side.folder.joinpath(*module.split("."))
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            continue
        code, _ = side.run_python(["-m", module])
        if code != 0:
            raise CompareError(f"compiling {side.name} failed with exit code {code}")


def locked_versions(folder: Path) -> set[str]:
    """All locked packages with their versions."""
    files = sorted((folder / "requirements").glob("*.txt"))
    return {found for path in files for found in re.findall(r"^\S+==\S+", path.read_text("utf-8"), re.M)}


def _install_environment(folder: Path) -> Path:
    targets = [".venv/.native", *([".venv/.dev"] if (folder / "requirements" / "run.txt").is_file() else [])]
    command = ["make", "-C", str(folder), f"PYTHON={sys.executable}", *targets]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise CompareError(f"could not create the environment of {folder}: make failed")
    return folder / ".venv" / "bin" / "python"


def _link_environment(folder: Path) -> Path:
    """An environment with the packages of this one and the genie of `folder`.

    PYTHONPATH is not enough: the editable install of this folder is an import hook, which precedes it. Hooks
    of a directory that a .pth file names are not run.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True)
    (packages,) = (folder / ".venv").glob("lib/python3*/site-packages")
    paths = [str(folder), *(path for path in sys.path if path.endswith("site-packages"))]
    (packages / "shared.pth").write_text("".join(f"{path}\n" for path in paths), "utf-8")
    return folder / ".venv" / "bin" / "python"


def _copy_reusable_objects(root: Path, folder: Path) -> None:
    """Copies compiled files that the base can reuse: they are named by the hash of their inputs."""
    for path in (root / "build" / "native").glob("**/*"):
        other = folder / path.relative_to(root)
        if path.suffix in (".o", ".txt", ".so", ".log") and not other.exists():
            other.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, other)


def _remove_old_checkouts(parent: Path) -> None:
    newest = sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in newest[CHECKOUTS_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def _run_git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0 and arguments[0] != "rev-parse":
        raise CompareError(f"git {arguments[0]} in {folder} failed: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare benchmarks of this folder with another revision.")
    add = parser.add_argument
    add("base", help="revision to compare with")
    add("--bench", type=Path, action="append", help="benchmark to run, repeatable (default: the fast ones)")
    add(
        "--rounds",
        type=report.parse_positive_int,
        default=DEFAULT_ROUNDS,
        help=f"runs on each side (default: {DEFAULT_ROUNDS})",
    )
    add(
        "--threshold",
        type=float,
        default=RATIO_THRESHOLD,
        help=f"worst allowed ratio (default: {RATIO_THRESHOLD})",
    )
    add("--json", action="store_true", help="print one JSON object per line")
    add("arguments", nargs="*", metavar="ARGUMENT", help="arguments of the benchmarks, after --")
    given = parser.parse_args()
    try:
        with report.use_temporary_state():
            new, base = open_current_revision(report.ROOT), check_out_base(report.ROOT, given.base)
            for side in (new, base):
                compile_libraries(side)
            figures = [
                figure
                for bench in given.bench or FAST_BENCHMARKS
                for figure in compare(
                    base,
                    new,
                    bench,
                    rounds=given.rounds,
                    arguments=given.arguments,
                    threshold=given.threshold,
                )
            ]
    except CompareError as error:
        print(error, file=sys.stderr)
        return 2
    if given.rounds < DEFAULT_ROUNDS:
        print(
            f"{given.rounds} rounds: a slower figure may be chance; use at least {DEFAULT_ROUNDS} to decide",
            file=sys.stderr,
        )
    return report.print_figures(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
