"""Calls of allowed ops for the fuzzer, and their hostile variants. Pure: a case follows from its seed.

The calls are recorded ones (fuzz_calls.txt, written by fuzz_recording.py), and ones that are made up from the
schema of each overload.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.executor.client import contiguous_strides

RECORDED_CALLS = Path(__file__).with_name("fuzz_calls.txt")

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
HOSTILE_INTEGERS = (
    -1, 0, 1, 2, 3, 7, 17, 1000, 2**20, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**62, _INT64_MAX, -2, -3, -1000,
    -(2**31), -(2**40), _INT64_MIN,
)  # fmt: skip
_HOSTILE_FLOATS = (-1.0, 0.0, 0.5, 2.0, 1e30, -1e30, 1e-30, math.inf, -math.inf, math.nan)
_DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "uint8",
    "int8",
    "bool",
    "complex64",
)
_INTEGER_RANGES = {
    "int64": (_INT64_MIN, _INT64_MAX),
    "int32": (-(2**31), 2**31 - 1),
    "uint8": (0, 255),
    "int8": (-128, 127),
}
_DIMENSIONS_MAX = 7
# The kernels repeat a loop as often as a value says.
_LOOPS = re.compile(r"special_\w+_polynomial_")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument; integers are `values`, or random ones in `bounds`."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int, ...] | None = None
    bounds: tuple[int, int] = (0, 2)
    strides: tuple[int, ...] | None = None

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)


class Kind:
    """An argument without a value of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


UNDEFINED, DEVICE, GENERATOR = Kind("UNDEFINED"), Kind("DEVICE"), Kind("GENERATOR")
# Any: an argument is whatever an op takes.
Value = Any


@dataclass(frozen=True)
class Call:
    """One call of an overload such as "add.Tensor", with all arguments in the order of the schema."""

    op: str
    arguments: tuple[Value, ...]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(_describe, self.arguments))})"


def _describe(value: Value) -> str:
    match value:
        case TensorSpec():
            text = f"{value.dtype}{list(value.shape)}"
            if value.strides is not None:
                text += f" strides {list(value.strides)}"
            return text + (f"={list(value.values)}" if value.values is not None else "")
        case list():
            return f"[{', '.join(map(_describe, value))}]"
    return repr(value)


# --- recorded calls -----------------------------------------------------------------------------


def recorded_calls() -> Iterator[Call]:
    for line in RECORDED_CALLS.read_text("ascii").splitlines():
        op, _, arguments = line.partition("\t")
        yield Call(op, tuple(_decode(value) for value in json.loads(arguments)))


def _decode(value: Any) -> Value:
    match value:
        case {"dtype": dtype, "shape": shape, **content}:
            values = tuple(content["values"]) if "values" in content else None
            low, high = content.get("range", (0, 2))
            return TensorSpec(dtype, tuple(shape), values, (low, high))
        case {"device": _}:
            return DEVICE
        case {"float": text}:
            return float(text)
        case list():
            return [_decode(item) for item in value]
    return value


def related_calls(schemas: dict[str, Any]) -> dict[str, list[Call]]:
    """Recorded calls of each overload, or those of one with the same arguments apart from outputs."""
    calls: dict[str, list[Call]] = {}
    for call in recorded_calls():
        calls.setdefault(call.op, []).append(call)
    by_inputs: dict[tuple[str, ...], list[Call]] = {}
    for op, recorded in calls.items():
        if op in schemas:
            by_inputs.setdefault(_inputs_key(schemas[op]), recorded)
    for op, schema in schemas.items():
        if op not in calls and (found := by_inputs.get(_inputs_key(schema))):
            calls[op] = [_call_with_outputs(op, schema, found[0])]
    return calls


def _is_output(argument: Any) -> bool:
    return bool(argument.alias_info and argument.alias_info.is_write and argument.kwarg_only)


def _inputs_key(schema: Any) -> tuple[str, ...]:
    base = schema.name.removeprefix("aten::").rstrip("_")
    return (base, *(f"{a.name}:{a.type}" for a in schema.arguments if not _is_output(a)))


def _call_with_outputs(op: str, schema: Any, call: Call) -> Call:
    inputs = iter(call.arguments)
    arguments = []
    for argument in schema.arguments:
        if not _is_output(argument):
            arguments.append(next(inputs))
        elif str(argument.type).startswith("List"):
            arguments.append([TensorSpec("float32", (2, 3))])
        else:
            arguments.append(TensorSpec("float32", (2, 3)))
    return Call(op, tuple(arguments))


# --- calls made up from schemas -----------------------------------------------------------------

