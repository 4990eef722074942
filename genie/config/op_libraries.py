"""The rule for op libraries of executors: a namespace of ops, and the library that defines them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from genie.config.schema import ValidationRule

_NAMESPACE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_LIBRARIES_MAX = 64


def is_shared_object(library: str) -> bool:
    return library.endswith(".so")


def _are_op_libraries(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) <= _LIBRARIES_MAX
        and all(_NAMESPACE.fullmatch(namespace) for namespace in value)
        and all(
            PurePath(library).is_absolute() if is_shared_object(library) else _MODULE.fullmatch(library)
            for library in value.values()
        )
    )


OP_LIBRARIES = ValidationRule(
    "namespaces of ops with an absolute path of a shared object (.so) or the name of a Python module; "
    f"at most {_LIBRARIES_MAX}",
    _are_op_libraries,
)
