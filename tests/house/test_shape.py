"""The shape of files: their size, their names, and the few habits that a reader counts on.

Every exception stands in a list here with its reason. An entry that is no longer needed fails, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.house.sources import functions, native_files, parsed, python_files, shown, text_files

CODE = ("genie", "tests", "benchmarks", "examples")
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 60
DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
HISTORY = re.compile(r"_(v\d+|new|old|optimized|enhanced|final)$")

# "file" or "file::function": the reason.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
# Tasks without a TaskGroup, which ends its children; here something else does, and the reason says what.
LOOSE_TASKS: dict[str, str] = {
    "genie/cluster/monitoring.py::ResourceMonitor.start": "the monitor owns it, and stop() waits for its end",
    "genie/controller/store/background.py::Background.open": "it holds the group, and close() awaits it",
}
# Broad catches that neither log the traceback, nor raise again, nor hand the error to a future.
QUIET_CATCHES: dict[str, str] = {
    "genie/controller/store/sqlite_file.py::SqliteFile.run": "runs each part alone, and that logs",
    "genie/cluster/loop_thread.py::LoopThread._carry_out": "_finish() hands it to the future",
    "genie/controller/ledger.py::Ledger._carry_out": "_refuse() hands it to those who asked",
    "genie/controller/ledger.py::Ledger.write_each": "it is that write's outcome, given to the one who asked",
    "genie/controller/ledger.py::Ledger._built": "_answer() hands it to the one who asked, after the commit",
    "genie/controller/ledger.py::Ledger.write_each": "gives it to the one who asked, as its outcome",
    "genie/grid/remote/core.py::Loop._carry_out": "who asked gets it with its traceback; a node has no log",
    "genie/grid/batch.py::run_batch": "on a worker; the traceback goes into the task's own result",
    "genie/scheduler/policies.py::Fenced._ask": "a user's code; `fault` tells it, `error` has it for the log",
    "genie/scheduler/policies.py::_told": "an error that fails at telling itself is told by its type",
}

# Spelled in halves so that this file does not name them.
PLACES = re.compile(
    "|".join(
        [
            r"(?<![\w.])/" + r"work/",
            r"/tmp/" + r"bash_jobs",
            r"/opt/" + r"(wheels|pypi)",
            r"\bpy" + r"pi\.org",
            r"python" + r"hosted",
            r"download\.py" + r"torch\.org",
            r"/root/" + r"\.pyenv",
        ]
    )
)
EMOJI = re.compile("[\U0001f000-\U0001faff\u2600-\u26ff\u2700-\u27bf\ufe0f\u2b50\u2b55]")


def excess(found: dict[str, str], allowed: dict[str, str]) -> str:
    """What is neither right nor excused, and excuses that nothing needs any more; '' when all is well."""
    wrong = [f"{where}: {what}" for where, what in found.items() if where not in allowed]
    stale = [f"{where}: is fine now, take it off the list" for where in allowed if where not in found]
    return "\n".join(wrong + stale)


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def test_files_are_short() -> None:
    files = [*python_files(*CODE), *native_files()]
    long = {shown(p): f"{lines(p)} lines" for p in files if lines(p) > FILE_LINES_MAX}
    assert not excess(long, LONG_FILES), excess(long, LONG_FILES)


def test_functions_fit_one_screen() -> None:
    long = {}
    for path in python_files(*CODE):
        for name, node in functions(parsed(path)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                long[f"{shown(path)}::{name}"] = f"{length} lines"
    assert not excess(long, LONG_FUNCTIONS), excess(long, LONG_FUNCTIONS)


def test_files_are_named_for_what_they_own() -> None:
    names = {p: {*p.relative_to(p.parents[1]).with_suffix("").parts} for p in python_files(*CODE)}
    wrong = [
        shown(p) for p, parts in names.items() if parts & DRAWERS or any(HISTORY.search(n) for n in parts)
    ]
    assert wrong == []


def test_every_module_says_what_it_is_for() -> None:
    assert [shown(p) for p in python_files(*CODE) if not ast.get_docstring(parsed(p))] == []


def test_every_task_has_a_parent() -> None:
    loose = _found_in_functions(_loose_tasks, "starts a task outside a TaskGroup")
    assert not excess(loose, LOOSE_TASKS), excess(loose, LOOSE_TASKS)


def test_a_broad_catch_logs_the_traceback_or_raises() -> None:
    quiet = _found_in_functions(_quiet_catches, "catches everything and says nothing")
    assert not excess(quiet, QUIET_CATCHES), excess(quiet, QUIET_CATCHES)


@pytest.mark.parametrize(("pattern", "what"), [(PLACES, "a place on one machine"), (EMOJI, "an emoji")])
def test_no_file_names(pattern: re.Pattern[str], what: str) -> None:
    hits = [
        f"{shown(path)}:{number}: {match[0]}"
        for path in text_files()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if (match := pattern.search(line))
    ]
    assert hits == [], what


def _found_in_functions(find: Callable[[ast.Module], list[ast.AST]], what: str) -> dict[str, str]:
    found = {}
    for path in python_files("genie"):
        tree = parsed(path)
        wrong = {id(node) for node in find(tree)}
        for name, function in reversed(list(functions(tree))):  # innermost first, and only that one
            here = wrong & {id(node) for node in ast.walk(function)}
            if here:
                found[f"{shown(path)}::{name}"] = what
                wrong -= here
        if wrong:
            found[shown(path)] = what
    return found


def _loose_tasks(tree: ast.Module) -> list[ast.AST]:
    groups = _task_groups(tree)
    calls = [(node, _dotted(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        node
        for node, called in calls
        if called.endswith("ensure_future")
        or (called.endswith("create_task") and _last(called.rpartition(".")[0]) not in groups)
    ]


def _task_groups(tree: ast.Module) -> set[str]:
    """The names in this file that hold a TaskGroup: made here, annotated, or handed on under a new name.

    Only the last part of a dotted name counts: `self.group` and `listener.group` are both `group`.
    """
    groups: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.withitem(context_expr=ast.Call(func=made), optional_vars=ast.expr() as name):
                groups |= {_last(_dotted(name))} if _dotted(made).endswith("TaskGroup") else set()
            case ast.arg(arg=name, annotation=ast.expr() as kind) if "TaskGroup" in ast.unparse(kind):
                groups.add(name)
            case ast.AnnAssign(target=name, annotation=kind) if "TaskGroup" in ast.unparse(kind):
                groups.add(_last(_dotted(name)))
    groups.discard("")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (
            _last(_dotted(node.value)) in groups or ast.unparse(node.value).endswith("TaskGroup()")
        ):
            groups.update(_last(_dotted(target)) for target in node.targets)
    return groups - {""}


def _quiet_catches(tree: ast.Module) -> list[ast.AST]:
    raised = {
        node.exc.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name)
    }
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return [node for node in handlers if _catches_quietly(node) and not _keeps(node) & raised]


def _keeps(node: ast.ExceptHandler) -> set[str]:
    """Names under which a handler keeps the error, to raise it behind the block."""
    kept = [item for item in node.body if isinstance(item, ast.Assign) and _dotted(item.value) == node.name]
    return {_dotted(target) for item in kept for target in item.targets}


def _catches_quietly(node: ast.ExceptHandler) -> bool:
    caught = {_dotted(item) for item in _caught_types(node)}
    if node.type is not None and not caught & {"Exception", "BaseException"}:
        return False
    return not any(_raises_or_tells(inner) for statement in node.body for inner in ast.walk(statement))


def _caught_types(node: ast.ExceptHandler) -> Iterator[ast.expr]:
    if isinstance(node.type, ast.Tuple):
        yield from node.type.elts
    elif node.type is not None:
        yield node.type


def _raises_or_tells(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    called = _last(_dotted(node.func))
    return called in {"exception", "set_exception"} or any(word.arg == "exc_info" for word in node.keywords)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


# --- the rules themselves: each must see what it forbids --------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "asyncio.create_task(work())",
        "self._loop.create_task(work())",
        "asyncio.ensure_future(work())",
        "asyncio.get_running_loop().create_task(work())",
        "group = other()\ngroup.create_task(work())",
    ],
)
def test_a_loose_task_is_seen(code: str) -> None:
    assert _loose_tasks(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "async def f():\n  async with asyncio.TaskGroup() as children:\n    children.create_task(work())",
        "def f(answers: asyncio.TaskGroup):\n  answers.create_task(work())",
        "def f(self, answers: asyncio.TaskGroup):\n  self._a = answers\n  self._a.create_task(work())",
        "self._group = asyncio.TaskGroup()\nself._group.create_task(work())",
        "@dataclass\nclass A:\n  group: TaskGroup\n  def f(self):\n    self.group.create_task(work())",
    ],
)
def test_a_task_in_a_group_is_not_loose(code: str) -> None:
    assert not _loose_tasks(ast.parse(code))


@pytest.mark.parametrize(
    ("caught", "body", "quiet"),
    [
        ("Exception", "pass", True),
        ("(ValueError, BaseException)", "x = 1", True),
        ("Exception", "log.exception('failed')", False),
        ("Exception as error", "log.error('failed', exc_info=error)", False),
        ("BaseException", "raise", False),
        ("BaseException as error", "future.set_exception(error)", False),
        ("ValueError", "pass", False),
    ],
)
def test_a_quiet_broad_catch_is_seen(caught: str, body: str, quiet: bool) -> None:
    tree = ast.parse(f"try:\n    work()\nexcept {caught}:\n    {body}")
    assert bool(_quiet_catches(tree)) is quiet


def test_an_error_that_is_kept_and_raised_later_is_not_quiet() -> None:
    kept = "try:\n    work()\nexcept Exception as error:\n    failure = error\n"
    assert _quiet_catches(ast.parse(kept))
    assert not _quiet_catches(ast.parse(kept + "if failure:\n    raise failure"))


@pytest.mark.parametrize("text", ["/wo" + "rk/main", "https://py" + "pi.org/simple"])
def test_a_place_on_one_machine_is_seen(text: str) -> None:
    assert PLACES.search(text)
    assert not PLACES.search("a framework/ or net/work/ is none")
