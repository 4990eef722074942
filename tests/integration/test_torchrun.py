"""Runs the torchrun command of the scheduling page with fewer processes and no GPUs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.repository_files import ROOT
from tests.integration.running_cluster import RunningCluster

TRAIN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():g}")
dist.destroy_process_group()
"""


def read_documented_command() -> list[str]:
    page = (ROOT / "docs" / "SCHEDULING.md").read_text("utf-8")
    (block,) = re.findall(r"^```sh\n(genie submit --workers 2 .*?torchrun.*?)^```", page, re.M | re.S)
    small = block.replace("--gpus 8 ", "").replace("--nproc-per-node=8", "--nproc-per-node=1")
    assert small.count("8") == 0, "every 8 in the example must be a number of GPUs or processes"
    return shlex.split(small.replace("genie submit", "submit --wait"))


@pytest.mark.long("imports torch in four processes")
def test_documented_torchrun_command_runs_in_a_gang(cluster: RunningCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, "-m", "genie", *read_documented_command()],
        cwd=tmp_path,
        env=cluster.environ(),
        capture_output=True,
        text=True,
        timeout=85,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 of 2: 3" in done.stdout
