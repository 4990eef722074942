"""The public names are exactly the documented ones, and all of them exist."""

from __future__ import annotations

import importlib
import importlib.metadata
import re

import pytest

import genie
from tests.house.repository_files import PACKAGE, ROOT, python_files

PUBLIC = {
    "__version__",
    "init",
    "shutdown",
    "is_initialized",
    "get_cluster_state",
    "connect",
    "disconnect",
    "session",
    "lock",
    "ClusterConfig",
    "ClusterState",
    "NodeInfo",
    "GPUInfo",
    "NodeStatus",
    "NodeRole",
}
# Public paths besides `genie` itself, from the user guide.
DOCUMENTED_MODULES = (
    "genie.cluster.init",
    "genie.cluster.node_info",
    "genie.cluster.monitoring",
    "genie.cluster.health",
    "genie.cluster.events",
    "genie.cluster.dashboard",
    "genie.runtime.network_discovery",
    "genie.runtime.backend_info",
)
ALIASES = ("backend_info", "network_discovery")  # of genie.runtime, in genie.cluster


def list_modules_with_all() -> list[str]:
    files = [
        path for path in python_files("genie") if re.search(r"^__all__\b", path.read_text("utf-8"), re.M)
    ]
    dotted = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    return [name.removesuffix(".__init__") for name in dotted]


def test_genie_exports_exactly_the_documented_names() -> None:
    assert set(genie.__all__) == PUBLIC


def test_dir_shows_the_public_names() -> None:
    assert set(dir(genie)) >= PUBLIC


@pytest.mark.parametrize("module", list_modules_with_all())
def test_every_name_in_all_exists(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("module", DOCUMENTED_MODULES)
def test_documented_module_can_be_imported(module: str) -> None:
    importlib.import_module(module)


@pytest.mark.parametrize("name", ALIASES)
def test_alias_module_has_all_public_names_of_its_original(name: str) -> None:
    original = importlib.import_module(f"genie.runtime.{name}")
    alias = importlib.import_module(f"genie.cluster.{name}")
    defined = {
        key: value
        for key, value in vars(original).items()
        if not key.startswith("_") and getattr(value, "__module__", "") == original.__name__
    }
    assert {key: getattr(alias, key, None) for key in defined} == defined
    assert all(getattr(alias, key) is getattr(original, key) for key in alias.__all__)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(genie, "no_such_name")  # noqa: B009 - mypy rejects the attribute


def test_version_is_defined_once() -> None:
    assert importlib.metadata.version("genie-gpu") == genie.__version__
    lines = (PACKAGE / "version.py").read_text("utf-8").splitlines()
    assert lines.count(f'__version__ = "{genie.__version__}"') == 1, "pyproject.toml reads this line"


def test_package_has_py_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
