"""submit, jobs, logs and cancel against a scripted controller."""

from __future__ import annotations

import json
import os
import signal

import pytest

from genie.cli.commands.jobs import build_job_spec
from genie.cli.placement_options import PlacementOptions
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
from tests.cli.sample_messages import make_job, make_placed_job

PLAIN_JOB_ARGUMENTS = {
    "argv": ["python", "train.py"],
    "name": None,
    "gpus": "0",
    "cpus": "0",
    "memory": None,
    "env": [],
}


def build_job_spec_with(**changes):
    return build_job_spec(**{**PLAIN_JOB_ARGUMENTS, **changes}, options=PlacementOptions(), now=0.0)


def make_job_reply(job):
    return JobReply(job=job)


def make_log_chunk(data: bytes) -> LogChunk:
    return LogChunk(data=data, start_offset=0, next_offset=len(data), eof=True)


# --- options ----------------------------------------------------------------------------------


def test_options_become_a_job_spec() -> None:
    spec = build_job_spec_with(name="n1", gpus="2", cpus="1.5", memory="1GiB", env=["A=1", "B=x=y", "C="])
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
def test_job_name_defaults_to_the_program(program, name) -> None:
    assert build_job_spec_with(argv=[program]).name == name


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"argv": []}, "command"),
        ({"argv": ["a\x00b"]}, "NUL"),
        ({"gpus": "-1"}, "--gpus"),
        ({"gpus": "17"}, "--gpus"),
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
def test_invalid_option_is_named(changes, named) -> None:
    with pytest.raises(UsageError) as caught:
        build_job_spec_with(**changes)
    assert named in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, NameInvalidError) or named != "--name"


# --- submit -----------------------------------------------------------------------------------


def test_submit_without_a_command_is_a_usage_error(genie) -> None:
    ran = genie("submit")
    assert (ran.code, ran.out) == (2, "")
    assert "no command" in ran.err


def test_submit_with_a_missing_directory_is_a_usage_error(genie, tmp_path) -> None:
    ran = genie("submit", "--workdir", str(tmp_path / "none"), "--", "x")
    assert ran.code == 2
    assert "--workdir" in ran.err


@pytest.mark.parametrize(
    ("folder", "why"),
    [("/", "it is the root of the file system"), ("user", "home directory"), ("", "contains the home")],
)
def test_submit_does_not_upload_the_home_directory_or_its_parents(
    genie, tmp_path, monkeypatch, folder, why
) -> None:
    (tmp_path / "user").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    ran = genie("submit", "--workdir", str(tmp_path / folder), "--", "x")
    assert ran.code == 2
    assert why in ran.err
    assert "--workdir" in ran.err


def test_submit_prints_only_the_job_id_to_standard_output(genie, controller) -> None:
    controller.replies[SubmitJob] = make_job_reply(make_job(reason="1 of 1 accelerators is held by j0"))
    ran = genie("submit", "--gpus", "1", "--name", "train", "--", "python", "train.py", "--debug", "-x")
    assert (ran.code, ran.out) == (0, "j1\n")
    assert ran.err == "queued: 1 of 1 accelerators is held by j0\n"
    (requests,) = controller.requests
    assert requests.spec.command == ("python", "train.py", "--debug", "-x")


def test_submit_accepts_a_command_without_dashes(genie, controller) -> None:
    controller.replies[SubmitJob] = make_job_reply(make_placed_job(JobState.RUNNING))
    assert genie("submit", "echo", "--json")[:2] == (0, "j1\n")
    assert controller.requests[0].spec.command == ("echo", "--json")


def test_submit_prints_json(genie, controller) -> None:
    controller.replies[SubmitJob] = make_job_reply(make_job())
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
def test_rejected_submit_shows_the_reason(genie, controller, error, code) -> None:
    controller.replies[SubmitJob] = error
    ran = genie("submit", "--", "x")
    assert (ran.code, ran.out) == (code, "")
    assert f"genie: {error.message}\n" in ran.err


def test_json_and_wait_are_mutually_exclusive(genie) -> None:
    ran = genie("submit", "--json", "--wait", "--", "x")
    assert ran.code == 2
    assert "--json" in ran.err


