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

_REGISTER_LENGTH = 607
_REGISTER_LAG = 273
_UINT63_MASK = 2**63 - 1
_SEED_TABLE_STEPS = 7_800_000_000_000
_COEFFICIENT_BYTES = 17  # a sum of 607 products of 63 bits

_SEEDING_MODULUS = 2**31 - 1
_SEEDING_FACTOR = 48271
_SEEDING_OUTPUTS_SKIPPED = 20
_SEED_FOR_ZERO = 89482311

_Item = TypeVar("_Item")


class GoRandom:
    """One random stream. Seeds that are equal modulo 2^31 - 1 give the same stream."""

    def __init__(self, seed: int) -> None:
        start = zip(_seeding_outputs(seed, shift=20), _seed_table(), strict=True)
        self._register = deque(
            _reorder_oldest_first([(small ^ fixed) & _UINT63_MASK for small, fixed in start]),
            maxlen=_REGISTER_LENGTH,
        )

    def skip_outputs(self, count: int) -> None:
        for _ in range(count):
            self._next_63_bits()

    def random_below(self, limit: int) -> int:
        """Return an integer from 0 to limit - 1, for a limit of at most 2^31 - 1 (Int31n)."""
        if limit & (limit - 1) == 0:
            return self._next_63_bits() >> 32 & (limit - 1)
        end = 2**31 - 2**31 % limit
        while (drawn := self._next_63_bits() >> 32) >= end:
            pass
        return drawn % limit

    def choice(self, items: Sequence[_Item]) -> _Item:
        return items[self.random_below(len(items))]

    def shuffled_copy(self, items: Sequence[_Item]) -> list[_Item]:
        mixed = list(items)
        for last in range(len(mixed) - 1, 0, -1):
            other = self._random_below_by_scaling(last + 1)
            mixed[last], mixed[other] = mixed[other], mixed[last]
        return mixed

    def permutation(self, count: int) -> list[int]:
        """Return a permutation of 0 to count - 1 (Perm); differs from that of `shuffled_copy`."""
        order: list[int] = []
        for number in range(count):
            place = self.random_below(number + 1)
            order.append(number)
            order[place], order[number] = number, order[place]
        return order

    def _random_below_by_scaling(self, limit: int) -> int:
        """Return an integer from 0 to limit - 1 by scaling, as used for shuffling (int31n)."""
        least = 2**32 % limit
        while (scaled := (self._next_63_bits() >> 31) * limit) & 0xFFFFFFFF < least:
            pass
        return scaled >> 32

    def _next_63_bits(self) -> int:
        drawn = (self._register[0] + self._register[-_REGISTER_LAG]) & _UINT63_MASK
        self._register.append(drawn)
        return drawn


def _seeding_outputs(seed: int, *, shift: int) -> list[int]:
    """Return 607 numbers of the seeding generator, each made of three outputs."""
    state = seed % _SEEDING_MODULUS or _SEED_FOR_ZERO
    draws = []
    for _ in range(_SEEDING_OUTPUTS_SKIPPED + 3 * _REGISTER_LENGTH):
        state = state * _SEEDING_FACTOR % _SEEDING_MODULUS
        draws.append(state)
    threes = zip(*(draws[_SEEDING_OUTPUTS_SKIPPED + part :: 3] for part in range(3)), strict=True)
    return [first << 2 * shift ^ second << shift ^ third for first, second, third in threes]


def _reorder_oldest_first(register: Sequence[int]) -> list[int]:
    """Reorder the register to oldest first. The reordering is its own inverse."""
    return [
        register[(_REGISTER_LENGTH - _REGISTER_LAG - 1 - age) % _REGISTER_LENGTH]
        for age in range(_REGISTER_LENGTH)
    ]


@functools.cache
def _seed_table() -> tuple[int, ...]:
    # The number after t steps is the sum of the first 607, weighted by the coefficients of x^t.
    first = _reorder_oldest_first(_seeding_outputs(1, shift=10))
    weights = [1] + [0] * (_REGISTER_LENGTH - 1)
    for bit in f"{_SEED_TABLE_STEPS:b}":
        weights = _square_polynomial(weights)
        if bit == "1":
            weights = _reduce_polynomial([0, *weights])
    later = []
    for _ in range(_REGISTER_LENGTH):
        later.append(
            sum(weight * number for weight, number in zip(weights, first, strict=True)) & _UINT63_MASK
        )
        weights = _reduce_polynomial([0, *weights])
    # The register is a ring buffer: rotate it by the number of steps.
    rotation = _SEED_TABLE_STEPS % _REGISTER_LENGTH
    return tuple(_reorder_oldest_first(later[-rotation:] + later[:-rotation]))


def _square_polynomial(coefficients: Sequence[int]) -> list[int]:
    """Square the polynomial as one large integer product, which is fastest in Python."""
    packed = b"".join(weight.to_bytes(_COEFFICIENT_BYTES, "little") for weight in coefficients)
    number = int.from_bytes(packed, "little")
    product = (number * number).to_bytes(2 * len(packed), "little")
    parts = range(0, len(product), _COEFFICIENT_BYTES)
    return _reduce_polynomial(
        [int.from_bytes(product[at : at + _COEFFICIENT_BYTES], "little") for at in parts]
    )


def _reduce_polynomial(coefficients: list[int]) -> list[int]:
    """Reduce the polynomial modulo x^607 - x^334 - 1."""
    for power in range(len(coefficients) - 1, _REGISTER_LENGTH - 1, -1):
        coefficients[power - _REGISTER_LENGTH] += coefficients[power]
        coefficients[power - _REGISTER_LAG] += coefficients[power]
    return [weight & _UINT63_MASK for weight in coefficients[:_REGISTER_LENGTH]]
