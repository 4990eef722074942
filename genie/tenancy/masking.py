"""Texts as one tenant may read them: jobs of others are counted in them, not named. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

_ID = r"\bj-[a-z2-7]{8}\b"
_IDS = re.compile(rf"{_ID}(?:, {_ID})*")


def masked(text: str, *, is_shown: Callable[[str], bool]) -> str:
    """`text` with the ids of jobs for which `is_shown` says yes; of the others, how many there are."""

    def kept(found: re.Match[str]) -> str:
        ids = found[0].split(", ")
        named = [job_id for job_id in ids if is_shown(job_id)]
        hidden = len(ids) - len(named)
        if hidden:
            named.append("another job" if hidden == 1 else f"{hidden} other jobs")
        return ", ".join(named)

    return _IDS.sub(kept, text)
