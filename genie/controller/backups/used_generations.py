"""The highest generation that a restore has used in this directory of a controller.

The default generation of a restore counts minutes, and the same backup may be restored twice within one.
"""

from __future__ import annotations

from pathlib import Path

from genie.errors import BackupError
from genie.processes import files

_USED_GENERATION_FILE = "generation"


def read_used_generation(directory: Path) -> int:
    """Return 0 if none was used. Blocks."""
    path = directory / _USED_GENERATION_FILE
    try:
        return int(files.read_small_file(path))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise BackupError(
            f"could not read the generation of the last restore from {path}: {error}",
            hint="remove the file, and choose a generation above that of the last restore: --generation N",
        ) from error


def record_used_generation(directory: Path, generation: int) -> None:
    """Record a generation before it is written to a store. Blocks."""
    files.write_private(directory / _USED_GENERATION_FILE, f"{generation}\n".encode())


def check_generation_unused(generation: int, *, used: int) -> None:
    """Raise BackupError for a generation that is not above the last one of this directory."""
    if generation <= used:
        raise BackupError(
            f"generation {generation} is not above {used}, that of an earlier restore on this machine: nodes "
            "could not distinguish the two",
            hint=f"use {used + 1} or more, or leave out --generation",
        )
