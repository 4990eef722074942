"""Fuzzes the executor: every allowed op is called with hostile indices, offsets, shapes, sizes and dtypes.

`python -m tests.executor.fuzz --seeds 5` runs five seeds on the CPU, where each storage ends, and in a second
run begins, at an unmapped page. `--device cuda` runs each case under compute-sanitizer instead, which must be
installed. The cases run in child processes; a case that ends its process or its session is a failure.
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.executor.fuzz_calls import Case, cases_of
from tests.executor.fuzz_worker import MARK, Job

_REPOSITORY = Path(__file__).parents[2]
_BATCH = 48
_STARTUP_TIMEOUT_S = 240.0
# An op may compute for as long as its arguments ask for; the client waits for it like any other.
_BATCH_TIMEOUT_S, _CASE_TIMEOUT_S = 20.0, 10.0
# On CUDA, most kernels check indices with an assertion, which ends the process. After that many, further
# hostile variants of the op are left out.
_ASSERTIONS_PER_OP_MAX = 2
# After that many failures, other cases of the op are left out.
_FAILURES_PER_OP_MAX = 3
_ERROR_LINES_MAX = 20
_ASSERTION = re.compile("device-side assert", re.IGNORECASE)


@dataclass
class Finding:
    """A case that ended its process or session."""

    case: Case
    reason: str

    def __str__(self) -> str:
        return f"{self.case.call}: {self.reason} (repeat with --replay {self.case.name})"


@dataclass
class FuzzReport:
    cases: int = 0
    failures: list[Finding] = field(default_factory=list)
    timeouts: list[Finding] = field(default_factory=list)
    asserted: Counter[str] = field(default_factory=Counter)
    """Assertions in kernels, by op; only on CUDA."""


@dataclass(frozen=True)
class Plan:
    """What to run."""

    seeds: Sequence[int] = (0,)
    device: str = "cpu"
    variants: int = 1
    ops: tuple[str, ...] = ()
    sanitizer: tuple[str, ...] = ()

    @property
    def placements(self) -> tuple[str, ...]:
        return ("end", "begin") if self.device == "cpu" else ("none",)


class _Worker:
    """A process of fuzz_worker.py. On CUDA each job needs a new one."""

    def __init__(self, plan: Plan, guard: Path | None) -> None:
        environment = dict(os.environ, PYTHONPATH=str(_REPOSITORY), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        if guard is not None:
            environment["LD_PRELOAD"] = str(guard)
        self._process = subprocess.Popen(
            [*plan.sanitizer, sys.executable, "-m", "tests.executor.fuzz_worker"],
            cwd=_REPOSITORY, env=environment, text=True, errors="replace",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: deque[str] = deque(maxlen=_ERROR_LINES_MAX)
        # Warnings of torch go to stderr; on one stream they would break lines of the protocol.
        self._readers = [
            threading.Thread(target=self._read_lines, name="fuzz-stdout"),
            threading.Thread(target=self._read_errors, name="fuzz-stderr"),
        ]
        for reader in self._readers:
            reader.start()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.rstrip("\n"))

    def run(self, job: Job) -> JobResult:
        assert self._process.stdin is not None
        self._process.stdin.write(job.line() + "\n")
        self._process.stdin.flush()
        limit_s = _STARTUP_TIMEOUT_S
        result = JobResult()
        child = 0
        while True:
            try:
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                result.reason = result.reason or "timeout"
                os.kill(child or self._process.pid, signal.SIGKILL)
                limit_s = _STARTUP_TIMEOUT_S
                continue
            if line is None:
                return result.ended_with(self._process.wait(), self._errors)
            if not line.startswith(MARK):
                result.output.append(line)
                continue
            kind, _, value = line.removeprefix(MARK).strip().partition(" ")
            match kind:
                case "started":
                    child = int(value)
                case "batch":
                    result.at = int(value)
                    limit_s = _CASE_TIMEOUT_S if job.batch == 1 else _BATCH_TIMEOUT_S
                case "ended":
                    result.reason = f"the session ended: {value}"
                case "done":
                    result.is_complete = True
                case "exit":
                    return result.ended_with(int(value), self._errors)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


@dataclass
class JobResult:
    """How the process of a job has ended."""

    at: int = -1
    reason: str = ""
    is_complete: bool = False
    output: list[str] = field(default_factory=list)

    def ended_with(self, code: int, errors: Iterable[str]) -> JobResult:
        if self.is_complete and code == 0:
            return self
        self.is_complete = False
        if not self.reason:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self.reason = name if code < 0 else f"{name}: {' '.join(errors)}"
        return self


class Fuzzer:
    """Runs a plan, and continues after each case that ended its process."""

    def __init__(self, plan: Plan, guard: Path | None, report_finding: Callable[[str], None]) -> None:
        self._plan = plan
        self._guard = guard
        self._report_finding = report_finding
        self._worker: _Worker | None = None
        self.report = FuzzReport()

    def run(self) -> FuzzReport:
        try:
            for seed in self._plan.seeds:
                cases = cases_of(seed, variants=self._plan.variants, ops=self._plan.ops)
                for placement in self._plan.placements:
                    first = 0
                    while first < len(cases):
                        first = self._run_from(seed, cases, placement, first)
                    self.report.cases += len(cases)
        finally:
            self._close_worker()
        return self.report

    def _run_from(self, seed: int, cases: list[Case], placement: str, first: int) -> int:
        """Run in batches from a case on; return the first case that has not been run."""
        result = self._run_job(seed, placement, first, len(cases) - 1, _BATCH)
        if result.is_complete:
            return len(cases)
        assert result.at >= 0, f"the worker did not start: {result.reason} {result.output}"
        last = min(result.at + _BATCH, len(cases)) - 1
        alone = self._run_job(seed, placement, result.at, last, 1)
        if alone.is_complete:
            self._note(cases[last], f"{placement}: {result.reason} (only together with the cases before it)")
            return last + 1
        self._note(cases[alone.at], f"{placement}: {alone.reason}")
        return alone.at + 1

    def _note(self, case: Case, reason: str) -> None:
        if _ASSERTION.search(reason):
            self.report.asserted[case.call.op] += 1
            return
        finding = Finding(case, reason)
        (self.report.timeouts if reason.endswith("timeout") else self.report.failures).append(finding)
        self._report_finding(str(finding))

    def _run_job(self, seed: int, placement: str, first: int, last: int, batch: int) -> JobResult:
        plan = self._plan
        failed = Counter(finding.case.call.op for finding in self.report.failures)
        left_out = (
            *(op for op, count in self.report.asserted.items() if count >= _ASSERTIONS_PER_OP_MAX),
            *(op for op, count in failed.items() if count >= _FAILURES_PER_OP_MAX),
        )
        job = Job(
            seed=seed, variants=plan.variants, ops=plan.ops, left_out=left_out, device=plan.device,
            placement=placement, first=first, last=last, batch=batch,
        )  # fmt: skip
        self._worker = self._worker or _Worker(plan, self._guard)
        try:
            return self._worker.run(job)
        finally:
            if plan.device != "cpu":
                self._close_worker()

    def _close_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None


def build_guard(folder: Path) -> Path:
    """Compile the allocator to preload."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "needs a C++ compiler"
    target = folder / "guard_pages.so"
    source = Path(__file__).with_name("guard_pages.cpp")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", target, source, "-ldl"], check=True)
    return target


