"""Opens streams to executors: TCP connection, certificate check, and TLS shutdown where both ends agree on
it.

Clients use it, and executors that fetch parcels from each other; each passes its own C++ library.
Does not implement the handshake (runtime/device_protocol.py).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

from genie.errors import ConnectionLostError, NothingListensError, ProtocolError, TlsError, UnreachableError
from genie.model.names import is_loopback


class Stream(Protocol):
    """What this module uses of the class `Stream` of a library (native/torch/stream_bindings.h)."""

    @classmethod
    def plaintext(cls, fd: int) -> Self: ...

    @classmethod
    def tls_client(
        cls, fd: int, ca_der: Sequence[bytes], server_name: str, timeout_s: float | None
    ) -> Self: ...

    def downgrade_to_plaintext(self, timeout_s: float | None) -> Self: ...

    @property
    def is_encrypted(self) -> bool: ...


_StreamT = TypeVar("_StreamT", bound=Stream)
_StreamT_co = TypeVar("_StreamT_co", bound=Stream, covariant=True)


class StreamLibrary(Protocol[_StreamT_co]):
    """genie_device or genie_executor."""

    @property
    def Stream(self) -> type[_StreamT_co]: ...  # noqa: N802 - names of classes

    @property
    def TlsHandshakeFailed(self) -> type[ConnectionError]: ...  # noqa: N802

    @property
    def ConnectionLost(self) -> type[ConnectionError]: ...  # noqa: N802


def connect(
    library: StreamLibrary[_StreamT],
    *,
    host: str,
    port: int,
    server_name: str,
    ca_certificates: Sequence[bytes] | None,
    peer: str,
    timeout_s: float,
) -> _StreamT:
    """Connect, and complete the TLS handshake. `ca_certificates` are trusted (DER); None: no TLS, which
    is allowed on loopback only."""
    if ca_certificates is None and not is_loopback(host):
        raise TlsError(f"{peer} is on another machine, and TLS is not configured")
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except ConnectionRefusedError as error:
        raise NothingListensError(f"cannot reach {peer}: {error}") from error
    except (OSError, UnicodeError) as error:
        raise UnreachableError(f"cannot reach {peer}: {error}") from error
    if ca_certificates is None:
        return library.Stream.plaintext(sock.detach())
    try:
        return library.Stream.tls_client(sock.detach(), list(ca_certificates), server_name, timeout_s)
    except library.TlsHandshakeFailed as error:
        raise TlsError(f"TLS verification of {peer} failed: {error}") from error
    except library.ConnectionLost as error:
        raise ConnectionLostError(
            f"{peer} closed the connection during the TLS handshake: {error}"
        ) from error


def downgrade_if_plaintext(stream: _StreamT, *, plaintext: bool, peer: str, timeout_s: float) -> _StreamT:
    """The stream to use after the handshake: without TLS if the executor's reply sets `plaintext`."""
    if not plaintext and not stream.is_encrypted:
        raise ProtocolError(f"{peer} requires an encrypted connection, and this one has no TLS")
    if not plaintext or not stream.is_encrypted:
        return stream
    try:
        return stream.downgrade_to_plaintext(timeout_s)
    except ConnectionError as error:
        raise ConnectionLostError(f"the connection to {peer} broke: {error}") from error
