"""How long jobs may run on: the two rules, and their limits."""

from __future__ import annotations

from genie.agent.lease import Lease


def lease(ttl_s: float = 10.0) -> Lease:
    made = Lease()
    made.ttl_s = ttl_s
    return made


def test_there_is_no_lease_before_the_first_acknowledgement() -> None:
    assert not lease().is_good(0.0)


def test_an_acknowledgement_counts_from_when_the_heartbeat_was_sent() -> None:
    held = lease()
    held.acknowledged(sent_at_s=100.0)
    assert held.is_good(106.9)
    assert not held.is_good(107.0)


def test_an_answer_to_an_older_heartbeat_does_not_shorten_it() -> None:
    held = lease()
    held.acknowledged(sent_at_s=100.0)
    held.acknowledged(sent_at_s=95.0)
    assert held.until_s == 107.0


def test_it_goes_on_while_nobody_leads() -> None:
    held = lease()
    held.acknowledged(sent_at_s=100.0)
    for asked_s in (105.0, 110.0, 115.0):
        held.nobody_leads(asked_since_s=asked_s)
    assert held.until_s == 122.0


def test_a_lease_that_ran_out_is_not_brought_back_by_nobody_leading() -> None:
    held = lease()
    held.acknowledged(sent_at_s=100.0)
    held.nobody_leads(asked_since_s=107.5)  # somebody may have led, and given things away, since 100
    assert not held.is_good(107.6)


def test_nobody_leading_gives_no_lease_to_a_node_that_had_none() -> None:
    held = lease()
    held.nobody_leads(asked_since_s=1.0)
    assert not held.is_good(1.1)


def test_the_last_grace_fits_into_the_time_to_live() -> None:
    assert lease(10.0).grace_s(5.0) == 1.5
    assert lease(10.0).grace_s(1.0) == 1.0
