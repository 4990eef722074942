"""The shim around real processes: ends, logs, trees of processes, and the dead-man timer."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from genie.agent import launcher as launching
from genie.agent import shim
from genie.agent.launcher import LaunchPlan, ShimLauncher
from genie.agent.logs import read_chunk
from genie.agent.processes import ProcessMark, read_started
from genie.model.messages import ExitReport
from tests.waiting import until

MakePlan = Callable[..., LaunchPlan]
LONG_S = 60.0


async def end_of(launcher: ShimLauncher, plan: LaunchPlan, *, for_s: float = LONG_S) -> ExitReport:
    launcher.start(plan, until_s=time.monotonic() + for_s)
    return await next_end(launcher)


async def next_end(launcher: ShimLauncher) -> ExitReport:
    ends: list[ExitReport] = []
    await until(lambda: ends.extend(launcher.exits()) or ends, what="an end")
    return ends[0]


def log_of(plan: LaunchPlan) -> str:
    return read_chunk(plan.directory, offset=0, bytes_max=1 << 20, live=False).data.decode()


async def marked(path: Path) -> ProcessMark:
    """The process whose number is in that file, once it is."""
    return await until(lambda: path.exists() and _mark_in(path), what=f"{path.name} is written")


def _mark_in(path: Path) -> ProcessMark | None:
    text = path.read_text().strip()
    return ProcessMark.of(int(text)) if text else None


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("exit 0", 0, "exit code 0"),
        ("exit 3", 3, "exit code 3"),
        ("kill -KILL $$", -9, "killed by signal 9"),
        ("kill -SEGV $$", -11, "killed by signal 11"),
    ],
)
async def test_an_end_is_told_as_it_was(
    launcher: ShimLauncher, make_plan: MakePlan, script: str, code: int, reason: str
) -> None:
    report = await end_of(launcher, make_plan("/bin/sh", "-c", script))
    assert (report.job_id, report.epoch, report.exit_code, report.reason) == ("job-1", 7, code, reason)
    assert launcher.running() == frozenset()


async def test_the_exit_record_is_on_disk_when_the_end_is_told(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "exit 4")
    await end_of(launcher, plan)
    record = json.loads((plan.directory / "exit.json").read_text())
    assert (record["job_id"], record["epoch"], record["exit_code"]) == ("job-1", 7, 4)


async def test_a_command_that_cannot_be_started_says_why(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    report = await end_of(launcher, make_plan("no-such-program"))
    assert report.exit_code is None
    assert report.reason == "cannot start 'no-such-program': no such program on this node"


async def test_a_command_in_one_text_is_told_what_it_needs(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    report = await end_of(launcher, make_plan("echo hi | cat"))
    assert report.reason == (
        "cannot start 'echo hi | cat': no such program on this node; "
        "a command with shell syntax needs sh -c '...'"
    )


async def test_a_script_without_its_interpreter_is_not_called_missing(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("./script")
    (plan.work_dir / "script").write_text("#!/no/such/shell\n")
    (plan.work_dir / "script").chmod(0o755)
    assert (await end_of(launcher, plan)).reason == "cannot start './script': No such file or directory"


async def test_the_shims_files_are_private_and_the_jobs_are_as_usual(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "umask; touch made; ls -l $GENIE_JOB_DIR/exit.json.new")
    before = os.umask(0o022)
    try:
        await end_of(launcher, plan)
    finally:
        os.umask(before)
    assert log_of(plan).startswith("0022\n-rw-------")
    assert (plan.work_dir / "made").stat().st_mode & 0o777 == 0o644
    modes = {path.name: path.stat().st_mode & 0o077 for path in plan.directory.rglob("*") if path.is_file()}
    assert {name for name, others in modes.items() if others} == {"made"}
    assert {"started.json", "exit.json", "shim.log"} <= set(modes)


@pytest.mark.parametrize(
    "script",
    [
        "rm exit.json.new; mkfifo exit.json.new",
        "mkdir exit.json",
        "mkfifo started.json; mkfifo started.json.new",
        "for i in 0 1 2 3 4 5; do mkfifo log/0000000000000000000$i.log; done; echo hello",
        "rm -r log; mkfifo log; echo hello",
    ],
)
async def test_what_a_job_puts_in_place_of_its_files_holds_nobody_up(
    launcher: ShimLauncher, make_plan: MakePlan, script: str
) -> None:
    plan = make_plan("/bin/sh", "-c", f"cd $GENIE_JOB_DIR; {script}; exit 5")
    assert (await end_of(launcher, plan)).exit_code == 5
    read_started(plan.directory / "started.json")
    log_of(plan)


async def test_no_shell_looks_at_the_arguments(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan("echo", "$HOME", ";", "*")
    await end_of(launcher, plan)
    assert log_of(plan) == "$HOME ; *\n"


async def test_output_and_errors_are_one_stream_in_order(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan("/bin/sh", "-c", "echo one; echo two >&2; echo three")
    await end_of(launcher, plan)
    assert log_of(plan) == "one\ntwo\nthree\n"


async def test_a_job_gets_its_own_session_an_empty_input_and_no_descriptors(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    code = (
        "import os, sys; fds = sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1];"
        "print(os.getsid(0) == os.getpid() == os.getpgid(0), repr(sys.stdin.read()), fds)"
    )
    plan = make_plan(sys.executable, "-c", code)
    await end_of(launcher, plan)
    assert log_of(plan) == "True '' [0, 1, 2]\n"


async def test_a_job_sees_exactly_the_environment_it_was_given(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/usr/bin/env", env={"PATH": "/usr/bin:/bin", "COLOUR": "blue"})
    await end_of(launcher, plan)
    assert sorted(log_of(plan).splitlines()) == ["COLOUR=blue", "PATH=/usr/bin:/bin"]


async def test_the_instructions_do_not_stay_on_disk(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan("true", env={"PATH": "/usr/bin:/bin", "SECRET": "s3cr3t-value"})
    await end_of(launcher, plan)
    kept = b"".join(path.read_bytes() for path in plan.directory.rglob("*") if path.is_file())
    assert b"s3cr3t-value" not in kept


# --- logs -------------------------------------------------------------------------------------


async def test_a_log_is_rotated_and_read_across_files_by_offset(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    code = "import sys\nfor i in range(3000): print(f'line {i:06d}')"
    plan = make_plan(sys.executable, "-c", code, log_bytes_max=4096, log_files_max=2)
    await end_of(launcher, plan)
    whole = "".join(f"line {i:06d}\n" for i in range(3000)).encode()
    assert len(list((plan.directory / "log").iterdir())) == 3
    chunk = read_chunk(plan.directory, offset=0, bytes_max=1 << 20, live=False)
    assert chunk.start == len(whole) // 4096 * 4096 - 2 * 4096
    assert chunk.data == whole[chunk.start :]
    assert chunk.next_offset == len(whole)
    some = read_chunk(plan.directory, offset=chunk.start + 4000, bytes_max=200, live=False)
    assert some.data == whole[chunk.start + 4000 : chunk.start + 4200]
    assert read_chunk(plan.directory, offset=len(whole), bytes_max=100, live=False).eof


async def test_a_full_disk_neither_ends_nor_blocks_the_job(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "head -c 300000 /dev/zero; echo done > finished; exit 5")
    (plan.directory / "log" / f"{0:020d}.log").symlink_to("/dev/full")
    report = await end_of(launcher, plan)
    assert report.exit_code == 5
    assert "300000 bytes of its output could not be written" in report.reason
    assert (plan.work_dir / "finished").exists()


def test_lost_output_is_noted_in_the_log_when_there_is_space_again(tmp_path: Path) -> None:
    log = shim.Log(str(tmp_path), file_bytes_max=4096, files_max=1)
    full = tmp_path / f"{0:020d}.log"
    full.symlink_to("/dev/full")
    log.write(b"x" * 10)
    log.close()
    full.unlink()
    log.write(b"back")
    log.close()
    assert full.read_text() == "\n[genie: 10 bytes of output were lost: No space left on device]\nback"


async def test_a_background_child_that_holds_the_log_does_not_hold_the_end(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "sleep 300 & echo $! > child; echo said")
    report = await end_of(launcher, plan)
    assert report.exit_code == 0
    assert log_of(plan) == "said\n"
    assert ProcessMark.of(int((plan.work_dir / "child").read_text())) is None


# --- ending -----------------------------------------------------------------------------------

STRAY = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in (0, 1, 2): os.close(fd)
        os.environ.clear()
        with open("stray.new", "w") as file: file.write(str(os.getpid()))
        os.rename("stray.new", "stray")
        time.sleep(300)
    os._exit(0)
os.wait()
time.sleep(300)
"""


