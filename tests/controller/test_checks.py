"""What a submitted job and a quota may say; everything else is refused before it is written."""

from __future__ import annotations

import math

import pytest

from genie.controller.checks import check_job, check_quota
from genie.errors import UsageError
from genie.model.job import JobKind, JobSpec, Resources, Spread, Wishes, Within
from genie.model.tenant import QuotaRecord


def spec(*, gpus: int = 1, **fields: object) -> JobSpec:
    given: dict[str, object] = {"resources": Resources(gpus=gpus), **fields}
    return JobSpec(name="train", command=("python",), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wishes",
    [
        Wishes(),
        Wishes(workers=1024, workers_min=1024),
        Wishes(workers=2, workers_min=0, spread=Spread.SPREAD, within=Within.RACK),
        Wishes(within=Within.NODE, spread=Spread.SPREAD),
        Wishes(priority=-1000, grace_s=0.0, time_limit_s=0.5, deadline_at=1.0),
        Wishes(priority=1000, grace_s=86400.0, preemptible=True),
        Wishes(labels={f"k{number}": "v" for number in range(64)}),
        Wishes(near=("a",) * 64, apart=("b-2",), gpu_models=("NVIDIA H200",), vendor="amd"),
        Wishes(capability_min=(99, 99), gpu_memory_min_bytes=1 << 40),
        Wishes(within=Within.ISLAND, workers=2),
    ],
)
def test_what_is_allowed_passes(wishes: Wishes) -> None:
    check_job(spec(wishes=wishes))


@pytest.mark.parametrize(
    ("wishes", "named"),
    [
        (Wishes(workers=0), "workers = 0"),
        (Wishes(workers=4097), "workers = 4097"),
        (Wishes(workers=2, workers_min=3), "workers_min"),
        (Wishes(workers_min=-1), "workers_min"),
        (Wishes(priority=1001), "priority"),
        (Wishes(priority=-1001), "priority"),
        (Wishes(grace_s=-0.1), "grace_s"),
        (Wishes(grace_s=86401.0), "grace_s"),
        (Wishes(grace_s=math.nan), "grace_s"),
        (Wishes(time_limit_s=0.0), "time_limit_s"),
        (Wishes(time_limit_s=math.nan), "time_limit_s"),
        (Wishes(time_limit_s=math.inf), "time_limit_s"),
        (Wishes(deadline_at=math.inf), "deadline_at"),
        (Wishes(deadline_at=-1.0), "deadline_at"),
        (Wishes(gpu_memory_min_bytes=-1), "gpu_memory_min_bytes"),
        (Wishes(capability_min=(100, 0)), "capability_min"),
        (Wishes(capability_min=(8, -1)), "capability_min"),
        (Wishes(near=("a b",)), "near"),
        (Wishes(near=("a",) * 65), "near"),
        (Wishes(apart=("",)), "apart"),
        (Wishes(apart=("a",) * 65), "apart"),
        (Wishes(gpu_models=("",)), "GPU model"),
        (Wishes(gpu_models=("a\0",)), "GPU model"),
        (Wishes(gpu_models=("m",) * 65), "gpu_models"),
        (Wishes(gpu_models=("x" * 1025,)), "GPU model"),
        (Wishes(vendor="acme"), "vendor"),
        (Wishes(labels={f"k{number}": "" for number in range(65)}), "labels"),
        (Wishes(labels={"": "v"}), "label"),
        (Wishes(labels={"k": "v\0"}), "label"),
        (Wishes(workers=2, spread=Spread.SPREAD, within=Within.NODE), "within one node"),
        (Wishes(workers=2, spread=Spread.SPREAD, within=Within.ISLAND), "within one island"),
        (Wishes(near=("a", "b"), apart=("b", "c", "a")), "near to and apart from jobs named a or b"),
    ],
)
def test_what_is_not_allowed_is_named(wishes: Wishes, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check_job(spec(wishes=wishes))


def test_an_island_is_one_of_gpus() -> None:
    with pytest.raises(UsageError, match="island without gpus"):
        check_job(spec(gpus=0, wishes=Wishes(within=Within.ISLAND)))


@pytest.mark.parametrize(
    "wishes",
    [
        Wishes(gpu_models=("H200",)),
        Wishes(vendor="nvidia"),
        Wishes(gpu_memory_min_bytes=1),
        Wishes(capability_min=(8, 0)),
    ],
)
def test_who_says_what_gpus_must_be_like_says_how_many(wishes: Wishes) -> None:
    check_job(spec(gpus=1, wishes=wishes))
    with pytest.raises(UsageError, match="not how many"):
        check_job(spec(gpus=0, wishes=wishes))


def test_accelerators_are_named_for_one_worker_only() -> None:
    check_job(spec(node_id="n1", gpu_ids=(0,)))
    with pytest.raises(UsageError, match="gpu_ids with 2 workers"):
        check_job(spec(node_id="n1", gpu_ids=(0,), wishes=Wishes(workers=2)))


def test_memory_of_gpus_is_bounded() -> None:
    check_job(spec(resources=Resources(gpus=1, gpu_memory_bytes=1 << 40)))
    with pytest.raises(UsageError, match="gpu_memory_bytes"):
        check_job(spec(resources=Resources(gpus=1, gpu_memory_bytes=-1)))


def test_a_session_cannot_be_submitted_and_so_has_no_wishes() -> None:
    with pytest.raises(UsageError, match="OpenDevice"):
        check_job(spec(kind=JobKind.SESSION, wishes=Wishes(priority=1000)))


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
def test_a_quota_that_makes_no_sense_is_named(fields: dict[str, object], named: str) -> None:
    check_quota(QuotaRecord(tenant="lab", gpus=0.0, borrow_gpus=1e6, weight=0.01))
    with pytest.raises(UsageError, match=named):
        check_quota(QuotaRecord(**{"tenant": "lab", **fields}))  # type: ignore[arg-type]
