"""Commands for simulations: sim run, replay and generate. They use the cluster's scheduler on simulated
time, with jobs of a trace or synthetic ones, and need no cluster.

The metrics are defined in genie/sim/metrics.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genie.cli import output
from genie.cli.app import Invocation, JsonOption, app, command
from genie.cli.quantities import format_duration, parse_duration, parse_integer, parse_number
from genie.errors import UsageError

if TYPE_CHECKING:
    from genie.config import ControllerConfig
    from genie.scheduler.request import NodeFacts
    from genie.scheduler.rules import Rules
    from genie.sim.events import NodeFailures, SimulationParameters
    from genie.sim.metrics import SimulationSummary, ValueSpread
    from genie.sim.workloads.workload import SimJob

sim_app = typer.Typer(
    name="sim",
    help="Simulate scheduling without a cluster.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(sim_app)

_POLICY_FAULT_HINT = (
    "hint: the results mix this policy and the fallback; fix the policy, or raise its time budget with "
    "GENIE_CONTROLLER_POLICY_BUDGET_S"
)
_PLACEMENT_POLICIES = ("supply", "fgd", "bestfit")
_TRACE_FORMATS = ("genie", "philly", "openb")
_JSON_NAME_BY_METRIC = {
    "finished_jobs": "jobs",
    "infeasible_jobs": "impossible",
    "never_started_jobs": "left_waiting",
    "jobs_ended_by_time_limit": "cut_short",
    "total_gpus": "gpus",
    "utilisation_while_pending": "utilisation_while_waiting",
    "utilisation_until_last_arrival": "utilisation_while_arriving",
    "pending_time_share": "waiting_share",
    "large_gang_wait_s": "wait_large_s",
    "jain_index_of_tenants": "jain",
    "finish_time_fairness": "finish_fairness",
    "jobs_ended_by_node_failure": "failures",
    "maximum": "most",
}
"""Names in summary.json and --json of the metrics that have another name there."""
_JOBS_MAX = 1_000_000
_NODES_MAX = 100_000
_LOAD_MIN = 0.001
_SEED_MAX = 2**31 - 1

_TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Trace file with jobs (default: synthetic jobs)."),
]
_TraceFormatOption = Annotated[
    str, typer.Option("--format", metavar="FORMAT", help="Trace format: genie, philly or openb.")
]
_NodesOption = Annotated[
    str,
    typer.Option(
        "--nodes",
        metavar="COUNTxGPUS|FILE",
        help="Cluster size as NODESxGPUS, or a node list file in the openb format.",
    ),
]
_SeedOption = Annotated[
    str, typer.Option("--seed", metavar="N", help="Random seed; equal seeds give equal results.")
]
_JobsOption = Annotated[
    str | None,
    typer.Option(
        "--jobs",
        metavar="N",
        help="Number of synthetic jobs, or of jobs read from the trace (default: 2000, or all).",
    ),
]
_LoadOption = Annotated[
    str | None,
    typer.Option(
        "--load",
        metavar="X",
        help="Requested / available GPU time (default: 1.2, or that of the trace).",
    ),
]
_TimeLimitFactorOption = Annotated[
    str,
    typer.Option(
        "--limits", metavar="X", help="Time limits: 1 to X times the duration of the job; 0 sets none."
    ),
]
_FailEveryOption = Annotated[
    str | None,
    typer.Option(
        "--fail-every",
        metavar="TIME",
        help="Mean time between failures per node, such as 30d (default: no failures).",
    ),
]
_NO_ADDRESS_HINT = "the simulator uses no cluster; --nodes describes the simulated one"
_QUEUE_ORDER_HELP = "Queue order: fifo, priority, fair, or a custom policy MODULE:CLASS."
_QueueOrderOption = Annotated[str, typer.Option("--order", metavar="ORDER", help=_QUEUE_ORDER_HELP)]
_PlacementOption = Annotated[
    str, typer.Option("--placement", metavar="POLICY", help="Placement policy: supply, fgd or bestfit.")
]


@command(
    sim_app,
    "run",
    example="genie sim run --nodes 128x8 --jobs 2000 --order fair --seed 1 --out results",
    no_address_hint=_NO_ADDRESS_HINT,
)
def run(
    invocation: Invocation,
    *,
    trace: _TraceOption = None,
    trace_format: _TraceFormatOption = "genie",
    nodes: _NodesOption = "128x8",
    jobs: _JobsOption = None,
    load: _LoadOption = None,
    limits: _TimeLimitFactorOption = "3",
    order: _QueueOrderOption = "fair",
    placement: _PlacementOption = "supply",
    no_backfill: Annotated[bool, typer.Option("--no-backfill", help="Disable backfill.")] = False,
    no_preempt: Annotated[bool, typer.Option("--no-preempt", help="Disable preemption.")] = False,
    fail_every: _FailEveryOption = None,
    repair: Annotated[
        str, typer.Option("--repair", metavar="TIME", help="Repair time of a failed node.")
    ] = "1h",
    seed: _SeedOption = "0",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Directory for summary.json and the plots (SVG)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate scheduling jobs with durations and print utilization, wait times and fairness.

    Synthetic jobs have single GPUs, fractions, gangs, three priorities and eight tenants.
    """
    from genie.sim.events import simulate
    from genie.sim.metrics import summarise_simulation

    settings = invocation.load_settings()
    seed_number = parse_integer(seed, what="--seed", low=0, high=_SEED_MAX)
    controller = settings.controller
    rules = _make_scheduling_rules(order, controller, backfills=not no_backfill, preempts=not no_preempt)
    machines = _parse_nodes(nodes)
    _validate_choice(trace_format, _TRACE_FORMATS, what="--format")
    work = _load_or_generate_jobs(
        machines, trace, trace_format, jobs=jobs, load=load, limits=limits, seed=seed_number
    )
    failures = _parse_node_failures(fail_every, repair)
    plan = _make_simulation_parameters(rules, placement, seed_number, failures=failures)
    line = output.ProgressLine()
    try:
        done = simulate(machines, work, plan, progress=partial(line, "simulating"))
    finally:
        line.close()
    summary = summarise_simulation(done)
    if out is not None:
        _write_results(out, summary, done)
    if as_json:
        about = {"placer": done.placer_kind, "decisions": done.pass_count, "policy_fault": done.policy_fault}
        output.write_json({**about, **_summary_to_json(summary)})
    else:
        output.write_fields(_summary_fields(summary))
    if done.policy_fault:
        output.print_message(f"genie: {output.to_one_line(done.policy_fault)}")
        output.print_message(_POLICY_FAULT_HINT)
        raise typer.Exit(1)


