"""Metrics of runs that are small enough to compute by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from genie.scheduler.order import Fifo
from genie.scheduler.rules import Rules
from genie.sim.events import SimulationParameters, SimulationResult, simulate
from genie.sim.metrics import isolated_completion_s, jain_index, summarise_simulation, summarise_values
from genie.sim.plots import plot_utilisation, plot_wait_times
from genie.sim.workloads.synthetic import SyntheticJobMix, synthetic_jobs
from genie.sim.workloads.workload import SimJob, offered_load, uniform_nodes

FIFO = SimulationParameters(Rules(order=Fifo()), "bestfit")


def simulate_two_jobs() -> SimulationResult:
    jobs = [
        SimJob("a", 0.0, 100.0, "x", gpus_per_worker=2),
        SimJob("b", 0.0, 100.0, "y", gpus_per_worker=4),
    ]
    return simulate(uniform_nodes(1, gpus=4), jobs, FIFO)


def test_metrics_of_two_jobs_match_those_computed_by_hand() -> None:
    it = summarise_simulation(simulate_two_jobs())
    assert (it.finished_jobs, it.total_gpus, it.span_s) == (2, 4, 200.0)
    assert it.utilisation == pytest.approx((2 * 100 + 4 * 100) / 800)
    assert it.utilisation_while_pending == pytest.approx(0.5)
    assert it.pending_time_share == pytest.approx(0.5)
    assert (it.wait_s.mean, it.wait_s.maximum) == (50.0, 100.0)
    assert (it.completion_s.mean, it.slowdown.maximum) == (150.0, 2.0)
    assert it.jain_index_of_tenants == pytest.approx(1.5**2 / (2 * 1.25))  # x ran all the time, y half of it
    # With 2 private GPUs each, a takes 100 s and b, which needs 4 GPUs, 200 s.
    assert (it.finish_time_fairness.mean, it.finish_time_fairness.maximum) == (1.0, 1.0)
    assert (it.preemptions, it.lost_gpu_hours, it.jobs_ended_by_time_limit) == (0, 0.0, 0)


def test_utilization_until_last_arrival_excludes_the_time_after_it() -> None:
    jobs = [
        SimJob("a", 0.0, 100.0, gpus_per_worker=4),
        SimJob("b", 10.0, 100.0, gpus_per_worker=4),
        SimJob("c", 50.0, 10.0, gpus_per_worker=3),
    ]
    jobs.append(SimJob("d", 60.0, 10.0, gpus_per_worker=3))
    it = summarise_simulation(simulate(uniform_nodes(1, gpus=4), jobs, FIFO))
    assert it.utilisation_until_last_arrival == 1.0
    assert it.utilisation_while_pending < 1.0


def test_lost_work_and_large_gangs_are_counted() -> None:
    jobs = [
        SimJob("low", 0.0, 3600.0, workers=4, gpus_per_worker=8, preemptible=True, grace_s=0.0),
        SimJob("high", 1800.0, 60.0, gpus_per_worker=8, priority=1),
    ]
    it = summarise_simulation(simulate(uniform_nodes(4), jobs, FIFO))
    assert (it.preemptions, it.lost_gpu_hours) == (1, 16.0)
    assert it.large_gang_wait_s.count == 1


def test_isolated_completion_time_assumes_first_come_first_served() -> None:
    jobs = [
        SimJob("a", 0.0, 10.0, gpus_per_worker=2),
        SimJob("b", 0.0, 10.0, gpus_per_worker=1),
        SimJob("c", 5.0, 10.0, gpus_per_worker=1),
        SimJob("d", 6.0, 10.0, gpus_per_worker=4),
    ]
    assert isolated_completion_s(jobs, gpus=2) == [10.0, 20.0, 15.0, 14.0 + 20.0]


@pytest.mark.parametrize(
    ("values", "index"), [([1, 1, 1], 1.0), ([3, 0, 0], 1 / 3), ([], 1.0), ([0, 0], 1.0)]
)
def test_jain_index_of_known_values(values: list[float], index: float) -> None:
    assert jain_index(values) == pytest.approx(index)


def test_summary_of_no_values_counts_zero() -> None:
    assert summarise_values([]).count == 0
    assert (summarise_values(range(1, 101)).p50, summarise_values(range(1, 101)).p99) == (51, 100)


@pytest.mark.parametrize("draw", [plot_utilisation, plot_wait_times])
def test_plots_are_written_as_svg(draw) -> None:
    root = ElementTree.fromstring(draw(simulate_two_jobs()))
    assert root.tag.endswith("svg")
    texts = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert "100%" in texts
    lines = [each for each in root.iter() if each.get("stroke-width")]
    assert len(lines) == (2 if draw is plot_utilisation else 1)  # there are no large gangs


def test_synthetic_jobs_have_the_requested_load_and_mix() -> None:
    nodes = uniform_nodes(16)
    jobs = synthetic_jobs(
        SyntheticJobMix(
            job_count=2000, load=0.9, tenant_count=3, gpu_fraction_job_share=0.4, gang_job_share=0.1
        ),
        nodes,
        seed=4,
    )
    assert offered_load(jobs, nodes) == pytest.approx(0.9)
    assert sum(job.gpu_milli < 1000 for job in jobs) == pytest.approx(800, rel=0.1)
    assert sum(job.workers > 1 for job in jobs) == pytest.approx(200, rel=0.25)
    assert {job.tenant for job in jobs} == {"tenant-1", "tenant-2", "tenant-3"}
    assert {job.priority for job in jobs} == {0, 1, 2}
    assert not any(job.preemptible and job.priority for job in jobs)
    assert sorted(job.duration_s for job in jobs)[1000] == pytest.approx(1800, rel=0.15)
    assert jobs == sorted(jobs, key=lambda job: job.submitted_s)
