"""Answers one command a line with one line of JSON, until its input ends. Started by fake.py."""

from __future__ import annotations

import sys

import msgspec

from genie.hardware import Inventory, probe


def main() -> None:
    with Inventory(cpu_accelerators=1) as inventory:
        commands = {
            "read": inventory.read,
            "probe": probe,
            "absent_reason": lambda: inventory.absent_reason,
        }
        for line in sys.stdin:
            sys.stdout.write(msgspec.json.encode(commands[line.strip()]()).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