@command(
    sim_app,
    "replay",
    example="genie sim replay --placement supply --seed 3",
    no_address_hint=_NO_ADDRESS_HINT,
)
def replay(
    invocation: Invocation,
    *,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Pod list of the openb trace, a CSV file (default: synthetic requests).",
        ),
    ] = None,
    nodes: Annotated[
        Path | None,
        typer.Option(
            "--nodes", metavar="FILE", help="Node list of the openb trace, a CSV file; required with --trace."
        ),
    ] = None,
    placement: _PlacementOption = "supply",
    seed: _SeedOption = "0",
    as_json: JsonOption = False,
) -> None:
    """Place requests that never end and print how much of the cluster they fill."""
    from genie.controller.placement.placers import placer_factory
    from genie.sim.replay import replay as run_replay
    from genie.sim.workloads import traces
    from genie.sim.workloads.synthetic import synthetic_workload
    from genie.sim.workloads.traces import Workload

    invocation.load_settings()
    _validate_choice(placement, _PLACEMENT_POLICIES, what="--placement")
    seed_number = parse_integer(seed, what="--seed", low=0, high=_SEED_MAX)
    if (trace is None) != (nodes is None):
        raise UsageError("--trace and --nodes must be given together", hint="give both files, or neither")
    if trace is None or nodes is None:
        workload = synthetic_workload(nodes=60, pods=1000, seed=0)
    else:
        workload = Workload(traces.read_openb_nodes(nodes), traces.read_openb_pods(trace))
    make, _ = placer_factory()
    outcome = run_replay(workload, lambda seed, typical: make(placement, seed, typical), seed=seed_number)
    if as_json:
        output.write_json(vars(outcome))
        return
    output.write_fields(
        [
            ("allocated", f"{outcome.allocated_pct:.2f}% of the GPUs when requests reach 100%"),
            ("arrivals", str(outcome.arrivals)),
            ("rejected", f"{outcome.dropped}, of which {outcome.dropped_multi_gpu} multi-GPU"),
        ]
    )


