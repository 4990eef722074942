"""submit, jobs, logs and cancel against a scripted controller."""

from __future__ import annotations

import json
import os
import signal

import pytest

from genie.cli.job_commands import job_spec
from genie.cli.wishes import WishOptions
from genie.errors import (
    GenieError,
    JobNotFoundError,
    JobRefusedError,
    NameInvalidError,
    StoreFullError,
    UsageError,
)
from genie.model.job import JobState
from genie.model.messages import (
    CancelJob,
    GetJob,
    JobReply,
    JobsReply,
    ListJobs,
    LogChunk,
    ReadLog,
    SubmitJob,
)
from tests.cli.nouns import job, placed

PLAIN = {"argv": ["python", "train.py"], "name": None, "gpus": "0", "cpus": "0", "memory": None, "env": []}


def spec_with(**changes):
    return job_spec(**{**PLAIN, **changes}, options=WishOptions(), now=0.0)


def says(job_after):
    return JobReply(job=job_after)


def log_of(data: bytes) -> LogChunk:
    return LogChunk(data=data, start=0, next_offset=len(data), eof=True)


# --- what is asked for ------------------------------------------------------------------------


def test_the_options_become_a_spec() -> None:
    spec = spec_with(name="n1", gpus="2", cpus="1.5", memory="1GiB", env=["A=1", "B=x=y", "C="])
    assert (spec.name, spec.command) == ("n1", ("python", "train.py"))
    assert (spec.resources.gpus, spec.resources.cpus, spec.resources.memory_bytes) == (2, 1.5, 1 << 30)
    assert spec.env == {"A": "1", "B": "x=y", "C": ""}


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("python", "python"),
        ("/usr/bin/g++-12", "g---12"),
        ("./a b.sh", "a-b-sh"),
        ("///", "job"),
        ("é", "job"),
        ("x" * 99, "x" * 63),
    ],
)
def test_a_job_without_a_name_is_named_after_its_program(program, name) -> None:
    assert spec_with(argv=[program]).name == name


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"argv": []}, "command"),
        ({"argv": ["a\x00b"]}, "NUL"),
        ({"gpus": "-1"}, "--gpus"),
        ({"gpus": "1000000000"}, "--gpus"),
        ({"gpus": "one"}, "--gpus"),
        ({"cpus": "-0.5"}, "--cpus"),
        ({"cpus": "nan"}, "--cpus"),
        ({"cpus": "inf"}, "--cpus"),
        ({"memory": "lots"}, "--memory"),
        ({"memory": "-1"}, "--memory"),
        ({"env": ["A"]}, "--env"),
        ({"env": ["=1"]}, "--env"),
        ({"env": ["1A=x"]}, "--env"),
        ({"env": ["A B=x"]}, "--env"),
        ({"env": ["A=\x00"]}, "--env"),
        ({"name": "a b"}, "--name"),
        ({"name": ""}, "--name"),
        ({"name": "../x"}, "--name"),
        ({"name": "x" * 64}, "--name"),
        ({"name": "n\x1b[2J"}, "--name"),
    ],
)
def test_what_is_wrong_is_named(changes, named) -> None:
    with pytest.raises(UsageError) as caught:
        spec_with(**changes)
    assert named in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, NameInvalidError) or named != "--name"


# --- submit -----------------------------------------------------------------------------------


def test_submit_without_a_command_is_a_usage_error(genie) -> None:
    ran = genie("submit")
    assert (ran.code, ran.out) == (2, "")
    assert "no command" in ran.err


def test_submit_with_a_directory_that_is_not_there_is_a_usage_error(genie, tmp_path) -> None:
    ran = genie("submit", "--workdir", str(tmp_path / "none"), "--", "x")
    assert ran.code == 2
    assert "--workdir" in ran.err


def test_submit_prints_the_id_and_nothing_else_on_standard_output(genie, controller) -> None:
    controller.answers[SubmitJob] = says(job(reason="1 of 1 accelerators is held by j0"))
    ran = genie("submit", "--gpus", "1", "--name", "train", "--", "python", "train.py", "--debug", "-x")
    assert (ran.code, ran.out) == (0, "j1\n")
    assert ran.err == "queued: 1 of 1 accelerators is held by j0\n"
    (asked,) = controller.asked
    assert asked.spec.command == ("python", "train.py", "--debug", "-x")


def test_submit_takes_a_command_without_dashes_too(genie, controller) -> None:
    controller.answers[SubmitJob] = says(placed(JobState.RUNNING))
    assert genie("submit", "echo", "--json")[:2] == (0, "j1\n")
    assert controller.asked[0].spec.command == ("echo", "--json")


