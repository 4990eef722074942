"""Start orders and cluster state of Ray, without nodes."""

from __future__ import annotations

from typing import Any

import pytest

from genie.errors import (
    DeadlineError,
    GenieError,
    HostKeyChangedError,
    HostKeyUnknownError,
    LoginRefusedError,
    NodeRefusedError,
    RayError,
    UnreachableError,
)
from genie.grid.grid_file import RaySettings
from genie.grid.ray.jobs import exit_code_of_ended_job, to_shell_line
from genie.grid.ray.plan import (
    NO_PYTHON_REASON,
    RayFacts,
    RayRecordOfNode,
    build_ray_cluster_view,
    plan_start,
)

KEYS = RaySettings(redis_port=7000, dashboard_port=7001)


def make_ray_facts(node: str, **given: Any) -> RayFacts:
    number = int(node.removeprefix("gpu"))
    known: dict[str, Any] = {
        "address": f"10.0.0.{number}",
        "ray_program": "/opt/ray",
        "ray_version": "2.60.0",
        "python_version": "3.11.7",
        "gpus": None,
        "record": None,
        **given,
    }
    return RayFacts(node, **known)


def make_ray_record(role: str = "worker", **given: Any) -> RayRecordOfNode:
    known = {
        "cluster": "c1",
        "head": "h",
        "dashboard_port": 7001,
        "recorded_count": 2,
        "alive_count": 2,
        **given,
    }
    return RayRecordOfNode(role=role, **known)


def test_first_node_is_head_and_others_join_it() -> None:
    head, worker = plan_start([make_ray_facts("gpu1"), make_ray_facts("gpu2", gpus=4)], KEYS)
    assert (head.node, head.role, head.head) == ("gpu1", "head", "10.0.0.1:7000")
    assert {"--head", "--port=7000", "--node-ip-address=10.0.0.1"} <= set(head.options)
    assert {"--dashboard-host=127.0.0.1", "--dashboard-port=7001"} <= set(head.options)
    assert ("0.0.0.0", 7000, "ray.redis_port") in head.ports_to_check
    assert (worker.role, worker.ports_to_check) == ("worker", ())
    assert {"--address=10.0.0.1:7000", "--node-ip-address=10.0.0.2", "--num-gpus=4"} <= set(worker.options)


def test_dashboard_binds_all_addresses_only_if_configured() -> None:
    (head,) = plan_start([make_ray_facts("gpu1")], RaySettings(dashboard_port=7001, head_bind_all=True))
    assert "--dashboard-host=0.0.0.0" in head.options
    assert ("0.0.0.0", 7001, "ray.dashboard_port") in head.ports_to_check
    (head,) = plan_start([make_ray_facts("gpu1", address="fd00::1")], RaySettings(head_bind_all=True))
    assert "--dashboard-host=::" in head.options
    (head,) = plan_start([make_ray_facts("gpu1")], RaySettings())
    assert "--dashboard-host=127.0.0.1" in head.options and not head.loopback


def test_unknown_gpu_count_is_left_to_ray() -> None:
    (head,) = plan_start([make_ray_facts("gpu1", gpus=None)], KEYS)
    assert not [option for option in head.options if option.startswith("--num-gpus")]
    (head,) = plan_start([make_ray_facts("gpu1", gpus=0)], KEYS)
    assert "--num-gpus=0" in head.options


def test_another_node_can_be_the_head() -> None:
    orders = plan_start([make_ray_facts("gpu1"), make_ray_facts("gpu2")], KEYS, head="gpu2")
    assert [(order.node, order.role) for order in orders] == [("gpu2", "head"), ("gpu1", "worker")]
    with pytest.raises(RayError, match="gpu9"):
        plan_start([make_ray_facts("gpu1")], KEYS, head="gpu9")


def test_ipv6_address_is_bracketed() -> None:
    (head,) = plan_start([make_ray_facts("gpu1", address="fd00::1")], KEYS)
    assert head.head == "[fd00::1]:7000"