@command(
    sim_app,
    "generate",
    example="genie sim generate --jobs 5000 --load 1.1 --seed 7 jobs.csv",
    no_address_hint=_NO_ADDRESS_HINT,
)
def generate(
    invocation: Invocation,
    *,
    file: Annotated[
        str, typer.Argument(help="CSV file to write; - writes to standard output.", metavar="FILE")
    ],
    nodes: _NodesOption = "128x8",
    jobs: _JobsOption = None,
    load: _LoadOption = None,
    limits: _TimeLimitFactorOption = "3",
    seed: _SeedOption = "0",
) -> None:
    """Generate synthetic jobs as CSV for 'genie sim run --trace'. --load is relative to --nodes."""
    from genie.sim.workloads.workload import write_workload, write_workload_csv

    invocation.load_settings()
    seed_number = parse_integer(seed, what="--seed", low=0, high=_SEED_MAX)
    made = _load_or_generate_jobs(
        _parse_nodes(nodes), None, "", jobs=jobs, load=load, limits=limits, seed=seed_number
    )
    if file == "-":
        write_workload_csv(sys.stdout, made)
        sys.stdout.flush()
        return
    write_workload(Path(file), made)
    output.print_message(f"wrote {len(made)} jobs to {file}")


# -- options ----------------------------------------------------------------------------------------


def _validate_choice(value: str, allowed: Sequence[str], *, what: str) -> str:
    if value not in allowed:
        raise UsageError(f"{what} {value!r} is invalid", hint=f"allowed: {', '.join(allowed)}")
    return value


def _parse_nodes(text: str) -> list[NodeFacts]:
    from genie.sim.workloads import traces
    from genie.sim.workloads.workload import to_node_facts, uniform_nodes

    count, by, gpus = text.partition("x")
    if by and text.isascii() and count.isdecimal() and gpus.isdecimal():
        return uniform_nodes(
            parse_integer(count, what=f"--nodes {text[:40]}: COUNT", low=1, high=_NODES_MAX),
            gpus=parse_integer(gpus, what=f"--nodes {text[:40]}: GPUS", low=1, high=16),
        )
    if not Path(text).is_file():
        raise UsageError(
            f"--nodes {text!r} is neither COUNTxGPUS nor a file",
            hint="give COUNTxGPUS such as 128x8, or a node list",
        )
    return to_node_facts(traces.read_openb_nodes(Path(text)))


def _load_or_generate_jobs(
    nodes: Sequence[NodeFacts],
    trace: Path | None,
    trace_format: str,
    *,
    jobs: str | None,
    load: str | None,
    limits: str,
    seed: int,
) -> list[SimJob]:
    from genie.sim.workloads import workload
    from genie.sim.workloads.synthetic import SyntheticJobMix, synthetic_jobs

    most = None if jobs is None else parse_integer(jobs, what="--jobs", low=1, high=_JOBS_MAX)
    factor = parse_number(limits, what="--limits", high=1000)
    if 0 < factor < 1:
        raise UsageError(
            f"--limits {limits!r} would end jobs before they finish", hint="give 0, or a number >= 1"
        )
    load_target = None if load is None else parse_number(load, what="--load", low=_LOAD_MIN, high=1000)
    if trace is None:
        mix = SyntheticJobMix(
            job_count=most or SyntheticJobMix.job_count,
            load=load_target or SyntheticJobMix.load,
            time_limit_factor_max=factor or None,
        )
        return synthetic_jobs(mix, nodes, seed=seed)
    if trace_format == "genie":
        found = workload.read_workload(trace)
    elif trace_format == "philly":
        found = workload.read_philly_jobs(
            trace, gpus_per_node=max((len(node.gpus) for node in nodes), default=8) or 8
        )
    else:
        found = workload.read_openb_jobs(trace, draw_duration_s=SyntheticJobMix().draw_duration_s, seed=seed)
    found = found[:most]
    if factor:
        found = workload.add_time_limits(found, factor=factor, seed=seed)
    return workload.scale_arrivals_to_load(found, nodes, load_target) if load_target else found