def test_submit_gives_json(genie, controller) -> None:
    controller.answers[SubmitJob] = says(job())
    ran = genie("submit", "--json", "--", "x")
    assert json.loads(ran.out)["job_id"] == "j1"
    assert json.loads(ran.out)["state"] == "queued"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JobRefusedError("no node has 9 accelerators", hint="ask for less"), 1),
        (StoreFullError("no space left"), 1),
    ],
)
def test_a_refusal_is_shown_with_its_reason(genie, controller, error, code) -> None:
    controller.answers[SubmitJob] = error
    ran = genie("submit", "--", "x")
    assert (ran.code, ran.out) == (code, "")
    assert f"genie: {error.message}\n" in ran.err


def test_json_and_wait_exclude_each_other(genie) -> None:
    ran = genie("submit", "--json", "--wait", "--", "x")
    assert ran.code == 2
    assert "--json" in ran.err


# --- submit --wait ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (placed(JobState.SUCCEEDED, exit_code=0), 0),
        (placed(JobState.FAILED, exit_code=3, reason="exit code 3"), 3),
        (placed(JobState.FAILED, exit_code=-9, reason="killed by signal 9"), 137),
        (placed(JobState.FAILED, reason="could not be started"), 1),
        (placed(JobState.CANCELLED, reason="cancelled"), 1),
        (placed(JobState.LOST, reason="node restarted"), 1),
    ],
    ids=lambda value: value.state.value if hasattr(value, "state") else str(value),
)
def test_wait_shows_the_output_and_passes_the_exit_code_on(genie, controller, end, code) -> None:
    controller.answers[SubmitJob] = says(job())
    controller.answers[ReadLog] = log_of(b"line \xff\n")
    controller.answers[GetJob] = says(end)
    ran = genie("submit", "--wait", "--", "x")
    assert ran.code == code
    assert ran.out.startswith("line ") and "j1" not in ran.out
    assert end.reason in ran.err


def press_ctrl_c() -> None:
    """One signal each, and never after the command has gone: pytest would take it."""
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_cancels_the_job_and_waits_for_its_end(genie, controller) -> None:
    pressed = ended = False

    def read(request):
        nonlocal pressed
        if not pressed:
            pressed = True
            press_ctrl_c()
        return LogChunk(data=b"", start=0, next_offset=0, eof=ended)

    def cancel(request):
        nonlocal ended
        ended = True
        return says(job(JobState.CANCELLED, reason="asked by owner1"))

    controller.answers[SubmitJob] = says(job())
    controller.answers[ReadLog] = read
    controller.answers[CancelJob] = cancel
    controller.answers[GetJob] = says(job(JobState.CANCELLED, reason="asked by owner1"))
    ran = genie("submit", "--wait", "--", "x")
    assert ran.code == 1
    assert "cancelling job j1" in ran.err and "asked by owner1" in ran.err
    assert sum(isinstance(request, CancelJob) for request in controller.asked) == 1


def test_a_second_ctrl_c_leaves(genie, controller) -> None:
    pressed = False

    def read(request):
        nonlocal pressed
        if not pressed:
            pressed = True
            press_ctrl_c()
        return LogChunk(data=b"", start=0, next_offset=0, eof=False)

    def cancel(request):
        press_ctrl_c()
        return says(placed(JobState.RUNNING))

    controller.answers[SubmitJob] = says(job())
    controller.answers[ReadLog] = read
    controller.answers[CancelJob] = cancel
    ran = genie("submit", "--wait", "--", "x")
    assert ran.code == 130
    assert "Traceback" not in ran.err


# --- jobs, logs, cancel -----------------------------------------------------------------------


def test_jobs_lists_those_that_wait_or_run(genie, controller) -> None:
    controller.answers[ListJobs] = JobsReply(jobs=(placed(JobState.RUNNING, reason="placed"),), more=False)
    ran = genie("jobs")
    assert ran.code == 0
    head, row = ran.out.splitlines()
    assert head.split()[:3] == ["JOB", "NAME", "STATE"]
    assert row.split()[:6] == ["j1", "train", "running", "1", "box:", "0"]
    assert set(controller.asked[0].states) == {"queued", "placing", "running"}


@pytest.mark.parametrize(
    ("argv", "states"), [(["--all"], set()), (["--state", "failed", "--state", "lost"], {"failed", "lost"})]
)
def test_jobs_asks_for_what_was_asked(genie, controller, argv, states) -> None:
    controller.answers[ListJobs] = JobsReply(jobs=(), more=False)
    assert genie("jobs", *argv)[:2] == (0, "")
    assert set(controller.asked[0].states) == states


def test_no_jobs_is_said_on_standard_error(genie, controller) -> None:
    controller.answers[ListJobs] = JobsReply(jobs=(), more=False)
    ran = genie("jobs")
    assert (ran.code, ran.out) == (0, "")
    assert "no jobs" in ran.err and "--all" in ran.err


def test_jobs_gives_json(genie, controller) -> None:
    controller.answers[ListJobs] = JobsReply(
        jobs=(placed(JobState.LOST, reason="node restarted"),), more=True
    )
    document = json.loads(genie("jobs", "--all", "--json").out)
    assert document["more"] is True
    assert document["jobs"][0]["placements"][0]["node_id"] == "box"
    assert document["jobs"][0]["reason"] == "node restarted"


