"""Tokens that a controller without tables reads from the store."""

from __future__ import annotations

import msgspec
import pytest

from genie.config.sections import ControllerConfig
from genie.controller.election import Election, StoreHealth
from genie.controller.ledger import Ledger
from genie.controller.rows import ClusterRecord
from genie.controller.store import Put
from genie.controller.tokens import TokenRegistry
from genie.errors import StoreUnavailableError, TokenRefusedError
from genie.model.tenant import TokenKind
from genie.sim.store import MemoryStore
from genie.tenancy.access import SECRET_BYTES, new_token, new_token_record
from tests.fakes.clock import FakeClock


async def test_forwarded_token_of_a_newer_release_is_refused_with_that_reason() -> None:
    clock, health = FakeClock(), StoreHealth()
    store = await MemoryStore.open(clock=clock)
    ledger = Ledger(
        store, Election(store, clock=clock, name="two", ttl_s=5.0, health=health), health, clock=clock
    )
    tokens = TokenRegistry(ledger, store, config=ControllerConfig(), clock=clock, random_bytes=bytes, pin="-")
    row = {"token_id": "red1", "kind": "user", "secret_sha256": "", "created_at": 1.0, "only_reads": True}
    await store.commit([], [Put("token/red1", msgspec.json.encode(row))])
    await store.commit([], [Put("cluster", msgspec.json.encode(ClusterRecord(cluster_id="c", ca_pin="-")))])
    await ledger.read_all_tables()
    with pytest.raises(TokenRefusedError, match="does not know only_reads"):
        tokens.identify_forwarded_client("red1")
    await store.close()


async def test_cached_token_is_accepted_for_a_minute_without_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, health = FakeClock(), StoreHealth()
    store = await MemoryStore.open(clock=clock)
    ledger = Ledger(
        store, Election(store, clock=clock, name="two", ttl_s=5.0, health=health), health, clock=clock
    )
    tokens = TokenRegistry(ledger, store, config=ControllerConfig(), clock=clock, random_bytes=bytes, pin="-")
    token = new_token(TokenKind.USER, token_id="00" * 6, secret=bytes(SECRET_BYTES), pin="-")
    record = new_token_record(token, now=clock.wall_s(), tenant="red")
    await store.commit([], [Put(ledger.tokens.prefix + token.token_id, msgspec.json.encode(record))])
    assert (await tokens.authenticate_token(str(token))).tenant == "red"

    async def fail(*arguments: object, **settings: object) -> object:
        raise StoreUnavailableError("the store does not respond")

    monkeypatch.setattr(store, "get", fail)
    await clock.advance(59)
    assert (await tokens.authenticate_token(str(token))).tenant == "red"
    await clock.advance(2)
    with pytest.raises(StoreUnavailableError):
        await tokens.authenticate_token(str(token))
    await store.close()
