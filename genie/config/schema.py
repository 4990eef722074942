"""The settings engine: declares, converts and validates settings.

A setting is a field of a frozen dataclass: type, default, range, allowed values or rule, and help text.
`convert()` turns a raw value of a file, an environment variable or an argument into that type. An error names
the key, its source and the allowed values.

Used for the settings tree (sections.py) and the grid file (genie/grid/grid_file.py). Reads no source itself.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genie.errors import ConfigError

REQUIRED: Any = dataclasses.MISSING  # Any: the type of a default
"""The default of a setting that must be given."""
_SUGGESTIONS_MAX = 3
_SIMILARITY_MIN = 0.6
_VALUE_CHARS_MAX = 80
_TYPE_HINTS_BY_SECTION: dict[type[Any], dict[str, Any]] = {}
"""Type hints by section, because every command loads all settings."""


@dataclass(frozen=True)
class ValidationRule:
    """What a valid value looks like, beyond type, range and allowed values."""

    text: str
    accepts: Callable[[Any], bool]  # Any: a value of the setting's type


def setting(
    default: object,
    help_text: str,
    *,
    env: str = "",
    allowed: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
    rule: ValidationRule | None = None,
) -> Any:  # Any: dataclasses.field() is typed as the field's own type
    """Declares a setting. `env` overrides the derived name of its environment variable.

    The default of a mapping must be empty. `low` and `high` are inclusive. Errors and repr() do not contain a
    `secret`: notebooks print the latter.
    """
    meta = {
        "help": help_text,
        "env": env,
        "allowed": allowed,
        "low": low,
        "high": high,
        "secret": secret,
        "rule": rule,
    }
    if isinstance(default, dict):
        assert not default, "a default that is not empty would be shared and mutable"
        return dataclasses.field(default_factory=dict, metadata=meta)
    return dataclasses.field(default=default, repr=not secret, metadata=meta)


def convert(section: type[Any], name: str, raw: object, *, key: str, source: str) -> object:
    """Returns `raw` as the type of the field `name` of the dataclass `section`, validated.

    `key` is the full name of the setting. Raises ConfigError, which names `source` unless it is empty.
    """
    field = setting_fields(section)[name]
    kind = base_type(section, name)
    meta = field.metadata
    problem = ""
    value: object = None
    try:
        value = _PARSERS[kind](raw)
    except (ValueError, TypeError):
        problem = "is empty" if raw == "" else f"is not {_TYPE_NAMES[kind]}"
    else:
        if isinstance(value, str):
            value = next((word for word in meta["allowed"] if word.lower() == value.lower()), value)
        if not _is_allowed(value, meta):
            problem = "is not allowed"
    if problem:
        source_note = f" ({source})" if source else ""
        shown_value = "its value" if meta["secret"] else _format_rejected_value(raw)
        hint = _allowed_text(kind, meta)
        if raw == "" and kind is str and not meta["allowed"] and not meta["rule"]:
            hint = "give a value, or leave it out"
        raise ConfigError(f"{key} = {shown_value}{source_note} {problem}", hint=hint)
    return value


def check_key(name: str, known: Sequence[str], *, of: str, source: str, aliases: Iterable[str] = ()) -> None:
    """Raises ConfigError if `name` is not one of the `known` keys of the section `of`."""
    if name in known:
        return
    text = name[:_VALUE_CHARS_MAX]
    near = suggest_similar(name, [*known, *aliases])
    raise ConfigError(
        f"{source}: {text!r} is not a key of {of}",
        hint=f"{near}{' ' if near else ''}allowed: {', '.join(known)}",
    )


def suggest_similar(word: str, known: Sequence[str]) -> str:
    """'did you mean X?' with the nearest `known` words; '' if none is near, or too many are equally near."""
    near = difflib.get_close_matches(
        word, [each for each in known if _are_similar(word, each)], n=_SUGGESTIONS_MAX + 1
    )
    ratios = [difflib.SequenceMatcher(None, each, word).ratio() for each in near]
    best = [each for each, ratio in zip(near, ratios, strict=True) if ratio == ratios[0]]
    if not best or len(best) > _SUGGESTIONS_MAX:
        return ""
    return f"did you mean {' or '.join(sorted(best, key=known.index))}?"


def _are_similar(word: str, other: str) -> bool:
    """Compare without the leading words that both have: GENIE_ alone makes no two variables similar."""
    words, others = word.split("_"), other.split("_")
    while len(words) > 1 and len(others) > 1 and words[0] == others[0]:
        del words[0], others[0]
    if set(words) <= set(others):
        return True
    return difflib.SequenceMatcher(None, "_".join(words), "_".join(others)).ratio() >= _SIMILARITY_MIN


def setting_fields(section: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a dataclass that were declared with setting(), by name."""
    return {field.name: field for field in dataclasses.fields(section) if "help" in field.metadata}


