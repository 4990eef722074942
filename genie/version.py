"""The version of Genie. Read by pyproject.toml, exported by `genie`; at the bottom of the layers, because
messages of every package contain it."""

from __future__ import annotations

__version__ = "0.1.0"