# --- submit --wait ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (make_placed_job(JobState.SUCCEEDED, exit_code=0), 0),
        (make_placed_job(JobState.FAILED, exit_code=3, reason="exit code 3"), 3),
        (make_placed_job(JobState.FAILED, exit_code=-9, reason="killed by signal 9"), 137),
        (make_placed_job(JobState.FAILED, reason="could not be started"), 1),
        (make_placed_job(JobState.CANCELLED, reason="cancelled"), 1),
        (make_placed_job(JobState.LOST, reason="node restarted"), 1),
    ],
    ids=lambda value: value.state.value if hasattr(value, "state") else str(value),
)
def test_wait_prints_the_output_and_returns_the_exit_code(genie, controller, end, code) -> None:
    controller.replies[SubmitJob] = make_job_reply(make_job())
    controller.replies[ReadLog] = make_log_chunk(b"line \xff\n")
    controller.replies[GetJob] = make_job_reply(end)
    ran = genie("submit", "--wait", "--", "x")
    assert ran.code == code
    assert ran.out.startswith("line ") and "j1" not in ran.out
    assert end.reason in ran.err


def press_ctrl_c() -> None:
    """Send one SIGINT, never after the command has ended: pytest would receive it."""
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_cancels_the_job_and_waits_for_its_end(genie, controller) -> None:
    pressed = ended = False

    def reply_to_read_log(request):
        nonlocal pressed
        if not pressed:
            pressed = True
            press_ctrl_c()
        return LogChunk(data=b"", start_offset=0, next_offset=0, eof=ended)

    def reply_to_cancel(request):
        nonlocal ended
        ended = True
        return make_job_reply(make_job(JobState.CANCELLED, reason="asked by owner1"))

    controller.replies[SubmitJob] = make_job_reply(make_job())
    controller.replies[ReadLog] = reply_to_read_log
    controller.replies[CancelJob] = reply_to_cancel
    controller.replies[GetJob] = make_job_reply(make_job(JobState.CANCELLED, reason="asked by owner1"))
    ran = genie("submit", "--wait", "--", "x")
    assert ran.code == 1
    assert "cancelling job j1" in ran.err and "asked by owner1" in ran.err
    assert sum(isinstance(request, CancelJob) for request in controller.requests) == 1


def test_second_ctrl_c_exits_without_waiting_for_the_job(genie, controller) -> None:
    pressed = False

    def reply_to_read_log(request):
        nonlocal pressed
        if not pressed:
            pressed = True
            press_ctrl_c()
        return LogChunk(data=b"", start_offset=0, next_offset=0, eof=False)

    def reply_to_cancel(request):
        press_ctrl_c()
        return make_job_reply(make_placed_job(JobState.RUNNING))

    controller.replies[SubmitJob] = make_job_reply(make_job())
    controller.replies[ReadLog] = reply_to_read_log
    controller.replies[CancelJob] = reply_to_cancel
    ran = genie("submit", "--wait", "--", "x")
    assert ran.code == 130
    assert "Traceback" not in ran.err


# --- jobs, logs, cancel -----------------------------------------------------------------------


def test_jobs_lists_queued_and_running_jobs(genie, controller) -> None:
    controller.replies[ListJobs] = JobsReply(
        jobs=(make_placed_job(JobState.RUNNING, reason="placed"),), more=False
    )
    ran = genie("jobs")
    assert ran.code == 0
    head, row = ran.out.splitlines()
    assert head.split()[:3] == ["JOB", "NAME", "STATE"]
    assert row.split()[:6] == ["j1", "train", "running", "1", "box:", "0"]
    assert set(controller.requests[0].states) == {"queued", "placing", "running"}


@pytest.mark.parametrize(
    ("argv", "states"), [(["--all"], set()), (["--state", "failed", "--state", "lost"], {"failed", "lost"})]
)
def test_jobs_sends_the_requested_filters(genie, controller, argv, states) -> None:
    controller.replies[ListJobs] = JobsReply(jobs=(), more=False)
    assert genie("jobs", *argv)[:2] == (0, "")
    assert set(controller.requests[0].states) == states


