"""What a server sets for the whole process."""

from __future__ import annotations

import gc
import sys

from genie.runtime.tasks import tune_for_serving


def test_a_server_collects_seldom_and_hands_over_soon() -> None:
    threshold, interval_s = gc.get_threshold(), sys.getswitchinterval()
    try:
        tune_for_serving()
        assert gc.get_threshold()[0] > threshold[0]
        assert sys.getswitchinterval() < interval_s
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval_s)
