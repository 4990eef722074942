"""Lists of a large cluster are complete: clients fetch all pages."""

from __future__ import annotations

from pathlib import Path

import msgspec

from genie.cluster.client import ClusterClient
from genie.config import WorkdirConfig
from genie.controller.ledger import Ledger, Transaction
from genie.controller.requests.reply_size import truncate_to_reply
from genie.controller.rows import NodeRecord
from genie.model.messages import ListTokens
from genie.model.tenant import TokenKind, TokenRecord
from genie.runtime.controller_connection import open_controller_connection
from tests.controller.running_controller import running_controller
from tests.fakes.agent import make_node_info

NODES = 700
TOKENS = 2000


async def _add_nodes_and_tokens(ledger: Ledger) -> None:
    info = make_node_info("n", gpus=8)
    infos = [msgspec.structs.replace(info, node_id=f"n{number:04}") for number in range(NODES)]
    tokens = [
        TokenRecord(
            token_id=f"{number:012x}",
            kind=TokenKind.NODE,
            secret_sha256="0" * 64,
            name="x" * 600,
            created_at=float(number),
        )
        for number in range(TOKENS)
    ]

    def nodes(txn: Transaction, start: int) -> None:
        for one in infos[start : start + 50]:
            txn.put(ledger.nodes, one.node_id, NodeRecord(info=one))

    def rows(txn: Transaction, start: int) -> None:
        for token in tokens[start : start + 100]:
            txn.put(ledger.tokens, token.token_id, token)

    for start in range(0, NODES, 50):
        await ledger.write(lambda txn, start=start: nodes(txn, start))
    for start in range(0, TOKENS, 100):
        await ledger.write(lambda txn, start=start: rows(txn, start))


async def test_client_lists_all_nodes_and_all_tokens(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as one:
        assert one.controller is not None
        await _add_nodes_and_tokens(one.controller._ledger)
        async with open_controller_connection(
            await one.access(), network=one.network, program="test", timeout_s=10
        ) as connection:
            client = ClusterClient(connection, workdir_limits=WorkdirConfig())
            nodes = [view.info.node_id for view in await client.nodes()]
            assert nodes == [f"n{number:04}" for number in range(NODES)]
            tokens = await client.list_tokens()
            assert len(tokens) == TOKENS + 1, "and the token of the owner"
            created = [token.created_at for token in tokens]
            assert created == sorted(created, reverse=True)
            assert not any(token.secret_sha256 for token in tokens)
            assert (await connection.call(ListTokens(), timeout_s=10)).more


def test_page_reads_no_items_beyond_the_first_that_does_not_fit() -> None:
    read: list[int] = []

    def tokens() -> object:
        for number in range(100):
            read.append(number)
            yield TokenRecord(
                token_id="t", kind=TokenKind.USER, secret_sha256="", name="x" * 100_000, created_at=0.0
            )

    page, more = truncate_to_reply(tokens())  # type: ignore[arg-type, var-annotated]
    assert (len(page), more) == (9, True)
    assert len(read) == 10
