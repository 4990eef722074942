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
        self._make_registration = register
        self._drop_registration = drop
        self._registrations_max = count_max
        self._number_by_key: OrderedDict[Key, int] = OrderedDict()
        self._last_key: Key | None = None
        """The last key looked up: the same one is often looked up several times in a row."""
        self._last_key_number = 0

    def __len__(self) -> int:
        return len(self._number_by_key)

    def get_number(self, key: Key) -> int:
        """Return the number of the key, valid until the next call."""
        if key is self._last_key:
            return self._last_key_number
        number = self._number_by_key.get(key)
        if number is not None:
            self._number_by_key.move_to_end(key)
            self._last_key, self._last_key_number = key, number
            return number
        if len(self._number_by_key) >= self._registrations_max:
            self._unregister_number(self._number_by_key.popitem(last=False)[1])
        register = self._make_registration(key)
        numbers = {register(placer) for placer in self._placers}
        assert len(numbers) == 1, "placers differ"
        self._number_by_key[key] = numbers.pop()
        return self._number_by_key[key]

    def clear(self) -> None:
        while self._number_by_key:
            self._unregister_number(self._number_by_key.popitem()[1])

    def _unregister_number(self, number: int) -> None:
        self._last_key = None
        for placer in self._placers:
            self._drop_registration(placer, number)
