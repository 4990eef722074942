"""Links, commands and Python names on the pages exist, and Python snippets compile."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer.main

import genie
from genie.agent import identity
from tests.house.repository_files import ROOT, list_pages, relative_path

REQUIRED_PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "docs/USER_GUIDE.md",
    "docs/ENVIRONMENT_VARIABLES.md",
    "docs/CLUSTER_INITIALIZATION.md",
)
REQUIRED_EXAMPLES = ("examples/tour.py", "examples/basic_client.py", "examples/gpu_server.py")

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# `genie word word` where a command can stand: a code span, or the start of a line in a block of code.
_COMMAND = re.compile(
    r"(?:`|^\s*(?:\$ )?|&& |\| )genie ((?:--?[\w-]+ )*)([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", re.MULTILINE
)


def list_local_links(page: Path) -> list[str]:
    text = _FENCE.sub("", page.read_text("utf-8"))
    return [target for target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def list_anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {text.strip().replace(" ", "-") for text in plain}


def find_commands(page: Path) -> set[tuple[str, str]]:
    text = page.read_text("utf-8")
    blocks = _FENCE.findall(text)
    spans = re.findall(r"`genie [^`]*`", _FENCE.sub("", text))
    return {(first, second) for _, first, second in _COMMAND.findall("\n".join(blocks + spans))}


def list_python_blocks(page: Path) -> list[str]:
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [_complete_signature(textwrap.dedent(block)) for block in blocks]


def _complete_signature(block: str) -> str:
    """Completes a signature that a page shows with its qualified name and without a body."""
    if not re.match(r"(async )?def genie\.", block):
        return block
    return block.replace("def genie.", "def ", 1).rstrip() + ": ..."


def find_genie_names(tree: ast.Module) -> set[str]:
    """All dotted names that start with `genie`, and names imported from genie."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names.update(item.name for item in node.names)
            case ast.ImportFrom(module=str(module)):
                names.update(f"{module}.{item.name}" for item in node.names)
            case ast.Attribute():
                names.add(ast.unparse(node))
    return {name for name in names if re.fullmatch(r"genie(\.\w+)+", name)}


def is_importable(name: str) -> bool:
    """Whether a program can import or access the name."""
    found: object = genie
    known = "genie"
    for part in name.split(".")[1:]:
        known = f"{known}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(known)
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


def list_commands_by_name() -> dict[str, Any]:  # Any: Typer has no public type for a command
    """All commands of the command line by name."""
    import genie.cli
    from genie.cli.app import app

    for module in pkgutil.walk_packages(genie.cli.__path__, "genie.cli."):
        importlib.import_module(module.name)  # importing a module registers its commands
    return dict(getattr(typer.main.get_command(app), "commands"))  # noqa: B009 - no public type has it


def list_subcommands_by_command() -> dict[str, dict[str, object]]:
    """All commands of the command line with their subcommands."""
    return {name: getattr(command, "commands", {}) for name, command in list_commands_by_name().items()}


@pytest.mark.parametrize("name", [*REQUIRED_PAGES, *REQUIRED_EXAMPLES])
def test_required_page_or_example_exists(name: str) -> None:
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("page", list_pages(), ids=relative_path)
def test_links_on_a_page_exist(page: Path) -> None:
    broken = []
    for target in list_local_links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in list_anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", list_pages(), ids=relative_path)
def test_commands_on_a_page_exist(page: Path) -> None:
    named = find_commands(page)
    if not named:
        return
    tree = list_subcommands_by_command()
    unknown = {f"genie {first}" for first, _ in named if first not in tree}
    for first, second in named:
        if tree.get(first) and second and second not in tree[first]:
            unknown.add(f"genie {first} {second}")
    assert unknown == set()


@pytest.mark.parametrize("page", list_pages(), ids=relative_path)
def test_python_on_a_page_compiles_and_its_names_exist(page: Path) -> None:
    wrong = []
    for block in list_python_blocks(page):
        try:
            tree = ast.parse(block)
        except SyntaxError as error:
            wrong.append(f"{error.msg}: {(error.text or '').strip()}")
            continue
        wrong += [name for name in sorted(find_genie_names(tree)) if not is_importable(name)]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```\n$ genie nodes --json\n```", {("nodes", "")}),
        ("run `genie token create` once", {("token", "create")}),
        ("```\ncd x && genie --debug status\n```", {("status", "")}),
        ("the genie is out of the bottle", set()),
    ],
)
def test_commands_are_found_on_a_page(text: str, found: set[tuple[str, str]], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert find_commands(page) == found


def test_broken_link_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[there](no-such.md) and [away](https://example.org)")
    assert list_local_links(page) == ["no-such.md"]


@pytest.mark.parametrize(
    ("code", "unknown"),
    [
        ("import genie\ngenie.init\nstate = genie.ClusterState\nother.genie.nothing", []),
        ("from genie.cluster.monitoring import create_resource_monitor", []),
        ("genie.initialise()", ["genie.initialise"]),
        ("from genie.cluster.init import start", ["genie.cluster.init.start"]),
        ("import genie.no_such_part", ["genie.no_such_part"]),
    ],
)
def test_unknown_name_is_detected(code: str, unknown: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"words\n```python\n{code}\n```\n")
    (block,) = list_python_blocks(page)
    assert [name for name in sorted(find_genie_names(ast.parse(block))) if not is_importable(name)] == unknown


@pytest.mark.parametrize(
    "statement",
    [
        "Tenants are not isolated from each other on a node.",
        "it runs as the user of the agent",
        f"read the identity of the node (`{identity._TOKEN_FILE}`, `{identity._KEY_FILE}`)",
        "send signals to the agent, to shims and to jobs of other tenants",
        "move itself to another control group",
        "fill the disk",
    ],
)
def test_security_page_states_what_a_job_can_do_to_its_node(statement: str) -> None:
    page = " ".join((ROOT / "SECURITY.md").read_text("utf-8").split())
    _, _, not_protected = page.partition("## Not protected")
    assert statement in not_protected
