"""Becoming a node: the join token's pin is checked, then the token is spent for an identity of one's own.

The server decides the node's id. Not for: running as that node (agent.py).
"""

from __future__ import annotations

from pathlib import Path

from genie.agent.identity import AGENTS_DIR, write_identity
from genie.errors import ProtocolError, TokenRefusedError
from genie.model.messages import Join
from genie.model.names import checked_node_id
from genie.model.tenant import TokenKind
from genie.runtime import rpc, tls
from genie.runtime.credentials import trust
from genie.runtime.network import Network
from genie.tenancy.access import NO_PIN, parse_token

JOIN_S = 15.0


async def join(
    host: str,
    port: int,
    token_text: str,
    *,
    state_dir: Path,
    node_id_wish: str,
    network: Network,
    exact: bool = False,
    timeout_s: float = JOIN_S,
) -> Path:
    """The new node's directory. With `exact`, a node id that is taken is an error.

    The token goes only to a server that has proved to be of its cluster.
    """
    token = parse_token(token_text)
    if token.kind is not TokenKind.JOIN:
        raise TokenRefusedError(
            f"a {token.kind} token cannot be used to join", hint="ask for one: 'genie token create --join'"
        )
    wish = checked_node_id(node_id_wish)
    trusted = await trust(network, host, port, pin=token.pin, state_dir=state_dir, timeout_s=timeout_s)
    key_pem, csr_pem = tls.new_key_and_csr()
    async with rpc.dial(network, host, port, tls=trusted, timeout_s=timeout_s) as peer:
        request = Join(token=str(token), node_id_wish=wish, csr_pem=csr_pem, exact=exact)
        joined = await peer.call(request, timeout_s=timeout_s)
    node_id = checked_node_id(joined.node_id, what="the node id that the controller gave,")
    if token.pin != NO_PIN and tls.fingerprint(joined.ca_pem) != token.pin:
        raise ProtocolError(f"{host}:{port} answered with another CA than the one that it uses")
    node_dir = state_dir / AGENTS_DIR / node_id
    write_identity(
        node_dir,
        token=joined.token,
        certificate_pem=joined.certificate_pem,
        key_pem=key_pem,
        ca_pem=joined.ca_pem,
        controller=(host, port),
    )
    return node_dir
