"""Simulations: the cluster's own scheduler on made-up time, with jobs of a trace or made-up ones.

Not for: anything that touches a cluster, and what the figures mean (genie/sim/measures.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import AsJson, Invocation, app, command
from genie.cli.quantities import duration_text, parse_amount, parse_duration, parse_whole
from genie.errors import UsageError

if TYPE_CHECKING:
    from genie.config import ControllerConfig
    from genie.scheduler.request import NodeFacts
    from genie.scheduler.scheduler import Rules
    from genie.sim.events import Failures, Plan
    from genie.sim.measures import Spread, Summary
    from genie.sim.workload import SimJob

sim_app = typer.Typer(
    name="sim",
    help="Simulate scheduling; no cluster is needed.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(sim_app)

_FAULT_HINT = (
    "hint: the figures are of both together; mend the policy, or give its calls more time with "
    "GENIE_CONTROLLER_POLICY_BUDGET_S"
)
_PLACEMENTS = ("supply", "fgd", "bestfit")
_FORMATS = ("genie", "philly", "openb")
_JOBS_MAX = 1_000_000
_NODES_MAX = 100_000
_SEED_MAX = 2**31 - 1

_Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Jobs from this file; without it, made-up ones."),
]
_Format = Annotated[
    str, typer.Option("--format", metavar="FORMAT", help="Of the trace: genie, philly or openb.")
]
_Nodes = Annotated[
    str,
    typer.Option("--nodes", metavar="COUNTxGPUS|FILE", help="Nodes of one kind, or an openb node list."),
]
_Seed = Annotated[str, typer.Option("--seed", metavar="N", help="The same seed gives the same run.")]
_Jobs = Annotated[
    str | None,
    typer.Option(
        "--jobs", metavar="N", help="So many are made up, 2000 without it; of a trace, the first N."
    ),
]
_Load = Annotated[
    str | None,
    typer.Option(
        "--load",
        metavar="X",
        help="GPU time asked for by what there is; 1.2 for made-up jobs, a trace's own without it.",
    ),
]
_Limits = Annotated[
    str,
    typer.Option(
        "--limits", metavar="X", help="Jobs without a time limit get 1 to X times what they take; 0: none."
    ),
]
_ORDER_HELP = "fifo, priority, fair, or MODULE:CLASS, a policy of your own, as for the controller."
_Order = Annotated[str, typer.Option("--order", metavar="ORDER", help=_ORDER_HELP)]
_Placement = Annotated[str, typer.Option("--placement", metavar="POLICY", help="supply, fgd or bestfit.")]


@command(
    sim_app, "run", example="genie sim run --nodes 128x8 --jobs 2000 --order fair --seed 1 --out results"
)
def run(
    invocation: Invocation,
    *,
    trace: _Trace = None,
    trace_format: _Format = "genie",
    nodes: _Nodes = "128x8",
    jobs: _Jobs = None,
    load: _Load = None,
    limits: _Limits = "3",
    order: _Order = "fair",
    placement: _Placement = "supply",
    no_backfill: Annotated[
        bool, typer.Option("--no-backfill", help="Nobody passes a job that waits.")
    ] = False,
    no_preempt: Annotated[bool, typer.Option("--no-preempt", help="Nobody is sent away.")] = False,
    fail_every: Annotated[
        str | None,
        typer.Option("--fail-every", metavar="TIME", help="A node fails so often on average, such as 30d."),
    ] = None,
    repair: Annotated[
        str, typer.Option("--repair", metavar="TIME", help="A failed node is back after it.")
    ] = "1h",
    seed: _Seed = "0",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="A folder for summary.json and the plots, as SVG."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run jobs through the scheduler, event by event, and tell what came of it.

    Without --trace the jobs are made up: single GPUs, fractions, gangs, three priorities, eight tenants.
    """
    from genie.sim.events import simulate
    from genie.sim.measures import summarise

    settings = invocation.load_settings()
    seed_number = parse_whole(seed, what="--seed", low=0, high=_SEED_MAX)
    rules = _rules(order, settings.controller, backfills=not no_backfill, preempts=not no_preempt)
    machines = _parse_nodes(nodes)
    work = _load_jobs(machines, trace, trace_format, jobs=jobs, load=load, limits=limits, seed=seed_number)
    plan = _plan(rules, placement, seed_number, failures=_failures(fail_every, repair))
    line = output.ProgressLine()
    try:
        done = simulate(machines, work, plan, progress=lambda over, total: line("simulating", over, total))
    finally:
        line.close()
    summary = summarise(done)
    if out is not None:
        _write_results(out, summary, done)
    if as_json:
        about = {"placer": done.placer, "decisions": done.decisions, "policy_fault": done.fault}
        output.write_json({**about, **_as_object(summary)})
    else:
        output.write_facts(_facts(summary))
    if done.fault:
        output.say(f"genie: {output.one_line(done.fault)}")
        output.say(_FAULT_HINT)
        raise typer.Exit(1)


