"""Numbers in requests: each one has a declared range, and the decoder rejects others by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from genie.errors import UsageError
from genie.model.messages import AGENT_REQUESTS, CONTROLLER_REQUESTS, Message
from genie.runtime.wire import RequestDecoder
from tests.model.sample_values import make_sample

REQUESTS = tuple(dict.fromkeys((*CONTROLLER_REQUESTS, *AGENT_REQUESTS)))
UNUSUAL_NUMBERS = (math.nan, math.inf, -math.inf, -1, -1.5, 0, 1e308, 1 << 31, 1 << 63, (1 << 64) - 1)


def numeric_types(field: inspect.Field) -> list[inspect.IntType | inspect.FloatType]:
    kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
    return [kind for kind in kinds if isinstance(kind, inspect.IntType | inspect.FloatType)]


def numeric_fields(request: type[Message]) -> list[tuple[str, inspect.IntType | inspect.FloatType]]:
    info = inspect.type_info(request)
    assert isinstance(info, inspect.StructType)
    return [(field.encode_name, kind) for field in info.fields for kind in numeric_types(field)]


FIELDS = [(request, *found) for request in REQUESTS for found in numeric_fields(request)]


def as_fields(request: type[Message]) -> dict[str, Any]:
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(make_sample(request)))
    assert isinstance(found, dict)
    return found


def test_there_are_numeric_fields() -> None:
    assert len(FIELDS) > 30


@pytest.mark.parametrize(
    ("request_type", "field", "kind"), FIELDS, ids=lambda item: getattr(item, "__name__", None)
)
def test_a_number_is_in_its_range_or_rejected_by_name(
    request_type: type[Message], field: str, kind: Any
) -> None:
    low = kind.ge if kind.ge is not None else kind.gt
    assert low is not None and kind.le is not None, "declare a range: genie/model/messages/numbers.py"
    decoder = RequestDecoder((request_type,))
    decoder.decode(msgspec.msgpack.encode(as_fields(request_type)), peer="x")
    for value in UNUSUAL_NUMBERS:
        if isinstance(kind, inspect.IntType) and isinstance(value, float):
            continue
        payload = msgspec.msgpack.encode(as_fields(request_type) | {field: value})
        if low <= value <= kind.le and value != kind.gt:
            decoder.decode(payload, peer="x")
            continue
        with pytest.raises(UsageError) as caught:
            decoder.decode(payload, peer="x")
        assert caught.value.message == f"{request_type.__name__}: {field} = {value} is not allowed"
        assert caught.value.hint.startswith("allowed: ")


def test_the_error_states_the_range() -> None:
    hints = {}
    for request_type, field, value in (
        ("GetJob", "wait_s", math.nan),
        ("ListJobs", "limit", -1),
        ("CreateToken", "ttl_s", 0),
    ):
        kind = next(each for each in REQUESTS if each.__name__ == request_type)
        with pytest.raises(UsageError) as caught:
            RequestDecoder((kind,)).decode(msgspec.msgpack.encode(as_fields(kind) | {field: value}), peer="x")
        hints[request_type] = caught.value.hint
    assert hints == {
        "GetJob": "allowed: 0 to 1000000000",
        "ListJobs": "allowed: 1 to 1000000",
        "CreateToken": "allowed: above 0 to 315360000",
    }
