"""What an etcd answer means: gRPC statuses as Genie's errors, and which versions may be used.

etcd tells many cases apart only by the text of the status, so the texts are here, and only
here. Not for: deciding whether to try again with another endpoint (etcd_channels.py).
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

NO_LEADER = "etcdserver: no leader"
_TOKEN_TEXTS = ("invalid auth token", "revision of auth store is old", "user name is empty")
# gRPC's own words: TSI is its TLS layer; the last is said of files that hold no certificate or key.
_TLS_TEXTS = ("handshake failed", "TSI_", "No match found for server name", "create security handshaker")
_INSTALL = "install etcd 3.4.22 or later of 3.4, or 3.5.6 or later (Debian: etcd-server)"


def translate(error: grpc.aio.AioRpcError, *, doing: str, endpoint: str) -> GenieError:
    code, text = error.code(), error.details() or ""
    told = f"etcd at {endpoint} answered {text!r} ({code.name}) to {doing}"
    match code:
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "database space exceeded" in text:
            return StoreFullError(
                f"etcd at {endpoint} is out of space ({doing}); nothing was changed",
                hint="compact and defragment it, then `etcdctl alarm disarm`, or raise --quota-backend-bytes",
            )
        case grpc.StatusCode.NOT_FOUND if "lease not found" in text:
            return LeaseLostError(f"the lease has expired or was revoked ({doing})", hint="grant a new one")
        case grpc.StatusCode.OUT_OF_RANGE if "compacted" in text:
            return CompactedError(told, hint="range again and watch from the revision it gives")
        case grpc.StatusCode.OUT_OF_RANGE if "future revision" in text:
            return UsageError(told)
        case grpc.StatusCode.INVALID_ARGUMENT if "too large" in text or "too many operations" in text:
            return UsageError(
                told, hint="the server allows less than Genie's own limits: --max-request-bytes"
            )
        case grpc.StatusCode.PERMISSION_DENIED:
            return StoreError(told, hint="give the user a role with read and write on the namespace")
        case grpc.StatusCode.DATA_LOSS:
            return StoreCorruptError(
                told, hint="a member has other data than the rest: see `etcdctl alarm list`"
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return StoreVersionError(f"{told}; this is not the etcd v3 API", hint=_INSTALL)
        case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.INVALID_ARGUMENT:
            return StoreError(told)
        case _:
            return StoreUnavailableError(
                told, hint="a write may have happened all the same: read to find out"
            )


def is_token_refused(error: grpc.aio.AioRpcError) -> bool:
    """The login is no longer valid. etcd says so before it does anything, so the call can be repeated."""
    return any(known in (error.details() or "") for known in _TOKEN_TEXTS)


def is_watch_refused(reason: str) -> bool:
    """The watch was ended for want of a right, which etcd 3.4 also says when the login is not valid."""
    return "permission denied" in reason or any(known in reason for known in _TOKEN_TEXTS)


def is_tls_failure(text: str) -> bool:
    return any(known in text for known in _TLS_TEXTS)


def check_version(version: str, *, endpoint: str) -> None:
    """StoreVersionError for servers that lose data or consistency when they are killed."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        raise StoreVersionError(f"etcd at {endpoint} calls its version {version!r}", hint=_INSTALL)
    major, minor, patch = (int(part) for part in found.groups())
    if (major, minor, patch) < (3, 4, 22) or (3, 5, 0) <= (major, minor, patch) < (3, 5, 6):
        raise StoreVersionError(
            f"etcd at {endpoint} is version {version}, which can lose data or let members differ "
            "when it is killed",
            hint=_INSTALL,
        )