_SHAPES: tuple[tuple[int, ...], ...] = (
    (2, 3),
    (4,),
    (1, 2, 4, 4),
    (2, 2, 5),
    (3, 3),
    (1, 2, 3, 4, 4),
    (),
    (0,),
)
_INDEX_NAMES = (
    "ind",
    "offset",
    "target",
    "length",
    "label",
    "bag",
    "count",
    "segment",
    "sizes",
    "cum_seq",
    "seed",
)


def invented_call(schema: Any, rng: random.Random) -> Call:
    """A call with arguments of the right types; few of them are valid."""
    name = schema.name.removeprefix("aten::")
    shape = rng.choice(_SHAPES)
    dtype = rng.choice(_DTYPES) if rng.random() < 0.3 else "float32"
    arguments = tuple(_invent(str(a.type), a.name, a, shape, dtype, rng) for a in schema.arguments)
    return Call(f"{name}.{schema.overload_name}".removesuffix("."), arguments)


def _invent(
    kind: str, name: str, argument: Any, shape: tuple[int, ...], dtype: str, rng: random.Random
) -> Value:
    if argument.has_default_value() and rng.random() < 0.5:
        default = argument.default_value
        if default is None or isinstance(default, bool | int | float | str):
            return default
        if isinstance(default, list) and all(isinstance(item, bool | int | float) for item in default):
            return list(default)
    if kind.startswith("Optional["):
        kind = kind[9:-1]
        if rng.random() < 0.4:
            return UNDEFINED if kind == "Tensor" else None
    if kind.startswith("List["):
        item = kind[5:-1]
        length = argument.N if getattr(argument, "N", None) else rng.randint(1, 3)
        return [_invent_item(item, name, shape, dtype, rng) for _ in range(length)]
    return _invent_item(kind, name, shape, dtype, rng)


def _invent_item(kind: str, name: str, shape: tuple[int, ...], dtype: str, rng: random.Random) -> Value:
    if kind.startswith("Optional["):
        kind = kind[9:-1]
    match kind:
        case "Tensor":
            if any(part in name for part in _INDEX_NAMES):
                return TensorSpec("int64", shape if rng.random() < 0.6 else rng.choice(_SHAPES))
            return TensorSpec(dtype, shape if rng.random() < 0.8 else rng.choice(_SHAPES))
        case "int" | "AnyEnumType":
            return 6 if "dtype" in name else rng.choice((0, 1, 1, 2, 3))
        case "number" | "float" | "complex":
            return rng.choice((0.0, 1.0, 0.5, 2.0))
        case "bool":
            return rng.random() < 0.5
        case "str":
            return rng.choice(("mean", "sum", "none", "max", "trunc", "linear", "zeros", "reflect", "ij"))
        case "Device":
            return DEVICE
        case "Generator":
            return None
    return None


# --- hostile variants ---------------------------------------------------------------------------


def hostile_variant(call: Call, rng: random.Random) -> Call:
    """The call with one argument changed, sometimes two."""
    arguments = list(call.arguments)
    for _ in range(1 if rng.random() < 0.7 else 2):
        positions = [
            i for i, value in enumerate(arguments) if value is not None and not isinstance(value, Kind)
        ]
        if not positions:
            break
        # Index tensors are what most kernels trust.
        weights = [3 if _has_integers(arguments[i]) else 1 for i in positions]
        position = rng.choices(positions, weights)[0]
        arguments[position] = _mutate(arguments[position], rng)
        if _LOOPS.match(call.op):
            arguments[position] = _with_small_values(arguments[position])
    return Call(call.op, tuple(arguments))


def _with_small_values(value: Value) -> Value:
    if isinstance(value, TensorSpec) and value.values is not None:
        return dataclasses.replace(value, values=tuple(number % 100 for number in value.values))
    return value


def _has_integers(value: Value) -> bool:
    return isinstance(value, TensorSpec) and value.dtype in ("int64", "int32")


def _mutate(value: Value, rng: random.Random) -> Value:
    match value:
        case TensorSpec():
            return _mutate_tensor(value, rng)
        case bool():
            return not value
        case int():
            return _hostile_integer(value, rng)
        case float():
            return rng.choice(_HOSTILE_FLOATS)
        case str():
            return rng.choice(("", "mean", "none", "sum", "max", "prod", "bilinear", "\x00", "x" * 100))
        case list():
            return _mutate_list(value, rng)
    return value


def _hostile_integer(value: int, rng: random.Random) -> int:
    if rng.random() < 0.3:
        return min(max(value + rng.choice((-1, 1)), _INT64_MIN), _INT64_MAX)
    return rng.choice(HOSTILE_INTEGERS)