def test_a_state_that_is_none_names_the_allowed_ones(genie) -> None:
    ran = genie("jobs", "--state", "done")
    assert ran.code == 2
    assert "--state" in ran.err and "succeeded" in ran.err


def test_a_reason_cannot_move_the_cursor(genie, controller) -> None:
    controller.answers[ListJobs] = JobsReply(jobs=(job(reason="bad\x1b[2J\nforged row"),), more=False)
    ran = genie("jobs")
    assert "\x1b" not in ran.out
    assert len(ran.out.splitlines()) == 2


def test_logs_are_printed_as_they_are(genie, controller) -> None:
    controller.answers[ReadLog] = log_of(b"one\ntwo")
    ran = genie("logs", "j1")
    assert ran == (0, "one\ntwo", "")
    assert controller.asked[0].wait_s == 0


def test_logs_as_one_document(genie, controller) -> None:
    controller.answers[ReadLog] = log_of(b"one\n\xff")
    assert json.loads(genie("logs", "j1", "--json").out) == {"job": "j1", "log": "one\n\ufffd"}


def logs_of_runs(logs: dict[int, bytes]):
    """A controller that has these runs; the last is still under way."""

    def read(request: ReadLog) -> LogChunk:
        run = request.run or max(logs)
        if run > max(logs):
            return LogChunk(data=b"", start=0, next_offset=0, eof=True)
        if not logs[run]:
            raise JobNotFoundError(f"node box has no log of run {run}")
        data = logs[run][request.offset :][: request.bytes_max]
        end = request.offset + len(data)
        return LogChunk(
            data=data, start=request.offset, next_offset=end, eof=not data, run=run, runs=tuple(logs)
        )

    return read


def test_logs_of_one_run_and_of_all(genie, controller) -> None:
    controller.answers[ReadLog] = logs_of_runs({3: b"three\n", 4: b"four\n"})
    assert genie("logs", "j1") == (0, "four\n", "")
    assert genie("logs", "j1", "--run", "3") == (0, "three\n", "")
    assert genie("logs", "j1", "--all-runs") == (0, "three\nfour\n", "run 3:\nrun 4:\n")
    document = json.loads(genie("logs", "j1", "--all-runs", "--json").out)
    assert document == {
        "job": "j1",
        "runs": [{"run": 3, "log": "three\n"}, {"run": 4, "log": "four\n"}],
    }
    assert json.loads(genie("logs", "j1", "--run", "3", "--json").out) == {"job": "j1", "log": "three\n"}


def test_a_run_whose_log_is_gone_leaves_the_others(genie, controller) -> None:
    controller.answers[ReadLog] = logs_of_runs({3: b"", 4: b"four\n"})
    ran = genie("logs", "j1", "--all-runs")
    assert (ran.code, ran.out) == (0, "four\n")
    assert "no log of run 3" in ran.err


@pytest.mark.parametrize(
    "argv", [["--run", "0"], ["--run", "x"], ["--all-runs", "-f"], ["--all-runs", "--run", "1"]]
)
def test_runs_that_make_no_sense_are_refused(genie, argv) -> None:
    assert genie("logs", "j1", *argv).code == 2


def test_who_follows_goes_on_with_the_next_run(genie, controller) -> None:
    controller.answers[ReadLog] = logs_of_runs({1: b"one\n", 2: b"two\n"})
    first = logs_of_runs({1: b"one\n"})
    read = controller.answers[ReadLog]
    controller.answers[ReadLog] = lambda request: (read if request.run else first)(request)
    assert genie("logs", "-f", "j1").out == "one\ntwo\n"
    assert genie("logs", "-f", "j1", "--run", "1").out == "one\n"


def test_logs_of_a_job_that_is_not_there(genie, controller) -> None:
    controller.answers[ReadLog] = JobNotFoundError("no job 'j9'", hint="see 'genie jobs --all'")
    ran = genie("logs", "j9")
    assert (ran.code, ran.out) == (1, "")
    assert "genie: no job 'j9'" in ran.err


def test_cancel_goes_on_after_one_that_fails(genie, controller) -> None:
    def cancel(request) -> JobReply:
        if request.job_id == "j9":
            raise JobNotFoundError("no job 'j9'")
        return says(job(JobState.CANCELLED, job_id=request.job_id, reason="cancelled by owner1"))

    controller.answers[CancelJob] = cancel
    ran = genie("cancel", "j9", "j2")
    assert ran.code == 1
    assert "j2  cancelled" in ran.out
    assert "no job 'j9'" in ran.err


def test_errors_of_the_server_keep_their_exit_code(genie, controller) -> None:
    controller.answers[CancelJob] = GenieError("internal error", hint="see the log")
    assert genie("cancel", "j1").code == 1
