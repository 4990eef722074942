"""What the agent still knows after a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from genie.agent.journal import JobRecord, Journal, parse_exit
from genie.errors import AgentRunningError, FencedError, NameInvalidError, StoreCorruptError
from genie.model.messages import ExitReport


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "n1")
    opened.open()
    yield opened
    opened.close()


def reopened(journal: Journal) -> Journal:
    journal.close()
    journal.open()
    return journal


def record(job_id: str, epoch: int = 1) -> JobRecord:
    return JobRecord(job_id=job_id, epoch=epoch, incarnation=1, accepted_at=1.0)


def end(job_id: str) -> ExitReport:
    return ExitReport(job_id=job_id, epoch=1, exit_code=None, reason="because", ended_at=2.0)


def test_incarnations_only_grow(journal: Journal) -> None:
    assert [reopened(journal).begin_incarnation() for _ in range(3)] == [1, 2, 3]


def test_only_one_agent_has_it(journal: Journal) -> None:
    with pytest.raises(AgentRunningError):
        Journal(journal.node_dir).open()
    journal.close()
    other = Journal(journal.node_dir)
    other.open()
    other.close()


def test_the_highest_leader_token_is_kept(journal: Journal) -> None:
    journal.obey(3, what="an order")
    journal.obey(3, what="an order")
    with pytest.raises(FencedError, match="an order refused: it carries leader token 2"):
        reopened(journal).obey(2, what="an order")


@pytest.mark.parametrize("name", ["fence.json", "incarnation"])
def test_a_damaged_file_is_an_error_and_is_not_replaced(journal: Journal, name: str) -> None:
    journal.begin_incarnation()
    journal.obey(3, what="an order")
    (journal.node_dir / name).write_bytes(b"{")
    with pytest.raises(StoreCorruptError, match=name):
        reopened(journal)
    assert (journal.node_dir / name).read_bytes() == b"{"


def test_an_accepted_job_is_known_after_a_crash(journal: Journal) -> None:
    journal.accept(record("j1", epoch=7))
    assert reopened(journal).record("j1") == record("j1", epoch=7)
    assert journal.record("j2") is None


def test_a_later_attempt_starts_with_an_empty_directory(journal: Journal) -> None:
    directory = journal.accept(record("j1"))
    (directory / "work" / "left").touch()
    journal.write_exit(end("j1"))
    journal.accept(record("j1", epoch=2))
    assert journal.pending_exits() == {}
    assert not list((directory / "work").iterdir())


def test_an_end_is_pending_until_it_is_settled(journal: Journal) -> None:
    journal.accept(record("j1"))
    journal.write_exit(end("j1"))
    assert reopened(journal).pending_exits() == {"j1": end("j1")}
    journal.settle("j1")
    assert reopened(journal).pending_exits() == {}
    journal.settle("j1")  # said twice


def test_a_damaged_exit_record_does_not_hide_the_others(journal: Journal) -> None:
    for job_id in ("j1", "j2"):
        journal.accept(record(job_id))
        journal.write_exit(end(job_id))
    (journal.job_dir("j1") / "exit.json").write_bytes(b"half")
    assert journal.pending_exits() == {"j2": end("j2")}


def test_only_what_is_finished_settled_and_old_is_pruned(journal: Journal) -> None:
    for number in range(6):
        directory = journal.accept(record(f"j{number}"))
        os.utime(directory, (number, number))
    journal.write_exit(end("j0"))
    assert [path.name for path in journal.prunable(kept=2, live={"j1"})] == ["j3", "j2"]


@pytest.mark.parametrize("job_id", ["..", "../x", "/etc", "", "a/b", "a\x00"])
def test_a_job_id_cannot_lead_elsewhere(journal: Journal, job_id: str) -> None:
    with pytest.raises(NameInvalidError):
        journal.job_dir(job_id)


def test_lost_output_is_part_of_the_end() -> None:
    line = b'{"job_id":"j","epoch":1,"exit_code":0,"reason":"exit code 0","ended_at":1.0,"log_bytes_lost":9}'
    assert parse_exit(line).reason == "exit code 0; 9 bytes of its output could not be written"
