"""The durable state of an agent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.agent import job_files
from genie.agent.journal import JobRecord, Journal, parse_exit_record
from genie.errors import AgentRunningError, FencedError, NameInvalidError, StoreCorruptError, StoreFullError
from genie.model.messages import ExitReport
from genie.processes import files


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "n1")
    opened.open()
    yield opened
    opened.close()


def reopen(journal: Journal) -> Journal:
    journal.close()
    journal.open()
    return journal


def make_job_record(job_id: str, epoch: int = 1) -> JobRecord:
    return JobRecord(job_id=job_id, epoch=epoch, incarnation=1, accepted_at=1.0)


def make_exit_report(job_id: str) -> ExitReport:
    return ExitReport(job_id=job_id, epoch=1, exit_code=None, reason="because", ended_at=2.0)


def test_incarnations_increase(journal: Journal) -> None:
    assert [reopen(journal).begin_incarnation() for _ in range(3)] == [1, 2, 3]


def test_journal_is_locked_by_one_agent(journal: Journal) -> None:
    with pytest.raises(AgentRunningError):
        Journal(journal.node_dir).open()
    journal.close()
    other = Journal(journal.node_dir)
    other.open()
    other.close()


def test_highest_leader_token_is_stored(journal: Journal) -> None:
    assert journal.accept_leader_token_and_check_new(3, message_name="an order")
    assert not journal.accept_leader_token_and_check_new(3, message_name="an order")
    journal.store_leader_token()
    with pytest.raises(FencedError, match="an order rejected: its leader token, revision 2 of generation 0"):
        reopen(journal).accept_leader_token_and_check_new(2, message_name="an order")


@pytest.mark.parametrize("name", ["fence.json", "incarnation"])
def test_damaged_journal_file_raises_and_is_not_replaced(journal: Journal, name: str) -> None:
    journal.begin_incarnation()
    journal.accept_leader_token_and_check_new(3, message_name="an order")
    journal.store_leader_token()
    (journal.node_dir / name).write_bytes(b"{")
    with pytest.raises(StoreCorruptError, match=name):
        reopen(journal)
    assert (journal.node_dir / name).read_bytes() == b"{"


def test_accepted_job_is_known_after_a_crash(journal: Journal) -> None:
    journal.record_launch(make_job_record("j1", epoch=7))
    assert reopen(journal).read_job_record("j1") == make_job_record("j1", epoch=7)
    assert journal.read_job_record("j2") is None


def test_next_run_of_a_job_starts_with_an_empty_directory(journal: Journal) -> None:
    directory = journal.record_launch(make_job_record("j1"))
    (directory / "work" / "left").touch()
    journal.write_exit_record(make_exit_report("j1"))
    journal.record_launch(make_job_record("j1", epoch=2))
    assert journal.unsettled_exits() == {}
    assert not list((directory / "work").iterdir())


def test_exit_is_pending_until_it_is_settled(journal: Journal) -> None:
    journal.record_launch(make_job_record("j1"))
    journal.write_exit_record(make_exit_report("j1"))
    assert reopen(journal).unsettled_exits() == {"j1": make_exit_report("j1")}
    journal.mark_exits_settled(["j1"])
    assert reopen(journal).unsettled_exits() == {}
    journal.mark_exits_settled(["j1"])  # a repetition is harmless


def test_damaged_exit_record_does_not_hide_the_others(journal: Journal) -> None:
    for job_id in ("j1", "j2"):
        journal.record_launch(make_job_record(job_id))
        journal.write_exit_record(make_exit_report(job_id))
    (journal.job_dir("j1") / "exit.json").write_bytes(b"half")
    assert journal.unsettled_exits() == {"j2": make_exit_report("j2")}


def test_only_old_settled_jobs_are_pruned(journal: Journal) -> None:
    for number in range(6):
        directory = journal.record_launch(make_job_record(f"j{number}"))
        os.utime(directory, (number, number))
    journal.write_exit_record(make_exit_report("j0"))
    discarded = journal.discard_old_runs_and_list_discarded(kept_count=2, live_job_ids={"j1"})
    assert sorted(path.name[:4] for path in discarded) == [".j2.", ".j3."]
    assert journal.list_job_ids() == ["j0", "j1", "j4", "j5"]


@pytest.mark.parametrize("job_id", ["..", "../x", "/etc", "", "a/b", "a\x00"])
def test_job_id_that_leads_to_another_path_is_rejected(journal: Journal, job_id: str) -> None:
    with pytest.raises(NameInvalidError):
        journal.job_dir(job_id)


def test_exit_reason_mentions_lost_log_output() -> None:
    line = b'{"job_id":"j","epoch":1,"exit_code":0,"reason":"exit code 0","ended_at":1.0,"log_bytes_lost":9}'
    report = parse_exit_record(line, job_id="j", epoch=1)
    assert report.reason == "exit code 0; 9 bytes of its output were lost"


# --- directories damaged by a job ----------------------------------------------------------------


def record_ended_job(journal: Journal, job_id: str) -> Path:
    directory = journal.record_launch(make_job_record(job_id))
    journal.write_exit_record(make_exit_report(job_id))
    return directory


def test_exit_is_settled_if_its_record_cannot_be_renamed(journal: Journal) -> None:
    (record_ended_job(journal, "j1") / "settled.json").mkdir()
    record_ended_job(journal, "j2")
    journal.mark_exits_settled(["j1", "j2"])
    assert journal.unsettled_exits() == {}
    assert reopen(journal).unsettled_exits() == {}
    assert journal.has_discarded_directories
    assert [
        path.name[:4] for path in journal.discard_old_runs_and_list_discarded(kept_count=9, live_job_ids=())
    ] == [".j1."]
    assert not journal.has_discarded_directories


def test_exit_is_settled_in_memory_if_its_directory_cannot_be_moved(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    (record_ended_job(journal, "j1") / "settled.json").mkdir()

    def refuse(*ignored: object) -> None:
        raise OSError(1, "no")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        journal.mark_exits_settled(["j1"])
    assert journal.unsettled_exits() == {}
    assert [
        path.name[:4] for path in journal.discard_old_runs_and_list_discarded(kept_count=0, live_job_ids=())
    ] == [".j1."]
    journal.record_launch(make_job_record("j1", epoch=2))
    journal.write_exit_record(make_exit_report("j1"))
    assert journal.unsettled_exits() == {"j1": make_exit_report("j1")}


@pytest.mark.parametrize("name", ["exit.json", "job.json"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "huge", "deep"])
def test_unreadable_job_or_exit_record_is_ignored(journal: Journal, name: str, kind: str) -> None:
    path = record_ended_job(journal, "j1") / name
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to("/dev/zero")
        case "huge":
            path.write_bytes(b" " * 70_000)
        case _:
            path.write_bytes(b"[" * 60_000)
    record_ended_job(journal, "j2")
    assert set(journal.unsettled_exits()) == ({"j2"} if name == "exit.json" else {"j1", "j2"})
    assert (journal.read_job_record("j1") is None) == (name == "job.json")
    journal.discard_old_runs_and_list_discarded(kept_count=0, live_job_ids=())


@pytest.mark.parametrize(("field", "number"), [("exit_code", 1 << 70), ("epoch", -1), ("ended_at", -1.0)])
def test_an_exit_record_with_an_impossible_number_is_ignored(
    journal: Journal, field: str, number: float
) -> None:
    path = record_ended_job(journal, "j1") / "exit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: number}))
    record_ended_job(journal, "j2")
    assert journal.unsettled_exits().keys() == {"j2"}


def test_exit_record_of_another_job_is_ignored(journal: Journal) -> None:
    directory = record_ended_job(journal, "j1")
    record_ended_job(journal, "j2")
    (journal.job_dir("j2") / "exit.json").replace(directory / "exit.json")
    assert journal.unsettled_exits() == {}


def test_pipe_at_the_exit_path_does_not_block_the_write(journal: Journal) -> None:
    directory = journal.record_launch(make_job_record("j1"))
    os.mkfifo(directory / "exit.json")
    os.mkfifo(directory / f".exit.json.{os.getpid()}.new")
    journal.write_exit_record(make_exit_report("j1"))
    assert journal.unsettled_exits() == {"j1": make_exit_report("j1")}


def test_write_exit_fails_if_the_directory_became_a_file(journal: Journal) -> None:
    directory = journal.record_launch(make_job_record("j1"))
    shutil.rmtree(directory)
    directory.touch()
    with pytest.raises(StoreFullError):
        journal.write_exit_record(make_exit_report("j1"))
    journal.mark_exits_settled(["j1"])
    assert (journal.read_job_record("j1"), journal.unsettled_exits()) == (None, {})
    assert journal.record_launch(make_job_record("j1", epoch=2)).is_dir()


def test_next_run_does_not_wait_for_the_removal_of_the_previous_directory(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    (journal.record_launch(make_job_record("j1")) / "work" / "left").touch()
    journal.record_launch(make_job_record("j1", epoch=2))
    (aside,) = journal.discard_old_runs_and_list_discarded(kept_count=9, live_job_ids={"j1"})
    assert (aside / "work" / "left").exists()
    job_files.try_remove_tree(aside)
    assert [path.name for path in journal.jobs_dir.iterdir()] == ["j1"]


def test_logs_of_the_newest_earlier_runs_are_kept(journal: Journal) -> None:
    for epoch in range(7, 14):
        directory = journal.record_launch(make_job_record("j1", epoch=epoch))
        if epoch != 12:  # one that never wrote anything is no run
            (directory / "log" / "00.log").write_text(f"{epoch}")
    kept = {
        epoch: (journal.run_dir("j1", epoch) / "log" / "00.log").read_text()
        for epoch in range(7, 14)
        if journal.run_dir("j1", epoch).is_dir()
    }
    assert kept == {epoch: f"{epoch}" for epoch in (8, 9, 10, 11, 13)}
    assert journal.run_dir("j1", 13) == journal.run_dir("j1", 0) == journal.job_dir("j1")
    for path in journal.discard_old_runs_and_list_discarded(kept_count=9, live_job_ids={"j1"}):
        job_files.try_remove_tree(path)
    assert [path.name for path in journal.jobs_dir.iterdir()] == ["j1"]


@pytest.mark.parametrize("name", ["earlier", "log"])
def test_job_that_replaced_its_log_directory_can_run_again(
    journal: Journal, tmp_path: Path, name: str
) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "00.log").touch()
    directory = journal.record_launch(make_job_record("j1"))
    shutil.rmtree(directory / name, ignore_errors=True)
    (directory / name).symlink_to(tmp_path / "others")
    again = journal.record_launch(make_job_record("j1", epoch=2))
    assert not (again / "earlier").is_symlink() and not (again / "earlier" / "1").exists()
    assert (tmp_path / "others" / "00.log").exists()


def test_many_exits_are_settled_with_one_sync(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        record_ended_job(journal, f"j{number}")
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_directory", synced.append)
    journal.mark_exits_settled([f"j{number}" for number in range(5)])
    assert len(synced) == 1
    assert journal.unsettled_exits() == {}