def _mutate_list(items: list[Value], rng: random.Random) -> list[Value]:
    changed = list(items)
    choice = rng.random()
    if not changed or choice < 0.1:
        changed.append(changed[-1] if changed else rng.choice((0, 1, TensorSpec("float32", (2,)))))
    elif choice < 0.2:
        changed.pop(rng.randrange(len(changed)))
    elif choice < 0.25:
        changed.clear()
    else:
        position = rng.randrange(len(changed))
        changed[position] = _mutate(changed[position], rng)
    return changed


def _mutate_tensor(spec: TensorSpec, rng: random.Random) -> Value:
    choice = rng.random()
    if spec.dtype in _INTEGER_RANGES and spec.element_count and choice < 0.6:
        return _with_hostile_values(spec, rng)
    if choice < 0.8:
        return _with_other_shape(spec, rng)
    if choice < 0.93:
        return dataclasses.replace(_without_values(spec), dtype=rng.choice(_DTYPES))
    if choice < 0.97 and spec.shape:
        expanded = rng.randrange(len(spec.shape))
        strides = list(contiguous_strides(spec.shape))
        strides[expanded] = 0
        return dataclasses.replace(_without_values(spec), strides=tuple(strides))
    return UNDEFINED


def _with_hostile_values(spec: TensorSpec, rng: random.Random) -> TensorSpec:
    low, high = _INTEGER_RANGES[spec.dtype]
    near = max(spec.values) if spec.values else spec.bounds[1]
    choices = (*HOSTILE_INTEGERS, near + 1, near + 2, near * 2 + 1, near + 64, near + 1500)
    values = list(integer_values(spec, rng))
    hostile = min(max(rng.choice(choices), low), high)
    if rng.random() < 0.3:
        values = [hostile] * len(values)
    else:
        values[rng.choice((0, -1, rng.randrange(len(values))))] = hostile
    return dataclasses.replace(spec, values=tuple(values))


def integer_values(spec: TensorSpec, rng: random.Random) -> tuple[int, ...]:
    """The values of a tensor with an integer dtype."""
    if spec.values is not None and len(spec.values) == spec.element_count:
        return spec.values
    low, high = _INTEGER_RANGES[spec.dtype]
    first, last = (min(max(bound, low), high) for bound in sorted(spec.bounds))
    return tuple(rng.randint(first, last) for _ in range(spec.element_count))


def _with_other_shape(spec: TensorSpec, rng: random.Random) -> TensorSpec:
    shape = list(spec.shape)
    choice = rng.random()
    if choice < 0.15 and len(shape) < _DIMENSIONS_MAX:
        shape.insert(rng.randint(0, len(shape)), rng.choice((1, 1, 2)))
    elif choice < 0.3 and shape:
        shape.pop(rng.randrange(len(shape)))
    elif choice < 0.4:
        shape = list(rng.choice(_SHAPES))
    elif shape:
        position = rng.randrange(len(shape))
        shape[position] = rng.choice(
            (0, 1, max(shape[position] - 1, 0), shape[position] + 1, shape[position] * 2)
        )
    return dataclasses.replace(_without_values(spec), shape=tuple(shape), strides=None)


def _without_values(spec: TensorSpec) -> TensorSpec:
    bounds = (
        spec.bounds if spec.values is None else (min(spec.values, default=0), max(spec.values, default=0))
    )
    return dataclasses.replace(spec, values=None, bounds=bounds)


# --- cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call to make; the name reproduces it."""

    name: str
    call: Call
    return_count: int


def cases_of(seed: int, *, variants: int, ops: Sequence[str] = ()) -> list[Case]:
    """Each recorded and each invented call, with hostile variants of it."""
    cases: list[Case] = []
    schemas = allowed_schemas()
    recorded = related_calls(schemas)
    for op, schema in schemas.items():
        if ops and op not in ops and op.partition(".")[0] not in ops:
            continue
        for index, call in enumerate([*recorded.get(op, ()), None]):
            for variant in range(variants + 1):
                name = f"{seed}:{op}:{index}:{variant}"
                rng = random.Random(name)
                varied = invented_call(schema, rng) if call is None else call
                if variant and (call is not None or rng.random() < 0.5):
                    varied = hostile_variant(varied, rng)
                cases.append(Case(name, varied, len(schema.returns)))
    return cases


@cache
def allowed_schemas() -> dict[str, Any]:
    """The schemas of the allowed ops, by name and overload."""
    import torch

    from genie.executor.session import ALLOWED_OPS

    schemas = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten" and name in ALLOWED_OPS:
            schemas[f"{name}.{schema.overload_name}".removesuffix(".")] = schema
    return dict(sorted(schemas.items()))
