"""Decides whether a history of concurrent operations is linearizable.

    counterexample = check_linearizable(model, history)
    assert counterexample is None, counterexample.describe()

A history is linearizable if each operation can be assigned one instant between its call and its return, such
that the model permits the outputs in that order. The search is that of Wing and Gong, with the memoization of
Lowe: it tries the operations that may come next and remembers each pair of the operations in the order so far
and the states that they lead to. A model may be nondeterministic, so the search follows sets of states.

An operation without a known outcome (`returned_s` is infinite) may take effect at any time after its call,
or never. Histories are checked per partition of the model, such as one lock, because in the worst case the
search is exponential in the number of concurrent operations.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

STEPS_MAX = 2_000_000


class SearchLimitExceededError(Exception):
    """The history is too large or has too many concurrent operations: nothing is known about it."""


@dataclass(frozen=True)
class Operation:
    """One call of a client. Times are of one monotonic clock that all clients share.

    `output` is meaningless while `returned_s` is infinite: then the outcome is unknown.
    """

    client: str
    input: Hashable
    output: Any  # Any: each model has its own
    called_s: float
    returned_s: float = math.inf

    @property
    def is_pending(self) -> bool:
        return math.isinf(self.returned_s)

    def describe(self) -> str:
        output = "outcome unknown" if self.is_pending else repr(self.output)
        returned = "" if self.is_pending else f" to {self.returned_s:.6f}"
        return f"[{self.called_s:.6f}{returned} s] {self.client}: {self.input!r} -> {output}"


class Model(Protocol):
    """A sequential specification. States and partition keys are hashable and immutable."""

    def partition_key(self, operation: Operation) -> Hashable:
        """Return the object that the operation concerns, such as the name of the lock."""
        ...

    def initial_state(self) -> Hashable: ...

    def apply_operation(self, state: Any, operation: Operation) -> Iterable[Hashable]:
        """Return the possible states after the operation; none if the output is impossible in `state`. The
        output of a pending operation is not read."""
        ...


@dataclass(frozen=True)
class Counterexample:
    """Why a partition of a history is not linearizable."""

    partition: Hashable
    longest_order: tuple[Operation, ...]
    """A longest order of operations that the model permits."""
    states: frozenset[Hashable]
    """The states after that order."""
    blocked: tuple[Operation, ...]
    """The completed operations of which one would have to come next; the model permits none of them."""

    def describe(self) -> str:
        lines = [f"the history of {self.partition!r} is not linearizable; a longest permitted order is"]
        lines += [f"  {operation.describe()}" for operation in self.longest_order]
        lines += [f"which leads to {', '.join(sorted(map(repr, self.states)))}; impossible then:"]
        lines += [f"  {operation.describe()}" for operation in self.blocked]
        return "\n".join(lines)


def check_linearizable(
    model: Model, history: Iterable[Operation], *, steps_max: int = STEPS_MAX
) -> Counterexample | None:
    """Return None if the history is linearizable, else a counterexample from one of its partitions.

    Raises SearchLimitExceededError after `steps_max` steps in one partition.
    """
    partitions: dict[Hashable, list[Operation]] = {}
    for operation in history:
        assert operation.called_s <= operation.returned_s, operation.describe()
        partitions.setdefault(model.partition_key(operation), []).append(operation)
    for partition, operations in partitions.items():
        found = _OrderSearch(model, partition, operations, steps_max=steps_max).find_counterexample()
        if found is not None:
            return found
    return None


class _Event:
    """A call or a return, in a doubly linked list in the order of time."""

    __slots__ = ("following", "is_call", "number", "preceding", "return_event")

    def __init__(self, number: int, *, is_call: bool) -> None:
        self.number = number
        self.is_call = is_call
        self.return_event: _Event | None = None
        """Of a call; None if the outcome is unknown."""
        self.preceding: _Event | None = None
        self.following: _Event | None = None

    def unlink(self) -> None:
        assert self.preceding is not None
        self.preceding.following = self.following
        if self.following is not None:
            self.following.preceding = self.preceding

    def relink(self) -> None:
        """Undo the last unlink that was not undone yet."""
        assert self.preceding is not None
        self.preceding.following = self
        if self.following is not None:
            self.following.preceding = self


@dataclass(frozen=True, slots=True)
class _OrderedOperation:
    """An operation in the order under examination, and the states before it."""

    call: _Event
    states_before: frozenset[Hashable]


class _OrderSearch:
    """Searches an order of the operations of one partition. Used once."""

    def __init__(
        self, model: Model, partition: Hashable, operations: Sequence[Operation], *, steps_max: int
    ) -> None:
        self._model = model
        self._partition = partition
        self._operations = operations
        self._steps_max = steps_max
        self._head = _link_events(operations)
        self._states: frozenset[Hashable] = frozenset((model.initial_state(),))
        self._order: list[_OrderedOperation] = []
        self._ordered_bits = 0
        self._completed_left = sum(not operation.is_pending for operation in operations)
        self._explored: set[tuple[int, frozenset[Hashable]]] = set()
        self._longest: Counterexample | None = None

    def find_counterexample(self) -> Counterexample | None:
        event = self._head.following
        for _ in range(self._steps_max):
            if not self._completed_left:
                return None
            assert event is not None, "the return of a completed operation is still in the list"
            if event.is_call:
                event = self._head.following if self._try_append(event) else event.following
                continue
            # Every operation called before this return was tried: the previous choice was wrong.
            self._record_if_longest()
            if not self._order:
                return self._longest
            event = self._remove_last()
        raise SearchLimitExceededError(
            f"no result after {self._steps_max} steps for {self._partition!r} with {len(self._operations)} "
            "operations"
        )

    def _try_append(self, call: _Event) -> bool:
        """Append the operation to the order, unless the model forbids it or the result was explored."""
        operation = self._operations[call.number]
        after = frozenset(
            state for before in self._states for state in self._model.apply_operation(before, operation)
        )
        if not after or (operation.is_pending and after == self._states):
            return False  # a pending operation without an effect is the same as none
        ordered_bits = self._ordered_bits | 1 << call.number
        if (ordered_bits, after) in self._explored:
            return False
        self._explored.add((ordered_bits, after))
        self._order.append(_OrderedOperation(call, self._states))
        self._states, self._ordered_bits = after, ordered_bits
        self._completed_left -= not operation.is_pending
        call.unlink()
        if call.return_event is not None:
            call.return_event.unlink()
        return True

    def _remove_last(self) -> _Event | None:
        """Remove the last operation of the order; return the event after its call."""
        last = self._order.pop()
        call = last.call
        if call.return_event is not None:
            call.return_event.relink()
        call.relink()
        self._states = last.states_before
        self._ordered_bits &= ~(1 << call.number)
        self._completed_left += not self._operations[call.number].is_pending
        return call.following

    def _record_if_longest(self) -> None:
        if self._longest is not None and len(self._longest.longest_order) >= len(self._order):
            return
        blocked = []
        event = self._head.following
        while event is not None and event.is_call:
            operation = self._operations[event.number]
            if not operation.is_pending:
                blocked.append(operation)
            event = event.following
        order = tuple(self._operations[each.call.number] for each in self._order)
        self._longest = Counterexample(self._partition, order, self._states, tuple(blocked))


def _link_events(operations: Sequence[Operation]) -> _Event:
    """Return the head of the list. Operations that touch at one instant count as concurrent."""
    timed: list[tuple[float, bool, int, _Event]] = []
    for number, operation in enumerate(operations):
        call = _Event(number, is_call=True)
        timed.append((operation.called_s, False, number, call))
        if not operation.is_pending:
            call.return_event = _Event(number, is_call=False)
            timed.append((operation.returned_s, True, number, call.return_event))
    timed.sort(key=lambda each: each[:3])
    head = previous = _Event(-1, is_call=False)
    for _, _, _, event in timed:
        previous.following, event.preceding = event, previous
        previous = event
    return head
