"""Registrations with the placers, such as request classes, by what they describe. An LRU cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from genie.scheduler.placement.protocol import Placer

Key = TypeVar("Key", bound=Hashable)


class RegistrationCache(Generic[Key]):
    """Registers each key with all placers, so that its number is the same in each.

    `register` returns the call that registers a key with one placer and returns the number.
    """

    def __init__(
        self,
        placers: Sequence[Placer],
        *,
        register: Callable[[Key], Callable[[Placer], int]],
        drop: Callable[[Placer, int], None],
        count_max: int,
    ) -> None:
        self._placers = placers
        self._register = register
        self._drop = drop
        self._count_max = count_max
        self._numbers: OrderedDict[Key, int] = OrderedDict()
        self._last_key: Key | None = None
        """The last key looked up: the same one is often looked up several times in a row."""
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def get_number(self, key: Key) -> int:
        """Return the number of the key, valid until the next call."""
        if key is self._last_key:
            return self._last_number
        number = self._numbers.get(key)
        if number is not None:
            self._numbers.move_to_end(key)
            self._last_key, self._last_number = key, number
            return number
        if len(self._numbers) >= self._count_max:
            self._unregister(self._numbers.popitem(last=False)[1])
        register = self._register(key)
        numbers = {register(placer) for placer in self._placers}
        assert len(numbers) == 1, "placers differ"
        self._numbers[key] = numbers.pop()
        return self._numbers[key]

    def clear(self) -> None:
        while self._numbers:
            self._unregister(self._numbers.popitem()[1])

    def _unregister(self, number: int) -> None:
        self._last_key = None
        for placer in self._placers:
            self._drop(placer, number)