@command(sim_app, "replay", example="genie sim replay --placement supply --seed 3")
def replay(
    invocation: Invocation,
    *,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="An openb pod list; without it, made-up requests."),
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option("--nodes", metavar="FILE", help="The openb node list that belongs to it.")
    ] = None,
    placement: _Placement = "supply",
    seed: _Seed = "0",
    as_json: AsJson = False,
) -> None:
    """Let requests arrive that never leave, and tell how much of the cluster they fill."""
    from genie.runtime.placers import placer_factory
    from genie.sim import traces
    from genie.sim.replay import Workload
    from genie.sim.replay import replay as replayed
    from genie.sim.synthetic import synthetic_workload

    invocation.load_settings()
    _one_of(placement, _PLACEMENTS, what="--placement")
    seed_number = parse_whole(seed, what="--seed", low=0, high=_SEED_MAX)
    if (trace is None) != (nodes is None):
        raise UsageError("--trace and --nodes belong together", hint="give both files, or neither")
    if trace is None or nodes is None:
        workload = synthetic_workload(nodes=60, pods=1000, seed=0)
    else:
        workload = Workload(traces.read_nodes(nodes), traces.read_pods(trace))
    make, _ = placer_factory()
    outcome = replayed(workload, lambda seed, typical: make(placement, seed, typical), seed=seed_number)
    if as_json:
        output.write_json(vars(outcome))
        return
    output.write_facts(
        [
            ("allocated", f"{outcome.allocated_pct:.2f}% of the GPUs, when requests reach all of them"),
            ("arrivals", str(outcome.arrivals)),
            ("dropped", f"{outcome.dropped}, {outcome.dropped_multi_gpu} of them for several GPUs"),
        ]
    )


@command(sim_app, "generate", example="genie sim generate --jobs 5000 --load 1.1 --seed 7 jobs.csv")
def generate(
    invocation: Invocation,
    *,
    file: Annotated[str, typer.Argument(help="The CSV file to write; - is standard output.", metavar="FILE")],
    nodes: _Nodes = "128x8",
    jobs: _Jobs = None,
    load: _Load = None,
    limits: _Limits = "3",
    seed: _Seed = "0",
) -> None:
    """Make jobs up and write them as CSV, for 'genie sim run --trace'. The nodes say what the load means."""
    from genie.sim.workload import write_lines, write_workload

    invocation.load_settings()
    seed_number = parse_whole(seed, what="--seed", low=0, high=_SEED_MAX)
    made = _load_jobs(_parse_nodes(nodes), None, "", jobs=jobs, load=load, limits=limits, seed=seed_number)
    if file == "-":
        write_lines(sys.stdout, made)
        sys.stdout.flush()
        return
    write_workload(Path(file), made)
    output.say(f"{len(made)} jobs are in {file}")


# -- what was asked for -----------------------------------------------------------------------------


def _one_of(value: str, allowed: Sequence[str], *, what: str) -> str:
    if value not in allowed:
        raise UsageError(f"{what} {value!r} is not known", hint=f"give one of {', '.join(allowed)}")
    return value


def _parse_nodes(text: str) -> list[NodeFacts]:
    from genie.sim import traces
    from genie.sim.workload import alike_nodes, nodes_of

    count, by, gpus = text.partition("x")
    if by and count.isdecimal() and gpus.isdecimal():
        return alike_nodes(
            parse_whole(count, what="--nodes", low=1, high=_NODES_MAX),
            gpus=parse_whole(gpus, what="--nodes", low=1, high=16),
        )
    if not Path(text).is_file():
        raise UsageError(
            f"--nodes {text!r} is neither COUNTxGPUS nor a file", hint="write 128x8, or give a node list"
        )
    return nodes_of(traces.read_nodes(Path(text)))


