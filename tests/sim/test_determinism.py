"""A seed replays the same run in every process, whatever the addresses and hashes of its objects."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import hashlib
from genie.sim.world import World
from tests.sim.run import try_seed

times = []
transit = World.simulate_frame_latency

async def record(world):
    times.append(world.now_s)
    await transit(world)

World.simulate_frame_latency = record
violations = try_seed(40, "store").violations
print(len(times) > 100, hashlib.sha256(repr((times, violations)).encode()).hexdigest())
"""


def test_seed_runs_alike_in_every_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            timeout=80,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2", "3")
    }
    assert len(outputs) == 1
    assert outputs.pop().startswith("True")
