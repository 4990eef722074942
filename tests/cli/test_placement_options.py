"""Resource and placement options of `genie submit`, and how they are printed."""

from __future__ import annotations

import shlex
import time

import msgspec
import pytest

from genie.cli.placement_options import (
    PlacementOptions,
    format_gpu_count,
    format_placements,
    format_request,
    parse_constraints,
    parse_resources,
)
from genie.controller.checks import check_job
from genie.errors import UsageError
from genie.model.job import JobSpec, JobState, Placement, PlacementConstraints, Resources, Spread, Within
from genie.model.messages import JobReply, JobsReply, ListJobs, SubmitJob
from tests.cli.sample_messages import make_job, make_placed_job

EVERYTHING = (
    "--gpus 2 --workers 4 --workers-min 3 --gpu-share 0.25 --gpu-memory 10GiB --gpu-model H200 --gpu-model "
    "A100-SXM4-80GB --gpu-vendor NVIDIA --gpu-memory-min 40GiB --capability 8.6 --label disk=nvme --label "
    "zone=a/b --within rack --near store --apart noisy --apart loud --node box-1 --priority -7 --preemptible "
    "--grace 2m --time-limit 2h --deadline 2h"
)


def parse_placement_options(**given: object) -> PlacementConstraints:
    return parse_constraints(PlacementOptions(**given), gpus=1, now=100.0)  # type: ignore[arg-type]


def test_every_option_is_sent_to_the_controller(genie, controller) -> None:
    controller.replies[SubmitJob] = JobReply(job=make_job())
    before = time.time()
    ran = genie("submit", *shlex.split(EVERYTHING), "--", "python", "train.py", "--workers", "9")
    assert ran.code == 0, ran.err
    spec = controller.requests[0].spec
    assert spec.command == ("python", "train.py", "--workers", "9")
    assert spec.node_id == "box-1"
    assert spec.resources == Resources(gpus=2, gpu_milli=250, gpu_memory_bytes=10 * 1024**3)
    constraints = spec.constraints
    assert msgspec.structs.replace(constraints, deadline_at=None) == PlacementConstraints(
        workers=4,
        workers_min=3,
        within=Within.RACK,
        near=("store",),
        apart=("noisy", "loud"),
        gpu_models=("H200", "A100-SXM4-80GB"),
        vendor="nvidia",
        gpu_memory_min_bytes=40 * 1024**3,
        capability_min=(8, 6),
        labels={"disk": "nvme", "zone": "a/b"},
        priority=-7,
        preemptible=True,
        grace_s=120.0,
        time_limit_s=7200.0,
    )
    assert constraints.deadline_at is not None
    assert before <= constraints.deadline_at - 7200 <= time.time()
    check_job(spec)


def test_spread_option_sets_the_spread_constraint(genie, controller) -> None:
    controller.replies[SubmitJob] = JobReply(job=make_job())
    assert genie("submit", "--workers", "2", "--spread", "--", "x").code == 0
    assert controller.requests[0].spec.constraints == PlacementConstraints(workers=2, spread=Spread.SPREAD)


def test_without_options_constraints_are_empty() -> None:
    assert parse_placement_options() == PlacementConstraints()
    assert parse_resources(PlacementOptions(), gpus="0", cpus="0", memory=None) == Resources()


def test_grace_period_defaults_to_30_seconds() -> None:
    assert parse_placement_options(preemptible=True) == PlacementConstraints(preemptible=True, grace_s=30.0)
    assert parse_placement_options(preemptible=True, grace="0").grace_s == 0.0


def test_deadline_is_relative_to_now() -> None:
    assert parse_placement_options(deadline="1m").deadline_at == 160.0


