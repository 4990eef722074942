"""The rule for labels and rack names. The settings, the grid file, the controller and the CLI all use it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from genie.config.schema import ValidationRule
from genie.errors import NameInvalidError, UsageError

LABELS_MAX = 64
"""Maximum number of labels of a node, and of the constraints of a job."""
LABEL_RULE = "1 to 63 letters, digits, '.', '_', '-' or '/'"
_LABEL_PATTERN = re.compile(r"[A-Za-z0-9._/-]{1,63}")


def is_label(text: str) -> bool:
    """Whether `text` is valid as a label key, a label value or a rack name."""
    return _LABEL_PATTERN.fullmatch(text) is not None


def are_labels(labels: Mapping[str, str]) -> bool:
    """Whether all keys and values are valid and there are at most LABELS_MAX labels."""
    return len(labels) <= LABELS_MAX and all(map(is_label, (*labels.keys(), *labels.values())))


LABEL = ValidationRule(LABEL_RULE, is_label)
"""For a setting that is a label key, a label value or a rack name."""
LABELS = ValidationRule(f"keys and values of {LABEL_RULE}; at most {LABELS_MAX} labels", are_labels)
"""For a setting with labels."""


def validate_label(value: str, *, what: str) -> str:
    """Returns `value` if it is a valid label key, label value or rack name.

    Raises NameInvalidError, which calls the value `what`.
    """
    if not is_label(value):
        text = value if len(value) <= 80 else value[:77] + "..."
        raise NameInvalidError(f"{what} {text!r} is not allowed", hint=f"use {LABEL_RULE}")
    return value


def validate_labels(labels: Mapping[str, str], *, what: str = "label") -> Mapping[str, str]:
    """Returns `labels` of a node, or of a job's placement constraints, if they are valid."""
    if len(labels) > LABELS_MAX:
        raise UsageError(
            f"{what}: {len(labels)} labels are too many", hint=f"at most {LABELS_MAX} are allowed"
        )
    for key, value in labels.items():
        validate_label(key, what=f"the name of {what}")
        validate_label(value, what=f"the value of {what} {key}")
    return labels
