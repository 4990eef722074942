"""The limit on open files, and returning memory, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

RAISE_LIMIT_SCRIPT = """
import resource, sys
from genie.processes.file_limit import raise_open_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))
print(raise_open_file_limit(int(sys.argv[1])), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
TRIM_HEAP_SCRIPT = """
from genie.processes import memory

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

class Node:
    pass

nodes = []
for _ in range(20_000):
    one, other = Node(), Node()
    one.other, other.other, one.data = other, one, bytes(2000)
    nodes.append(one)
peak = resident_bytes()
del nodes, one, other
memory.collect_garbage()
print(memory.trim_heap(), peak - resident_bytes() > 20_000_000)
"""


def run_python(code: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()


@pytest.mark.parametrize(("wanted", "found"), [("64", "128"), ("300", "300"), ("4096", "512")])
def test_open_file_limit_is_raised_up_to_the_hard_limit_and_never_lowered(wanted: str, found: str) -> None:
    assert run_python(RAISE_LIMIT_SCRIPT, wanted) == [found, found, "512"]


def test_memory_of_freed_objects_is_returned_to_the_system() -> None:
    trimmed, is_less = run_python(TRIM_HEAP_SCRIPT)
    assert is_less == "True" or trimmed == "False", "the C library cannot trim"