def _make_scheduling_rules(
    order: str, controller: ControllerConfig, *, backfills: bool, preempts: bool
) -> Rules:
    """Return the scheduling rules for a policy name, with the controller's time budget for custom policies.

    The budget counts CPU time here, so that other load on the machine does not change the results.
    """
    from genie.controller.placement.policy import create_policy_by_name
    from genie.scheduler.rules import Rules

    try:
        policy = create_policy_by_name(order, budget_s=controller.policy_budget_s, clock=time.thread_time)
    except UsageError as error:
        raise UsageError(f"--order: {error.message}", hint=error.hint) from error
    return Rules(allows_backfill=backfills, allows_preemption=preempts).with_order(policy)


def _make_simulation_parameters(
    rules: Rules, placement: str, seed: int, *, failures: NodeFailures | None
) -> SimulationParameters:
    from genie.sim.events import SimulationParameters

    _validate_choice(placement, _PLACEMENT_POLICIES, what="--placement")
    return SimulationParameters(rules, placement, seed, failures)


def _parse_node_failures(fail_every: str | None, repair: str) -> NodeFailures | None:
    from genie.sim.events import NodeFailures

    if fail_every is None:
        return None
    every_s = parse_duration(fail_every, what="--fail-every")
    return NodeFailures(every_s, parse_duration(repair, what="--repair"))


# -- results ----------------------------------------------------------------------------------------


def _write_results(folder: Path, summary: SimulationSummary, done: Any) -> None:
    import json

    from genie.sim.plots import plot_utilisation, plot_wait_times

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(json.dumps(_summary_to_json(summary), indent=2) + "\n", "utf-8")
        (folder / "utilisation.svg").write_text(plot_utilisation(done), "utf-8")
        (folder / "waiting.svg").write_text(plot_wait_times(done), "utf-8")
    except OSError as error:
        raise UsageError(
            f"could not write to --out {str(folder)!r}: {error.strerror}", hint="give another directory"
        ) from error


def _summary_to_json(summary: SimulationSummary) -> dict[str, Any]:
    from dataclasses import asdict

    def to_json_names(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        return {_JSON_NAME_BY_METRIC.get(name, name): value for name, value in fields}

    return asdict(summary, dict_factory=to_json_names)


def _summary_fields(it: SimulationSummary) -> list[tuple[str, str]]:
    large = (
        f" (gangs of 32 or more GPUs: {_format_mean_and_percentiles(it.large_gang_wait_s)})"
        if it.large_gang_wait_s.count
        else ""
    )
    skipped = f", {it.infeasible_jobs} skipped: larger than the cluster" if it.infeasible_jobs else ""
    if it.never_started_jobs:
        skipped += f", {it.never_started_jobs} never started: the policy rejected all nodes"
    return [
        ("jobs", f"{it.finished_jobs}{skipped}, {it.jobs_ended_by_time_limit} ended by their time limit"),
        ("GPUs", f"{it.total_gpus}, over {format_duration(it.span_s)}"),
        ("utilization", f"{it.utilisation:.1%} of GPU time"),
        (
            "utilization while pending",
            f"{it.utilisation_while_pending:.1%}, for {it.pending_time_share:.0%} of the time",
        ),
        ("utilization until last arrival", f"{it.utilisation_until_last_arrival:.1%}"),
        ("wait time", _format_mean_and_percentiles(it.wait_s) + large),
        ("completion time", _format_mean_and_percentiles(it.completion_s)),
        ("slowdown", f"mean {it.slowdown.mean:.2f}, p50 {it.slowdown.p50:.2f}, p99 {it.slowdown.p99:.1f}"),
        ("tenant fairness (Jain)", f"{it.jain_index_of_tenants:.3f}"),
        (
            "finish-time fairness",
            f"mean {it.finish_time_fairness.mean:.2f}, p99 {it.finish_time_fairness.p99:.2f}",
        ),
        ("preemptions", f"{it.preemptions}, {it.lost_gpu_hours:.1f} GPU hours lost"),
        ("jobs ended by node failures", str(it.jobs_ended_by_node_failure)),
        ("fragmentation", f"{it.fragmentation:.1%} of GPUs free but unusable while jobs are pending"),
    ]


def _format_mean_and_percentiles(it: ValueSpread) -> str:
    return f"mean {format_duration(it.mean)}, p50 {format_duration(it.p50)}, p99 {format_duration(it.p99)}"
