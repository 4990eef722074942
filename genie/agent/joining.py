"""Joining a cluster: verifies the controller against the pin of the join token, then exchanges the token for
a node identity. The controller assigns the node ID."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypeVar

from genie.agent.identity import AGENTS_DIR, ControllerAddress, write_identity
from genie.errors import (
    ConnectionLostError,
    DeadlineError,
    GenieError,
    NotLeaderError,
    ProtocolError,
    TokenRefusedError,
    UnreachableError,
)
from genie.model.messages import Message, Request
from genie.model.messages.handshake import Join
from genie.model.names import address_text, is_loopback, parse_endpoint, validate_node_id
from genie.model.tenant import TokenKind
from genie.processes.clock import Clock, SystemClock
from genie.processes.tasks import Offload, run_inline
from genie.runtime import rpc, tls
from genie.runtime.credentials import make_pinned_client_tls
from genie.runtime.network import Network
from genie.tenancy.access import NO_PIN, parse_token

JOIN_TIMEOUT_S = 15.0
_ELECTION_RETRY_INTERVAL_S = 0.5
_ATTEMPT_TIMEOUT_S_MIN = 0.001

_Reply = TypeVar("_Reply", bound=Message)


async def join_cluster(
    host: str,
    port: int,
    token_text: str,
    *,
    state_dir: Path,
    requested_node_id: str,
    network: Network,
    is_node_id_fixed: bool = False,
    offload: Offload = run_inline,
    timeout_s: float = JOIN_TIMEOUT_S,
    clock: Clock | None = None,
) -> Path:
    """Returns the directory of the new node. With `is_node_id_fixed`, a node ID that is in use is an error.
    `offload` writes the identity.

    The token is sent only to a server that the pin verifies. A standby is followed to the leader.
    """
    token = parse_token(token_text)
    if token.kind is not TokenKind.JOIN:
        raise TokenRefusedError(
            f"{token.kind.with_article} token cannot be used to join",
            hint="use 'genie join --server'"
            if token.kind is TokenKind.SERVER_JOIN
            else "create one: 'genie token create --join'",
        )
    preferred_id = validate_node_id(requested_node_id)
    key_pem, csr_pem = tls.new_key_and_csr()
    request = Join(
        token=str(token),
        requested_node_id=preferred_id,
        csr_pem=csr_pem,
        must_get_requested_id=is_node_id_fixed,
    )
    joined, (host, port) = await call_leader(
        request,
        (host, port),
        pin=token.pin,
        state_dir=state_dir,
        network=network,
        timeout_s=timeout_s,
        clock=clock or SystemClock(),
    )
    node_id = validate_node_id(joined.node_id, what="the node ID from the controller,")
    if token.pin != NO_PIN and tls.fingerprint(joined.ca_pem) != token.pin:
        raise ProtocolError(f"{address_text(host, port)} returned another CA than that of its certificate")
    node_dir = state_dir / AGENTS_DIR / node_id
    write = partial(
        write_identity,
        node_dir,
        token=joined.token,
        certificate_pem=joined.certificate_pem,
        key_pem=key_pem,
        ca_pem=joined.ca_pem,
        controller=(host, port),
    )
    await offload(write, writes=True)
    return node_dir


async def call_leader(
    request: Request[_Reply],
    server: ControllerAddress,
    *,
    pin: str,
    state_dir: Path,
    network: Network,
    timeout_s: float,
    clock: Clock,
) -> tuple[_Reply, ControllerAddress]:
    """Sends a request that needs no login to the leader; `server` may be a standby, which names the leader.
    Returns the reply and the address of the leader. Each server is verified against the pin.

    While none leads, such as during an election, or while the named leader cannot be reached, asks `server`
    again until `timeout_s`. A request whose reply was lost is not repeated: its token may be used up.
    """
    deadline_s = clock.monotonic_s() + timeout_s
    target = server
    while True:
        remaining_s = max(deadline_s - clock.monotonic_s(), _ATTEMPT_TIMEOUT_S_MIN)
        # A leader that was lost with its machine may not respond: reserves time to ask for the next one.
        attempt_s = remaining_s if target == server else remaining_s / 2
        is_sent = False
        try:
            trusted = await make_pinned_client_tls(
                network, *target, pin=pin, state_dir=state_dir, timeout_s=attempt_s
            )
            async with rpc.dial(network, *target, tls=trusted, timeout_s=attempt_s) as peer:
                remaining_s = max(deadline_s - clock.monotonic_s(), _ATTEMPT_TIMEOUT_S_MIN)
                is_sent = True
                return await peer.call(request, timeout_s=remaining_s), target
        except NotLeaderError as error:
            failure: GenieError = error
            leader = parse_endpoint(error.leader) if error.leader else server
        except (UnreachableError, ConnectionLostError, DeadlineError) as error:
            if target == server or is_sent:
                raise
            failure, leader = error, server
        if pin == NO_PIN and not is_loopback(leader[0]):
            leader = server
        if leader == server or target != server:  # otherwise two servers that name each other, without end
            await clock.sleep(_ELECTION_RETRY_INTERVAL_S)
        if clock.monotonic_s() >= deadline_s:
            raise failure
        target = leader
