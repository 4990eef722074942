"""Jobs of the simulator: CSV format, traces, load and time limits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from genie.errors import UsageError
from genie.model.job import Within
from genie.sim.workloads.workload import (
    SimJob,
    add_time_limits,
    offered_load,
    read_openb_jobs,
    read_philly_jobs,
    read_workload,
    scale_arrivals_to_load,
    uniform_nodes,
    write_workload,
)


@pytest.fixture
def write_csv(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "jobs.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_workload_with_only_the_two_required_columns_is_read(write_csv) -> None:
    jobs = read_workload(write_csv("submitted_s,duration_s\n5,60\n1,30\n"))
    assert jobs == [SimJob("job-2", 1.0, 30.0), SimJob("job-1", 5.0, 60.0)]


def test_written_workload_is_read_back(tmp_path: Path) -> None:
    jobs = [
        SimJob(
            "a",
            0.0,
            60.5,
            "t",
            workers=4,
            gpus_per_worker=8,
            priority=2,
            within=Within.RACK,
            time_limit_s=90.0,
        ),
        SimJob(
            "b",
            1.0,
            9.0,
            gpu_milli=250,
            cpu_milli_per_worker=1500,
            memory_mib_per_worker=10,
            gpu_models=frozenset({"A", "B"}),
        ),
        SimJob("c", 2.0, 9.0, preemptible=True, grace_s=0.0, checkpoint_interval_s=5.0),
    ]
    write_workload(tmp_path / "w.write_csv", jobs)
    assert read_workload(tmp_path / "w.write_csv") == jobs


def test_former_column_names_are_read(write_csv) -> None:
    header = "submitted_s,duration_s,gpus,cpus,memory_mib,models,checkpoint_s,within"
    assert read_workload(write_csv(header + "\n0,9,2,1.5,10,A|B,5,rack\n")) == [
        SimJob(
            "job-1",
            0.0,
            9.0,
            gpus_per_worker=2,
            cpu_milli_per_worker=1500,
            memory_mib_per_worker=10,
            gpu_models=frozenset({"A", "B"}),
            within=Within.RACK,
            checkpoint_interval_s=5.0,
        )
    ]


def test_former_and_new_name_of_a_column_are_rejected(write_csv) -> None:
    with pytest.raises(UsageError, match="columns 'gpus' and 'gpus_per_worker' are the same"):
        read_workload(write_csv("submitted_s,duration_s,gpus,gpus_per_worker\n0,1,2,2\n"))


@pytest.mark.parametrize(
    ("column", "value", "allowed"),
    [
        ("submitted_s", "soon", "a number of seconds >= 0"),
        ("duration_s", "0", "seconds > 0"),
        ("duration_s", "-1", "a number of seconds > 0"),
        ("workers", "0", "from 1 to 100000"),
        ("gpus_per_worker", "17", "from 0 to 16"),
        ("gpu_share", "1.5", "at most 1"),
        ("gpu_share", "nan", "at most 1"),
        ("cpus_per_worker", "-2", "a number >= 0"),
        ("placed_within", "street", "anywhere, rack, node"),
        ("priority", "high", "an integer from 0"),
        ("preemptible", "perhaps", "yes or no"),
        ("checkpoint_interval_s", "0", "seconds > 0"),
        ("time_limit_s", "inf", "a number of seconds > 0"),
        ("job_id", "one", "unique"),
    ],
)
def test_invalid_value_is_reported_with_line_column_and_allowed_values(
    write_csv, column, value, allowed
) -> None:
    cells = {"job_id": "two", "submitted_s": "0", "duration_s": "1"} | {column: value}
    first = {"job_id": "one", "submitted_s": "0", "duration_s": "1"}
    lines = [",".join(cells), ",".join(first.get(name, "") for name in cells), ",".join(cells.values())]
    path = write_csv("\n".join(lines) + "\n")
    with pytest.raises(UsageError) as caught:
        read_workload(path)
    assert f"{path}:3: {column} is {value!r}; it must be" in caught.value.message
    assert allowed in caught.value.message


@pytest.mark.parametrize(
    ("column", "hint"),
    [
        ("gpus_per_workers", "did you mean gpus_per_worker?"),
        ("colour", "known columns: checkpoint_interval_s, "),
    ],
)
def test_unknown_column_is_rejected(write_csv, column: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"csv:1: unknown column '{column}'") as caught:
        read_workload(write_csv(f"submitted_s,duration_s,{column}\n0,1,2\n"))
    assert hint in str(caught.value.hint)


def test_share_of_several_gpus_is_rejected(write_csv) -> None:
    with pytest.raises(UsageError, match="1 for several"):
        read_workload(write_csv("submitted_s,duration_s,gpus,gpu_share\n0,1,2,0.5\n"))


def test_philly_jobs_larger_than_a_node_are_gangs(write_csv) -> None:
    jobs = read_philly_jobs(
        write_csv(
            "timestamp,duration,num_gpus,gpu_time,cluster\n"
            "2017-09-04 10:00:00,100,8,800,x\n2017-09-04 10:00:10,50,12,600,y\n2017-09-04 10:00:20,0,32,0,x\n"
        )
    )
    assert [
        (job.submitted_s, job.duration_s, job.workers, job.gpus_per_worker, job.tenant) for job in jobs
    ] == [
        (0.0, 100.0, 1, 8, "x"),
        (10.0, 50.0, 2, 6, "y"),
        (20.0, 1.0, 4, 8, "x"),
    ]


def test_openb_durations_come_from_the_trace_or_are_drawn(write_csv) -> None:
    head = "cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time,scheduled_time\n"
    path = write_csv(head + "100,5,1,460,A|B,10,200,20\n100,5,0,0,,15,200,\n")
    jobs = read_openb_jobs(path, draw_duration_s=lambda rng: 77.0, seed=0)
    assert [(job.submitted_s, job.duration_s, job.gpus_per_worker, job.gpu_milli) for job in jobs] == [
        (0.0, 180.0, 1, 460),
        (5.0, 77.0, 0, 1000),
    ]
    assert jobs[0].gpu_models == {"A", "B"}


def test_openb_without_times_draws_them_from_the_seed(write_csv) -> None:
    path = write_csv("cpu_milli,memory_mib,num_gpu,gpu_milli\n" + "100,5,1,1000\n" * 20)

    def draw_s(rng: random.Random) -> float:
        return rng.uniform(10, 20)

    runs = [read_openb_jobs(path, draw_duration_s=draw_s, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert len({job.submitted_s for job in runs[0]}) == 20


def test_submission_times_are_scaled_to_the_requested_load() -> None:
    nodes = uniform_nodes(1, gpus=4)
    jobs = [SimJob("a", 0.0, 100.0, gpus_per_worker=4), SimJob("b", 400.0, 100.0, gpus_per_worker=4)]
    assert offered_load(jobs, nodes) == 0.5
    faster = scale_arrivals_to_load(jobs, nodes, 2.0)
    assert [job.submitted_s for job in faster] == [0.0, 100.0]
    assert offered_load(faster, nodes) == 2.0


def test_drawn_time_limits_keep_given_limits_and_cover_the_duration() -> None:
    jobs = [SimJob("a", 0, 10.0, time_limit_s=5.0)] + [SimJob(f"j{n}", 0, 100.0) for n in range(50)]
    limited = add_time_limits(jobs, factor=3, seed=0)
    assert limited[0].time_limit_s == 5.0
    assert all(100 <= (job.time_limit_s or 0) <= 300 for job in limited[1:])
    assert jobs[0].limited_duration_s == 5.0


def test_error_names_the_column_as_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("submitted_s,duration_s,gpus\n0,1,x\n", "utf-8")
    with pytest.raises(UsageError, match=r"jobs.csv:2: gpus is 'x'; it must be an integer from 0 to 16"):
        read_workload(path)
