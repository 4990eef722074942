"""The snippets, by topic. Every module has a table `SNIPPETS`."""

from __future__ import annotations
