"""Creates minimal wheels that pip installs without network access."""

from __future__ import annotations

import zipfile
from pathlib import Path


def make_wheel(folder: Path, *, name: str = "small-thing", version: str = "1.0", value: int = 1) -> None:
    """Write the smallest wheel that pip accepts."""
    folder.mkdir(exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}.py", f"VALUE = {value}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(
            f"{info}/RECORD", f"{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
