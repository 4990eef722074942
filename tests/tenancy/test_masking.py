"""Texts for one tenant count the jobs of others."""

from __future__ import annotations

import pytest

from genie.tenancy.masking import masked

MINE, OTHER, THIRD = "j-aaaaaaaa", "j-bbbbbbbb", "j-cccc2222"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"would delay {OTHER}, which has a reservation", "would delay another job, which has a reservation"),
        (f"would delay {MINE}, which has a reservation", f"would delay {MINE}, which has a reservation"),
        (f"waits for {OTHER}, {THIRD} to make room", "waits for 2 other jobs to make room"),
        (f"waits for {OTHER}, {MINE}, {THIRD} to make room", f"waits for {MINE}, 2 other jobs to make room"),
        ("1 of 4 GPUs are free", "1 of 4 GPUs are free"),
        (f"held by {OTHER} and {THIRD}", "held by another job and another job"),
        ("", ""),
    ],
)
def test_only_what_is_shown_is_named(text: str, shown: str) -> None:
    assert masked(text, is_shown=lambda job_id: job_id == MINE) == shown
