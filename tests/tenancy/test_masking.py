"""Texts for one tenant do not name jobs of others."""

from __future__ import annotations

import pytest

from genie.tenancy.masking import mask_job_ids

MINE, OTHER, THIRD = "j-aaaaaaaa", "j-bbbbbbbb", "j-cccc2222"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"would delay {OTHER}, which has a reservation", "would delay another job, which has a reservation"),
        (f"would delay {MINE}, which has a reservation", f"would delay {MINE}, which has a reservation"),
        (f"pending: {OTHER}, {THIRD} must end", "pending: 2 other jobs must end"),
        (f"pending: {OTHER}, {MINE}, {THIRD} must end", f"pending: {MINE}, 2 other jobs must end"),
        ("1 of 4 GPUs are free", "1 of 4 GPUs are free"),
        (f"held by {OTHER} and {THIRD}", "held by another job and another job"),
        ("", ""),
    ],
)
def test_only_visible_jobs_are_named(text: str, shown: str) -> None:
    assert mask_job_ids(text, is_visible=lambda job_id: job_id == MINE) == shown
