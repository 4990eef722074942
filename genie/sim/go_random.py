"""Go's math/rand generator, to reproduce the request arrivals of the published runs from their seeds.

It is an additive lagged Fibonacci generator: each number is the sum, modulo 2^63, of those 273 and 607 steps
earlier. The seed determines 607 numbers of a linear congruential generator, which are XORed with a fixed
table: the state of the generator after 7.8e12 steps from seed 1. The table is computed by jumping ahead:
x^steps modulo x^607 - x^334 - 1.

Not cryptographically secure.
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


class GoRandom:
    """One random stream. Seeds that are equal modulo 2^31 - 1 give the same stream."""

    def __init__(self, seed: int) -> None:
        start = zip(_seed_numbers(seed, shift=20), _table(), strict=True)
        self._last = deque(_by_age([(small ^ fixed) & _MASK for small, fixed in start]), maxlen=_LENGTH)

    def skip(self, count: int) -> None:
        for _ in range(count):
            self._bits63()

    def below(self, limit: int) -> int:
        """Return an integer from 0 to limit - 1, for a limit of at most 2^31 - 1 (Int31n)."""
        if limit & (limit - 1) == 0:
            return self._bits63() >> 32 & (limit - 1)
        end = 2**31 - 2**31 % limit
        while (drawn := self._bits63() >> 32) >= end:
            pass
        return drawn % limit

    def choice(self, items: Sequence[_Item]) -> _Item:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[_Item]) -> list[_Item]:
        mixed = list(items)
        for last in range(len(mixed) - 1, 0, -1):
            other = self._scaled_below(last + 1)
            mixed[last], mixed[other] = mixed[other], mixed[last]
        return mixed

    def permutation(self, count: int) -> list[int]:
        """Return a permutation of 0 to count - 1 (Perm); differs from that of `shuffled`."""
        order: list[int] = []
        for number in range(count):
            place = self.below(number + 1)
            order.append(number)
            order[place], order[number] = number, order[place]
        return order

    def _scaled_below(self, limit: int) -> int:
        """Return an integer from 0 to limit - 1 by scaling, as used for shuffling (int31n)."""
        least = 2**32 % limit
        while (scaled := (self._bits63() >> 31) * limit) & 0xFFFFFFFF < least:
            pass
        return scaled >> 32

    def _bits63(self) -> int:
        drawn = (self._last[0] + self._last[-_LAG]) & _MASK
        self._last.append(drawn)
        return drawn


def _seed_numbers(seed: int, *, shift: int) -> list[int]:
    """Return 607 numbers of the seeding generator, each made of three outputs."""
    state = seed % _SMALL_MODULUS or _SEED_FOR_ZERO
    draws = []
    for _ in range(_SMALL_SKIPPED + 3 * _LENGTH):
        state = state * _SMALL_FACTOR % _SMALL_MODULUS
        draws.append(state)
    threes = zip(*(draws[_SMALL_SKIPPED + part :: 3] for part in range(3)), strict=True)
    return [first << 2 * shift ^ second << shift ^ third for first, second, third in threes]


def _by_age(register: Sequence[int]) -> list[int]:
    """Reorder the register to oldest first. The reordering is its own inverse."""
    return [register[(_LENGTH - _LAG - 1 - age) % _LENGTH] for age in range(_LENGTH)]


@functools.cache
def _table() -> tuple[int, ...]:
    # The number after t steps is the sum of the first 607, weighted by the coefficients of x^t.
    first = _by_age(_seed_numbers(1, shift=10))
    weights = [1] + [0] * (_LENGTH - 1)
    for bit in f"{_TABLE_STEPS:b}":
        weights = _square(weights)
        if bit == "1":
            weights = _reduce([0, *weights])
    later = []
    for _ in range(_LENGTH):
        later.append(sum(weight * number for weight, number in zip(weights, first, strict=True)) & _MASK)
        weights = _reduce([0, *weights])
    # The register is a ring buffer: rotate it by the number of steps.
    rotation = _TABLE_STEPS % _LENGTH
    return tuple(_by_age(later[-rotation:] + later[:-rotation]))


def _square(weights: Sequence[int]) -> list[int]:
    """Square the polynomial as one large integer product, which is fastest in Python."""
    packed = b"".join(weight.to_bytes(_COEFFICIENT_BYTES, "little") for weight in weights)
    number = int.from_bytes(packed, "little")
    product = (number * number).to_bytes(2 * len(packed), "little")
    parts = range(0, len(product), _COEFFICIENT_BYTES)
    return _reduce([int.from_bytes(product[at : at + _COEFFICIENT_BYTES], "little") for at in parts])


def _reduce(weights: list[int]) -> list[int]:
    """Reduce the polynomial modulo x^607 - x^334 - 1."""
    for power in range(len(weights) - 1, _LENGTH - 1, -1):
        weights[power - _LENGTH] += weights[power]
        weights[power - _LAG] += weights[power]
    return [weight & _MASK for weight in weights[:_LENGTH]]
