"""Calls a function once a module has been imported: at once, or right after its import."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # importlib.abc is slow to import, and every `import genie` runs this
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec


def call_after_import(name: str, function: Callable[[], None]) -> None:
    """Call once per process. Does not import the module itself."""
    if sys.modules.get(name) is not None:  # None: its import is blocked
        function()
    else:
        sys.meta_path.insert(0, _ModuleFinder(name, function))


class _ModuleFinder:
    """Finds the module with the other finders, and wraps its loader."""

    def __init__(self, name: str, after_import: Callable[[], None]) -> None:
        self._name = name
        self._after_import = after_import
        self._search_in_progress = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or getattr(self._search_in_progress, "now", False):
            return None
        self._search_in_progress.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._search_in_progress.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _ModuleLoader(spec.loader, self._after_import))
        return spec


class _ModuleLoader:
    def __init__(self, real: Loader, after_import: Callable[[], None]) -> None:
        self._wrapped_loader = real
        self._after_import = after_import

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._wrapped_loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Restored first: inspect and importlib.resources need the module's real loader.
        module.__loader__ = self._wrapped_loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._wrapped_loader
        self._wrapped_loader.exec_module(module)
        self._after_import()
