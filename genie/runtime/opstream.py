"""A stream to an executor, set up: connected, its certificate checked, TLS ended where that is agreed.

Clients and executors that fetch from one another need the same, each with the streams of its own
C++ library. Not for: what is said over it (opwire.py), and when to connect (device/, agent/executor/).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from genie.errors import ConnectionLostError, NothingListensError, ProtocolError, TlsError, UnreachableError


def connect(
    library: Any,  # Any: compiled; genie_device or genie_executor
    *,
    host: str,
    port: int,
    server_name: str,
    trusted: Sequence[bytes] | None,
    peer: str,
    timeout_s: float,
) -> Any:
    """A stream of `library`. `trusted` holds CA certificates (DER); None: without TLS, on loopback only."""
    from genie.runtime.credentials import is_loopback  # late: `import genie.device` stays cheap

    if trusted is None and not is_loopback(host):
        raise TlsError(f"{peer} is on another machine, and there is no TLS to reach it with")
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except ConnectionRefusedError as error:
        raise NothingListensError(f"cannot reach {peer}: {error}") from error
    except (OSError, UnicodeError) as error:
        raise UnreachableError(f"cannot reach {peer}: {error}") from error
    if trusted is None:
        return library.Stream.bare(sock.detach())
    try:
        return library.Stream.tls_client(sock.detach(), list(trusted), server_name, timeout_s)
    except library.TlsRefused as error:
        raise TlsError(f"{peer} is not to be trusted: {error}") from error
    except library.ConnectionLost as error:
        raise ConnectionLostError(f"{peer} left during the handshake: {error}") from error


def agreed(stream: Any, *, bare: bool, peer: str, timeout_s: float) -> Any:
    """The stream that goes on after an answer that said `bare` or did not."""
    if not bare and not stream.encrypted:
        raise ProtocolError(f"{peer} wants an encrypted connection where none can be")
    if not bare or not stream.encrypted:
        return stream
    try:
        return stream.without_tls(timeout_s)
    except ConnectionError as error:
        raise ConnectionLostError(f"the connection to {peer} broke: {error}") from error