def default_value(field: dataclasses.Field[Any]) -> object:
    return {} if field.default is dataclasses.MISSING else field.default


def base_type(section: type[Any], name: str) -> type:
    """bool, int, float, str, Path, Mapping or tuple; the type X of `X | None`."""
    hint = _type_hints(section)[name]
    origin = typing.get_origin(hint)
    if origin in _PARSERS:
        return typing.cast("type", origin)
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    return typing.cast("type", parts[0] if parts else hint)


def describe_type(section: type[Any], name: str) -> str:
    """The allowed values, or the name of the type, for documentation."""
    allowed = setting_fields(section)[name].metadata["allowed"]
    return " | ".join(allowed) if allowed else _TYPE_NAMES[base_type(section, name)]


def _type_hints(section: type[Any]) -> dict[str, Any]:
    if section not in _TYPE_HINTS_BY_SECTION:
        _TYPE_HINTS_BY_SECTION[section] = typing.get_type_hints(section)
    return _TYPE_HINTS_BY_SECTION[section]


def _is_allowed(value: object, meta: Mapping[str, Any]) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # Written so that NaN is outside of every range.
        if meta["low"] is not None and not value >= meta["low"]:
            return False
        if meta["high"] is not None and not value <= meta["high"]:
            return False
    if meta["allowed"] and value not in meta["allowed"]:
        return False
    return meta["rule"] is None or bool(meta["rule"].accepts(value))


def _to_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _BOOLEANS:
        return _BOOLEANS[raw.lower()]
    raise ValueError(raw)


def _to_int(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, (int, str)):
        raise TypeError(raw)
    if isinstance(raw, str) and not _INTEGER_PATTERN.fullmatch(raw.strip()):
        raise ValueError(raw)
    return int(raw)


def _to_float(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise TypeError(raw)
    if isinstance(raw, str) and not _NUMBER_PATTERN.fullmatch(raw.strip()):
        raise ValueError(raw)
    return float(raw)


def _to_str(raw: object) -> str:
    if not isinstance(raw, str) or not raw or "\x00" in raw:
        raise TypeError(raw)
    return str(raw)


def _to_path(raw: object) -> Path:
    return raw if isinstance(raw, Path) else Path(_to_str(raw))


def _to_mapping(raw: object) -> Mapping[str, str]:
    """From a mapping, or from text of the form K=V,K=V."""
    if isinstance(raw, Mapping):
        return {_to_str(key): _to_str(value) for key, value in raw.items()}
    pairs = [pair.strip().partition("=") for pair in _to_str(raw).split(",")]
    found = {key: value for key, equals, value in pairs if equals}
    if len(found) != len(pairs):  # a pair without '=', or a duplicate key
        raise ValueError(raw)
    return found


def _to_tuple(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, (list, tuple)):
        raise TypeError(raw)
    return tuple(map(_to_str, raw))


# Python also accepts underscores and the digits of other scripts.
_INTEGER_PATTERN = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER_PATTERN = re.compile(
    r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?"
)
_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)
_PARSERS: dict[Any, Callable[[object], object]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    Path: _to_path,
    Mapping: _to_mapping,
    tuple: _to_tuple,
}
_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    Mapping: "a mapping (K=V,K=V; a table in the file)",
    tuple: "a list of strings",
}


def _allowed_text(kind: type, meta: Mapping[str, Any]) -> str:
    if meta["allowed"]:
        return f"allowed: {', '.join(meta['allowed'])}"
    if meta["rule"]:
        return f"allowed: {meta['rule'].text}"
    if meta["low"] is not None:
        low, high = (_format_number(meta[bound]) for bound in ("low", "high"))
        return f"allowed: {_TYPE_NAMES[kind]} from {low} to {high}"
    return f"allowed: {_TYPE_NAMES[kind]}"


def _format_rejected_value(raw: object) -> str:
    text = repr(raw)
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[: _VALUE_CHARS_MAX - 3]}..."


def _format_number(number: float) -> str:
    """Whole numbers in full, because :g formats a limit in bytes as 1.09951e+12."""
    return str(int(number)) if number == int(number) else f"{number:g}"