@pytest.mark.parametrize(("text", "found"), [("8.0", (8, 0)), ("9", (9, 0)), ("12.1", (12, 1))])
def test_compute_capability_is_parsed(text: str, found: tuple[int, int]) -> None:
    assert parse_placement_options(capability=text).capability_min == found


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"workers": "0"}, "--workers"),
        ({"workers": "4097"}, "--workers"),
        ({"workers": "2", "workers_min": "3"}, "--workers-min"),
        ({"workers_min": "0"}, "--workers-min"),
        ({"gpu_memory_min": "lots"}, "--gpu-memory-min"),
        ({"gpu_model": [""]}, "--gpu-model"),
        ({"gpu_model": ["a\x07"]}, "--gpu-model"),
        ({"gpu_model": ["m"] * 65}, "--gpu-model"),
        ({"gpu_vendor": "acme"}, "--gpu-vendor"),
        ({"capability": "new"}, "--capability"),
        ({"capability": "8.0.1"}, "--capability"),
        ({"label": ["disk"]}, "--label 'disk' is not KEY=VALUE"),
        ({"label": ["=x"]}, "--label"),
        ({"label": ["x="]}, "the value of --label x"),
        ({"label": ["a b=x"]}, "the name of --label"),
        ({"label": ["k=" + "v" * 64]}, "the value of --label k"),
        ({"label": [f"k{number}=v" for number in range(65)]}, "--label"),
        ({"within": "house"}, "--within"),
        ({"near": ["a b"]}, "--near"),
        ({"apart": [""]}, "--apart"),
        ({"priority": "1001"}, "--priority"),
        ({"priority": "high"}, "--priority"),
        ({"grace": "2d"}, "--grace"),
        ({"time_limit": "0"}, "--time-limit"),
        ({"deadline": "yesterday"}, "--deadline"),
        ({"workers": "2", "spread": True, "within": "node"}, "--spread"),
        ({"grace": "30s"}, "--grace requires --preemptible"),
        ({"label": ["a=b", "a=c"]}, "--label a=b and --label a=c contradict each other"),
    ],
)
def test_invalid_option_is_named_with_allowed_values(given: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_placement_options(**given)
    assert caught.value.message.startswith(named)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--gpus", "1", "--gpu-share", "0"], "--gpu-share"),
        (["--gpus", "1", "--gpu-share", "1.1"], "--gpu-share"),
        (["--gpus", "1", "--gpu-memory", "much"], "--gpu-memory"),
        (["--node", "Box One"], "--node"),
    ],
)
def test_invalid_resources_are_named(genie, controller, argv, named) -> None:
    ran = genie("submit", *argv, "--", "x")
    assert (ran.code, controller.requests) == (2, [])
    assert named in ran.err and "hint: " in ran.err


@pytest.mark.parametrize(
    "argv",
    [
        ("--gpu-share", "0.5"),
        ("--gpu-memory", "1G"),
        ("--gpu-model", "H200"),
        ("--gpu-vendor", "nvidia"),
        ("--gpu-memory-min", "1G"),
        ("--capability", "8.0"),
        ("--within", "island"),
    ],
)
def test_gpu_options_require_gpus(genie, argv) -> None:
    ran = genie("submit", *argv, "--", "x")
    assert ran.code == 2
    assert ran.err.startswith(f"genie: {argv[0]}") and "--gpus 1" in ran.err


@pytest.mark.parametrize(
    ("resources", "constraints", "text", "short"),
    [
        (Resources(), PlacementConstraints(), "-", "0"),
        (Resources(gpus=1), PlacementConstraints(), "1 GPU", "1"),
        (Resources(gpus=2, gpu_milli=500), PlacementConstraints(), "2 GPUs at 0.5", "1"),
        (Resources(gpus=1, gpu_memory_bytes=1 << 30), PlacementConstraints(), "1 GPU with 1.0 GiB", "1"),
        (Resources(cpus=1), PlacementConstraints(workers=2), "2 workers of 1 CPU", "2x0"),
        (
            Resources(gpus=8, cpus=2.5, memory_bytes=1 << 34),
            PlacementConstraints(workers=4, workers_min=2),
            "2 to 4 workers of 8 GPUs, 2.5 CPUs, 16.0 GiB",
            "4x8",
        ),
        (Resources(), PlacementConstraints(workers=3), "3 workers", "3x0"),
    ],
)
def test_resource_request_is_formatted(
    resources: Resources, constraints: PlacementConstraints, text: str, short: str
) -> None:
    assert format_request(resources, constraints) == text
    assert format_gpu_count(resources, constraints) == short


def test_job_list_shows_workers_and_gpus(genie, controller) -> None:
    spec = JobSpec(
        name="gang", command=("x",), resources=Resources(gpus=8), constraints=PlacementConstraints(workers=4)
    )
    gang = msgspec.structs.replace(make_placed_job(JobState.RUNNING), spec=spec)
    controller.replies[ListJobs] = JobsReply(jobs=(gang,), more=False)
    assert " 4x8 " in genie("jobs").out


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([], ""),
        ([("n1", ())], "n1"),
        ([("n1", ()), ("n2", ()), ("n2", ())], "n1, n2 (2 workers)"),
        ([("n1", (0, 1, 2, 3)), ("n1", (4, 5, 6, 7)), ("n2", (0, 1, 2, 3))], "n1: 0-7, n2: 0-3"),
        ([("n1", (3, 0, 1)), ("n1", (6,)), ("n1", (6,))], "n1: 0-1 3 6"),
    ],
)
def test_placements_are_formatted_by_node(places: list[tuple[str, tuple[int, ...]]], text: str) -> None:
    placements = [
        Placement(node_id=node_id, incarnation=1, gpu_ids=gpu_ids, epoch=1) for node_id, gpu_ids in places
    ]
    assert format_placements(placements) == text
