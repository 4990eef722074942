"""Hides the IDs of other tenants' jobs in texts. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

_JOB_ID_REGEX = r"\bj-[a-z2-7]{8}\b"
_JOB_ID_LIST_PATTERN = re.compile(rf"{_JOB_ID_REGEX}(?:, {_JOB_ID_REGEX})*")


def mask_job_ids(text: str, *, is_visible: Callable[[str], bool]) -> str:
    """Returns `text` with the job IDs that are not visible replaced by their number."""

    def replace(found: re.Match[str]) -> str:
        ids = found[0].split(", ")
        visible = [job_id for job_id in ids if is_visible(job_id)]
        hidden = len(ids) - len(visible)
        if hidden:
            visible.append("another job" if hidden == 1 else f"{hidden} other jobs")
        return ", ".join(visible)

    return _JOB_ID_LIST_PATTERN.sub(replace, text)