def run(plan: Plan, folder: Path, *, report_finding: Callable[[str], None]) -> FuzzReport:
    guard = build_guard(folder) if plan.device == "cpu" else None
    return Fuzzer(plan, guard, report_finding).run()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.executor.fuzz", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--variants", type=int, default=4, help="hostile variants of each call")
    parser.add_argument("--ops", default="", help="run only these ops, separated by commas")
    parser.add_argument(
        "--sanitizer", default="compute-sanitizer --tool memcheck", help="prefix on CUDA; may be empty"
    )
    parser.add_argument("--replay", metavar="SEED:OP:CALL:VARIANT", help="run one case and print its error")
    options = parser.parse_args(arguments)
    sanitizer = () if options.device == "cpu" else tuple(options.sanitizer.split())
    ops = tuple(options.ops.split(",")) if options.ops else ()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    with tempfile.TemporaryDirectory() as folder:
        if options.replay:
            return _replay(options.replay, options.device, sanitizer, Path(folder))
        plan = Plan(seeds, options.device, options.variants, ops, sanitizer)
        report = run(plan, Path(folder), report_finding=functools.partial(print, flush=True))
    print(f"{report.cases} cases, {len(report.failures)} failures, {len(report.timeouts)} timeouts")
    if report.asserted:
        print(f"ops whose kernels ended the process with an assertion: {', '.join(sorted(report.asserted))}")
    return 1 if report.failures else 0


def _replay(name: str, device: str, sanitizer: tuple[str, ...], folder: Path) -> int:
    seed, op, _, variant = name.split(":")
    plan = Plan((int(seed),), device, int(variant), (op,), sanitizer)
    guard = build_guard(folder) if device == "cpu" else None
    at = [case.name for case in cases_of(int(seed), variants=plan.variants, ops=plan.ops)].index(name)
    failed = False
    for placement in plan.placements:
        worker = _Worker(plan, guard)
        job = Job(int(seed), plan.variants, plan.ops, (), device, placement, at, at, 1, explain=True)
        result = worker.run(job)
        worker.close()
        print(f"{placement}: {result.reason or 'passed'}", *result.output, sep="\n  ")
        failed = failed or not result.is_complete
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
