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
    def encrypted(self) -> bool: ...


_S = TypeVar("_S", bound=Stream)
_S_co = TypeVar("_S_co", bound=Stream, covariant=True)


class StreamLibrary(Protocol[_S_co]):
    """genie_device or genie_executor."""

    @property
    def Stream(self) -> type[_S_co]: ...  # noqa: N802 - names of classes

    @property
    def TlsRefused(self) -> type[ConnectionError]: ...  # noqa: N802

    @property
    def ConnectionLost(self) -> type[ConnectionError]: ...  # noqa: N802


def connect(
    library: StreamLibrary[_S],
    *,
    host: str,
    port: int,
    server_name: str,
    trusted: Sequence[bytes] | None,
    peer: str,
    timeout_s: float,
) -> _S:
    """Connect, and complete the TLS handshake. `trusted` holds CA certificates (DER); None: no TLS, which is
    allowed on loopback only."""
    if trusted is None and not is_loopback(host):
        raise TlsError(f"{peer} is on another machine, and TLS is not configured")
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except ConnectionRefusedError as error:
        raise NothingListensError(f"cannot reach {peer}: {error}") from error
    except (OSError, UnicodeError) as error:
        raise UnreachableError(f"cannot reach {peer}: {error}") from error
    if trusted is None:
        return library.Stream.plaintext(sock.detach())
    try:
        return library.Stream.tls_client(sock.detach(), list(trusted), server_name, timeout_s)
    except library.TlsRefused as error:
        raise TlsError(f"TLS verification of {peer} failed: {error}") from error
    except library.ConnectionLost as error:
        raise ConnectionLostError(
            f"{peer} closed the connection during the TLS handshake: {error}"
        ) from error


def downgrade_if_plaintext(stream: _S, *, plaintext: bool, peer: str, timeout_s: float) -> _S:
    """The stream to use after the handshake: without TLS if the executor's reply sets `plaintext`."""
    if not plaintext and not stream.encrypted:
        raise ProtocolError(f"{peer} requires an encrypted connection, and this one has no TLS")
    if not plaintext or not stream.encrypted:
        return stream
    try:
        return stream.downgrade_to_plaintext(timeout_s)
    except ConnectionError as error:
        raise ConnectionLostError(f"the connection to {peer} broke: {error}") from error