def _load_jobs(
    nodes: Sequence[NodeFacts],
    trace: Path | None,
    trace_format: str,
    *,
    jobs: str | None,
    load: str | None,
    limits: str,
    seed: int,
) -> list[SimJob]:
    from genie.sim import workload
    from genie.sim.synthetic import Mix, synthetic_jobs

    most = None if jobs is None else parse_whole(jobs, what="--jobs", low=1, high=_JOBS_MAX)
    factor = parse_amount(limits, what="--limits", high=1000)
    if 0 < factor < 1:
        raise UsageError(f"--limits {limits!r} would end jobs early", hint="give 0, or a number from 1")
    wanted = None if load is None else parse_amount(load, what="--load", high=1000)
    if wanted == 0:
        raise UsageError("--load 0 is no load", hint="give a number above 0, such as 1.2")
    if trace is None:
        mix = Mix(jobs=most or Mix.jobs, load=wanted or Mix.load, limit_factor=factor or None)
        return synthetic_jobs(mix, nodes, seed=seed)
    _one_of(trace_format, _FORMATS, what="--format")
    if trace_format == "genie":
        found = workload.read_workload(trace)
    elif trace_format == "philly":
        found = workload.philly_jobs(
            trace, gpus_of_node=max((len(node.gpus) for node in nodes), default=8) or 8
        )
    else:
        found = workload.openb_jobs(trace, draw_s=Mix().draw_s, seed=seed)
    found = found[:most]
    if factor:
        found = workload.with_limits(found, factor=factor, seed=seed)
    return workload.with_load(found, nodes, wanted) if wanted else found


def _rules(order: str, controller: ControllerConfig, *, backfills: bool, preempts: bool) -> Rules:
    """By the name of a policy, as a controller takes it, and with the time that it may take there.

    It is the processor's time that counts here: what else the machine does must not change a run.
    """
    from genie.controller.policy import policy_named
    from genie.scheduler.scheduler import Rules

    try:
        policy = policy_named(order, budget_s=controller.policy_budget_s, clock=time.thread_time)
    except UsageError as error:
        raise UsageError(f"--order: {error.message}", hint=error.hint) from error
    return Rules(backfills=backfills, preempts=preempts).under(policy)


def _plan(rules: Rules, placement: str, seed: int, *, failures: Failures | None) -> Plan:
    from genie.sim.events import Plan

    _one_of(placement, _PLACEMENTS, what="--placement")
    return Plan(rules, placement, seed, failures)


def _failures(fail_every: str | None, repair: str) -> Failures | None:
    from genie.sim.events import Failures

    if fail_every is None:
        return None
    every_s = parse_duration(fail_every, what="--fail-every")
    return Failures(every_s, parse_duration(repair, what="--repair"))


# -- what is shown ----------------------------------------------------------------------------------


def _write_results(folder: Path, summary: Summary, done: Any) -> None:
    import json

    from genie.sim.plots import utilisation_svg, waiting_svg

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(json.dumps(_as_object(summary), indent=2) + "\n", "utf-8")
        (folder / "utilisation.svg").write_text(utilisation_svg(done), "utf-8")
        (folder / "waiting.svg").write_text(waiting_svg(done), "utf-8")
    except OSError as error:
        raise UsageError(
            f"--out {str(folder)!r} cannot be written: {error.strerror}", hint="give another"
        ) from error


def _as_object(summary: Summary) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(summary)


def _facts(it: Summary) -> list[tuple[str, str]]:
    large = f" (gangs with 32 GPUs or more: {_times(it.wait_large_s)})" if it.wait_large_s.count else ""
    left_out = f", {it.impossible} left out: they fit no cluster like this" if it.impossible else ""
    if it.left_waiting:
        left_out += f", {it.left_waiting} never started: the policy keeps them off every node"
    return [
        ("jobs", f"{it.jobs}{left_out}, {it.cut_short} ended by their time limits"),
        ("GPUs", f"{it.gpus}, for {duration_text(it.span_s)}"),
        ("in use", f"{it.utilisation:.1%} of GPU time"),
        ("while jobs wait", f"{it.utilisation_while_waiting:.1%}, in {it.waiting_share:.0%} of the time"),
        ("while jobs wait and arrive", f"{it.utilisation_while_arriving:.1%}"),
        ("waiting", _times(it.wait_s) + large),
        ("completion", _times(it.completion_s)),
        ("slowdown", f"mean {it.slowdown.mean:.2f}, p50 {it.slowdown.p50:.2f}, p99 {it.slowdown.p99:.1f}"),
        ("fairness of tenants (Jain)", f"{it.jain:.3f}"),
        ("finish-time fairness", f"mean {it.finish_fairness.mean:.2f}, p99 {it.finish_fairness.p99:.2f}"),
        ("preemptions", f"{it.preemptions}, {it.lost_gpu_hours:.1f} GPU hours lost"),
        ("ended by failing nodes", str(it.failures)),
        ("free but of no use", f"{it.fragmentation:.1%} of GPUs while jobs wait"),
    ]


def _times(it: Spread) -> str:
    return f"mean {duration_text(it.mean)}, p50 {duration_text(it.p50)}, p99 {duration_text(it.p99)}"
