"""The default Ray namespace of programs on the cluster that pass none to ray.init().

Ray reads RAY_NAMESPACE for ray:// clients only. SITECUSTOMIZE_SOURCE is written to a directory on the
PYTHONPATH of all processes of the cluster: Python imports it at startup, and it sets the default of
ray.init(). A program that replaces PYTHONPATH gets Ray's default, an anonymous namespace.

Runs on nodes: standard library only, Python 3.8.
"""

from __future__ import annotations

SITECUSTOMIZE_SOURCE = '''\
"""Written by grid-cli cluster start: ray.init() without a namespace uses RAY_NAMESPACE."""

import os
import sys
from _thread import get_ident
from importlib.machinery import PathFinder


class _RayFinder:
    """Finds ray like Python does, and replaces ray.init after the import.

    It stays installed until then, because find_spec("ray") may be called without an import.
    """

    _active = set()  # threads in find_spec: prevents recursion if another finder also calls all finders

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        thread = get_ident()
        if name != "ray" or thread in cls._active:
            return None
        cls._active.add(thread)
        try:
            for finder in list(sys.meta_path):
                find = None if finder is cls else getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find else None
                if spec is not None:
                    return cls._patch_loader(spec)
            return None
        finally:
            cls._active.discard(thread)

    @classmethod
    def _patch_loader(cls, spec):
        if spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                if module.__name__ != "ray":
                    return  # the loader is shared with other modules
                if cls in sys.meta_path:
                    sys.meta_path.remove(cls)
                if hasattr(module, "init"):
                    module.init = _with_namespace(module.init)

            spec.loader.exec_module = exec_module
        return spec


def _with_namespace(init):
    from functools import wraps

    @wraps(init)
    def ray_init(*args, **kwargs):
        given = getattr(kwargs.get("job_config"), "ray_namespace", None)
        if kwargs.get("namespace") is None and given is None and os.environ.get("RAY_NAMESPACE"):
            kwargs["namespace"] = os.environ["RAY_NAMESPACE"]
        return init(*args, **kwargs)

    return ray_init


def _run_next(folders):
    """Run the next sitecustomize.py on the path outside `folders`: Python imports only the first one."""
    path = [each for each in sys.path if os.path.realpath(each or ".") not in folders]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        spec.loader.exec_module(module_from_spec(spec))


def _main():
    """Install the finder once, even if several grids' files or several spellings of a path are found."""
    here = os.path.dirname(os.path.realpath(__file__))
    folders = sys.__dict__.setdefault("_genie_ray_namespace", [])
    if here in folders:
        return
    if not folders and os.environ.get("RAY_NAMESPACE"):
        sys.meta_path.insert(0, _RayFinder)
    folders.append(here)
    _run_next(folders)


_main()
'''
