"""Event-driven runs: who starts and ends when, what preemption and failures cost, and that seeds decide."""

from __future__ import annotations

import pytest

from genie.errors import NativeBuildError, UsageError
from genie.model.job import Within
from genie.runtime import native
from genie.scheduler.order import Fifo, Priority
from genie.scheduler.request import NodeFacts
from genie.scheduler.scheduler import Rules
from genie.sim.events import Failures, Plan, Record, Run, simulate
from genie.sim.synthetic import Mix, synthetic_jobs
from genie.sim.workload import SimJob, alike_nodes

FIFO = Plan(Rules(order=Fifo()), "bestfit")
PRIORITY = Plan(Rules(order=Priority()), "bestfit")


def of(run: Run) -> dict[str, Record]:
    return {record.job.job_id: record for record in run.records}


def times(run: Run) -> dict[str, tuple[float | None, float | None]]:
    return {name: (record.started_s, record.ended_s) for name, record in of(run).items()}


def test_a_job_waits_for_room_and_runs_its_own_time_not_its_limit() -> None:
    jobs = [
        SimJob("a", 0.0, 100.0, gpus=4, time_limit_s=500.0),
        SimJob("b", 10.0, 50.0, gpus=4, time_limit_s=500.0),
    ]
    run = simulate(alike_nodes(1, gpus=4), jobs, FIFO)
    assert times(run) == {"a": (0.0, 100.0), "b": (100.0, 150.0)}
    assert [(it.at_s, it.used_milli, it.waiting) for it in run.moments] == [
        (0.0, 4000, 0),
        (10.0, 4000, 1),
        (100.0, 4000, 0),
        (150.0, 0, 0),
    ]


def test_every_moment_counts_all_who_wait_also_those_who_were_told_nothing_new() -> None:
    jobs = [SimJob(f"j{number}", float(number), 100.0, gpus=4) for number in range(4)]
    run = simulate(alike_nodes(1, gpus=4), jobs, FIFO)
    waiting = [(it.at_s, it.waiting) for it in run.moments]
    assert waiting[:4] == [(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 3)]
    assert waiting[4:] == [(100.0, 2), (200.0, 1), (300.0, 0), (400.0, 0)]


def test_a_time_limit_ends_a_job() -> None:
    run = simulate(alike_nodes(1), [SimJob("a", 0.0, 100.0, time_limit_s=30.0)], FIFO)
    assert times(run) == {"a": (0.0, 30.0)}


def test_what_happens_at_one_time_is_one_decision() -> None:
    jobs = [SimJob(f"j{number}", 5.0, 10.0) for number in range(8)]
    run = simulate(alike_nodes(1), jobs, FIFO)
    assert run.decisions == 2
    assert {record.ended_s for record in run.records} == {15.0}


def test_a_short_job_is_backfilled_and_a_long_one_is_not() -> None:
    jobs = [
        SimJob("runs", 0.0, 100.0, gpus=2, time_limit_s=100.0),
        SimJob("large", 1.0, 10.0, gpus=4, time_limit_s=10.0),
        SimJob("long", 2.0, 500.0, gpus=1, time_limit_s=500.0),
        SimJob("short", 3.0, 50.0, gpus=1, time_limit_s=50.0),
    ]
    nodes = alike_nodes(1, gpus=4)
    found = times(simulate(nodes, jobs, FIFO))
    assert found["large"] == (100.0, 110.0)
    assert found["short"] == (3.0, 53.0)
    assert found["long"] == (110.0, 610.0)
    strict = times(simulate(nodes, jobs, Plan(Rules(order=Fifo(), backfills=False), "bestfit")))
    assert strict["short"] == (110.0, 160.0)


@pytest.mark.parametrize(
    ("checkpoint_s", "lost_s", "ended_s"),
    # It ran 60 s when it was told to go, and 10 s of grace; the other one takes 20 s.
    [(None, 70.0, 90.0 + 100.0), (50.0, 20.0, 90.0 + 50.0), (5.0, 0.0, 90.0 + 30.0)],
)
def test_a_preempted_job_goes_after_its_grace_and_loses_what_it_had_not_saved(
    checkpoint_s: float | None, lost_s: float, ended_s: float
) -> None:
    jobs = [
        SimJob("low", 0.0, 100.0, gpus=8, preemptible=True, grace_s=10.0, checkpoint_s=checkpoint_s),
        SimJob("high", 60.0, 20.0, gpus=8, priority=5),
    ]
    run = simulate(alike_nodes(1), jobs, PRIORITY)
    assert times(run) == {"low": (0.0, ended_s), "high": (70.0, 90.0)}
    assert (of(run)["low"].preemptions, of(run)["low"].lost_s) == (1, lost_s)


