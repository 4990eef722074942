"""Duration of the first `make run` in a fresh clone, compared with another revision.

    python benchmarks/first_run.py BASE [--json] [--rounds 3] [--goal 0.6]

Clones both revisions again for each run, in alternating order, and measures wall-clock and CPU time of the
phases: installing packages, compiling the libraries, the tour. A round takes minutes, so `make bench` does
not include it. Uncommitted changes are not measured. Exits with code 1 if the goal is missed.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import report

MARKER_BY_PHASE = {"installing": ".venv/.genie", "compiling": ".venv/.native", "tour": "run"}
"""Make targets by phase; each includes the previous ones."""
PHASE_TIMEOUT_S = 3600.0


def measure_first_run(
    commit: str, folder: Path, environment: dict[str, str]
) -> dict[str, tuple[float, float]]:
    """Wall-clock and CPU seconds of each phase."""
    git = ["git", "-c", "advice.detachedHead=false"]
    subprocess.run([*git, "clone", "--quiet", "--shared", "--no-checkout", report.ROOT, folder], check=True)
    subprocess.run([*git, "-C", folder, "checkout", "--quiet", commit], check=True)
    try:
        make = ["make", "-C", str(folder)]
        return {phase: _run_timed([*make, target], environment) for phase, target in MARKER_BY_PHASE.items()}
    finally:
        shutil.rmtree(folder)


def _run_timed(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    before, began_s = os.times(), time.monotonic()
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    )
    try:
        code = process.wait(timeout=PHASE_TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if code != 0:
        raise SystemExit(f"{' '.join(command)} failed with exit code {code}")
    after = os.times()
    used = (after.children_user + after.children_system) - (before.children_user + before.children_system)
    return time.monotonic() - began_s, used


def main() -> int:
    parser = report.make_parser((__doc__ or "").splitlines()[0], rounds=3)
    parser.add_argument("base", help="revision to compare with")
    parser.add_argument("--goal", type=float, default=0.6, help="maximum ratio in total (default: 0.6)")
    given = parser.parse_args()
    commits = {name: _resolve_commit(name) for name in (given.base, "HEAD")}
    runs: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in commits}
    environment = dict(os.environ)  # of the caller: temporary_state changes it
    with report.use_temporary_state() as place:
        for number in range(given.rounds):
            order = list(commits) if number % 2 == 0 else list(commits)[::-1]
            for name in order:
                print(f"round {number + 1}: {name}", file=sys.stderr)
                runs[name].append(measure_first_run(commits[name], place / "clone", environment))
    return report.print_figures(_make_figures(runs["HEAD"], runs[given.base], given.goal), as_json=given.json)


def _resolve_commit(revision: str) -> str:
    command = ["git", "-C", str(report.ROOT), "rev-parse", "--verify", f"{revision}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise SystemExit(f"{revision!r} is not a revision of {report.ROOT}")
    return found.stdout.strip()


def _make_figures(
    new: list[dict[str, tuple[float, float]]], base: list[dict[str, tuple[float, float]]], goal: float
) -> list[report.Figure]:
    figures = []
    for kind, position in (("wall", 0), ("processor", 1)):
        for phase in ("first_run", *MARKER_BY_PHASE):
            ours, theirs = (
                [
                    sum(times[position] for name, times in run.items() if phase in ("first_run", name))
                    for run in runs
                ]
                for runs in (new, base)
            )
            judged = phase == "first_run" and kind == "wall"
            figures.append(
                report.make_figure(
                    f"{phase}_{kind}",
                    statistics.median(ours),
                    samples=ours,
                    baseline=statistics.median(theirs),
                    unit="s",
                    goal=report.ratio_at_most(goal) if judged else None,
                )
            )
    return figures


if __name__ == "__main__":
    sys.exit(main())