def test_empty_job_list_is_reported_on_standard_error(genie, controller) -> None:
    controller.replies[ListJobs] = JobsReply(jobs=(), more=False)
    ran = genie("jobs")
    assert (ran.code, ran.out) == (0, "")
    assert "no jobs" in ran.err and "--all" in ran.err


def test_jobs_prints_json(genie, controller) -> None:
    controller.replies[ListJobs] = JobsReply(
        jobs=(make_placed_job(JobState.LOST, reason="node restarted"),), more=True
    )
    document = json.loads(genie("jobs", "--all", "--json").out)
    assert document["more"] is True
    assert document["jobs"][0]["placements"][0]["node_id"] == "box"
    assert document["jobs"][0]["reason"] == "node restarted"


def test_invalid_state_names_the_allowed_ones(genie) -> None:
    ran = genie("jobs", "--state", "done")
    assert ran.code == 2
    assert "--state" in ran.err and "succeeded" in ran.err


def test_control_characters_in_a_reason_are_removed(genie, controller) -> None:
    controller.replies[ListJobs] = JobsReply(jobs=(make_job(reason="bad\x1b[2J\nforged row"),), more=False)
    ran = genie("jobs")
    assert "\x1b" not in ran.out
    assert len(ran.out.splitlines()) == 2


def test_logs_are_printed_unchanged(genie, controller) -> None:
    controller.replies[ReadLog] = make_log_chunk(b"one\ntwo")
    ran = genie("logs", "j1")
    assert ran == (0, "one\ntwo", "")
    assert controller.requests[0].wait_s == 0


@pytest.mark.parametrize("name", ["j1", "j1.0"])
def test_logs_of_a_pending_job_report_its_state(genie, controller, name) -> None:
    controller.replies[ReadLog] = make_log_chunk(b"")
    controller.replies[GetJob] = make_job_reply(make_job(job_id="j1", state=JobState.QUEUED))
    ran = genie("logs", name)
    assert ran == (0, "", "no output yet: job j1 is queued; 'genie logs -f' waits for it\n")
    assert controller.requests[-1].job_id == "j1"
    controller.replies[GetJob] = make_job_reply(make_placed_job(JobState.SUCCEEDED, exit_code=0))
    assert genie("logs", name) == (0, "", "")


@pytest.mark.parametrize("options", [(), ("-f",)])
def test_empty_log_of_a_failed_job_reports_why_it_failed(genie, controller, options) -> None:
    controller.replies[ReadLog] = make_log_chunk(b"")
    failed = make_job(job_id="j1", state=JobState.FAILED, reason="cannot start 'x': no such program")
    controller.replies[GetJob] = make_job_reply(failed)
    ran = genie("logs", "j1", *options)
    assert ran == (0, "", "no output: job j1 failed: cannot start 'x': no such program\n")


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_following_a_pending_job_reports_that_it_waits_and_why(genie, controller, options) -> None:
    controller.replies[ReadLog] = make_log_chunk(b"")
    controller.replies[GetJob] = make_job_reply(
        make_job(job_id="j1", state=JobState.QUEUED, reason="no suitable node: n: has 2 GPUs")
    )
    ran = genie("logs", "-f", "j1.0", *options)
    assert ran.code == 0
    assert ran.err == "waiting for job j1 to start; it is queued: no suitable node: n: has 2 GPUs\n"
    controller.replies[GetJob] = make_job_reply(make_job(job_id="j1", state=JobState.PLACING, reason=""))
    assert genie("logs", "-f", "j1", *options).err == "waiting for job j1 to start; it is placing\n"
    controller.replies[GetJob] = make_job_reply(make_placed_job(JobState.RUNNING))
    assert genie("logs", "-f", "j1", *options).err == ""


def test_jobs_shows_128_plus_signal_as_exit_code_of_a_killed_job(genie, controller) -> None:
    killed = make_placed_job(JobState.FAILED, exit_code=-9, reason="killed by signal 9")
    controller.replies[ListJobs] = JobsReply(jobs=(killed,), more=False)
    assert " 137 " in genie("jobs", "--all").out


