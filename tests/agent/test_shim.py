"""The shim with real processes: exits, logs, process trees, the dead-man timer."""

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
from genie.agent.leftovers import read_start_record
from genie.agent.logs import read_log_chunk
from genie.model.messages import ExitReport
from genie.processes.process_identity import ProcessIdentity
from tests.waiting import until

MakePlan = Callable[..., LaunchPlan]
LONG_S = 60.0


async def run_until_exit(launcher: ShimLauncher, plan: LaunchPlan, *, for_s: float = LONG_S) -> ExitReport:
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + for_s)
    return await wait_for_exit(launcher)


async def wait_for_exit(launcher: ShimLauncher) -> ExitReport:
    ends: list[ExitReport] = []
    await until(lambda: ends.extend(launcher.take_exit_reports()) or ends, what="an end")
    return ends[0]


def read_log(plan: LaunchPlan) -> str:
    return read_log_chunk(plan.directory, offset=0, bytes_max=1 << 20, is_live=False).data.decode()


async def wait_for_process_in_file(path: Path) -> ProcessIdentity:
    """Waits for the file and returns the process whose ID it contains."""
    return await until(lambda: path.exists() and _try_read_process(path), what=f"{path.name} is written")


def _try_read_process(path: Path) -> ProcessIdentity | None:
    text = path.read_text().strip()
    return ProcessIdentity.of_pid(int(text)) if text else None


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("exit 0", 0, "exit code 0"),
        ("exit 3", 3, "exit code 3"),
        ("kill -KILL $$", -9, "killed by signal 9"),
        ("kill -SEGV $$", -11, "killed by signal 11"),
    ],
)
async def test_exit_report_contains_code_and_reason(
    launcher: ShimLauncher, make_plan: MakePlan, script: str, code: int, reason: str
) -> None:
    report = await run_until_exit(launcher, make_plan("/bin/sh", "-c", script))
    assert (report.job_id, report.epoch, report.exit_code, report.reason) == ("job-1", 7, code, reason)
    assert launcher.running_jobs_and_kill_errors() == {}


async def test_exit_record_is_on_disk_when_the_exit_is_reported(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "exit 4")
    await run_until_exit(launcher, plan)
    record = json.loads((plan.directory / "exit.json").read_text())
    assert (record["job_id"], record["epoch"], record["exit_code"]) == ("job-1", 7, 4)


