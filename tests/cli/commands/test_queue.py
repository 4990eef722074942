"""queue and explain against a scripted controller."""

from __future__ import annotations

import json
import time

import pytest

from genie.errors import JobNotFoundError
from genie.model.job import JobState, Placement, PlacementConstraints, Resources, Transition
from genie.model.messages import ExplainJob, ExplainReply, GetQueue, NodesRuledOut, QueuedJob, QueueReply
from genie.model.tenant import TokenKind
from genie.processes.files import write_private
from genie.tenancy.access import NO_PIN, new_token
from tests.cli.sample_messages import make_job, make_placed_job


def make_queued_job(position: int = 1, **fields: object) -> QueuedJob:
    given: dict[str, object] = {
        "job_id": f"j{position}",
        "name": "train",
        "tenant": "lab",
        "resources": Resources(gpus=8),
        "constraints": PlacementConstraints(workers=4, priority=5),
        "submitted_at": time.time() - 600,
        "reason": "waiting for resources on n1 (reserved for this job)",
        **fields,
    }
    return QueuedJob(position=position, **given)  # type: ignore[arg-type]


def make_queue_reply(*jobs: QueuedJob, waiting: int = 1, more: bool = False) -> QueueReply:
    return QueueReply(jobs=jobs, waiting=waiting, more=more)


# --- queue ------------------------------------------------------------------------------------


def test_queue_has_a_row_per_job(genie, controller) -> None:
    first = make_queued_job(1, starts_at=time.time() + 7200)
    controller.replies[GetQueue] = make_queue_reply(
        first, make_queued_job(3, starts_at=None, tenant="own"), waiting=3
    )
    ran = genie("queue")
    heading, one, two = ran.out.splitlines()
    assert " ".join(heading.split()) == "# JOB NAME TENANT REQUEST PRIORITY AGE EXPECTED START PENDING REASON"
    assert one.split("  ")[0] == "1" and two.split("  ")[0] == "3"
    for part in ("j1", "train", "lab", "4 workers of 8 GPUs", "5", "10 min", "in 2 h", first.reason):
        assert f"  {part}" in one
    assert "own" in two and "  -  " in two
    assert controller.requests == [GetQueue(limit=100)]


def test_queue_of_a_user_has_no_tenant_column(genie, controller, state_dir) -> None:
    controller.only_token = new_token(TokenKind.USER, token_id="user1", secret=b"\x05" * 32, pin=NO_PIN)
    write_private(state_dir / "user.token", str(controller.only_token).encode())
    controller.replies[GetQueue] = make_queue_reply(make_queued_job())
    ran = genie("queue", "--token-file", str(state_dir / "user.token"))
    assert ran.code == 0, ran.err
    assert "TENANT" not in ran.out and "  lab" not in ran.out
    assert "REQUEST" in ran.out


@pytest.mark.parametrize(
    ("waiting", "message"), [(0, "no pending jobs\n"), (4, "no pending jobs in your tenant\n")]
)
def test_empty_queue_is_reported(genie, controller, waiting, message) -> None:
    controller.replies[GetQueue] = make_queue_reply(waiting=waiting)
    assert genie("queue") == (0, "", message)


def test_truncated_queue_is_reported(genie, controller) -> None:
    controller.replies[GetQueue] = make_queue_reply(make_queued_job(), waiting=40, more=True)
    ran = genie("queue", "--limit", "1")
    assert "40 jobs are pending" in ran.err
    assert controller.requests == [GetQueue(limit=1)]
    assert genie("queue", "--limit", "0").code == 2


def test_queue_prints_json(genie, controller) -> None:
    controller.replies[GetQueue] = make_queue_reply(make_queued_job(2), waiting=2)
    document = json.loads(genie("queue", "--json").out)
    assert set(document) == set(QueueReply.__struct_fields__)
    assert document["jobs"][0]["position"] == 2
    assert document["jobs"][0]["constraints"]["workers"] == 4


# --- explain ----------------------------------------------------------------------------------


def make_explain_reply(**fields: object) -> ExplainReply:
    step = Transition(state=JobState.QUEUED, at=time.time() - 300, reason="submitted")
    waiting = make_job(JobState.QUEUED, reason="waiting for j9 to stop", history=(step,))
    return ExplainReply(job=waiting, **fields)  # type: ignore[arg-type]