def test_logs_prints_json(genie, controller) -> None:
    controller.replies[ReadLog] = make_log_chunk(b"one\n\xff")
    assert json.loads(genie("logs", "j1", "--json").out) == {"job": "j1", "log": "one\n\ufffd"}


def make_read_log_handler(log_by_run: dict[int, bytes]):
    """Let the controller have these runs; the last one is running."""

    def reply_to_read_log(request: ReadLog) -> LogChunk:
        run = request.run_number or max(log_by_run)
        if run > max(log_by_run):
            return LogChunk(data=b"", start_offset=0, next_offset=0, eof=True)
        if not log_by_run[run]:
            raise JobNotFoundError(f"node box has no log of run {run}")
        data = log_by_run[run][request.offset :][: request.bytes_max]
        end = request.offset + len(data)
        return LogChunk(
            data=data,
            start_offset=request.offset,
            next_offset=end,
            eof=not data,
            run_number=run,
            run_numbers=tuple(log_by_run),
        )

    return reply_to_read_log


def test_logs_prints_the_last_one_or_all_runs(genie, controller) -> None:
    controller.replies[ReadLog] = make_read_log_handler({3: b"three\n", 4: b"four\n"})
    assert genie("logs", "j1") == (0, "four\n", "")
    assert genie("logs", "j1", "--run", "3") == (0, "three\n", "")
    assert genie("logs", "j1", "--all-runs") == (0, "three\nfour\n", "run 3:\nrun 4:\n")
    document = json.loads(genie("logs", "j1", "--all-runs", "--json").out)
    assert document == {
        "job": "j1",
        "runs": [{"run": 3, "log": "three\n"}, {"run": 4, "log": "four\n"}],
    }
    assert json.loads(genie("logs", "j1", "--run", "3", "--json").out) == {"job": "j1", "log": "three\n"}


def test_missing_log_of_a_run_does_not_hide_the_others(genie, controller) -> None:
    controller.replies[ReadLog] = make_read_log_handler({3: b"", 4: b"four\n"})
    ran = genie("logs", "j1", "--all-runs")
    assert (ran.code, ran.out) == (0, "four\n")
    assert "no log of run 3" in ran.err


@pytest.mark.parametrize(
    "argv", [["--run", "0"], ["--run", "x"], ["--all-runs", "-f"], ["--all-runs", "--run", "1"]]
)
def test_invalid_run_options_are_rejected(genie, argv) -> None:
    assert genie("logs", "j1", *argv).code == 2


def test_follow_continues_with_the_next_run(genie, controller) -> None:
    controller.replies[ReadLog] = make_read_log_handler({1: b"one\n", 2: b"two\n"})
    controller.replies[GetJob] = make_job_reply(make_placed_job(JobState.RUNNING))
    first = make_read_log_handler({1: b"one\n"})
    read = controller.replies[ReadLog]
    controller.replies[ReadLog] = lambda request: (read if request.run_number else first)(request)
    assert genie("logs", "-f", "j1").out == "one\ntwo\n"
    assert genie("logs", "-f", "j1", "--run", "1").out == "one\n"


def test_logs_of_an_unknown_job_is_an_error(genie, controller) -> None:
    controller.replies[ReadLog] = JobNotFoundError("no job 'j9'", hint="see 'genie jobs --all'")
    ran = genie("logs", "j9")
    assert (ran.code, ran.out) == (1, "")
    assert "genie: no job 'j9'" in ran.err


def test_cancel_continues_after_a_failure(genie, controller) -> None:
    def reply_to_cancel(request) -> JobReply:
        if request.job_id == "j9":
            raise JobNotFoundError("no job 'j9'")
        return make_job_reply(
            make_job(JobState.CANCELLED, job_id=request.job_id, reason="cancelled by owner1")
        )

    controller.replies[CancelJob] = reply_to_cancel
    ran = genie("cancel", "j9", "j2")
    assert ran.code == 1
    assert "j2  cancelled" in ran.out
    assert "no job 'j9'" in ran.err


def test_controller_error_exits_with_1(genie, controller) -> None:
    controller.replies[CancelJob] = GenieError("internal error", hint="see the log")
    assert genie("cancel", "j1").code == 1
