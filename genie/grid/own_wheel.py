"""Builds a wheel of the running Genie from its own files, so that a node gets the same version.

Works for an installed package and for a checkout, needs no build tool, and is reproducible. Not used for
publishing (see the build backend in pyproject.toml).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import genie

DISTRIBUTION_NAME = "genie-gpu"
_ZIP_TIMESTAMP = (1980, 1, 1, 0, 0, 0)
_SOURCE_SUFFIXES = {".py", ".typed", ".yml", ".yaml", ".cpp", ".h", ".txt", ".proto"}


def build_genie_wheel() -> tuple[str, bytes]:
    """Return the file name and content."""
    found = importlib.metadata.distribution(DISTRIBUTION_NAME)
    info = f"{DISTRIBUTION_NAME.replace('-', '_')}-{found.version}.dist-info"
    files = dict(_package_files())
    for name in ("METADATA", "entry_points.txt"):
        files[f"{info}/{name}"] = (found.read_text(name) or "").encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: genie\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/RECORD"] = _format_wheel_record(files, f"{info}/RECORD")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, _ZIP_TIMESTAMP), files[name], zipfile.ZIP_DEFLATED)
    return f"{DISTRIBUTION_NAME.replace('-', '_')}-{found.version}-py3-none-any.whl", packed.getvalue()


def _package_files() -> Iterator[tuple[str, bytes]]:
    package = Path(genie.__file__).parent
    yield from _source_files(package, "genie")
    # The C++ sources are next to the package in a checkout, and inside it in a wheel.
    native = package.parent / "native"
    if not (package / "_native").is_dir() and native.is_dir():
        yield from _source_files(native, "genie/_native")


def _source_files(folder: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in _SOURCE_SUFFIXES and "__pycache__" not in path.parts:
            yield f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def _format_wheel_record(files: dict[str, bytes], own: str) -> bytes:
    lines = []
    for name, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}\n")
    return "".join([*lines, f"{own},,\n"]).encode()