async def test_a_kill_reaches_a_grandchild_that_made_itself_a_daemon(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan(sys.executable, "-c", STRAY)
    launcher.start(plan, until_s=time.monotonic() + LONG_S)
    stray = await marked(plan.work_dir / "stray")
    launcher.kill("job-1", reason="enough")
    report = await next_end(launcher)
    assert (report.exit_code, report.reason) == (None, "enough")
    assert not stray.is_alive


async def test_a_job_may_use_the_grace_to_end_well(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    script = "trap 'echo tidy; exit 0' TERM; echo $$ > pid; while :; do sleep 0.01; done"
    plan = make_plan("/bin/sh", "-c", script, grace_s=LONG_S)
    launcher.start(plan, until_s=time.monotonic() + LONG_S)
    await marked(plan.work_dir / "pid")
    launcher.kill("job-1", reason="enough")
    assert (await next_end(launcher)).reason == "enough"
    assert "tidy" in log_of(plan).splitlines()


async def test_a_job_that_ignores_the_signal_is_killed_after_the_grace(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "trap '' TERM; echo $$ > pid; while :; do sleep 0.01; done")
    launcher.start(plan, until_s=time.monotonic() + LONG_S)
    job = await marked(plan.work_dir / "pid")
    launcher.kill("job-1", reason="enough")
    assert (await next_end(launcher)).exit_code is None
    assert not job.is_alive


async def test_a_job_that_is_not_vouched_for_ends(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    report = await end_of(launcher, make_plan("sleep", "300"), for_s=0.5)
    assert report.exit_code is None
    assert report.reason == "ended by Genie: the node lost contact with the controller"


async def test_a_job_that_is_vouched_for_again_and_again_goes_on(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "echo $$ > pid; sleep 1.2; exit 9")
    launcher.start(plan, until_s=time.monotonic() + 0.5)

    def vouched() -> list[ExitReport]:
        launcher.refresh(time.monotonic() + 0.5)
        return launcher.exits()

    (report,) = await until(vouched, what="the end of the job itself")
    assert report.exit_code == 9


async def test_an_old_word_does_not_shorten_a_newer_one(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan("/bin/sh", "-c", "echo $$ > pid; sleep 0.5; exit 9")
    launcher.start(plan, until_s=time.monotonic() + LONG_S)
    await marked(plan.work_dir / "pid")
    launcher.refresh(time.monotonic() - 1)
    assert (await next_end(launcher)).exit_code == 9


async def test_a_start_that_comes_too_late_starts_nothing(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("touch", "ran")
    report = await end_of(launcher, plan, for_s=-1.0)
    assert report.exit_code is None
    assert "too late" in report.reason
    assert not (plan.work_dir / "ran").exists()


async def test_a_shim_that_is_killed_takes_its_job_along(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan(sys.executable, "-c", STRAY.replace("os.environ.clear()", ""))
    launcher.start(plan, until_s=time.monotonic() + LONG_S)
    stray = await marked(plan.work_dir / "stray")
    await until((plan.directory / "started.json").exists)
    record = json.loads((plan.directory / "started.json").read_text())
    job = ProcessMark(*record["command"])
    assert ProcessMark(*record["shim"]).send_signal(signal.SIGKILL)
    report = await next_end(launcher)
    assert report.exit_code is None
    assert "watched over it died" in report.reason
    assert not job.is_alive
    assert not stray.is_alive


async def test_the_end_of_the_lease_cuts_a_long_grace_short(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    script = "trap '' TERM; echo $$ > pid; while :; do sleep 0.01; done"
    plan = make_plan("/bin/sh", "-c", script, grace_s=LONG_S)
    launcher.start(plan, until_s=time.monotonic() + 0.5)
    await marked(plan.work_dir / "pid")
    launcher.kill("job-1", reason="enough")
    assert (await next_end(launcher)).reason == "enough"


async def test_a_shim_that_does_not_obey_is_ended_with_its_job(
    launcher: ShimLauncher, make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "STUBBORN_S", 0.0)
    plan = make_plan("/bin/sh", "-c", "echo $$ > pid; sleep 300", grace_s=0.0)
    launcher.start(plan, until_s=time.monotonic() + LONG_S)
    job = await marked(plan.work_dir / "pid")
    await until((plan.directory / "started.json").exists)
    shim_process, _ = read_started(plan.directory / "started.json")
    assert shim_process.send_signal(signal.SIGSTOP)

    def told_again() -> list[ExitReport]:
        launcher.kill("job-1", reason="enough")
        return launcher.exits()

    (report,) = await until(told_again, what="the end")
    assert report.reason == "enough"
    assert not job.is_alive


async def test_a_job_does_not_outlive_its_shim_even_when_the_agent_is_gone(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "echo $$ > pid; sleep 300")
    launcher.start(plan, until_s=time.monotonic() + LONG_S)
    job = await marked(plan.work_dir / "pid")
    await until((plan.directory / "started.json").exists)
    shim_process, _ = read_started(plan.directory / "started.json")
    launcher.close()
    assert shim_process.send_signal(signal.SIGKILL)
    await until(lambda: os.waitpid(shim_process.pid, os.WNOHANG)[0], what="the shim ends")
    await until(lambda: not job.is_alive, what="the job ends")


async def test_a_shim_that_is_told_to_stop_ends_its_job_first(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("sleep", "300")
    launcher.start(plan, until_s=time.monotonic() + LONG_S)
    await until((plan.directory / "started.json").exists)
    record = json.loads((plan.directory / "started.json").read_text())
    assert ProcessMark(*record["shim"]).send_signal(signal.SIGTERM)
    assert "told to stop" in (await next_end(launcher)).reason
    assert not ProcessMark(*record["command"]).is_alive


def test_a_signal_never_reaches_a_process_that_took_over_the_number() -> None:
    assert not shim.send_signal(1, "another-boot:1", 0)
    assert not shim.send_signal(1, "", 0)
