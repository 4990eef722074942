"""Tables: how they fit a terminal, and what they leave out when it is narrow."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from genie.cli import output
from genie.model.job import JobState
from genie.model.messages import JobsReply, ListJobs, ListNodes, NodesReply
from tests.cli.nouns import node, placed

LONG = "no heartbeat for 190 s, so everything that it held was given away to others"
COLUMNS = ("node", "status", "address", "cpus held", "reserved", "heard", "reason")
ROW = ("gpu-box-12", "disconnected", "192.168.100.17", "12.5 of 128", "100 GiB of 2.0 TiB", "3 min ago", LONG)


@pytest.fixture
def terminal(monkeypatch, capfd):
    """Makes standard output a terminal of that many columns, and gives back what is written to it."""

    def lines(width: int, *argv) -> list[str]:
        monkeypatch.setattr(output, "terminal_width", lambda: width)
        capfd.readouterr()
        output.write_table(*argv[:2], spare=argv[2] if len(argv) > 2 else ())
        return capfd.readouterr().out.splitlines()

    return lines


def words(lines: list[str]) -> list[str]:
    return [word for line in lines for word in line.split()]


def test_a_wide_terminal_shows_everything_on_one_line(terminal) -> None:
    lines = terminal(200, COLUMNS, [ROW], ("address", "heard"))
    assert len(lines) == 2
    assert all(cell in lines[1] for cell in ROW)


def test_80_columns_break_no_word(terminal) -> None:
    lines = terminal(80, COLUMNS, [ROW, ROW], ("address", "heard"))
    assert max(map(len, lines)) <= 80
    assert set(LONG.split()) <= set(words(lines)), "the last column is wrapped between words"
    assert {"gpu-box-12", "disconnected"} <= set(words(lines))


def test_spare_columns_are_left_out_in_their_order_and_only_as_needed(terminal) -> None:
    heads = terminal(100, COLUMNS, [ROW], ("address", "heard"))[0]
    assert "ADDRESS" not in heads and "HEARD" in heads
    heads = terminal(80, COLUMNS, [ROW], ("address", "heard"))[0]
    assert "HEARD" not in heads and "RESERVED" in heads


def test_where_nothing_may_be_left_out_the_widest_is_shortened(terminal) -> None:
    name = "NVIDIA RTX 6000 Ada Generation Laptop GPU"
    lines = terminal(60, ("node", "accelerator", "held by"), [("gpu-box", name, "j-7k2m4xab (100%)")])
    assert max(map(len, lines)) <= 60
    assert "gpu-box" in lines[1] and "…" in lines[1] and "j-7k2m4xab (100%)" in lines[1]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 200))
def test_columns_fit_or_are_as_short_as_they_may_be(sizes, width) -> None:
    cells = ["x" * size for size in sizes]
    kept, widths = output._fitted([cells], spare=list(range(len(cells) - 1))[::2], width=width)
    assert kept[-1] == len(cells) - 1, "the last column is what the table is for"
    taken = sum(widths) + 2 * (len(widths) - 1)
    assert taken <= width or all(size <= 6 for size in widths[:-1])


def test_the_tables_of_commands_fit_80_columns(genie, controller, monkeypatch) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 80)
    controller.answers[ListNodes] = NodesReply(nodes=(node(),))
    controller.answers[ListJobs] = JobsReply(
        jobs=(placed(JobState.FAILED, job_id="j-7k2m4xab", exit_code=1, reason=LONG),), more=False
    )
    for command in ("nodes", "jobs"):
        ran = genie(command)
        assert ran.code == 0
        assert max(map(len, ran.out.splitlines())) <= 80
    assert "j-7k2m4xab" in ran.out and "failed" in ran.out


def test_json_shows_fields_that_have_their_defaults_wherever_they_are() -> None:
    job = placed(JobState.RUNNING)
    shown = output.as_object(JobsReply(jobs=(job,), more=False))
    assert "type" not in shown and "more" in shown
    (told,) = shown["jobs"]
    assert set(told) == set(job.__struct_fields__)
    assert set(told["spec"]["wishes"]) == set(job.spec.wishes.__struct_fields__)
    assert "exit_code" in told["placements"][0]


class _Inner(Struct, omit_defaults=True):
    size: int = 0
    parts: tuple[str, ...] = ()


class _Outer(Struct, omit_defaults=True):
    by_name: dict[str, _Inner | list[_Inner]]


def test_json_shows_them_behind_the_names_of_a_mapping_too(capsys) -> None:
    output.write_json(output.as_object(_Outer({"one": _Inner(), "several": [_Inner(2)]})))
    assert json.loads(capsys.readouterr().out) == {
        "by_name": {"one": {"size": 0, "parts": []}, "several": [{"size": 2, "parts": []}]}
    }