@pytest.mark.parametrize("other", [{"ray_version": "2.59.0"}, {"python_version": "3.12.1"}])
def test_different_versions_are_rejected(other: dict[str, str]) -> None:
    with pytest.raises(RayError) as caught:
        plan_start([make_ray_facts("gpu1"), make_ray_facts("gpu2", **other)], KEYS)
    assert "gpu1: Ray 2.60.0, Python 3.11.7" in caught.value.message
    assert next(iter(other.values())) in caught.value.message


def test_python_patch_release_may_differ() -> None:
    assert (
        len(
            plan_start(
                [
                    make_ray_facts("gpu1"),
                    make_ray_facts("gpu2", python_version="3.11.9"),
                    make_ray_facts("gpu3", python_version=""),
                ],
                KEYS,
            )
        )
        == 3
    )


def test_node_without_ray_is_rejected_with_hint() -> None:
    with pytest.raises(RayError, match="Ray is not installed on gpu2") as caught:
        plan_start([make_ray_facts("gpu1"), make_ray_facts("gpu2", ray_program="", ray_version="")], KEYS)
    assert "grid-cli setup" in caught.value.hint


def test_running_cluster_is_rejected_and_dead_one_is_replaced() -> None:
    with pytest.raises(RayError, match="already running on gpu2"):
        plan_start([make_ray_facts("gpu1"), make_ray_facts("gpu2", record=make_ray_record())], KEYS)
    assert plan_start([make_ray_facts("gpu1", record=make_ray_record(alive_count=0))], KEYS)


def test_head_on_loopback_rejects_workers() -> None:
    keys = RaySettings(redis_port=7000, head_bind_all=False)
    (head,) = plan_start([make_ray_facts("gpu1")], keys)
    assert (head.loopback, head.head) == (True, "127.0.0.1:7000")
    with pytest.raises(RayError, match="head_bind_all"):
        plan_start([make_ray_facts("gpu1"), make_ray_facts("gpu2")], keys)
    with pytest.raises(RayError, match="cannot reach"):
        plan_start([make_ray_facts("gpu1", address="127.0.0.1"), make_ray_facts("gpu2")], KEYS)


def make_listed_ray_node(name: str, state: str = "ALIVE", **more: Any) -> dict[str, Any]:
    return {"node_name": name, "state": state, "node_ip": "10.0.0.1", "resources_total": {"CPU": 8.0}, **more}


def get_state_by_node(found: Any) -> dict[str, str]:
    return {row.node: row.state for row in found.nodes}


def test_cluster_with_all_nodes_alive_is_running() -> None:
    records = {"gpu1": make_ray_record("head"), "gpu2": make_ray_record(), "gpu3": None}
    failed = {"gpu4": UnreachableError("no route")}
    found = build_ray_cluster_view(
        records, failed, [make_listed_ray_node("gpu1"), make_listed_ray_node("gpu2")], version="2.60.0"
    )
    assert (found.state, found.head, found.cluster) == ("running", "gpu1", "c1")
    assert get_state_by_node(found) == {
        "gpu1": "alive",
        "gpu2": "alive",
        "gpu3": "not started",
        "gpu4": "unreachable",
    }
    assert found.nodes[0].cpus == 8


def test_dead_nodes_make_cluster_broken() -> None:
    records = {
        "gpu1": make_ray_record("head"),
        "gpu2": make_ray_record(alive_count=0),
        "gpu3": make_ray_record(),
    }
    found = build_ray_cluster_view(
        records,
        {},
        [
            make_listed_ray_node("gpu1"),
            make_listed_ray_node("gpu2", "DEAD"),
            make_listed_ray_node("gpu3", "DEAD"),
        ],
    )
    assert found.state == "broken"
    assert get_state_by_node(found) == {"gpu1": "alive", "gpu2": "dead", "gpu3": "dead"}


