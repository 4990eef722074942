"""The limit on open files of this process (RLIMIT_NOFILE)."""

from __future__ import annotations

import resource

_OPEN_FILES_IF_UNLIMITED = 1 << 30


def get_open_file_limit() -> int:
    """The soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _OPEN_FILES_IF_UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_open_file_limit(wanted: int) -> int:
    """Raises the soft limit to `wanted`, as far as the hard limit allows, and returns it. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if target > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return get_open_file_limit()
