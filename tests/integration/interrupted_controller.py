"""A real controller process that can be killed between two transactions of a release.

After SIGUSR1, its transactions have room for the row of one node only, as they would have on nodes with
thousands of workers, and the process kills itself (SIGKILL) before the second part of the next release is
stored. It creates the file `armed` in its state directory then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genie.controller import __main__ as controller_main
from genie.controller.jobs import changes
from genie.controller.ledger import write_batch
from genie.controller.store import Compare, Delete, Put, Store
from genie.controller.store.limits import check_transaction_and_get_size_bytes
from genie.errors import RowTooLargeError

MODULE = "tests.integration.interrupted_controller"
ARMED_FILE = "armed"

_armed = threading.Event()


def _arm_kill_in_next_release(state_dir: Path) -> None:
    _armed.set()
    changes._RELEASE_TXN_NODES_MAX = 1
    write_batch.TXN_OPS_MAX = 0  # so that every transaction is checked
    write_batch.check_transaction_and_get_size_bytes = _check_small_transaction
    (state_dir / ARMED_FILE).touch()


def _check_small_transaction(
    compares: Sequence[Compare], operations: Sequence[Put | Delete], *, ops_max: int = 0
) -> int:
    if sum(operation.key.startswith("ledger/") for operation in operations) > 1:
        raise RowTooLargeError("the transaction has the rows of several nodes")
    return check_transaction_and_get_size_bytes(compares, operations)


async def _open_store(*arguments: Any, **more: Any) -> Store:
    store = await _open_real_store(*arguments, **more)
    commit, parts = store.commit, 0

    async def commit_or_kill_process(
        compares: Sequence[Any], operations: Sequence[Put | Delete], **options: Any
    ) -> Any:
        nonlocal parts
        if _armed.is_set() and any(_is_part_of_release(operation) for operation in operations):
            parts += 1
            if parts == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return await commit(compares, operations, **options)

    store.commit = commit_or_kill_process  # type: ignore[method-assign]
    return store


def _is_part_of_release(operation: Put | Delete) -> bool:
    return isinstance(operation, Put) and b"its launch is no longer valid" in operation.value


_open_real_store = controller_main.open_store


if __name__ == "__main__":
    state_directory = Path(sys.argv[sys.argv.index("--state-dir") + 1])
    controller_main.open_store = _open_store
    signal.signal(signal.SIGUSR1, lambda *_: _arm_kill_in_next_release(state_directory))
    sys.exit(controller_main.main())
