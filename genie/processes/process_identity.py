"""Identity of a process: process ID and start time, so that a reused process ID never matches."""

from __future__ import annotations

from dataclasses import dataclass

from genie.processes import process_table


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process; a later process with the same ID has another start mark."""

    pid: int
    start_mark: str

    @classmethod
    def of_pid(cls, pid: int) -> ProcessIdentity | None:
        start = process_table.start_mark(pid)
        return cls(pid, start) if start else None

    @property
    def is_alive(self) -> bool:
        """False for a zombie."""
        if not self.start_mark or process_table.start_mark(self.pid) != self.start_mark:
            return False
        return process_table.is_running(self.pid)

    def send_signal(self, number: int) -> bool:
        return process_table.send_signal(self.pid, self.start_mark, number)
