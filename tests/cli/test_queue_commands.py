"""queue and explain against a scripted controller."""

from __future__ import annotations

import json
import time

import pytest

from genie.errors import JobNotFoundError
from genie.model.job import JobState, Placement, Resources, Transition, Wishes
from genie.model.messages import ExplainJob, ExplainReply, GetQueue, NodesRuledOut, QueuedJob, QueueReply
from genie.model.tenant import TokenKind
from genie.runtime.files import write_private
from genie.tenancy.access import NO_PIN, new_token
from tests.cli.nouns import job, placed


def waits(position: int = 1, **fields: object) -> QueuedJob:
    given: dict[str, object] = {
        "job_id": f"j{position}",
        "name": "train",
        "tenant": "lab",
        "resources": Resources(gpus=8),
        "wishes": Wishes(workers=4, priority=5),
        "submitted_at": time.time() - 600,
        "reason": "has a reservation on n1",
        **fields,
    }
    return QueuedJob(position=position, **given)  # type: ignore[arg-type]


def says(*jobs: QueuedJob, waiting: int = 1, more: bool = False) -> QueueReply:
    return QueueReply(jobs=jobs, waiting=waiting, more=more)


# --- queue ------------------------------------------------------------------------------------


def test_the_queue_has_a_row_for_each_with_all_that_matters(genie, controller) -> None:
    first = waits(1, starts_at=time.time() + 7200)
    controller.answers[GetQueue] = says(first, waits(3, starts_at=None, tenant="own"), waiting=3)
    ran = genie("queue")
    heading, one, two = ran.out.splitlines()
    assert " ".join(heading.split()) == "# JOB NAME TENANT ASKS FOR PRIORITY WAITS EXPECTED REASON"
    assert one.split("  ")[0] == "1" and two.split("  ")[0] == "3"
    for part in ("j1", "train", "lab", "4 workers of 8 GPUs", "5", "10 min", "in 2 h", first.reason):
        assert f"  {part}" in one
    assert "own" in two and "  -  " in two
    assert controller.asked == [GetQueue(limit=100)]


def test_a_user_sees_no_column_of_tenants(genie, controller, state_dir) -> None:
    controller.token = new_token(TokenKind.USER, token_id="user1", secret=b"\x05" * 32, pin=NO_PIN)
    write_private(state_dir / "user.token", str(controller.token).encode())
    controller.answers[GetQueue] = says(waits())
    ran = genie("queue", "--token-file", str(state_dir / "user.token"))
    assert ran.code == 0, ran.err
    assert "TENANT" not in ran.out and "  lab" not in ran.out
    assert "ASKS FOR" in ran.out


@pytest.mark.parametrize(("waiting", "said"), [(0, "nothing waits\n"), (4, "nothing of yours waits\n")])
def test_an_empty_queue_says_so(genie, controller, waiting, said) -> None:
    controller.answers[GetQueue] = says(waiting=waiting)
    assert genie("queue") == (0, "", said)


def test_what_is_left_out_is_told(genie, controller) -> None:
    controller.answers[GetQueue] = says(waits(), waiting=40, more=True)
    ran = genie("queue", "--limit", "1")
    assert "40 wait in all" in ran.err
    assert controller.asked == [GetQueue(limit=1)]
    assert genie("queue", "--limit", "0").code == 2


def test_the_queue_gives_json_with_the_names_of_the_model(genie, controller) -> None:
    controller.answers[GetQueue] = says(waits(2), waiting=2)
    document = json.loads(genie("queue", "--json").out)
    assert set(document) == set(QueueReply.__struct_fields__)
    assert document["jobs"][0]["position"] == 2
    assert document["jobs"][0]["wishes"]["workers"] == 4


# --- explain ----------------------------------------------------------------------------------


def explained(**fields: object) -> ExplainReply:
    step = Transition(state=JobState.QUEUED, at=time.time() - 300, reason="submitted")
    waiting = job(JobState.QUEUED, reason="waits for j9 to make room", history=(step,))
    return ExplainReply(job=waiting, **fields)  # type: ignore[arg-type]


