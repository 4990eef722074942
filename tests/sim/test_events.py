"""Event-driven simulation: start and end times, cost of preemption and failures, determinism."""

from __future__ import annotations

import pytest

from genie.errors import NativeBuildError, UsageError
from genie.model.job import Within
from genie.native import libraries
from genie.scheduler.order import Fifo, Priority
from genie.scheduler.request import NodeFacts
from genie.scheduler.rules import Rules
from genie.sim.events import NodeFailures, SimJobResult, SimulationParameters, SimulationResult, simulate
from genie.sim.workloads.synthetic import SyntheticJobMix, synthetic_jobs
from genie.sim.workloads.workload import SimJob, uniform_nodes

FIFO = SimulationParameters(Rules(order=Fifo()), "bestfit")
PRIORITY = SimulationParameters(Rules(order=Priority()), "bestfit")


def results_by_job(run: SimulationResult) -> dict[str, SimJobResult]:
    return {record.job.job_id: record for record in run.job_results}


def start_and_end_times(run: SimulationResult) -> dict[str, tuple[float | None, float | None]]:
    return {name: (record.first_started_s, record.ended_s) for name, record in results_by_job(run).items()}


def test_job_waits_for_gpus_and_runs_its_duration_not_its_limit() -> None:
    jobs = [
        SimJob("a", 0.0, 100.0, gpus_per_worker=4, time_limit_s=500.0),
        SimJob("b", 10.0, 50.0, gpus_per_worker=4, time_limit_s=500.0),
    ]
    run = simulate(uniform_nodes(1, gpus=4), jobs, FIFO)
    assert start_and_end_times(run) == {"a": (0.0, 100.0), "b": (100.0, 150.0)}
    assert [(it.time_s, it.used_gpu_milli, it.pending_jobs) for it in run.usage_samples] == [
        (0.0, 4000, 0),
        (10.0, 4000, 1),
        (100.0, 4000, 0),
        (150.0, 0, 0),
    ]


def test_usage_counts_all_pending_jobs() -> None:
    jobs = [SimJob(f"j{number}", float(number), 100.0, gpus_per_worker=4) for number in range(4)]
    run = simulate(uniform_nodes(1, gpus=4), jobs, FIFO)
    waiting = [(it.time_s, it.pending_jobs) for it in run.usage_samples]
    assert waiting[:4] == [(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 3)]
    assert waiting[4:] == [(100.0, 2), (200.0, 1), (300.0, 0), (400.0, 0)]


def test_time_limit_ends_a_job() -> None:
    run = simulate(uniform_nodes(1), [SimJob("a", 0.0, 100.0, time_limit_s=30.0)], FIFO)
    assert start_and_end_times(run) == {"a": (0.0, 30.0)}


def test_simultaneous_events_cause_one_scheduling_pass() -> None:
    jobs = [SimJob(f"j{number}", 5.0, 10.0) for number in range(8)]
    run = simulate(uniform_nodes(1), jobs, FIFO)
    assert run.pass_count == 2
    assert {record.ended_s for record in run.job_results} == {15.0}


def test_short_job_is_backfilled_and_long_job_is_not() -> None:
    jobs = [
        SimJob("runs", 0.0, 100.0, gpus_per_worker=2, time_limit_s=100.0),
        SimJob("large", 1.0, 10.0, gpus_per_worker=4, time_limit_s=10.0),
        SimJob("long", 2.0, 500.0, gpus_per_worker=1, time_limit_s=500.0),
        SimJob("short", 3.0, 50.0, gpus_per_worker=1, time_limit_s=50.0),
    ]
    nodes = uniform_nodes(1, gpus=4)
    found = start_and_end_times(simulate(nodes, jobs, FIFO))
    assert found["large"] == (100.0, 110.0)
    assert found["short"] == (3.0, 53.0)
    assert found["long"] == (110.0, 610.0)
    strict = start_and_end_times(
        simulate(nodes, jobs, SimulationParameters(Rules(order=Fifo(), allows_backfill=False), "bestfit"))
    )
    assert strict["short"] == (110.0, 160.0)


@pytest.mark.parametrize(
    ("checkpoint_s", "lost_s", "ended_s"),
    # It ran for 60 s plus 10 s of grace period; the other job takes 20 s.
    [(None, 70.0, 90.0 + 100.0), (50.0, 20.0, 90.0 + 50.0), (5.0, 0.0, 90.0 + 30.0)],
)
def test_preempted_job_stops_after_grace_period_and_loses_unsaved_work(
    checkpoint_s: float | None, lost_s: float, ended_s: float
) -> None:
    jobs = [
        SimJob(
            "low",
            0.0,
            100.0,
            gpus_per_worker=8,
            preemptible=True,
            grace_s=10.0,
            checkpoint_interval_s=checkpoint_s,
        ),
        SimJob("high", 60.0, 20.0, gpus_per_worker=8, priority=5),
    ]
    run = simulate(uniform_nodes(1), jobs, PRIORITY)
    assert start_and_end_times(run) == {"low": (0.0, ended_s), "high": (70.0, 90.0)}
    assert (results_by_job(run)["low"].preemption_count, results_by_job(run)["low"].lost_work_s) == (
        1,
        lost_s,
    )


