"""Records the operations of concurrent clients as a history."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

from tests.linearizability.checker import Operation

_Output = TypeVar("_Output")


class HistoryRecorder:
    """All operations of one history are recorded by one process, whose monotonic clock they share."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    async def record(
        self,
        client: str,
        operation_input: Hashable,
        call: Callable[[], Awaitable[_Output]],
        *,
        to_output: Callable[[_Output], Any] = lambda output: output,
        outcome_unknown: tuple[type[BaseException], ...] = (),
    ) -> _Output | None:
        """Await `call()`, record its output, and return it. One of `outcome_unknown`, or a cancellation,
        records a pending operation; None is returned. Other errors mean that there was no effect: they are
        raised and nothing is recorded."""
        called_s = time.monotonic()
        returned_s, output, is_recorded = math.inf, None, True
        try:
            result = await call()
            returned_s, output = time.monotonic(), to_output(result)
            return result
        except outcome_unknown:
            return None
        except Exception:
            is_recorded = False
            raise
        finally:
            if is_recorded:
                self.operations.append(Operation(client, operation_input, output, called_s, returned_s))

    def record_pending(self, client: str, operation_input: Hashable) -> None:
        """Record an operation that may take effect from now on, or never."""
        self.operations.append(Operation(client, operation_input, None, time.monotonic()))
