"""The default namespace of ray.init(), with a fake Ray; tests/grid/ray/test_cluster.py uses Ray itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from genie.grid.remote.ray_namespace import SITECUSTOMIZE_SOURCE

RAY = "def init(address=None, **kwargs):\n    return kwargs.get('namespace')\n"
PROGRAM = """
import sys, types, ray, ray.deep
named = types.SimpleNamespace(ray_namespace="config")
print(ray.init(), ray.init(namespace="own"), ray.init(job_config=named), ray.deep.__name__, *sys.argv[1:])
"""


@pytest.fixture
def hook_and_ray_folder(tmp_path: Path) -> Path:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(SITECUSTOMIZE_SOURCE)
    (tmp_path / "libs/ray").mkdir(parents=True)
    (tmp_path / "libs/ray/__init__.py").write_text(RAY)
    (tmp_path / "libs/ray/deep.py").touch()
    return tmp_path


def run_with_hooks(folder: Path, program: str, *, hooks: Sequence[str] = ("hook",), **more: str) -> str:
    path = os.pathsep.join(str(folder / name) for name in (*hooks, "libs"))
    env = {**os.environ, "PYTHONPATH": path, **more}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_default_namespace_applies_only_if_none_is_given(hook_and_ray_folder: Path) -> None:
    assert run_with_hooks(hook_and_ray_folder, PROGRAM, RAY_NAMESPACE="team") == "team own None ray.deep\n"


def test_no_default_namespace_without_the_variable(hook_and_ray_folder: Path) -> None:
    assert run_with_hooks(hook_and_ray_folder, PROGRAM, RAY_NAMESPACE="") == "None own None ray.deep\n"


def test_next_sitecustomize_runs_too(hook_and_ray_folder: Path) -> None:
    (hook_and_ray_folder / "libs/sitecustomize.py").write_text("import sys; sys.own_mark = 'seen'\n")
    assert (
        run_with_hooks(hook_and_ray_folder, "import sys; print(sys.own_mark)", RAY_NAMESPACE="team")
        == "seen\n"
    )


def test_importing_missing_ray_raises_the_usual_error(hook_and_ray_folder: Path) -> None:
    program = "try:\n    import ray\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    (hook_and_ray_folder / "libs/ray").rename(hook_and_ray_folder / "libs/other")
    shown = run_with_hooks(
        hook_and_ray_folder,
        f"import sys; sys.path = [p for p in sys.path if 'packages' not in p]\n{program}",
        RAY_NAMESPACE="x",
    )
    assert shown == "ray\n"


def test_find_spec_without_import_changes_nothing(hook_and_ray_folder: Path) -> None:
    lookup = "from importlib.util import find_spec\nassert find_spec('ray') and find_spec('ray')\n"
    assert (
        run_with_hooks(hook_and_ray_folder, lookup + PROGRAM, RAY_NAMESPACE="team")
        == "team own None ray.deep\n"
    )


def test_failed_import_can_be_repeated_and_success_removes_the_finder(hook_and_ray_folder: Path) -> None:
    failing = "import sys\nif not hasattr(sys, 'tried'):\n    sys.tried = 1\n    raise ImportError\n"
    (hook_and_ray_folder / "libs/ray/__init__.py").write_text(failing + RAY)
    program = (
        "try:\n    import ray\nexcept ImportError:\n    pass\n"
        "import ray, sys\nprint(ray.init(), any('Ray' in repr(finder) for finder in sys.meta_path))"
    )
    assert run_with_hooks(hook_and_ray_folder, program, RAY_NAMESPACE="team") == "team False\n"


@pytest.mark.parametrize(
    "hooks", [("hook", "other"), ("hook", "other", "hook"), ("link", "hook"), ("hook", "link")]
)
def test_hooks_of_two_grids_and_another_sitecustomize_work_together(
    hook_and_ray_folder: Path, hooks: Sequence[str]
) -> None:
    (hook_and_ray_folder / "other").mkdir()
    (hook_and_ray_folder / "other/sitecustomize.py").write_text(SITECUSTOMIZE_SOURCE)
    (hook_and_ray_folder / "link").symlink_to("hook")
    own = "import sys; sys.own_marks = [*getattr(sys, 'own_marks', []), 'seen']\n"
    (hook_and_ray_folder / "libs/sitecustomize.py").write_text(own)
    program = f"{PROGRAM}\nprint(*sys.own_marks, 'Ray' in repr(sys.meta_path))"
    shown = run_with_hooks(hook_and_ray_folder, program, hooks=hooks, RAY_NAMESPACE="team")
    assert shown == "team own None ray.deep\nseen False\n"


def test_delegating_import_finder_finds_ray(hook_and_ray_folder: Path) -> None:
    delegating = (
        "import sys\nclass Delegating:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        others = [each for each in sys.meta_path if each is not Delegating]\n"
        "        found = (each.find_spec(name, path, target) for each in others)\n"
        "        return next((each for each in found if each), None) if name == 'ray' else None\n"
        "sys.meta_path.insert(0, Delegating)\n"
    )
    assert (
        run_with_hooks(hook_and_ray_folder, delegating + PROGRAM, RAY_NAMESPACE="team")
        == "team own None ray.deep\n"
    )


def test_shared_loader_patches_only_ray(hook_and_ray_folder: Path) -> None:
    sharing = (
        "import sys\nfrom importlib.machinery import ModuleSpec\nclass Loader:\n"
        "    def create_module(self, spec):\n        return None\n"
        "    def exec_module(self, module):\n"
        "        module.init = lambda **given: given.get('namespace')\n"
        "class Sharing:\n    loader = Loader()\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        return ModuleSpec(name, Sharing.loader) if name in ('ray', 'gamma') else None\n"
        "sys.meta_path.insert(1, Sharing)\n"
        "from importlib.util import find_spec\nfind_spec('ray')\n"
        "import gamma, ray\nprint(gamma.init(), ray.init())\n"
    )
    assert run_with_hooks(hook_and_ray_folder, sharing, RAY_NAMESPACE="team") == "None team\n"
