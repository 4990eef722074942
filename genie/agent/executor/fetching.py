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
from genie.errors import NothingListensError, TlsError
from genie.runtime import opstream, opwire
from genie.runtime.credentials import is_loopback

_CONNECT_TIMEOUT_S = 10.0


class Fetcher:
    """What the library calls when a copy from another executor is due."""

    def __init__(self, library: Any, config: ExecutorConfig) -> None:  # Any: compiled
        self._library = library
        self._ca_path = config.ca_path

    def __call__(self, host: str, port: int, server_name: str, number: int, token: str) -> Any:
        """A stream on which the parcel comes next. TransportError, or what the other refused with."""
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
            request = opwire.Fetch(number=number, token=token, machine=opwire.this_machine())
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
