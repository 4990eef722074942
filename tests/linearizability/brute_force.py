"""The definition of linearizability as a program: tries every order of every subset. For small histories."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

from tests.linearizability.checker import Model, Operation


def is_linearizable_by_definition(model: Model, history: Sequence[Operation]) -> bool:
    """Whether an order of all completed and some pending operations respects time and the model. All
    operations must belong to one partition."""
    completed = [operation for operation in history if not operation.is_pending]
    pending = [operation for operation in history if operation.is_pending]
    return any(
        _respects_time(order) and _is_permitted(model, order)
        for count in range(len(pending) + 1)
        for chosen in combinations(pending, count)
        for order in permutations([*completed, *chosen])
    )


def _respects_time(order: Sequence[Operation]) -> bool:
    return not any(later.returned_s < earlier.called_s for earlier, later in combinations(order, 2))


def _is_permitted(model: Model, order: Sequence[Operation]) -> bool:
    states = {model.initial_state()}
    for operation in order:
        states = {after for state in states for after in model.apply_operation(state, operation)}
    return bool(states)