def test_a_job_that_ends_within_its_grace_has_lost_nothing() -> None:
    jobs = [
        SimJob("low", 0.0, 100.0, gpus=8, preemptible=True, grace_s=30.0),
        SimJob("high", 90.0, 20.0, gpus=8, priority=5),
    ]
    run = simulate(alike_nodes(1), jobs, PRIORITY)
    assert times(run) == {"low": (0.0, 100.0), "high": (100.0, 120.0)}
    assert of(run)["low"].lost_s == 0.0


def test_nobody_is_sent_away_without_preemption() -> None:
    jobs = [
        SimJob("low", 0.0, 100.0, gpus=8, preemptible=True),
        SimJob("high", 60.0, 20.0, gpus=8, priority=5),
    ]
    run = simulate(alike_nodes(1), jobs, Plan(Rules(order=Priority(), preempts=False), "bestfit"))
    assert times(run) == {"low": (0.0, 100.0), "high": (100.0, 120.0)}


def test_a_failing_node_ends_what_runs_there_and_comes_back() -> None:
    jobs = [SimJob(f"j{number}", 10.0 * number, 200.0, gpus=8) for number in range(60)]
    run = simulate(alike_nodes(4), jobs, Plan(Rules(order=Fifo()), "bestfit", 3, Failures(300.0, 50.0)))
    assert sum(record.failures for record in run.records) > 0
    assert all(record.ended_s is not None for record in run.records)
    assert {moment.there_milli for moment in run.moments} > {32_000}
    assert all(moment.used_milli <= moment.there_milli for moment in run.moments)
    lost = [record for record in run.records if record.failures]
    assert all(record.lost_s > 0 for record in lost)


def test_a_job_that_fits_no_empty_cluster_is_left_out() -> None:
    nodes = alike_nodes(2, gpus=4, of_rack=1)
    jobs = [
        SimJob("a", 0.0, 1.0, gpus=8),
        SimJob("b", 0.0, 1.0, workers=3, gpus=4),
        SimJob("c", 0.0, 1.0, workers=2, gpus=4, within=Within.RACK),
        SimJob("d", 0.0, 1.0, workers=2, gpus=3, within=Within.NODE),
        SimJob("e", 0.0, 1.0, models=frozenset({"A"})),
        SimJob("fits", 0.0, 1.0, workers=2, gpus=4),
    ]
    run = simulate(nodes, jobs, FIFO)
    assert list(run.impossible) == ["a", "b", "c", "d", "e"]
    assert times(run) == {"fits": (0.0, 1.0)}


@pytest.mark.parametrize("placement", ["supply", "fgd", "bestfit"])
def test_the_same_seed_is_the_same_run(placement: str) -> None:
    nodes = alike_nodes(4)

    def run(seed: int) -> list[tuple[float | None, float | None, int]]:
        jobs = synthetic_jobs(Mix(jobs=150, gangs=0.02, load=2.0), nodes, seed=seed)
        plan = Plan(placement=placement, seed=seed, failures=Failures(50_000.0, 600.0))
        records = simulate(nodes, jobs, plan).records
        return [(record.started_s, record.ended_s, record.preemptions) for record in records]

    assert run(1) == run(1) != run(2)


def test_without_a_compiler_the_plain_placer_gives_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = alike_nodes(3)
    jobs = synthetic_jobs(Mix(jobs=60, gangs=0.02, load=2.0), nodes, seed=0)
    fast = simulate(nodes, jobs, Plan())

    def refuse(name: str) -> None:
        raise NativeBuildError("there is no compiler")

    monkeypatch.setattr(native, "load", refuse)
    slow = simulate(nodes, jobs, Plan())
    assert (fast.placer, slow.placer) == ("native", "plain")
    assert times(fast) == times(slow)


def test_free_gpus_of_no_use_are_those_on_which_the_first_cannot_put_a_worker() -> None:
    jobs = [SimJob(f"one{number}", 0.0, 100.0, gpus=3) for number in range(2)]
    jobs.append(SimJob("two", 1.0, 10.0, gpus=2))
    run = simulate(alike_nodes(2, gpus=4), jobs, FIFO)
    assert [(it.free_milli, it.useless_milli) for it in run.samples] == [(2000, 2000)]


def test_two_jobs_of_one_name_and_an_empty_simulation_are_refused() -> None:
    with pytest.raises(UsageError, match="two jobs 'a'"):
        simulate(alike_nodes(1), [SimJob("a", 0.0, 1.0), SimJob("a", 1.0, 1.0)], FIFO)
    for nodes, jobs in (([], [SimJob("a", 0.0, 1.0)]), (alike_nodes(1), []), ([NodeFacts("n", 1, 1)], [])):
        with pytest.raises(UsageError, match="needs nodes with GPUs and jobs"):
            simulate(nodes, jobs, FIFO)
