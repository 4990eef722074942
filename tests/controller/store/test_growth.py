"""How much a store grows per written byte: the estimate between two measurements must not be too low."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from genie.controller.jobs.space import STORE_GROWTH_PER_WRITTEN_BYTE_MAX
from genie.controller.store import MeasurableStore, Put
from genie.controller.store.limits import check_transaction_and_get_size_bytes
from tests.controller.store.conftest import Engine
from tests.controller.store.etcd_server import EtcdServer
from tests.waiting import until

MIB = 1024 * 1024
WRITTEN_BYTES_MIN = 6 * MIB
BATCH_BYTES = MIB


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """With batches of one change, etcd updates its size after every change."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), options=["--backend-batch-limit", "1"])
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("row_bytes", [300, 1200, 2000, 4200, 100_000])
async def test_store_grows_by_at_most_the_estimate(engine: Engine, row_bytes: int) -> None:
    """Rows of half a page need most: only one fits."""
    store = engine.store
    assert isinstance(store, MeasurableStore)
    before = (await store.measure_space()).used_bytes
    written_bytes = number = 0
    while written_bytes < WRITTEN_BYTES_MIN:
        batch = []
        for _ in range(min(100, BATCH_BYTES // row_bytes)):
            number += 1
            batch.append(Put(f"job/j-{row_bytes}-{number:08}", b"x" * row_bytes))
        written_bytes += check_transaction_and_get_size_bytes([], batch)
        await store.commit([], batch)

    async def has_grown() -> bool:
        """etcd counts the pages that a change has replaced until the next one."""
        await store.commit([], [Put("mark", b"")])
        growth = ((await store.measure_space()).used_bytes - before) / written_bytes
        return 0.9 < growth <= STORE_GROWTH_PER_WRITTEN_BYTE_MAX

    await until(
        has_grown, what=f"a growth of at most {STORE_GROWTH_PER_WRITTEN_BYTE_MAX} bytes per written byte"
    )
