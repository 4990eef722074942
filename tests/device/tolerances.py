"""Tolerances of torch's own databases.

Does not compare (paired_runs.py). Importing this changes settings of the process, as torch's databases do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride
from torch.testing._internal.opinfo.core import DecorateInfo

from tests.device.paired_runs import Tolerance


def tolerance_of(decorators: Iterable[Any], tests: str, dtype: torch.dtype, local: str) -> Tolerance:
    """The database's tolerance for an entry, in general or in a given class of torch's tests."""
    here = (None, local.partition(":")[0])
    decorators = list(decorators)
    plain = [item for item in decorators if not isinstance(item, DecorateInfo)]
    for item in decorators:
        if not isinstance(item, DecorateInfo) or item.cls_name not in (None, tests):
            continue
        if item.device_type in here and (item.dtypes is None or dtype in item.dtypes):
            plain += item.decorators
    allowed = Tolerance()
    for item in plain:
        if isinstance(item, toleranceOverride) and dtype in item.d:
            given = item.d[dtype]
            allowed = Tolerance(max(allowed.rtol, given.rtol), max(allowed.atol, given.atol))
        elif isinstance(item, precisionOverride) and dtype in item.d:
            allowed = replace(allowed, atol=max(allowed.atol, item.d[dtype]))
    return allowed
