"""Fencing tokens: their order, and that they fit into a message."""

from __future__ import annotations

import msgspec
import pytest

from genie.model.fencing import (
    GENERATION_MAX,
    REVISION_MAX,
    describe_token,
    make_fencing_token,
    revision_of_token,
)


def test_tokens_are_ordered_by_generation_then_revision() -> None:
    tokens = [
        make_fencing_token(generation=generation, revision=revision)
        for generation in (0, 1, GENERATION_MAX)
        for revision in (1, 7, REVISION_MAX)
    ]
    assert tokens == sorted(tokens)
    assert [revision_of_token(token) for token in tokens] == [1, 7, REVISION_MAX] * 3


def test_the_token_of_generation_zero_is_the_revision() -> None:
    assert make_fencing_token(generation=0, revision=7) == 7


def test_the_highest_token_fits_into_a_message() -> None:
    token = make_fencing_token(generation=GENERATION_MAX, revision=REVISION_MAX)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(token), type=int) == token
    assert msgspec.json.decode(msgspec.json.encode(token), type=int) == token


@pytest.mark.parametrize(
    ("generation", "revision"), [(-1, 1), (GENERATION_MAX + 1, 1), (0, REVISION_MAX + 1)]
)
def test_numbers_that_do_not_fit_are_rejected(generation: int, revision: int) -> None:
    with pytest.raises(ValueError, match=f"revision {revision} of generation {generation}"):
        make_fencing_token(generation=generation, revision=revision)


def test_a_token_is_described_for_people() -> None:
    assert describe_token(make_fencing_token(generation=2, revision=7)) == "revision 7 of generation 2"
