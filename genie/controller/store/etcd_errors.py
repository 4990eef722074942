"""Maps gRPC statuses of etcd to Genie's errors, and checks etcd versions.

etcd distinguishes many errors only by the text of the status; those texts are in this file
only. Retries are decided in etcd_channels.py.
"""

from __future__ import annotations

import re

import grpc
import grpc.aio

from genie.errors import (
    CompactedError,
    GenieError,
    LeaseLostError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreVersionError,
    UsageError,
)

NO_LEADER_MESSAGE = "etcdserver: no leader"
_LOST_CONNECTION_MESSAGE = "Internal error from Core"
"""Of gRPC itself: its stream ended without a status."""
_LEARNER_MESSAGE = "rpc not supported for learner"
_REJECTED_TOKEN_MESSAGES = ("invalid auth token", "revision of auth store is old", "user name is empty")
# Texts of gRPC itself: TSI is its TLS layer; the last one is about files without a certificate or key.
_TLS_FAILURE_MESSAGES = (
    "handshake failed",
    "TSI_",
    "No match found for server name",
    "create security handshaker",
)
_GRPC_CONNECT_FAILURE = re.compile(
    r"failed to connect to all addresses; last error: \w+: (ipv[46]:\S+: )?"
    r"(Failed to connect to remote host: )?"
)
_INSTALL_HINT = "install etcd 3.4.22 or later of 3.4, or 3.5.6 or later (Debian: etcd-server)"


def to_genie_error(
    error: grpc.aio.AioRpcError, *, action: str, endpoint: str, idempotent: bool
) -> GenieError:
    """`idempotent`: repeating the call changes nothing, so its caller need not find out what it did."""
    code, text = error.code(), error.details() or ""
    reason = (
        "the connection was lost"
        if _LOST_CONNECTION_MESSAGE in text
        else f"{without_grpc_address(text)!r} ({code.name})"
    )
    message = f"etcd at {endpoint}: {action} failed: {reason}"
    match code:
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "database space exceeded" in text:
            return StoreFullError(
                f"etcd at {endpoint} is out of space ({action}); nothing was changed",
                hint="compact and defragment, then `etcdctl alarm disarm`, or raise --quota-backend-bytes",
            )
        case grpc.StatusCode.NOT_FOUND if "lease not found" in text:
            return LeaseLostError(f"the lease has expired or was revoked ({action})", hint="grant a new one")
        case grpc.StatusCode.OUT_OF_RANGE if "compacted" in text:
            return CompactedError(message, hint="range again and watch from the returned revision")
        case grpc.StatusCode.OUT_OF_RANGE if "future revision" in text:
            return UsageError(message)
        case grpc.StatusCode.INVALID_ARGUMENT if "too large" in text or "too many operations" in text:
            return UsageError(message, hint="the server's limit is below Genie's: raise --max-request-bytes")
        case grpc.StatusCode.PERMISSION_DENIED:
            return StoreError(message, hint="grant the user a role with read and write on the namespace")
        case grpc.StatusCode.DATA_LOSS:
            return StoreCorruptError(
                message, hint="the data of a member differs from the others: see `etcdctl alarm list`"
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return StoreVersionError(f"{message}; this is not the etcd v3 API", hint=_INSTALL_HINT)
        case grpc.StatusCode.FAILED_PRECONDITION if is_rejected_by_learner(error):
            return StoreUnavailableError(message)
        case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.INVALID_ARGUMENT:
            return StoreError(message)
        case _:
            hint = "" if idempotent else "a write may have been applied: read the key to find out"
            return StoreUnavailableError(message, hint=hint)


def without_grpc_address(text: str) -> str:
    """The reason in gRPC's text for a failed connection, which repeats the address."""
    return _GRPC_CONNECT_FAILURE.sub("", text)


def is_token_rejected(error: grpc.aio.AioRpcError) -> bool:
    """True if the login token is no longer valid. etcd checks it first, so the call can be retried."""
    return any(known in (error.details() or "") for known in _REJECTED_TOKEN_MESSAGES)


def is_rejected_by_learner(error: grpc.aio.AioRpcError) -> bool:
    """True if the member does not vote yet; it rejects requests before applying them. The status is
    UNAVAILABLE up to etcd 3.5, FAILED_PRECONDITION from 3.6 on."""
    return _LEARNER_MESSAGE in (error.details() or "")


def is_watch_denied(reason: str) -> bool:
    """True if the watch was denied; etcd 3.4 reports an invalid login in the same way."""
    return "permission denied" in reason or any(known in reason for known in _REJECTED_TOKEN_MESSAGES)


def is_tls_failure(text: str) -> bool:
    return any(known in text for known in _TLS_FAILURE_MESSAGES)


def check_etcd_version(version: str, *, endpoint: str) -> None:
    """Raises StoreVersionError for servers that lose data or consistency when they are killed."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        raise StoreVersionError(f"etcd at {endpoint} has an unknown version {version!r}", hint=_INSTALL_HINT)
    major, minor, patch = (int(part) for part in found.groups())
    if (major, minor, patch) < (3, 4, 22) or (3, 5, 0) <= (major, minor, patch) < (3, 5, 6):
        raise StoreVersionError(
            f"etcd at {endpoint} is version {version}, which can lose data or consistency when it is killed",
            hint=_INSTALL_HINT,
        )
