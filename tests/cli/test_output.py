"""Tables on wide and narrow terminals, and JSON."""

from __future__ import annotations

import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from genie.cli import output
from genie.model.job import JobState
from genie.model.messages import JobsReply, ListJobs, ListNodes, NodesReply
from tests.cli.sample_messages import make_node_view, make_placed_job

LONG_REASON = "no heartbeat for 190 s, so everything that it held was given away to others"
COLUMNS = ("node", "status", "address", "cpus allocated", "memory", "heartbeat", "reason")
ROW = (
    "gpu-box-12",
    "disconnected",
    "192.168.100.17",
    "12.5 of 128",
    "100 GiB of 2.0 TiB",
    "3 min ago",
    LONG_REASON,
)


@pytest.fixture
def write_table_at_width(monkeypatch, capfd):
    """Make standard output a terminal with this width and return the written lines."""

    def write_and_get_lines(width: int, *argv) -> list[str]:
        monkeypatch.setattr(output, "terminal_width", lambda: width)
        capfd.readouterr()
        output.write_table(*argv[:2], droppable=argv[2] if len(argv) > 2 else ())
        return capfd.readouterr().out.splitlines()

    return write_and_get_lines


def split_into_words(lines: list[str]) -> list[str]:
    return [word for line in lines for word in line.split()]


def test_wide_terminal_shows_all_columns(write_table_at_width) -> None:
    lines = write_table_at_width(200, COLUMNS, [ROW], ("address", "heartbeat"))
    assert len(lines) == 2
    assert all(cell in lines[1] for cell in ROW)


def test_table_of_80_columns_breaks_no_word(write_table_at_width) -> None:
    lines = write_table_at_width(80, COLUMNS, [ROW, ROW], ("address", "heartbeat"))
    assert max(map(len, lines)) <= 80
    assert set(LONG_REASON.split()) <= set(split_into_words(lines)), (
        "the last column is wrapped between words"
    )
    assert {"gpu-box-12", "disconnected"} <= set(split_into_words(lines))


def test_droppable_columns_are_omitted_in_order_as_needed(write_table_at_width) -> None:
    heads = write_table_at_width(100, COLUMNS, [ROW], ("address", "heartbeat"))[0]
    assert "ADDRESS" not in heads and "HEARTBEAT" in heads
    heads = write_table_at_width(80, COLUMNS, [ROW], ("address", "heartbeat"))[0]
    assert "HEARTBEAT" not in heads and "MEMORY" in heads


def test_widest_column_is_truncated_if_none_is_droppable(write_table_at_width) -> None:
    name = "NVIDIA RTX 6000 Ada Generation Laptop GPU"
    lines = write_table_at_width(
        60, ("node", "accelerator", "jobs"), [("gpu-box", name, "j-7k2m4xab (100%)")]
    )
    assert max(map(len, lines)) <= 60
    assert "gpu-box" in lines[1] and "…" in lines[1] and "j-7k2m4xab (100%)" in lines[1]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 200))
def test_table_fits_or_its_columns_have_minimum_width(sizes, width) -> None:
    cells = ["x" * size for size in sizes]
    kept, widths = output._columns_and_widths_that_fit(
        [cells], droppable=list(range(len(cells) - 1))[::2], width=width
    )
    assert kept[-1] == len(cells) - 1, "the last column is what the table is for"
    taken = sum(widths) + 2 * (len(widths) - 1)
    assert taken <= width or all(size <= 6 for size in widths[:-1])


def test_command_tables_fit_80_columns(genie, controller, monkeypatch) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 80)
    controller.replies[ListNodes] = NodesReply(nodes=(make_node_view(),))
    controller.replies[ListJobs] = JobsReply(
        jobs=(make_placed_job(JobState.FAILED, job_id="j-7k2m4xab", exit_code=1, reason=LONG_REASON),),
        more=False,
    )
    for command in ("nodes", "jobs"):
        ran = genie(command)
        assert ran.code == 0
        assert max(map(len, ran.out.splitlines())) <= 80
    assert "j-7k2m4xab" in ran.out and "failed" in ran.out


def test_json_includes_default_values() -> None:
    job = make_placed_job(JobState.RUNNING)
    shown = output.struct_to_json(JobsReply(jobs=(job,), more=False))
    assert "type" not in shown and "more" in shown
    (shown_job,) = shown["jobs"]
    assert set(shown_job) == set(job.__struct_fields__)
    assert set(shown_job["spec"]["constraints"]) == set(job.spec.constraints.__struct_fields__)
    assert "exit_code" in shown_job["placements"][0]


class _StructWithDefaults(Struct, omit_defaults=True):
    size: int = 0
    parts: tuple[str, ...] = ()


class _StructWithMapping(Struct, omit_defaults=True):
    by_name: dict[str, _StructWithDefaults | list[_StructWithDefaults]]


def test_json_includes_default_values_in_mappings(capsys) -> None:
    output.write_json(
        output.struct_to_json(
            _StructWithMapping({"one": _StructWithDefaults(), "several": [_StructWithDefaults(2)]})
        )
    )
    assert json.loads(capsys.readouterr().out) == {
        "by_name": {"one": {"size": 0, "parts": []}, "several": [{"size": 2, "parts": []}]}
    }


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_repeated_waiting_line_is_replaced_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    progress = output.ProgressPrinter()
    progress(f"waiting for s1 {'.' * 40}")
    progress(f"waiting for s2 {'.' * 40}")
    progress("done")
    first, second, done = terminal.getvalue().splitlines()
    assert first == f"waiting for s1 {'.' * 40} (0 s)"
    assert second == f"\x1b[2A\x1b[Jwaiting for s2 {'.' * 40} (0 s)", "moves up two rows and clears them"
    assert done == "done"


def test_repeated_waiting_line_is_printed_once_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = output.ProgressPrinter()
    for line in ("waiting for s1", "waiting for s1", "waiting for s2", "done", "waiting for s2"):
        progress(line)
    expected = ["waiting for s1", "waiting for s2", "done", "waiting for s2"]
    assert capsys.readouterr().err.splitlines() == expected
