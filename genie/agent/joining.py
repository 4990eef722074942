"""Joining a cluster: verifies the controller against the pin of the join token, then exchanges the token for
a node identity. The controller assigns the node ID."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from genie.agent.identity import AGENTS_DIR, write_identity
from genie.errors import ProtocolError, TokenRefusedError
from genie.model.messages.handshake import Join
from genie.model.names import address_text, validate_node_id
from genie.model.tenant import TokenKind
from genie.processes.tasks import Offload, run_inline
from genie.runtime import rpc, tls
from genie.runtime.credentials import make_pinned_client_tls
from genie.runtime.network import Network
from genie.tenancy.access import NO_PIN, parse_token

JOIN_TIMEOUT_S = 15.0


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
) -> Path:
    """Returns the directory of the new node. With `is_node_id_fixed`, a node ID that is in use is an error.
    `offload` writes the identity.

    The token is sent only to a server that the pin verifies.
    """
    token = parse_token(token_text)
    if token.kind is not TokenKind.JOIN:
        raise TokenRefusedError(
            f"a {token.kind} token cannot be used to join",
            hint="use 'genie join --server'"
            if token.kind is TokenKind.SERVER_JOIN
            else "create one: 'genie token create --join'",
        )
    preferred_id = validate_node_id(requested_node_id)
    trusted = await make_pinned_client_tls(
        network, host, port, pin=token.pin, state_dir=state_dir, timeout_s=timeout_s
    )
    key_pem, csr_pem = tls.new_key_and_csr()
    async with rpc.dial(network, host, port, tls=trusted, timeout_s=timeout_s) as peer:
        request = Join(
            token=str(token),
            requested_node_id=preferred_id,
            csr_pem=csr_pem,
            must_get_requested_id=is_node_id_fixed,
        )
        joined = await peer.call(request, timeout_s=timeout_s)
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
