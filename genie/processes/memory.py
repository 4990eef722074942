"""Returns unused memory of this process to the system."""

from __future__ import annotations

import ctypes
import gc


def collect_garbage() -> None:
    """Frees cycles, such as closed TLS connections. Stops all Python code of the process meanwhile."""
    gc.collect()


def trim_heap() -> bool:
    """Returns free memory of the C heap to the system; False where the C library cannot. Releases the GIL."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    trim(0)
    return True