async def test_failed_start_reports_the_reason(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    report = await run_until_exit(launcher, make_plan("no-such-program"))
    assert report.exit_code is None
    assert report.reason == "cannot start 'no-such-program': no such program on this node"


async def test_shell_syntax_in_the_program_adds_a_hint(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    report = await run_until_exit(launcher, make_plan("echo hi | cat"))
    assert report.reason == (
        "cannot start 'echo hi | cat': no such program on this node; "
        "a command with shell syntax needs sh -c '...'"
    )


async def test_script_with_missing_interpreter_keeps_the_system_error(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("./script")
    (plan.work_dir / "script").write_text("#!/no/such/shell\n")
    (plan.work_dir / "script").chmod(0o755)
    assert (
        await run_until_exit(launcher, plan)
    ).reason == "cannot start './script': No such file or directory"


async def test_shim_files_are_private_and_job_files_use_the_umask(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "umask; touch made; ls -l $GENIE_JOB_DIR/exit.json.new")
    before = os.umask(0o022)
    try:
        await run_until_exit(launcher, plan)
    finally:
        os.umask(before)
    assert read_log(plan).startswith("0022\n-rw-------")
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
async def test_replaced_job_files_do_not_block_the_shim(
    launcher: ShimLauncher, make_plan: MakePlan, script: str
) -> None:
    plan = make_plan("/bin/sh", "-c", f"cd $GENIE_JOB_DIR; {script}; exit 5")
    assert (await run_until_exit(launcher, plan)).exit_code == 5
    read_start_record(plan.directory / "started.json")
    read_log(plan)


async def test_arguments_are_not_interpreted_by_a_shell(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan("echo", "$HOME", ";", "*")
    await run_until_exit(launcher, plan)
    assert read_log(plan) == "$HOME ; *\n"


async def test_stdout_and_stderr_are_one_stream_in_order(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan("/bin/sh", "-c", "echo one; echo two >&2; echo three")
    await run_until_exit(launcher, plan)
    assert read_log(plan) == "one\ntwo\nthree\n"


async def test_job_has_its_own_session_and_inherits_no_descriptors(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    code = (
        "import os, sys; fds = sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1];"
        "print(os.getsid(0) == os.getpid() == os.getpgid(0), repr(sys.stdin.read()), fds)"
    )
    plan = make_plan(sys.executable, "-c", code)
    await run_until_exit(launcher, plan)
    assert read_log(plan) == "True '' [0, 1, 2]\n"


async def test_job_environment_is_exactly_that_of_the_plan(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/usr/bin/env", env={"PATH": "/usr/bin:/bin", "COLOUR": "blue"})
    await run_until_exit(launcher, plan)
    assert sorted(read_log(plan).splitlines()) == ["COLOUR=blue", "PATH=/usr/bin:/bin"]


async def test_job_ignores_no_signal(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    """The shim ignores some signals, and so may an agent under nohup."""
    code = (
        "from signal import *; print(*(number.name for number in (SIGHUP, SIGINT, SIGQUIT, SIGTERM)"
        " if getsignal(number) == SIG_IGN))"
    )
    plan = make_plan(sys.executable, "-c", code)
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        await run_until_exit(launcher, plan)
    finally:
        signal.signal(signal.SIGQUIT, before)
    assert read_log(plan) == "\n"


async def test_shim_config_is_removed_from_disk(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan("true", env={"PATH": "/usr/bin:/bin", "SECRET": "s3cr3t-value"})
    await run_until_exit(launcher, plan)
    kept = b"".join(path.read_bytes() for path in plan.directory.rglob("*") if path.is_file())
    assert b"s3cr3t-value" not in kept


# --- logs -------------------------------------------------------------------------------------


async def test_rotated_log_is_read_by_offset_across_files(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    code = "import sys\nfor i in range(3000): print(f'line {i:06d}')"
    plan = make_plan(sys.executable, "-c", code, log_file_bytes_max=4096, log_files_max=2)
    await run_until_exit(launcher, plan)
    whole = "".join(f"line {i:06d}\n" for i in range(3000)).encode()
    assert len(list((plan.directory / "log").iterdir())) == 3
    chunk = read_log_chunk(plan.directory, offset=0, bytes_max=1 << 20, is_live=False)
    assert chunk.start_offset == len(whole) // 4096 * 4096 - 2 * 4096
    assert chunk.data == whole[chunk.start_offset :]
    assert chunk.next_offset == len(whole)
    some = read_log_chunk(plan.directory, offset=chunk.start_offset + 4000, bytes_max=200, is_live=False)
    assert some.data == whole[chunk.start_offset + 4000 : chunk.start_offset + 4200]
    assert read_log_chunk(plan.directory, offset=len(whole), bytes_max=100, is_live=False).eof


async def test_full_disk_neither_ends_nor_blocks_the_job(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan("/bin/sh", "-c", "head -c 300000 /dev/zero; echo done > finished; exit 5")
    (plan.directory / "log" / f"{0:020d}.log").symlink_to("/dev/full")
    report = await run_until_exit(launcher, plan)
    assert report.exit_code == 5
    assert "300000 bytes of its output were lost" in report.reason
    assert (plan.work_dir / "finished").exists()


def test_log_notes_lost_output_when_there_is_space_again(tmp_path: Path) -> None:
    log = shim.RotatingJobLog(str(tmp_path), file_bytes_max=4096, files_max=1)
    full = tmp_path / f"{0:020d}.log"
    full.symlink_to("/dev/full")
    log.write(b"x" * 10)
    log.close()
    full.unlink()
    log.write(b"back")
    log.close()
    assert full.read_text() == "\n[genie: 10 bytes of output were lost: No space left on device]\nback"


async def test_background_child_does_not_delay_the_exit(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan("/bin/sh", "-c", "sleep 300 & echo $! > child; echo said")
    report = await run_until_exit(launcher, plan)
    assert report.exit_code == 0
    assert read_log(plan) == "said\n"
    assert ProcessIdentity.of_pid(int((plan.work_dir / "child").read_text())) is None


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


async def test_kill_reaches_a_daemonized_grandchild(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan(sys.executable, "-c", STRAY)
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    stray = await wait_for_process_in_file(plan.work_dir / "stray")
    launcher.kill_job("job-1", reason="enough")
    report = await wait_for_exit(launcher)
    assert (report.exit_code, report.reason) == (None, "enough")
    assert not stray.is_alive


async def test_job_can_exit_within_the_grace_period(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    script = "trap 'echo tidy; exit 0' TERM; echo $$ > pid; while :; do sleep 0.01; done"
    plan = make_plan("/bin/sh", "-c", script, grace_s=LONG_S)
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    await wait_for_process_in_file(plan.work_dir / "pid")
    launcher.kill_job("job-1", reason="enough")
    assert (await wait_for_exit(launcher)).reason == "enough"
    assert "tidy" in read_log(plan).splitlines()


async def test_job_that_ignores_sigterm_is_killed_after_the_grace_period(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "trap '' TERM; echo $$ > pid; while :; do sleep 0.01; done")
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    job = await wait_for_process_in_file(plan.work_dir / "pid")
    launcher.kill_job("job-1", reason="enough")
    assert (await wait_for_exit(launcher)).exit_code is None
    assert not job.is_alive


async def test_job_ends_when_dead_man_timer_expires(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    report = await run_until_exit(launcher, make_plan("sleep", "300"), for_s=1.5)
    assert report.exit_code is None
    assert report.reason == "ended by Genie: the node lost contact with the controller"


async def test_job_keeps_running_while_its_dead_man_timer_is_refreshed(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "sleep 2; exit 9")
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + 1.5)

    def vouched() -> list[ExitReport]:
        launcher.extend_deadman_timers(time.monotonic() + 1.5)
        return launcher.take_exit_reports()

    (report,) = await until(vouched, what="the end of the job itself")
    assert report.exit_code == 9


async def test_older_refresh_does_not_shorten_the_dead_man_timer(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan(
        "/bin/sh", "-c", "echo $$ > pid; while [ ! -e go ]; do sleep 0.02; done; sleep 0.3; exit 9"
    )
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    await wait_for_process_in_file(plan.work_dir / "pid")
    launcher.extend_deadman_timers(time.monotonic() - 1)
    (plan.work_dir / "go").touch()
    assert (await wait_for_exit(launcher)).exit_code == 9


async def test_job_without_dead_man_timer_runs_until_it_ends(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan(
        "/bin/sh",
        "-c",
        "echo $$ > pid; while [ ! -e go ]; do sleep 0.02; done; sleep 0.3; exit 9",
        has_deadman_timer=False,
    )
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() - LONG_S)
    await wait_for_process_in_file(plan.work_dir / "pid")
    launcher.extend_deadman_timers(time.monotonic() - 1)
    (plan.work_dir / "go").touch()
    assert (await wait_for_exit(launcher)).exit_code == 9


async def test_job_without_dead_man_timer_can_be_killed(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan("sleep", "300", has_deadman_timer=False)
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    launcher.kill_job("job-1", reason="cancelled")
    assert (await wait_for_exit(launcher)).reason == "cancelled"


async def test_job_does_not_start_after_the_dead_man_timer_expired(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("touch", "ran")
    report = await run_until_exit(launcher, plan, for_s=-1.0)
    assert report.exit_code is None
    assert "dead-man timer expired" in report.reason
    assert not (plan.work_dir / "ran").exists()


async def test_job_ends_with_a_killed_shim(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan(sys.executable, "-c", STRAY.replace("os.environ.clear()", ""))
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    stray = await wait_for_process_in_file(plan.work_dir / "stray")
    await until((plan.directory / "started.json").exists)
    record = json.loads((plan.directory / "started.json").read_text())
    job = ProcessIdentity(*record["command"])
    assert ProcessIdentity(*record["shim"]).send_signal(signal.SIGKILL)
    report = await wait_for_exit(launcher)
    assert report.exit_code is None
    assert "the shim exited unexpectedly" in report.reason
    assert not job.is_alive
    assert not stray.is_alive


@pytest.mark.parametrize("forged", [{"job_id": "job-2"}, {"epoch": 2**40}])
async def test_exit_record_of_another_job_is_ignored(
    launcher: ShimLauncher, make_plan: MakePlan, forged: dict[str, object]
) -> None:
    """The job has written it, and has killed its shim."""
    plan = make_plan("sleep", "300")
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    await until((plan.directory / "started.json").exists)
    record = json.loads((plan.directory / "started.json").read_text())
    own = {"job_id": plan.job_id, "epoch": plan.epoch, "exit_code": 0, "reason": "forged", "ended_at": 1.0}
    (plan.directory / "exit.json").write_text(json.dumps(own | forged))
    assert ProcessIdentity(*record["shim"]).send_signal(signal.SIGKILL)
    report = await wait_for_exit(launcher)
    assert (report.job_id, report.epoch, report.exit_code) == (plan.job_id, plan.epoch, None)
    assert "the shim exited unexpectedly" in report.reason


async def test_expired_lease_shortens_the_grace_period(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    script = "trap '' TERM; echo $$ > pid; while :; do sleep 0.01; done"
    plan = make_plan("/bin/sh", "-c", script, grace_s=LONG_S)
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + 1.5)
    await wait_for_process_in_file(plan.work_dir / "pid")
    launcher.kill_job("job-1", reason="enough")
    assert (await wait_for_exit(launcher)).reason == "enough"


async def test_unresponsive_shim_is_killed_with_its_job(
    launcher: ShimLauncher, make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "SHIM_KILL_DELAY_AFTER_GRACE_S", 0.0)
    plan = make_plan("/bin/sh", "-c", "echo $$ > pid; sleep 300", grace_s=0.0)
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    job = await wait_for_process_in_file(plan.work_dir / "pid")
    await until((plan.directory / "started.json").exists)
    shim_process, _ = read_start_record(plan.directory / "started.json")
    assert shim_process.send_signal(signal.SIGSTOP)

    def told_again() -> list[ExitReport]:
        launcher.kill_job("job-1", reason="enough")
        return launcher.take_exit_reports()

    (report,) = await until(told_again, what="the end")
    assert report.reason == "enough"
    assert not job.is_alive


async def test_job_ends_with_its_shim_when_the_agent_has_ended(
    launcher: ShimLauncher, make_plan: MakePlan
) -> None:
    plan = make_plan("/bin/sh", "-c", "echo $$ > pid; sleep 300")
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    job = await wait_for_process_in_file(plan.work_dir / "pid")
    await until((plan.directory / "started.json").exists)
    shim_process, _ = read_start_record(plan.directory / "started.json")
    launcher.close()
    assert shim_process.send_signal(signal.SIGKILL)
    await until(lambda: os.waitpid(shim_process.pid, os.WNOHANG)[0], what="the shim ends")
    await until(lambda: not job.is_alive, what="the job ends")


async def test_shim_ends_its_job_on_sigterm(launcher: ShimLauncher, make_plan: MakePlan) -> None:
    plan = make_plan("sleep", "300")
    await launcher.start_job(plan, deadman_expiry_s=time.monotonic() + LONG_S)
    await until((plan.directory / "started.json").exists)
    record = json.loads((plan.directory / "started.json").read_text())
    assert ProcessIdentity(*record["shim"]).send_signal(signal.SIGTERM)
    assert "received SIGTERM" in (await wait_for_exit(launcher)).reason
    assert not ProcessIdentity(*record["command"]).is_alive
