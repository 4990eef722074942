"""Imports point down the layer list, and every folder is one that the architecture names."""

from __future__ import annotations

import subprocess
import sys
import tomllib

from tests.house.sources import PACKAGE, ROOT

# The layer list, top first. pyproject.toml has the same one; changing it is a decision.
LAYERS = (
    {"cli"},
    {"tui", "gateway", "grid", "sim"},
    {"cluster", "serving"},
    {"controller", "agent", "device"},
    {"runtime", "hardware", "telemetry"},
    {"scheduler", "memory", "tenancy"},
    {"model"},
    {"config"},
    {"errors"},
)
DECIDING = {"model", "scheduler", "memory", "tenancy"}


def contracts() -> dict[str, dict[str, list[str]]]:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    return {contract["type"]: contract for contract in tool["contracts"]}


def names_in_package() -> set[str]:
    found = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    return found | {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}


def test_every_import_keeps_the_contracts() -> None:
    # A process of its own: the linter reconfigures logging, and would switch our loggers off.
    run_linter = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", run_linter, "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_holds_the_list_of_the_architecture() -> None:
    held = [{name.strip(" ()") for name in layer.split("|")} for layer in contracts()["layers"]["layers"]]
    assert held == list(LAYERS)


def test_every_folder_is_one_that_the_architecture_names() -> None:
    assert names_in_package() - set().union(*LAYERS) == set()


def test_folders_that_exist_are_no_longer_optional_in_the_linter() -> None:
    optional = {
        name.strip(" ()")
        for layer in contracts()["layers"]["layers"]
        for name in layer.split("|")
        if "(" in name
    }
    assert optional & names_in_package() == set(), "take their parentheses away in pyproject.toml"


def test_all_deciding_folders_are_kept_from_touching_the_world() -> None:
    held = {name.removeprefix("genie.") for name in contracts()["forbidden"]["source_modules"]}
    assert held == DECIDING & names_in_package(), "list them in pyproject.toml"
