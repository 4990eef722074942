"""The reference tables of the pages list exactly the fields, options and values of the code.

A table is found by its first heading, the name of a type in backquotes; its first column lists every field
and public property of that type. test_env_page.py checks environment variables, tests/cli/test_app.py
commands.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import msgspec
import pytest
import yaml

import genie
from genie.agent.preparation import job_environment
from genie.cluster import health, state
from genie.cluster.lifecycle import init_phases
from genie.config import VARIABLES_INHERITED_BY_JOBS, ClusterConfig
from genie.grid import executor, grid_file, metrics
from genie.grid.health import check as health_check
from genie.grid.runs import run
from genie.model import event, node
from genie.model.job import JobSpec, Placement
from genie.model.messages import Launch
from genie.runtime import backend_info, data_plane, network_discovery, network_interfaces
from genie.sim.workloads import workload
from tests.house.repository_files import PACKAGE, ROOT, list_functions, parse_file, read_table
from tests.house.test_docs import list_commands_by_name

SESSION, GRID = "docs/CLUSTER_INITIALIZATION.md", "docs/GRID.md"
TYPES: dict[str, tuple[type, ...]] = {
    SESSION: (
        ClusterConfig,
        state.ClusterState,
        node.NodeInfo,
        node.GPUInfo,
        event.ClusterEvent,
        event.EventType,
        health.HealthReport,
        health.CheckResult,
        data_plane.DataPlaneConfig,
        data_plane.TransportCoordinator,
        network_discovery.DiscoveryResult,
        network_interfaces.Interface,
        network_interfaces.Throughput,
        network_discovery.Probe,
        network_discovery.Recommendation,
        network_discovery.Selection,
        backend_info.BackendInfo,
    ),
    GRID: (executor.RunResult, health_check.HealthState),
}
ALL = [(page, kind) for page, kinds in TYPES.items() for kind in kinds]
_CODE = re.compile(r"`([^`]+)`")


def read_page(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def find_names(rows: Iterable[list[str]]) -> list[str]:
    return [name for row in rows for name in _CODE.findall(row[0])]


def list_public_members(kind: type) -> set[str]:
    """Public fields and properties, or the values of an enum."""
    if issubclass(kind, StrEnum):
        return {str(member) for member in kind}
    if issubclass(kind, msgspec.Struct):
        fields = set(kind.__struct_fields__)
    elif dataclasses.is_dataclass(kind):
        fields = {field.name for field in dataclasses.fields(kind)}
    else:
        fields = set(
            re.findall(r"^        self\.([a-z]\w*)\b", inspect.getsource(kind.__init__), re.MULTILINE)
        )
    properties = {name for name, value in inspect.getmembers(kind) if isinstance(value, property)}
    return {name for name in fields | properties if not name.startswith("_")}


def describe_difference(listed: Iterable[str], real: Iterable[str]) -> str:
    """Names that are missing on the page, unknown, or listed twice; empty if there are none."""
    names, wanted = Counter(listed), set(real)
    found = {
        "not on the page": wanted - set(names),
        "does not exist": set(names) - wanted,
        "listed twice": {name for name, count in names.items() if count > 1},
    }
    return "; ".join(f"{what}: {', '.join(sorted(which))}" for what, which in found.items() if which)


def format_default(value: object) -> str:
    return "" if value is dataclasses.MISSING else f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


@pytest.mark.parametrize(("page", "kind"), ALL, ids=lambda value: getattr(value, "__name__", ""))
def test_table_lists_exactly_the_fields_of_its_type(page: str, kind: type) -> None:
    assert (
        describe_difference(
            find_names(read_table(read_page(page), f"`{kind.__name__}`")), list_public_members(kind)
        )
        == ""
    )


@pytest.mark.parametrize("kind", [ClusterConfig, data_plane.DataPlaneConfig])
def test_table_shows_the_defaults(kind: type[ClusterConfig | data_plane.DataPlaneConfig]) -> None:
    defaults = {field.name: format_default(field.default) for field in dataclasses.fields(kind)}
    rows = read_table(read_page(SESSION), f"`{kind.__name__}`")
    assert {name: row[1] for row in rows for name in _CODE.findall(row[0])} == defaults


def test_all_tables_with_defaults_are_compared() -> None:
    headings = re.findall(r"^\| `(\w+)` \| default \|", read_page(SESSION), re.MULTILINE)
    assert headings == ["ClusterConfig", "DataPlaneConfig"]


def test_page_lists_all_node_statuses() -> None:
    (row,) = [row for row in read_table(read_page(SESSION), "`NodeInfo`") if "`status`" in row[0]]
    assert _CODE.findall(row[2]) == [str(status) for status in node.NodeStatus]


def test_page_lists_all_health_checks() -> None:
    listed = [row[0] for row in read_table(read_page(SESSION), "check")]
    made = re.findall(r'CheckResult\(\s*name="(\w+)"', inspect.getsource(health))
    assert describe_difference(listed, made) == ""


def test_page_lists_all_phases_and_roles() -> None:
    assert [row[1] for row in read_table(read_page(SESSION), "phase")] == list(init_phases.INIT_PHASES)
    assert find_names(read_table(read_page(SESSION), "role")) == [str(role) for role in node.NodeRole]


def test_page_lists_all_public_calls() -> None:
    calls = [re.findall(r"genie\.(\w+)", name) for name in find_names(read_table(read_page(SESSION), "call"))]
    assert {call for found in calls for call in found} | {"init"} == {
        name for name in genie.__all__ if name.islower() and not name.startswith("_")
    }


def test_documented_calls_of_the_device_module_exist() -> None:
    listed = find_names(read_table(read_page("docs/DEVICE.md"), "call"))
    called = {found for name in listed for found in re.findall(r"torch\.remote_accelerator\.(\w+)", name)}
    defined = {name for name, _ in list_functions(parse_file(PACKAGE / "device" / "accelerator.py"))}
    assert called
    assert called - defined == set()


# --- options, columns and metrics -----------------------------------------------------------------


def list_options(*path: str) -> set[str]:
    """Long options of a command, without those of all commands."""
    command = list_commands_by_name()[path[0]]
    for step in path[1:]:
        command = command.commands[step]
    named = {option for each in command.params for option in each.opts if option.startswith("--")}
    return named - {"--address", "--token-file", "--debug", "--log-level", "--help"}


def find_options(rows: Iterable[list[str]]) -> list[str]:
    return [option for name in find_names(rows) for option in re.findall(r"--[a-z-]+", name)]


def test_each_submit_option_is_on_one_page() -> None:
    pages = ("docs/USER_GUIDE.md", "docs/SCHEDULING.md")
    listed = [
        option for page in pages for option in find_options(read_table(read_page(page), "`genie submit`"))
    ]
    assert describe_difference(listed, list_options("submit") - {"--json"}) == ""


def test_page_lists_all_options_of_a_grid_run() -> None:
    listed = find_options(read_table(read_page(GRID), "`grid-cli run`"))
    assert describe_difference(listed, list_options("grid", "run") - {"--config"}) == ""


def test_page_lists_all_variables_of_a_gang(tmp_path: Path) -> None:
    def variables(*hosts: str) -> dict[str, str]:
        launch = Launch(
            job_id="j-1.1",
            tenant="default",
            spec=JobSpec(name="train", command=("true",)),
            placement=Placement(node_id="n", incarnation=1, gpu_ids=(), epoch=1),
            leader_token=1,
            hosts=hosts,
            rank=1,
        )
        here = node.NodeInfo(node_id="n", hostname="n", role=node.NodeRole.SERVER, host="10.0.0.1")
        return job_environment(launch, base={}, node=here, directory=tmp_path)

    alone, gang = variables("10.0.0.1"), variables("10.0.0.1", "10.0.0.2")
    different = {name for name, value in gang.items() if alone.get(name) != value}
    listed = find_names(read_table(read_page("docs/SCHEDULING.md"), "variable"))
    assert describe_difference(listed, different | {"GENIE_JOB_RANK"}) == ""


def test_page_lists_all_variables_that_a_job_inherits() -> None:
    (sentence,) = re.findall(
        r"a job inherits (.*?), and nothing else", read_page("docs/USER_GUIDE.md"), re.DOTALL
    )
    assert describe_difference(_CODE.findall(sentence), VARIABLES_INHERITED_BY_JOBS) == ""


def test_page_lists_all_columns_of_a_workload() -> None:
    listed = find_names(read_table(read_page("docs/SIMULATOR.md"), "column"))
    assert describe_difference(listed, workload.WORKLOAD_COLUMNS) == ""


def test_page_lists_all_states_of_a_run() -> None:
    listed = set(find_names(read_table(read_page(GRID), "state of a run")))
    assert listed == {str(each) for each in run.RunState} | {"unreachable"}


def test_page_lists_all_metrics() -> None:
    rows = read_table(read_page(GRID), "name")
    listed = {(name.partition("{")[0], row[1]) for row in rows for name in _CODE.findall(row[0])}
    text = metrics.prometheus_text(metrics.MetricsSnapshot.empty())
    assert listed == set(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))


# --- the grid file --------------------------------------------------------------------------------


def read_grid_yaml_block() -> str:
    """The YAML block of the page with every key and its default."""
    blocks: list[str] = re.findall(r"^```yaml\n(nodes:.*?)^```", read_page(GRID), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


def test_page_shows_every_key_of_the_grid_file_with_its_default() -> None:
    shown, read = (
        yaml.safe_load(read_grid_yaml_block()),
        grid_file.parse_grid_file(read_grid_yaml_block(), name="GRID.md"),
    )
    declared = {field.name: field.default for field in dataclasses.fields(grid_file.GridFile)}
    del declared["path"]
    assert set(shown) == set(declared)
    assert {name: getattr(read, name) for name in declared} == {**declared, "nodes": read.nodes}
    for name, section in declared.items():
        if dataclasses.is_dataclass(section):
            assert set(shown[name]) == {field.name for field in dataclasses.fields(section)}, name


def test_page_shows_every_key_of_a_node() -> None:
    nodes = [entry for entry in yaml.safe_load(read_grid_yaml_block())["nodes"] if isinstance(entry, dict)]
    fields = {field.name for field in dataclasses.fields(grid_file.GridNode)}
    assert set().union(*nodes) == fields


# --- tests of the rules ---------------------------------------------------------------------------


def test_missing_field_and_wrong_default_are_detected() -> None:
    page = "| `DataPlaneConfig` | default | meaning |\n|---|---|---|\n| `host`, `port` | `1` | a \\| b |\n"
    rows = read_table(page, "`DataPlaneConfig`")
    assert rows == [["`host`, `port`", "`1`", "a \\| b"]]
    assert describe_difference(find_names(rows), list_public_members(data_plane.DataPlaneConfig)) == (
        "not on the page: backend, timeout_s"
    )
    assert describe_difference(["a", "b", "b"], ["a"]) == "does not exist: b; listed twice: b"
    assert format_default(5555) != rows[0][1]
    with pytest.raises(AssertionError, match="found 0 tables"):
        read_table(page, "`ClusterConfig`")
