"""Hides the IDs of other tenants' jobs in texts. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

_ID = r"\bj-[a-z2-7]{8}\b"
_IDS = re.compile(rf"{_ID}(?:, {_ID})*")


def mask_job_ids(text: str, *, is_shown: Callable[[str], bool]) -> str:
    """Returns `text` with the job IDs that are not visible replaced by their number."""

    def replace(found: re.Match[str]) -> str:
        ids = found[0].split(", ")
        visible = [job_id for job_id in ids if is_shown(job_id)]
        hidden = len(ids) - len(visible)
        if hidden:
            visible.append("another job" if hidden == 1 else f"{hidden} other jobs")
        return ", ".join(visible)

    return _IDS.sub(replace, text)
