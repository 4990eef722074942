"""What a server sets for the whole process."""

from __future__ import annotations

import gc

from genie.runtime.tasks import tune_for_serving


def test_a_server_collects_seldom() -> None:
    threshold = gc.get_threshold()
    try:
        tune_for_serving()
        assert gc.get_threshold()[0] > threshold[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
