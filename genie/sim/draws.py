"""Chance as the published runs drew it: with a seed of theirs, requests arrive here as they did there.

It is the additive generator of Go's math/rand: each number is the sum, modulo 2^63, of the ones 273 and 607
before it. A seed gives 607 numbers of a small generator, which are mixed with a fixed table: the state of the
same generator after 7.8e12 steps from seed 1. No table is kept here; those steps are jumped over, as the
remainder of x^steps by x^607 - x^334 - 1.

Not for: anything that must be hard to guess.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

_LENGTH = 607
_LAG = 273
_MASK = 2**63 - 1
_TABLE_STEPS = 7_800_000_000_000
_COEFFICIENT_BYTES = 17  # a sum of 607 products of 63 bits

_SMALL_MODULUS = 2**31 - 1
_SMALL_FACTOR = 48271
_SMALL_SKIPPED = 20
_SEED_FOR_ZERO = 89482311

_Item = TypeVar("_Item")


class Draws:
    """One stream. Seeds that are equal modulo 2^31 - 1 give the same."""

    def __init__(self, seed: int) -> None:
        start = zip(_small(seed, shift=20), _table(), strict=True)
        self._last = deque(_in_time([(small ^ fixed) & _MASK for small, fixed in start]), maxlen=_LENGTH)

    def skip(self, count: int) -> None:
        for _ in range(count):
            self._bits63()

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1; the limit is at most 2^31 - 1."""
        if limit & (limit - 1) == 0:
            return self._bits63() >> 32 & (limit - 1)
        end = 2**31 - 2**31 % limit
        while (drawn := self._bits63() >> 32) >= end:
            pass
        return drawn % limit

    def one_of(self, items: Sequence[_Item]) -> _Item:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[_Item]) -> list[_Item]:
        mixed = list(items)
        for last in range(len(mixed) - 1, 0, -1):
            other = self._scaled_below(last + 1)
            mixed[last], mixed[other] = mixed[other], mixed[last]
        return mixed

    def permutation(self, count: int) -> list[int]:
        """The numbers from 0 to count - 1. Not the order that shuffling them would give."""
        order: list[int] = []
        for number in range(count):
            place = self.below(number + 1)
            order.append(number)
            order[place], order[number] = number, order[place]
        return order

    def _scaled_below(self, limit: int) -> int:
        """As below(), by scaling and not by the remainder: shuffling is done with it."""
        least = 2**32 % limit
        while (scaled := (self._bits63() >> 31) * limit) & 0xFFFFFFFF < least:
            pass
        return scaled >> 32

    def _bits63(self) -> int:
        drawn = (self._last[0] + self._last[-_LAG]) & _MASK
        self._last.append(drawn)
        return drawn


def _small(seed: int, *, shift: int) -> list[int]:
    """607 numbers of the small generator, each of three draws."""
    state = seed % _SMALL_MODULUS or _SEED_FOR_ZERO
    draws = []
    for _ in range(_SMALL_SKIPPED + 3 * _LENGTH):
        state = state * _SMALL_FACTOR % _SMALL_MODULUS
        draws.append(state)
    threes = zip(*(draws[_SMALL_SKIPPED + part :: 3] for part in range(3)), strict=True)
    return [first << 2 * shift ^ second << shift ^ third for first, second, third in threes]


def _in_time(register: Sequence[int]) -> list[int]:
    """A register is kept in another order than its numbers came in; this is the oldest first, and undoes
    itself."""
    return [register[(_LENGTH - _LAG - 1 - age) % _LENGTH] for age in range(_LENGTH)]


@functools.cache
def _table() -> tuple[int, ...]:
    # The number t steps on is the sum of the first 607 ones, weighted with the coefficients of x^t.
    first = _in_time(_small(1, shift=10))
    weights = [1] + [0] * (_LENGTH - 1)
    for bit in f"{_TABLE_STEPS:b}":
        weights = _squared(weights)
        if bit == "1":
            weights = _reduced([0, *weights])
    later = []
    for _ in range(_LENGTH):
        later.append(sum(weight * number for weight, number in zip(weights, first, strict=True)) & _MASK)
        weights = _reduced([0, *weights])
    # A register is written in turns: after so many steps its next place is another.
    turn = _TABLE_STEPS % _LENGTH
    return tuple(_in_time(later[-turn:] + later[:-turn]))


def _squared(weights: Sequence[int]) -> list[int]:
    """As one product of two large numbers, which is the fastest way here."""
    packed = b"".join(weight.to_bytes(_COEFFICIENT_BYTES, "little") for weight in weights)
    number = int.from_bytes(packed, "little")
    product = (number * number).to_bytes(2 * len(packed), "little")
    parts = range(0, len(product), _COEFFICIENT_BYTES)
    return _reduced([int.from_bytes(product[at : at + _COEFFICIENT_BYTES], "little") for at in parts])


def _reduced(weights: list[int]) -> list[int]:
    """The remainder by x^607 - x^334 - 1."""
    for power in range(len(weights) - 1, _LENGTH - 1, -1):
        weights[power - _LENGTH] += weights[power]
        weights[power - _LAG] += weights[power]
    return [weight & _MASK for weight in weights[:_LENGTH]]