def test_node_with_ended_daemon_is_failing() -> None:
    found = build_ray_cluster_view(
        {"gpu1": make_ray_record("head", alive_count=1)}, {}, [make_listed_ray_node("gpu1")]
    )
    assert (found.state, get_state_by_node(found)) == ("broken", {"gpu1": "failing"})
    assert "1 of 2 Ray processes have ended" in found.nodes[0].message
    found = build_ray_cluster_view({"gpu1": make_ray_record("head")}, {}, None)
    assert (found.state, get_state_by_node(found)) == ("broken", {"gpu1": "failing"})


def test_worker_without_head_is_stray() -> None:
    found = build_ray_cluster_view({"gpu1": None, "gpu2": make_ray_record()}, {}, None)
    assert (found.state, get_state_by_node(found)["gpu2"]) == ("broken", "stray")
    found = build_ray_cluster_view(
        {"gpu1": make_ray_record("head"), "gpu2": make_ray_record(cluster="c2")},
        {},
        [make_listed_ray_node("gpu1")],
    )
    assert get_state_by_node(found)["gpu2"] == "stray"


def test_node_listed_as_dead_and_alive_is_alive() -> None:
    records = {"gpu1": make_ray_record("head")}
    assert get_state_by_node(
        build_ray_cluster_view(
            records, {}, [make_listed_ray_node("gpu1", "DEAD"), make_listed_ray_node("gpu1")]
        )
    ) == {"gpu1": "alive"}
    assert get_state_by_node(
        build_ray_cluster_view(
            records, {}, [make_listed_ray_node("gpu1"), make_listed_ray_node("gpu1", "DEAD")]
        )
    ) == {"gpu1": "alive"}


@pytest.mark.parametrize(
    ("error", "node_state", "state", "code"),
    [
        (UnreachableError("x"), "unreachable", "unreachable", 255),
        (DeadlineError("x"), "unreachable", "unreachable", 255),
        (LoginRefusedError("x"), "login refused", "unknown", 255),
        (HostKeyUnknownError("x"), "host key unknown", "unknown", 255),
        (HostKeyChangedError("x"), "host key changed", "unknown", 255),
        (NodeRefusedError("x", reason=NO_PYTHON_REASON), "no python", "unknown", 1),
        (NodeRefusedError("x", reason="denied"), "refused", "unknown", 1),
    ],
)
def test_error_determines_state_of_unqueried_node(
    error: GenieError, node_state: str, state: str, code: int
) -> None:
    alone = build_ray_cluster_view({}, {"gpu1": error}, None)
    assert (get_state_by_node(alone), alone.state, alone.exit_code) == ({"gpu1": node_state}, state, code)
    with_head = build_ray_cluster_view(
        {"gpu1": make_ray_record("head")}, {"gpu2": error}, [make_listed_ray_node("gpu1")]
    )
    assert (get_state_by_node(with_head)["gpu2"], with_head.state, with_head.exit_code) == (
        node_state,
        "running",
        0,
    )


def test_cluster_without_records_is_stopped() -> None:
    assert build_ray_cluster_view({"gpu1": None}, {}, None).state == "stopped"


@pytest.mark.parametrize(
    ("info", "code"),
    [
        ({"status": "FAILED", "driver_exit_code": 3}, 3),
        ({"status": "FAILED", "driver_exit_code": -9}, 137),
        ({"status": "SUCCEEDED", "driver_exit_code": 0}, 0),
        ({"status": "SUCCEEDED"}, 0),
        ({"status": "STOPPED", "driver_exit_code": None}, 143),
        ({"status": "FAILED", "driver_exit_code": None}, 1),
    ],
)
def test_job_exit_code_is_that_of_its_command(info: dict[str, Any], code: int) -> None:
    assert exit_code_of_ended_job(info) == code


def test_only_commands_of_several_arguments_are_quoted() -> None:
    assert to_shell_line(["echo a; exit 3"]) == "echo a; exit 3"
    assert to_shell_line(["echo", "a; exit 3"]) == "echo 'a; exit 3'"
