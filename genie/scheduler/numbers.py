"""Numbers that placers gave out, kept by what they stand for. Bounded: the one unused for longest makes room.

Not for: what a number means to a placer (placement/protocol.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from genie.scheduler.placement.protocol import Placer

Key = TypeVar("Key", bound=Hashable)


class Numbers(Generic[Key]):
    """The placers are in step: what one is told, all are, so that a number is the same in all of them.

    `register` says what each of them is told.
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
        self._known: OrderedDict[Key, int] = OrderedDict()
        self._last: Key | None = None
        """The one that was asked for last, which is often asked for several times."""
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._known)

    def of(self, key: Key) -> int:
        """Good until the next call."""
        if key is self._last:
            return self._last_number
        number = self._known.get(key)
        if number is not None:
            self._known.move_to_end(key)
            self._last, self._last_number = key, number
            return number
        if len(self._known) >= self._count_max:
            self._forget(self._known.popitem(last=False)[1])
        register = self._register(key)
        numbers = {register(placer) for placer in self._placers}
        assert len(numbers) == 1, "the placers are out of step"
        self._known[key] = numbers.pop()
        return self._known[key]

    def clear(self) -> None:
        while self._known:
            self._forget(self._known.popitem()[1])

    def _forget(self, number: int) -> None:
        self._last = None
        for placer in self._placers:
            self._drop(placer, number)