def test_explain_shows_blocked_nodes_of_a_pending_job(genie, controller) -> None:
    full = NodesRuledOut(
        reason="1 of 8 GPUs are free", count=5, nodes=("a", "b", "c", "d"), is_permanent=False
    )
    small = NodesRuledOut(reason="has 1 GPU", count=1, nodes=("tiny",), is_permanent=True)
    controller.replies[ExplainJob] = make_explain_reply(
        ahead=2, starts_at=time.time() + 7200, ruled_out=(full, small), ruled_out_more=3
    )
    ran = genie("explain", "train")
    assert ran.code == 0, ran.err
    facts, nodes, history = ran.out.split("\n\n")
    assert "state           queued for 5 min\n" in facts
    assert "request         1 GPU\n" in facts
    assert "pending reason  waiting for j9 to stop\n" in facts
    assert "jobs ahead      2\n" in facts
    assert "expected start  at the latest in about 2 h (" in facts and facts.endswith(
        "), if running jobs use their full time limit"
    )
    _, first, second = nodes.splitlines()
    assert (
        first.split(None, 1)[0] == "5" and "  a, b, c and 2 more  temporarily  1 of 8 GPUs are free" in first
    )
    assert "  tiny " in second and second.endswith("  permanently  has 1 GPU")
    assert "3 nodes more" in ran.err
    assert "submitted" in history
    assert controller.requests == [ExplainJob(job_id="train")]


def test_explain_shows_an_unknown_start(genie, controller) -> None:
    controller.replies[ExplainJob] = make_explain_reply(ahead=0)
    ran = genie("explain", "j1")
    assert "expected start  unknown\n" in ran.out
    assert "jobs ahead      0\n" in ran.out


def test_explain_names_the_job_without_time_limit(genie, controller) -> None:
    why = "j9 has no time limit, and must be over first"
    controller.replies[ExplainJob] = make_explain_reply(ahead=1, starts_why=why)
    assert f"expected start  unknown: {why}\n" in genie("explain", "j1").out
    controller.replies[ExplainJob] = make_explain_reply(ahead=1, starts_why=why, starts_at=time.time() + 7200)
    shown = genie("explain", "j1").out
    assert "expected start  in about 2 h (" in shown and f"): {why}\n" in shown and "latest" not in shown


def test_explain_shows_the_placements_of_all_workers(genie, controller) -> None:
    places = [
        Placement(node_id=node_id, incarnation=1, gpu_ids=gpu_ids, epoch=4)
        for node_id, gpu_ids in (("n1", (0, 1)), ("n1", (2, 3)), ("n2", (0, 1)))
    ]
    gang = make_job(JobState.RUNNING, placements=tuple(places))
    controller.replies[ExplainJob] = ExplainReply(job=gang)
    assert "placement  n1: 0-3, n2: 0-1\n" in genie("explain", "j1").out
    document = json.loads(genie("explain", "j1", "--json").out)
    assert [each["node_id"] for each in document["job"]["placements"]] == ["n1", "n1", "n2"]


def test_explain_of_an_unscheduled_job_shows_only_its_reason(genie, controller) -> None:
    controller.replies[ExplainJob] = make_explain_reply()
    ran = genie("explain", "j1")
    assert "pending reason" in ran.out and "ahead" not in ran.out and "expected start" not in ran.out


def test_explain_of_a_running_job_shows_placement_and_reason(genie, controller) -> None:
    now = time.time()
    steps = (
        Transition(state=JobState.QUEUED, at=now - 900, reason="submitted"),
        Transition(state=JobState.PLACING, at=now - 601, reason="it fits: box"),
        Transition(state=JobState.RUNNING, at=now - 600, reason="started on node box"),
    )
    runs = make_placed_job(JobState.RUNNING, history=steps, reason="started on node box")
    controller.replies[ExplainJob] = ExplainReply(job=runs)
    ran = genie("explain", "j1")
    assert "state             running for 10 min\n" in ran.out
    assert "placement         box: 0\n" in ran.out
    assert "placement reason  it fits: box\n" in ran.out
    assert "pending reason" not in ran.out
    _, history = ran.out.split("\n\n")
    assert [line.split()[2] for line in history.splitlines()[1:]] == ["queued", "placing", "running"]


def test_explain_of_a_finished_job_shows_its_end(genie, controller) -> None:
    over = make_placed_job(JobState.FAILED, reason="exit code 3", ended_at=time.time() - 7200)
    controller.replies[ExplainJob] = ExplainReply(job=over)
    ran = genie("explain", "j1")
    assert "failed, 2 h ago\n" in ran.out and "exit code 3\n" in ran.out


def test_explain_prints_json(genie, controller) -> None:
    controller.replies[ExplainJob] = make_explain_reply(ahead=1)
    document = json.loads(genie("explain", "j1", "--json").out)
    assert set(document) == set(ExplainReply.__struct_fields__)
    assert (document["ahead"], document["job"]["job_id"]) == (1, "j1")


def test_explain_of_an_unknown_job_is_an_error(genie, controller) -> None:
    controller.replies[ExplainJob] = JobNotFoundError("there is no job 'x'", hint="'genie jobs' lists them")
    ran = genie("explain", "x")
    assert (ran.code, ran.out) == (1, "")
    assert "there is no job 'x'" in ran.err
