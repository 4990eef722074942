"""Validation of submitted jobs and quotas."""

from __future__ import annotations

import math

import pytest

from genie.controller.checks import check_job, check_quota
from genie.errors import NameInvalidError, UsageError
from genie.model.job import JobKind, JobSpec, PlacementConstraints, Resources, Spread, Within
from genie.model.tenant import QuotaRecord


def make_spec(*, gpus: int = 1, **fields: object) -> JobSpec:
    given: dict[str, object] = {"resources": Resources(gpus=gpus), **fields}
    return JobSpec(name="train", command=("python",), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "constraints",
    [
        PlacementConstraints(),
        PlacementConstraints(workers=1024, workers_min=1024),
        PlacementConstraints(workers=2, workers_min=0, spread=Spread.SPREAD, within=Within.RACK),
        PlacementConstraints(within=Within.NODE, spread=Spread.SPREAD),
        PlacementConstraints(priority=-1000, grace_s=0.0, time_limit_s=0.5, deadline_at=1.0),
        PlacementConstraints(priority=1000, grace_s=86400.0, preemptible=True),
        PlacementConstraints(labels={f"k{number}": "v" for number in range(64)}),
        PlacementConstraints(near=("a",) * 64, apart=("b-2",), gpu_models=("NVIDIA H200",), vendor="amd"),
        PlacementConstraints(capability_min=(99, 99), gpu_memory_min_bytes=1 << 40),
        PlacementConstraints(within=Within.ISLAND, workers=2),
    ],
)
def test_valid_constraints_are_accepted(constraints: PlacementConstraints) -> None:
    check_job(make_spec(constraints=constraints))


@pytest.mark.parametrize(
    ("constraints", "named"),
    [
        (PlacementConstraints(workers=0), "workers = 0"),
        (PlacementConstraints(workers=4097), "workers = 4097"),
        (PlacementConstraints(workers=2, workers_min=3), "workers_min"),
        (PlacementConstraints(workers_min=-1), "workers_min"),
        (PlacementConstraints(priority=1001), "priority"),
        (PlacementConstraints(priority=-1001), "priority"),
        (PlacementConstraints(grace_s=-0.1), "grace_s"),
        (PlacementConstraints(grace_s=86401.0), "grace_s"),
        (PlacementConstraints(grace_s=math.nan), "grace_s"),
        (PlacementConstraints(time_limit_s=0.0), "time_limit_s"),
        (PlacementConstraints(time_limit_s=math.nan), "time_limit_s"),
        (PlacementConstraints(time_limit_s=math.inf), "time_limit_s"),
        (PlacementConstraints(deadline_at=math.inf), "deadline_at"),
        (PlacementConstraints(deadline_at=-1.0), "deadline_at"),
        (PlacementConstraints(gpu_memory_min_bytes=-1), "gpu_memory_min_bytes"),
        (PlacementConstraints(capability_min=(100, 0)), "capability_min"),
        (PlacementConstraints(capability_min=(8, -1)), "capability_min"),
        (PlacementConstraints(near=("a b",)), "near"),
        (PlacementConstraints(near=("a",) * 65), "near"),
        (PlacementConstraints(apart=("",)), "apart"),
        (PlacementConstraints(apart=("a",) * 65), "apart"),
        (PlacementConstraints(gpu_models=("",)), "GPU model"),
        (PlacementConstraints(gpu_models=("a\0",)), "GPU model"),
        (PlacementConstraints(gpu_models=("m",) * 65), "gpu_models"),
        (PlacementConstraints(gpu_models=("x" * 1025,)), "GPU model"),
        (PlacementConstraints(vendor="acme"), "vendor"),
        (PlacementConstraints(labels={f"k{number}": "" for number in range(65)}), "labels"),
        (PlacementConstraints(labels={"": "v"}), "label"),
        (PlacementConstraints(labels={"k": "v\0"}), "label"),
        (PlacementConstraints(workers=2, spread=Spread.SPREAD, within=Within.NODE), "within = node"),
        (PlacementConstraints(workers=2, spread=Spread.SPREAD, within=Within.ISLAND), "within = island"),
        (
            PlacementConstraints(near=("a", "b"), apart=("b", "c", "a")),
            "near and apart both name job a or b",
        ),
    ],
)
def test_error_names_the_invalid_constraint(constraints: PlacementConstraints, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check_job(make_spec(constraints=constraints))


def test_constraint_within_an_island_needs_gpus() -> None:
    with pytest.raises(UsageError, match="island requires GPUs"):
        check_job(make_spec(gpus=0, constraints=PlacementConstraints(within=Within.ISLAND)))


@pytest.mark.parametrize(
    "constraints",
    [
        PlacementConstraints(gpu_models=("H200",)),
        PlacementConstraints(vendor="nvidia"),
        PlacementConstraints(gpu_memory_min_bytes=1),
        PlacementConstraints(capability_min=(8, 0)),
    ],
)
def test_gpu_constraints_need_gpus(constraints: PlacementConstraints) -> None:
    check_job(make_spec(gpus=1, constraints=constraints))
    with pytest.raises(UsageError, match="GPU constraints require GPUs"):
        check_job(make_spec(gpus=0, constraints=constraints))


def test_gpu_ids_need_a_single_worker() -> None:
    check_job(make_spec(node_id="n1", gpu_ids=(0,)))
    with pytest.raises(UsageError, match="gpu_ids requires a job with one worker"):
        check_job(make_spec(node_id="n1", gpu_ids=(0,), constraints=PlacementConstraints(workers=2)))


def test_requested_gpu_memory_out_of_range_is_rejected() -> None:
    check_job(make_spec(resources=Resources(gpus=1, gpu_memory_bytes=1 << 40)))
    with pytest.raises(UsageError, match="gpu_memory_bytes"):
        check_job(make_spec(resources=Resources(gpus=1, gpu_memory_bytes=-1)))


def test_session_cannot_be_submitted() -> None:
    with pytest.raises(UsageError, match="OpenDevice"):
        check_job(make_spec(kind=JobKind.SESSION, constraints=PlacementConstraints(priority=1000)))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tenant": "a b"}, "tenant"),
        ({"tenant": "../x"}, "tenant"),
        ({"gpus": -1.0}, "gpus"),
        ({"gpus": math.nan}, "gpus"),
        ({"borrow_gpus": math.inf}, "borrow_gpus"),
        ({"weight": 0.0}, "weight"),
        ({"weight": math.nan}, "weight"),
        ({"weight": 1001.0}, "weight"),
    ],
)
def test_error_names_the_invalid_field_of_a_quota(fields: dict[str, object], named: str) -> None:
    check_quota(QuotaRecord(tenant="lab", gpus=0.0, borrow_gpus=1e6, weight=0.01))
    with pytest.raises(UsageError, match=named):
        check_quota(QuotaRecord(**{"tenant": "lab", **fields}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["j-abcdefgh", "j-22222222", "j-abcdefgh.3"])
def test_job_must_not_be_named_like_a_job_id(name: str) -> None:
    with pytest.raises(NameInvalidError, match="form of a job ID"):
        check_job(JobSpec(name=name, command=("true",)))


@pytest.mark.parametrize("name", ["j-abc", "j-abcdefgh-2", "j-ABCDEFGH", "job"])
def test_name_that_only_resembles_a_job_id_is_allowed(name: str) -> None:
    check_job(JobSpec(name=name, command=("true",)))
