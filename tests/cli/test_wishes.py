"""What `genie submit` takes beside the command, and how it is shown."""

from __future__ import annotations

import shlex
import time

import msgspec
import pytest

from genie.cli.wishes import WishOptions, asked_text, gpus_text, places_text, resources_of, wishes_of
from genie.controller.checks import check_job
from genie.errors import UsageError
from genie.model.job import JobSpec, JobState, Placement, Resources, Spread, Wishes, Within
from genie.model.messages import JobReply, JobsReply, ListJobs, SubmitJob
from tests.cli.nouns import job, placed

EVERYTHING = (
    "--gpus 2 --workers 4 --workers-min 3 --gpu-share 0.25 --gpu-memory 10GiB --gpu-model H200 --gpu-model "
    "A100-SXM4-80GB --gpu-vendor NVIDIA --gpu-memory-min 40GiB --capability 8.6 --label disk=nvme --label "
    "zone=a/b --within rack --near store --apart noisy --apart loud --node box-1 --priority -7 --preemptible "
    "--grace 2m --time-limit 2h --deadline 2h"
)


def read(**given: object) -> Wishes:
    return wishes_of(WishOptions(**given), gpus=1, now=100.0)  # type: ignore[arg-type]


def test_every_option_arrives_at_the_controller(genie, controller) -> None:
    controller.answers[SubmitJob] = JobReply(job=job())
    before = time.time()
    ran = genie("submit", *shlex.split(EVERYTHING), "--", "python", "train.py", "--workers", "9")
    assert ran.code == 0, ran.err
    spec = controller.asked[0].spec
    assert spec.command == ("python", "train.py", "--workers", "9")
    assert spec.node_id == "box-1"
    assert spec.resources == Resources(gpus=2, gpu_milli=250, gpu_memory_bytes=10 * 1024**3)
    wishes = spec.wishes
    assert msgspec.structs.replace(wishes, deadline_at=None) == Wishes(
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
    assert wishes.deadline_at is not None
    assert before <= wishes.deadline_at - 7200 <= time.time()
    check_job(spec)


def test_spread_is_a_wish_of_its_own(genie, controller) -> None:
    controller.answers[SubmitJob] = JobReply(job=job())
    assert genie("submit", "--workers", "2", "--spread", "--", "x").code == 0
    assert controller.asked[0].spec.wishes == Wishes(workers=2, spread=Spread.SPREAD)


def test_without_options_there_are_no_wishes() -> None:
    assert read() == Wishes()
    assert resources_of(WishOptions(), gpus="0", cpus="0", memory=None) == Resources()


def test_a_job_that_may_be_stopped_has_half_a_minute_then_or_what_is_said() -> None:
    assert read(preemptible=True) == Wishes(preemptible=True, grace_s=30.0)
    assert read(preemptible=True, grace="0").grace_s == 0.0


def test_a_deadline_counts_from_now() -> None:
    assert read(deadline="1m").deadline_at == 160.0


@pytest.mark.parametrize(("text", "found"), [("8.0", (8, 0)), ("9", (9, 0)), ("12.1", (12, 1))])
def test_a_capability_is_two_numbers(text: str, found: tuple[int, int]) -> None:
    assert read(capability=text).capability_min == found


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
        ({"label": ["disk"]}, "--label"),
        ({"label": ["=x"]}, "--label"),
        ({"label": ["a b=x"]}, "--label"),
        ({"label": ["k=" + "v" * 64]}, "--label"),
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
        ({"grace": "30s"}, "--grace without --preemptible"),
        ({"label": ["a=b", "a=c"]}, "--label a=b and --label a=c exclude each other"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(given: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(**given)
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
def test_what_is_wrong_with_a_workers_part_is_named(genie, controller, argv, named) -> None:
    ran = genie("submit", *argv, "--", "x")
    assert (ran.code, controller.asked) == (2, [])
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
def test_wishes_for_gpus_need_gpus(genie, argv) -> None:
    ran = genie("submit", *argv, "--", "x")
    assert ran.code == 2
    assert ran.err.startswith(f"genie: {argv[0]}") and "--gpus 1" in ran.err


@pytest.mark.parametrize(
    ("resources", "wishes", "text", "short"),
    [
        (Resources(), Wishes(), "-", "0"),
        (Resources(gpus=1), Wishes(), "1 GPU", "1"),
        (Resources(gpus=2, gpu_milli=500), Wishes(), "2 GPUs at 0.5", "1"),
        (Resources(gpus=1, gpu_memory_bytes=1 << 30), Wishes(), "1 GPU with 1.0 GiB", "1"),
        (Resources(cpus=1), Wishes(workers=2), "2 workers of 1 CPU", "2x0"),
        (
            Resources(gpus=8, cpus=2.5, memory_bytes=1 << 34),
            Wishes(workers=4, workers_min=2),
            "2 to 4 workers of 8 GPUs, 2.5 CPUs, 16.0 GiB",
            "4x8",
        ),
        (Resources(), Wishes(workers=3), "3 workers", "3x0"),
    ],
)
def test_what_a_job_asks_for_is_shown(resources: Resources, wishes: Wishes, text: str, short: str) -> None:
    assert asked_text(resources, wishes) == text
    assert gpus_text(resources, wishes) == short


def test_the_list_of_jobs_counts_workers(genie, controller) -> None:
    spec = JobSpec(name="gang", command=("x",), resources=Resources(gpus=8), wishes=Wishes(workers=4))
    gang = msgspec.structs.replace(placed(JobState.RUNNING), spec=spec)
    controller.answers[ListJobs] = JobsReply(jobs=(gang,), more=False)
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
def test_all_places_of_a_job_are_shown_short(places: list[tuple[str, tuple[int, ...]]], text: str) -> None:
    placements = [
        Placement(node_id=node_id, incarnation=1, gpu_ids=gpu_ids, epoch=1) for node_id, gpu_ids in places
    ]
    assert places_text(placements) == text
