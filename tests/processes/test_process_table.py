"""Signals that are safe against reused process IDs."""

from __future__ import annotations

from genie.processes import process_table


def test_signal_is_not_sent_to_a_process_that_reused_the_id() -> None:
    assert not process_table.send_signal(1, "another-boot:1", 0)
    assert not process_table.send_signal(1, "", 0)
