"""Connects to another executor to fetch a parcel.

The client provides the address and the token. The certificate of the other executor is checked, and without
TLS only this machine is connected to. C++ receives the contents (native/torch/executor/parcel_fetcher.h);
listener.py is the other side.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from genie.errors import ConnectionLostError, DeadlineError, NothingListensError, TlsError
from genie.model.names import address_text, is_loopback
from genie.native import executor_stream, genie_executor
from genie.processes.executor_config import ExecutorConfig
from genie.runtime import device_protocol

if TYPE_CHECKING:
    from genie.native.genie_executor import Stream

_CONNECT_TIMEOUT_S = 10.0
_REUSABLE_CONNECTIONS_MAX = 16


class ParcelConnector:
    """Called by the library, on one thread, to fetch a parcel.

    Keeps connections for later parcels of the same executor; the library shuts down unusable ones.
    """

    def __init__(self, config: ExecutorConfig) -> None:
        self._ca_path = config.ca_path
        self._reusable_streams: dict[tuple[str, int, str], Stream] = {}
        """By address, least recently used first."""

    def __call__(self, host: str, port: int, server_name: str, number: int, token: str) -> Stream:
        """Return a stream on which the parcel follows. TransportError, or the error of the other executor."""
        address = (host, port, server_name)
        request = device_protocol.Fetch(
            number=number, token=token, machine=device_protocol.machine_identity()
        )
        stream = self._try_request_on_open_stream(self._reusable_streams.pop(address, None), request)
        if stream is None:
            stream = self._connect_and_request(address, request)
        while len(self._reusable_streams) >= _REUSABLE_CONNECTIONS_MAX:
            self._reusable_streams.pop(next(iter(self._reusable_streams))).close()
        self._reusable_streams[address] = stream
        return stream

    def close(self) -> None:
        while self._reusable_streams:
            self._reusable_streams.popitem()[1].close()

    def _try_request_on_open_stream(
        self, stream: Stream | None, request: device_protocol.Fetch
    ) -> Stream | None:
        """None if the connection is lost: the other executor closes it when it is idle."""
        if stream is None:
            return None
        try:
            device_protocol.request_fetch(
                stream, request, peer="the other executor", timeout_s=_CONNECT_TIMEOUT_S, is_reused=True
            )
        except (ConnectionLostError, DeadlineError):
            stream.close()
            return None
        except BaseException:
            stream.close()
            raise
        return stream

    def _connect_and_request(self, address: tuple[str, int, str], request: device_protocol.Fetch) -> Stream:
        host, port, server_name = address
        peer = f"the executor at {address_text(host, port)}"
        try:
            stream = executor_stream.connect(
                genie_executor,
                host=host,
                port=port,
                server_name=server_name,
                ca_certificates=self._read_trusted_certificates(),
                peer=peer,
                timeout_s=_CONNECT_TIMEOUT_S,
            )
        except NothingListensError as error:
            raise NothingListensError(error.message, hint=_connection_refused_hint(host)) from error
        try:
            fetched = device_protocol.request_fetch(stream, request, peer=peer, timeout_s=_CONNECT_TIMEOUT_S)
            return executor_stream.downgrade_if_plaintext(
                stream, plaintext=fetched.plaintext, peer=peer, timeout_s=_CONNECT_TIMEOUT_S
            )
        except BaseException:
            stream.close()
            raise

    def _read_trusted_certificates(self) -> Sequence[bytes] | None:
        if not self._ca_path:
            return None
        try:
            return [ssl.PEM_cert_to_DER_cert(Path(self._ca_path).read_text("ascii"))]
        except (OSError, ValueError) as error:
            raise TlsError(f"cannot read the certificate of the cluster's CA: {error}") from error


def _connection_refused_hint(host: str) -> str:
    if is_loopback(host):
        return "it has ended, or it listens on loopback of another machine: set agent.host there"
    return "it has ended"
