"""The ranges of the numbers in requests. The decoder rejects numbers outside of them, and NaN, by name.

Every numeric field of a request itself has one of these types. Records inside of a request are checked by
controller/checks.py, and reports of agents one by one, because one of them must not reject the others.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import inspect

from genie.model.limits import GRACE_S_MAX, INTERVAL_S_MAX, TIME_LIMIT_S_MAX, WORKERS_MAX
from genie.model.lock import LOCK_TTL_S_MAX, LOCK_TTL_S_MIN

CHUNK_BYTES_MAX = 512 * 1024
LOG_OFFSET_MAX = (1 << 62) - 1
"""Files cannot be longer than 2^63 bytes."""
LIST_LIMIT_MAX = 1_000_000
"""A reply has fewer entries: at most LIST_MAX, and as many as fit into a frame."""
_ACCELERATOR_NUMBER_MAX = 1 << 20
_REQUESTED_WAIT_S_MAX = 1e9

Counter = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""An epoch, incarnation, sequence number, number of a run, or fencing token."""
Offset = Annotated[int, msgspec.Meta(ge=0, le=LOG_OFFSET_MAX)]
"""Into a log, a blob or a backup, in bytes."""
ChunkBytes = Annotated[int, msgspec.Meta(ge=1, le=CHUNK_BYTES_MAX)]
ListLimit = Annotated[int, msgspec.Meta(ge=1, le=LIST_LIMIT_MAX)]
AcceleratorNumber = Annotated[int, msgspec.Meta(ge=0, le=_ACCELERATOR_NUMBER_MAX)]
WorkerRank = Annotated[int, msgspec.Meta(ge=0, le=WORKERS_MAX - 1)]
WaitS = Annotated[float, msgspec.Meta(ge=0.0, le=_REQUESTED_WAIT_S_MAX)]
"""A server waits no longer than WAIT_S_MAX: a longer wait is not an error."""
IntervalS = Annotated[float, msgspec.Meta(ge=0.0, le=INTERVAL_S_MAX)]
GraceS = Annotated[float, msgspec.Meta(ge=0.0, le=GRACE_S_MAX)]
LockTtlS = Annotated[float, msgspec.Meta(ge=LOCK_TTL_S_MIN, le=LOCK_TTL_S_MAX)]
TokenTtlS = Annotated[float, msgspec.Meta(gt=0.0, le=TIME_LIMIT_S_MAX)]


class NumberOutOfRange(NamedTuple):
    """`allowed` is for people, such as "0 to 30"."""

    field: str
    value: float
    allowed: str


def find_number_out_of_range(
    kind: type[msgspec.Struct], value: dict[object, object]
) -> NumberOutOfRange | None:
    """The first field of `value`, decoded without a type, whose number is not in the range that `kind`
    declares."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        number = value.get(field.encode_name)
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        for declared in _numeric_types(field.type):
            if not _is_in_range(number, declared):
                return NumberOutOfRange(field.encode_name, number, _describe_range(declared))
    return None


def _numeric_types(node: inspect.Type) -> list[inspect.IntType | inspect.FloatType]:
    parts = node.types if isinstance(node, inspect.UnionType) else (node,)
    return [part for part in parts if isinstance(part, inspect.IntType | inspect.FloatType)]


def _is_in_range(number: float, declared: inspect.IntType | inspect.FloatType) -> bool:
    return (
        (declared.ge is None or number >= declared.ge)
        and (declared.gt is None or number > declared.gt)
        and (declared.le is None or number <= declared.le)
    )


def _describe_range(declared: inspect.IntType | inspect.FloatType) -> str:
    low = f"above {declared.gt:g}" if declared.gt is not None else _format_number(declared.ge)
    return f"{low} to {_format_number(declared.le)}"


def _format_number(number: float | None) -> str:
    return f"{number:.0f}" if isinstance(number, float) and number.is_integer() else str(number)