def test_a_job_that_waits_is_told_what_is_in_the_way(genie, controller) -> None:
    full = NodesRuledOut(reason="1 of 8 GPUs are free", count=5, nodes=("a", "b", "c", "d"), ever=False)
    small = NodesRuledOut(reason="has 1 GPU", count=1, nodes=("tiny",), ever=True)
    controller.answers[ExplainJob] = explained(
        ahead=2, starts_at=time.time() + 7200, ruled_out=(full, small), ruled_out_more=3
    )
    ran = genie("explain", "train")
    assert ran.code == 0, ran.err
    facts, nodes, history = ran.out.split("\n\n")
    assert "state      queued for 5 min\n" in facts
    assert "asks for   1 GPU\n" in facts
    assert "waits for  waits for j9 to make room\n" in facts
    assert "ahead      2 jobs\n" in facts
    assert "starts     at the latest in about 2 h (" in facts and facts.endswith(
        "), if jobs run to their limits"
    )
    _, first, second = nodes.splitlines()
    assert first.split(None, 1)[0] == "5" and "  a, b, c and 2 more  now   1 of 8 GPUs are free" in first
    assert "  tiny " in second and second.endswith("  good  has 1 GPU")
    assert "3 nodes more" in ran.err
    assert "submitted" in history
    assert controller.asked == [ExplainJob(job_id="train")]


def test_when_nobody_can_say_when_it_starts_that_is_said(genie, controller) -> None:
    controller.answers[ExplainJob] = explained(ahead=0)
    ran = genie("explain", "j1")
    assert "starts     nobody can say\n" in ran.out
    assert "ahead      0 jobs\n" in ran.out


def test_a_job_without_a_limit_that_is_in_the_way_of_an_estimate_is_named(genie, controller) -> None:
    why = "j9 has no time limit, and must be over first"
    controller.answers[ExplainJob] = explained(ahead=1, starts_why=why)
    assert f"starts     nobody can say: {why}\n" in genie("explain", "j1").out
    controller.answers[ExplainJob] = explained(ahead=1, starts_why=why, starts_at=time.time() + 7200)
    shown = genie("explain", "j1").out
    assert "starts     in about 2 h (" in shown and f"): {why}\n" in shown and "latest" not in shown


def test_every_worker_of_a_gang_is_shown_where_it_is(genie, controller) -> None:
    places = [
        Placement(node_id=node_id, incarnation=1, gpu_ids=gpu_ids, epoch=4)
        for node_id, gpu_ids in (("n1", (0, 1)), ("n1", (2, 3)), ("n2", (0, 1)))
    ]
    gang = job(JobState.RUNNING, placements=tuple(places))
    controller.answers[ExplainJob] = ExplainReply(job=gang)
    assert "where     n1: 0-3, n2: 0-1\n" in genie("explain", "j1").out
    document = json.loads(genie("explain", "j1", "--json").out)
    assert [each["node_id"] for each in document["job"]["placements"]] == ["n1", "n1", "n2"]


def test_a_job_that_nobody_has_looked_at_yet_has_its_reason_only(genie, controller) -> None:
    controller.answers[ExplainJob] = explained()
    ran = genie("explain", "j1")
    assert "waits for" in ran.out and "ahead" not in ran.out and "starts" not in ran.out


def test_a_job_that_runs_is_told_where_since_when_and_why_there(genie, controller) -> None:
    now = time.time()
    steps = (
        Transition(state=JobState.QUEUED, at=now - 900, reason="submitted"),
        Transition(state=JobState.PLACING, at=now - 601, reason="it fits: box"),
        Transition(state=JobState.RUNNING, at=now - 600, reason="started on node box"),
    )
    runs = placed(JobState.RUNNING, history=steps, reason="started on node box")
    controller.answers[ExplainJob] = ExplainReply(job=runs)
    ran = genie("explain", "j1")
    assert "state      running for 10 min\n" in ran.out
    assert "where      box: 0\n" in ran.out
    assert "why there  it fits: box\n" in ran.out
    assert "waits for" not in ran.out
    _, history = ran.out.split("\n\n")
    assert [line.split()[2] for line in history.splitlines()[1:]] == ["queued", "placing", "running"]


def test_a_job_that_is_over_says_how_it_ended(genie, controller) -> None:
    over = placed(JobState.FAILED, reason="exit code 3", ended_at=time.time() - 7200)
    controller.answers[ExplainJob] = ExplainReply(job=over)
    ran = genie("explain", "j1")
    assert "failed, 2 h ago\n" in ran.out and "exit code 3\n" in ran.out


def test_explain_gives_json_with_the_names_of_the_model(genie, controller) -> None:
    controller.answers[ExplainJob] = explained(ahead=1)
    document = json.loads(genie("explain", "j1", "--json").out)
    assert set(document) == set(ExplainReply.__struct_fields__)
    assert (document["ahead"], document["job"]["job_id"]) == (1, "j1")


def test_a_job_that_is_not_there_is_an_error(genie, controller) -> None:
    controller.answers[ExplainJob] = JobNotFoundError("there is no job 'x'", hint="'genie jobs' lists them")
    ran = genie("explain", "x")
    assert (ran.code, ran.out) == (1, "")
    assert "there is no job 'x'" in ran.err