def test_job_that_ends_within_grace_period_loses_nothing() -> None:
    jobs = [
        SimJob("low", 0.0, 100.0, gpus_per_worker=8, preemptible=True, grace_s=30.0),
        SimJob("high", 90.0, 20.0, gpus_per_worker=8, priority=5),
    ]
    run = simulate(uniform_nodes(1), jobs, PRIORITY)
    assert start_and_end_times(run) == {"low": (0.0, 100.0), "high": (100.0, 120.0)}
    assert results_by_job(run)["low"].lost_work_s == 0.0


def test_no_job_is_stopped_when_preemption_is_disabled() -> None:
    jobs = [
        SimJob("low", 0.0, 100.0, gpus_per_worker=8, preemptible=True),
        SimJob("high", 60.0, 20.0, gpus_per_worker=8, priority=5),
    ]
    run = simulate(
        uniform_nodes(1),
        jobs,
        SimulationParameters(Rules(order=Priority(), allows_preemption=False), "bestfit"),
    )
    assert start_and_end_times(run) == {"low": (0.0, 100.0), "high": (100.0, 120.0)}


def test_node_failure_ends_its_jobs_and_node_is_repaired() -> None:
    jobs = [SimJob(f"j{number}", 10.0 * number, 200.0, gpus_per_worker=8) for number in range(60)]
    run = simulate(
        uniform_nodes(4),
        jobs,
        SimulationParameters(Rules(order=Fifo()), "bestfit", 3, NodeFailures(300.0, 50.0)),
    )
    assert sum(record.node_failure_count for record in run.job_results) > 0
    assert all(record.ended_s is not None for record in run.job_results)
    assert {sample.available_gpu_milli for sample in run.usage_samples} > {32_000}
    assert all(sample.used_gpu_milli <= sample.available_gpu_milli for sample in run.usage_samples)
    lost = [record for record in run.job_results if record.node_failure_count]
    assert all(record.lost_work_s > 0 for record in lost)


def test_job_that_does_not_fit_the_empty_cluster_is_skipped() -> None:
    nodes = uniform_nodes(2, gpus=4, nodes_per_rack=1)
    jobs = [
        SimJob("a", 0.0, 1.0, gpus_per_worker=8),
        SimJob("b", 0.0, 1.0, workers=3, gpus_per_worker=4),
        SimJob("c", 0.0, 1.0, workers=2, gpus_per_worker=4, within=Within.RACK),
        SimJob("d", 0.0, 1.0, workers=2, gpus_per_worker=3, within=Within.NODE),
        SimJob("e", 0.0, 1.0, gpu_models=frozenset({"A"})),
        SimJob("fits", 0.0, 1.0, workers=2, gpus_per_worker=4),
    ]
    run = simulate(nodes, jobs, FIFO)
    assert list(run.infeasible_job_ids) == ["a", "b", "c", "d", "e"]
    assert start_and_end_times(run) == {"fits": (0.0, 1.0)}


@pytest.mark.parametrize("placement", ["supply", "fgd", "bestfit"])
def test_equal_seeds_give_equal_runs(placement: str) -> None:
    nodes = uniform_nodes(4)

    def run(seed: int) -> list[tuple[float | None, float | None, int]]:
        jobs = synthetic_jobs(SyntheticJobMix(job_count=150, gang_job_share=0.02, load=2.0), nodes, seed=seed)
        plan = SimulationParameters(
            placement_policy=placement, seed=seed, node_failures=NodeFailures(50_000.0, 600.0)
        )
        records = simulate(nodes, jobs, plan).job_results
        return [(record.first_started_s, record.ended_s, record.preemption_count) for record in records]

    assert run(1) == run(1) != run(2)


def test_plain_placer_gives_the_same_run_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = uniform_nodes(3)
    jobs = synthetic_jobs(SyntheticJobMix(job_count=60, gang_job_share=0.02, load=2.0), nodes, seed=0)
    fast = simulate(nodes, jobs, SimulationParameters())

    def refuse(name: str) -> None:
        raise NativeBuildError("no compiler")

    monkeypatch.setattr(libraries, "load", refuse)
    slow = simulate(nodes, jobs, SimulationParameters())
    assert (fast.placer_kind, slow.placer_kind) == ("native", "plain")
    assert start_and_end_times(fast) == start_and_end_times(slow)


def test_fragmentation_counts_free_gpus_that_fit_no_worker_of_the_first_job() -> None:
    jobs = [SimJob(f"one{number}", 0.0, 100.0, gpus_per_worker=3) for number in range(2)]
    jobs.append(SimJob("two", 1.0, 10.0, gpus_per_worker=2))
    run = simulate(uniform_nodes(2, gpus=4), jobs, FIFO)
    assert [(it.free_gpu_milli, it.unusable_gpu_milli) for it in run.fragmentation_samples] == [(2000, 2000)]


def test_duplicate_job_ids_and_empty_simulations_are_rejected() -> None:
    with pytest.raises(UsageError, match="duplicate job ID 'a'"):
        simulate(uniform_nodes(1), [SimJob("a", 0.0, 1.0), SimJob("a", 1.0, 1.0)], FIFO)
    for nodes, jobs in (([], [SimJob("a", 0.0, 1.0)]), (uniform_nodes(1), []), ([NodeFacts("n", 1, 1)], [])):
        with pytest.raises(UsageError, match="needs nodes with GPUs and jobs"):
            simulate(nodes, jobs, FIFO)
