"""Calls a function once torch has been imported: at once, or right after the import."""

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

_NAME = "torch"


def call_with_torch(function: Callable[[], None]) -> None:
    """Call once per process. Does not import torch itself."""
    if sys.modules.get(_NAME) is not None:  # None: its import is blocked
        function()
    else:
        sys.meta_path.insert(0, _TorchFinder(function))


class _TorchFinder:
    """Finds torch with the other finders, and wraps its loader."""

    def __init__(self, after_import: Callable[[], None]) -> None:
        self._after_import = after_import
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME or getattr(self._searching, "now", False):
            return None
        self._searching.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _Loader(spec.loader, self._after_import))
        return spec


class _Loader:
    def __init__(self, real: Loader, after_import: Callable[[], None]) -> None:
        self._real = real
        self._after_import = after_import

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Restored first: inspect and importlib.resources need the module's real loader.
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        self._after_import()
