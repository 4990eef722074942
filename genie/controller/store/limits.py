"""Argument checks that every engine makes first, so that all engines reject the same requests.

The limits are defined in protocol.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from genie.controller.store.protocol import (
    KEY_BYTES_MAX,
    LEASE_TTL_S_MAX,
    RANGE_LIMIT_MAX,
    TXN_BYTES_MAX,
    TXN_OPS_MAX,
    VALUE_BYTES_MAX,
    Compare,
    Delete,
    Put,
)
from genie.errors import RowTooLargeError, UsageError

# UTF-8 has no byte 0xff, so prefix + 0xff sorts after every key that starts with the prefix.
_BYTE_AFTER_ALL_KEYS = b"\xff"


def encode_key(key: str) -> bytes:
    """Encodes a key as UTF-8. Raises UsageError when it is empty, too long or not valid UTF-8."""
    if not key:
        raise UsageError("a store key is empty", hint="use at least one character")
    return _encode_utf8(key, text_name="store key")


def key_range(prefix: str, *, start_after: str = "") -> tuple[bytes, bytes]:
    """(first, end) in byte order: the keys under `prefix` after `start_after` are first <= key < end."""
    prefix_bytes = _encode_utf8(prefix, text_name="prefix")
    after = _encode_utf8(start_after, text_name="start_after")
    first = max(prefix_bytes, after + b"\0") if after else prefix_bytes
    return first, prefix_bytes + _BYTE_AFTER_ALL_KEYS


def check_range_limit(limit: int) -> None:
    if not 1 <= limit <= RANGE_LIMIT_MAX:
        raise UsageError(f"range limit {limit} is not between 1 and {RANGE_LIMIT_MAX}")


def check_after_revision(after_revision: int) -> None:
    if after_revision < 0:
        raise UsageError(f"a watch cannot start after revision {after_revision}; the minimum is 0")


def check_ttl(ttl_s: float) -> None:
    # Written so that NaN is rejected too.
    if not 0 < ttl_s <= LEASE_TTL_S_MAX:
        raise UsageError(f"lease TTL {ttl_s} s is not above 0 and at most {LEASE_TTL_S_MAX:.0f} s")


def check_transaction_and_get_size_bytes(
    compares: Sequence[Compare], operations: Sequence[Put | Delete], *, ops_max: int = TXN_OPS_MAX
) -> int:
    """Checks a transaction and returns its size in bytes, as counted against TXN_BYTES_MAX."""
    if len(compares) > ops_max or len(operations) > ops_max:
        raise UsageError(
            f"a transaction has {len(compares)} compares and {len(operations)} operations",
            hint=f"at most {ops_max} of each; split it",
        )
    size_bytes = 0
    for compare in compares:
        size_bytes += _compare_size_bytes(compare)
    for operation in operations:
        size_bytes += operation_size_bytes(operation)
    if size_bytes > TXN_BYTES_MAX:
        raise RowTooLargeError(
            f"a transaction has {size_bytes} bytes; the limit is {TXN_BYTES_MAX}", hint="split it"
        )
    if len(operations) > 1 and len({operation.key for operation in operations}) != len(operations):
        raise UsageError("a key occurs in two operations of one transaction")
    return size_bytes


def _compare_size_bytes(compare: Compare) -> int:
    key = compare.key
    if compare.revision < 0:
        raise UsageError(f"compare of {key!r} with revision {compare.revision}; the minimum is 0")
    # Fast path for ASCII keys; encode_key() handles the rest and the errors. Here and below.
    key_bytes = len(key)
    return key_bytes if 0 < key_bytes <= KEY_BYTES_MAX and key.isascii() else len(encode_key(key))


def operation_size_bytes(operation: Put | Delete) -> int:
    """Size in bytes as counted against TXN_BYTES_MAX. Raises UsageError for an invalid operation."""
    key = operation.key
    key_bytes = len(key)
    if not (0 < key_bytes <= KEY_BYTES_MAX and key.isascii()):
        key_bytes = len(encode_key(key))
    if not isinstance(operation, Put):
        return key_bytes
    value_bytes = len(operation.value)
    if value_bytes > VALUE_BYTES_MAX:
        raise RowTooLargeError(
            f"the value of {key!r} has {value_bytes} bytes; the limit is {VALUE_BYTES_MAX}"
        )
    if operation.lease_id < 0:
        raise UsageError(f"put of {operation.key!r} with lease {operation.lease_id}; lease IDs are above 0")
    return key_bytes + value_bytes


def _encode_utf8(text: str, *, text_name: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{text_name} {text[:40]!r} is not valid UTF-8: {error.reason}") from None
    if len(encoded) > KEY_BYTES_MAX:
        raise UsageError(
            f"{text_name} {text[:40]!r}... has {len(encoded)} bytes; the limit is {KEY_BYTES_MAX}"
        )
    return encoded
