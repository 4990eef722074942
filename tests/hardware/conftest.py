"""The fake NVML as fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml.fake_nvml import FakeNvml


@pytest.fixture
def fake_nvml(nvml_library: Path, tmp_path: Path) -> Iterator[FakeNvml]:
    fake = FakeNvml(nvml_library, tmp_path)
    yield fake
    fake.close()
