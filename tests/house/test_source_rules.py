"""Rules for source files: size, names, docstrings, task groups, broad exception handlers.

Exceptions are listed here with their reason. An entry that is no longer needed fails, too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.house.repository_files import (
    list_functions,
    native_files,
    parse_file,
    python_files,
    relative_path,
    text_files,
)

CODE = ("genie", "tests", "benchmarks", "examples")
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 60
PACKAGE_MODULES_MAX = 15
GENERIC_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
HISTORY_SUFFIX_PATTERN = re.compile(r"_(v\d+|new|old|optimized|enhanced|final)$")

# "file" or "file::function": the reason.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
# Calls that open a TaskGroup.
GROUPS = ("TaskGroup", "unwrapped_task_group")
# Tasks outside a TaskGroup; the reason names their owner.
LOOSE_TASKS: dict[str, str] = {
    "genie/cluster/monitoring.py::ResourceMonitor.start": "owned by the monitor; stop() awaits it",
    "genie/controller/store/background.py::BackgroundTasks.open": "owned by the group; close() awaits it",
}
# Broad handlers that neither log the traceback, nor raise, nor set the exception of a future.
QUIET_CATCHES: dict[str, str] = {
    "genie/controller/store/sqlite_file.py::SqliteFile.run_group": "retries each part separately, which logs",
    "genie/cluster/lifecycle/loop_thread.py::LoopThread._run_submitted_work": "sets it on the future",
    "genie/controller/ledger/ledger.py::Ledger._commit_next_batch": "fail_writes() sets it on the futures",
    "genie/controller/ledger/ledger.py::Ledger.write_each": (
        "returned to the caller as the result of its write"
    ),
    "genie/controller/ledger/ledger.py::Ledger._try_build_write_into_batch": "resolve_write() sets it",
    "genie/controller/ledger/ledger.py::Ledger._commit_batch": "Quarantine.add() logs it",
    "genie/controller/ledger/quarantine.py::Quarantine.quarantine_row_on_error": "Quarantine.add() logs it",
    "genie/controller/jobs/changes.py::JobChanges._apply_or_quarantine": "Quarantine.add() logs it",
    "genie/controller/terms/periodic_steps.py::PeriodicStepRunner.run_steps": (
        "_record_step_failure() logs it"
    ),
    "genie/grid/remote/core.py::RequestLoop._execute_op_and_reply": (
        "the caller gets it with its traceback; a node has no log"
    ),
    "genie/grid/ray/batch.py::run_batch": "runs on a worker; the traceback is part of the result of the task",
    "genie/scheduler/policies.py::IsolatedPolicy._call_policy": "a user's code; `fault` describes the error",
    "genie/scheduler/policies.py::_format_error": "an error that cannot be formatted is reported by its type",
}

# Split strings, so that this file does not match.
LOCAL_PATHS_PATTERN = re.compile(
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


def describe_violations(found: dict[str, str], allowed: dict[str, str]) -> str:
    """Violations that are not allowed, and allowed ones that no longer exist; empty if there are none."""
    wrong = [f"{where}: {what}" for where, what in found.items() if where not in allowed]
    stale = [f"{where}: no longer needed, remove it from the list" for where in allowed if where not in found]
    return "\n".join(wrong + stale)


def count_lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def test_source_files_are_within_the_line_limit() -> None:
    files = [*python_files(*CODE), *native_files()]
    long = {relative_path(p): f"{count_lines(p)} lines" for p in files if count_lines(p) > FILE_LINES_MAX}
    assert not describe_violations(long, LONG_FILES), describe_violations(long, LONG_FILES)


def test_packages_are_within_the_module_limit() -> None:
    modules = Counter(
        relative_path(path.parent) for path in python_files("genie") if path.name != "__init__.py"
    )
    assert {package: count for package, count in modules.items() if count > PACKAGE_MODULES_MAX} == {}


def test_functions_are_within_the_line_limit() -> None:
    long = {}
    for path in python_files(*CODE):
        for name, node in list_functions(parse_file(path)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                long[f"{relative_path(path)}::{name}"] = f"{length} lines"
    assert not describe_violations(long, LONG_FUNCTIONS), describe_violations(long, LONG_FUNCTIONS)


def test_file_names_have_no_generic_words_or_history() -> None:
    names = {p: {*p.relative_to(p.parents[1]).with_suffix("").parts} for p in python_files(*CODE)}
    wrong = [
        relative_path(p)
        for p, parts in names.items()
        if parts & GENERIC_NAMES or any(HISTORY_SUFFIX_PATTERN.search(n) for n in parts)
    ]
    assert wrong == []


def test_addresses_are_formatted_by_address_text() -> None:
    """It puts IPv6 addresses in brackets, so that they can be passed to commands."""
    by_hand = re.compile(r"%s:%d|\{[\w.]*host\}:\{[\w.]*port\}")
    found = {relative_path(path) for path in python_files("genie") if by_hand.search(path.read_text("utf-8"))}
    assert found == {"genie/model/names.py"}


def test_every_module_has_a_docstring() -> None:
    assert [relative_path(p) for p in python_files(*CODE) if not ast.get_docstring(parse_file(p))] == []


def test_tasks_are_in_task_groups() -> None:
    loose = _find_by_function(_find_tasks_outside_groups, "starts a task outside a TaskGroup")
    assert not describe_violations(loose, LOOSE_TASKS), describe_violations(loose, LOOSE_TASKS)


def test_broad_handler_logs_the_traceback_or_raises() -> None:
    quiet = _find_by_function(_find_silent_broad_handlers, "catches everything and does not report it")
    assert not describe_violations(quiet, QUIET_CATCHES), describe_violations(quiet, QUIET_CATCHES)


@pytest.mark.parametrize(
    ("pattern", "what"), [(LOCAL_PATHS_PATTERN, "a path or index of one machine"), (EMOJI, "an emoji")]
)
def test_no_file_contains_local_paths_or_emoji(pattern: re.Pattern[str], what: str) -> None:
    hits = [
        f"{relative_path(path)}:{number}: {match[0]}"
        for path in text_files()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if (match := pattern.search(line))
    ]
    assert hits == [], what


def _find_by_function(find: Callable[[ast.Module], list[ast.AST]], what: str) -> dict[str, str]:
    found = {}
    for path in python_files("genie"):
        tree = parse_file(path)
        wrong = {id(node) for node in find(tree)}
        if not wrong:
            continue
        for name, function in reversed(list(list_functions(tree))):  # innermost function only
            here = wrong & {id(node) for node in ast.walk(function)}
            if here:
                found[f"{relative_path(path)}::{name}"] = what
                wrong -= here
        if wrong:
            found[relative_path(path)] = what
    return found


def _find_tasks_outside_groups(tree: ast.Module) -> list[ast.AST]:
    calls = [(node, _get_dotted_name(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [(node, called) for node, called in calls if called.endswith(("ensure_future", "create_task"))]
    groups = _find_task_group_names(tree) if calls else set()
    return [
        node
        for node, called in calls
        if called.endswith("ensure_future") or _last_component(called.rpartition(".")[0]) not in groups
    ]


def _find_task_group_names(tree: ast.Module) -> set[str]:
    """Names in this file that refer to a TaskGroup: created here, annotated, or assigned from another name.

    Only the last part of a dotted name counts: `self.group` and `listener.group` are both `group`.
    """
    groups: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.withitem(context_expr=ast.Call(func=made), optional_vars=ast.expr() as name):
                groups |= (
                    {_last_component(_get_dotted_name(name))}
                    if _get_dotted_name(made).endswith(GROUPS)
                    else set()
                )
            case ast.arg(arg=name, annotation=ast.expr() as kind) if "TaskGroup" in ast.unparse(kind):
                groups.add(name)
            case ast.AnnAssign(target=name, annotation=kind) if "TaskGroup" in ast.unparse(kind):
                groups.add(_last_component(_get_dotted_name(name)))
    groups.discard("")
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (
            _last_component(_get_dotted_name(node.value)) in groups
            or ast.unparse(node.value).endswith("TaskGroup()")
        ):
            groups.update(_last_component(_get_dotted_name(target)) for target in node.targets)
    return groups - {""}


def _find_silent_broad_handlers(tree: ast.Module) -> list[ast.AST]:
    raised = {
        node.exc.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name)
    }
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return [
        node
        for node in handlers
        if _is_silent_broad_handler(node) and not _names_assigned_the_error(node) & raised
    ]


def _names_assigned_the_error(node: ast.ExceptHandler) -> set[str]:
    """Names to which a handler assigns the error, to raise it after the block."""
    kept = [
        item
        for item in node.body
        if isinstance(item, ast.Assign) and _get_dotted_name(item.value) == node.name
    ]
    return {_get_dotted_name(target) for item in kept for target in item.targets}


def _is_silent_broad_handler(node: ast.ExceptHandler) -> bool:
    caught = {_get_dotted_name(item) for item in _caught_types(node)}
    if node.type is not None and not caught & {"Exception", "BaseException"}:
        return False
    return not any(
        _raises_or_logs_the_error(inner) for statement in node.body for inner in ast.walk(statement)
    )


def _caught_types(node: ast.ExceptHandler) -> Iterator[ast.expr]:
    if isinstance(node.type, ast.Tuple):
        yield from node.type.elts
    elif node.type is not None:
        yield node.type


def _raises_or_logs_the_error(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    called = _last_component(_get_dotted_name(node.func))
    return called in {"exception", "set_exception"} or any(word.arg == "exc_info" for word in node.keywords)


def _get_dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_get_dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _last_component(dotted: str) -> str:
    return dotted.rpartition(".")[2]


# --- tests of the rules -----------------------------------------------------------------------


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
def test_task_outside_a_group_is_detected(code: str) -> None:
    assert _find_tasks_outside_groups(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "async def f():\n  async with asyncio.TaskGroup() as children:\n    children.create_task(work())",
        "async def f():\n  async with unwrapped_task_group() as children:\n    children.create_task(work())",
        "def f(answers: asyncio.TaskGroup):\n  answers.create_task(work())",
        "def f(self, answers: asyncio.TaskGroup):\n  self._a = answers\n  self._a.create_task(work())",
        "self._group = asyncio.TaskGroup()\nself._group.create_task(work())",
        "@dataclass\nclass A:\n  group: TaskGroup\n  def f(self):\n    self.group.create_task(work())",
    ],
)
def test_task_in_a_group_is_allowed(code: str) -> None:
    assert not _find_tasks_outside_groups(ast.parse(code))


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
def test_quiet_broad_handler_is_detected(caught: str, body: str, quiet: bool) -> None:
    tree = ast.parse(f"try:\n    work()\nexcept {caught}:\n    {body}")
    assert bool(_find_silent_broad_handlers(tree)) is quiet


def test_broad_handler_may_store_the_error_and_raise_it_later() -> None:
    kept = "try:\n    work()\nexcept Exception as error:\n    failure = error\n"
    assert _find_silent_broad_handlers(ast.parse(kept))
    assert not _find_silent_broad_handlers(ast.parse(kept + "if failure:\n    raise failure"))


@pytest.mark.parametrize("text", ["/wo" + "rk/main", "https://py" + "pi.org/simple"])
def test_local_path_is_detected(text: str) -> None:
    assert LOCAL_PATHS_PATTERN.search(text)
    assert not LOCAL_PATHS_PATTERN.search("a framework/ or net/work/ is none")
