"""Connects to another executor, whose shelf has what the client wants here, and shows it the token.

The client names the address and gives the token; neither is trusted further than that: the other
executor's certificate is checked as a client would, and without TLS only this machine is connected
to. Not for: the contents, which C++ reads (native/torch/executor/landing.h), and the other side
(door.py).
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genie.agent.executor.config import ExecutorConfig
from genie.errors import ConnectionLostError, DeadlineError, NothingListensError, TlsError
from genie.runtime import opstream, opwire
from genie.runtime.credentials import is_loopback

_CONNECT_TIMEOUT_S = 10.0
_KEPT_MAX = 16


class Fetcher:
    """What the library calls, on one thread, when a copy from another executor is due.

    Connections are kept for the next copy from the same executor; the library shuts down those that are of
    no more use.
    """

    def __init__(self, library: Any, config: ExecutorConfig) -> None:  # Any: compiled
        self._library = library
        self._ca_path = config.ca_path
        self._kept: dict[tuple[str, int, str], Any] = {}
        """By address, the longest unused first."""

    def __call__(self, host: str, port: int, server_name: str, number: int, token: str) -> Any:
        """A stream on which the parcel comes next. TransportError, or what the other refused with."""
        address = (host, port, server_name)
        request = opwire.Fetch(number=number, token=token, machine=opwire.this_machine())
        stream = self._asked_again(self._kept.pop(address, None), request)
        if stream is None:
            stream = self._asked_first(address, request)
        while len(self._kept) >= _KEPT_MAX:
            self._kept.pop(next(iter(self._kept))).close()
        self._kept[address] = stream
        return stream

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()

    def _asked_again(self, stream: Any, request: opwire.Fetch) -> Any:
        """None when there is no connection any more: the other keeps it for a while only."""
        if stream is None:
            return None
        try:
            opwire.fetch(stream, request, peer="the other executor", timeout_s=_CONNECT_TIMEOUT_S, again=True)
        except (ConnectionLostError, DeadlineError):
            stream.close()
            return None
        except BaseException:
            stream.close()
            raise
        return stream

    def _asked_first(self, address: tuple[str, int, str], request: opwire.Fetch) -> Any:
        host, port, server_name = address
        peer = f"the executor at {host}:{port}"
        try:
            stream = opstream.connect(
                self._library,
                host=host,
                port=port,
                server_name=server_name,
                trusted=self._trusted(),
                peer=peer,
                timeout_s=_CONNECT_TIMEOUT_S,
            )
        except NothingListensError as error:
            raise NothingListensError(error.message, hint=_why_nothing(host)) from error
        try:
            fetched = opwire.fetch(stream, request, peer=peer, timeout_s=_CONNECT_TIMEOUT_S)
            return opstream.agreed(stream, bare=fetched.bare, peer=peer, timeout_s=_CONNECT_TIMEOUT_S)
        except BaseException:
            stream.close()
            raise

    def _trusted(self) -> Sequence[bytes] | None:
        if not self._ca_path:
            return None
        try:
            return [ssl.PEM_cert_to_DER_cert(Path(self._ca_path).read_text("ascii"))]
        except (OSError, ValueError) as error:
            raise TlsError(f"the certificate of the cluster's CA cannot be read: {error}") from error


def _why_nothing(host: str) -> str:
    if is_loopback(host):
        return "it has ended, or it listens on loopback of another machine: set agent.host there"
    return "it has ended"
