"""status and nodes."""

from __future__ import annotations

import json
import os

import msgspec
import pytest

from genie.model.allocation import Hold, NodeHolds
from genie.model.messages import GetStatus, ListNodes, NodesReply
from genie.supervisor.process_records import SUPERVISOR, record_process
from tests.cli.sample_messages import make_node_view, make_status_reply
from tests.supervisor.test_incomplete_join import MEMBER
from tests.supervisor.test_local_server import WAITING


def test_status_prints_a_summary(genie, controller) -> None:
    controller.replies[GetStatus] = make_status_reply()
    ran = genie("status")
    lines = dict(line.split(None, 1) for line in ran.out.splitlines() if not line.startswith("uptime"))
    assert ran.code == 0
    assert lines["address"] == f"127.0.0.1:{controller.port}"
    assert lines["accelerators"] == "3 free of 4"
    assert lines["jobs"] == "2 running"
    assert lines["nodes"] == "1 healthy"
    assert lines["policy"] == "fair"


def test_status_shows_a_disabled_policy(genie, controller) -> None:
    fault = "policy 'own:Mine' is disabled and replaced by FairShare: within() raised OSError"
    controller.replies[GetStatus] = msgspec.structs.replace(
        make_status_reply(), policy="own:Mine", policy_fault=fault
    )
    assert fault in " ".join(genie("status").out.split())


def test_status_shows_an_unresponsive_store(genie, controller) -> None:
    controller.replies[GetStatus] = msgspec.structs.replace(make_status_reply(), store_ok=False)
    assert "sqlite (not responding)" in genie("status").out
    controller.replies[GetStatus] = msgspec.structs.replace(
        make_status_reply(), store_ok=False, store_reason="etcd rejected user 'genie'"
    )
    assert "sqlite (not responding: etcd rejected user 'genie')" in " ".join(genie("status").out.split())


@pytest.mark.parametrize(
    ("leader", "message"),
    [("10.0.0.5:5555", "10.0.0.5:5555 (genie status --address 10.0.0.5:5555)"), ("", "none elected")],
)
def test_status_of_a_standby_names_the_leader(genie, controller, leader, message) -> None:
    reply = msgspec.structs.replace(
        make_status_reply(), leading=False, leader=leader, gpus_total=0, gpus_free=0
    )
    controller.replies[GetStatus] = reply
    ran = genie("status")
    assert ran.code == 0
    assert "role     standby\n" in ran.out and f"leader   {message}\n" in ran.out
    assert "accelerators" not in ran.out and "jobs" not in ran.out


def test_standby_without_a_store_shows_that_no_leader_exists(genie, controller) -> None:
    reply = msgspec.structs.replace(
        make_status_reply(), leading=False, leader="10.0.0.5:5555", store_ok=False, age_s=70.0
    )
    controller.replies[GetStatus] = reply
    ran = genie("status")
    assert ran.code == 1 and "leader   none (last: 10.0.0.5:5555)\n" in ran.out
    ran = genie("status", "--json")
    assert ran.code == 1 and json.loads(ran.out)["leader"] == ""
    # The leader has answered: only this server does not reach the store.
    controller.replies[GetStatus] = msgspec.structs.replace(reply, age_s=0.0, has_cluster_data=True)
    ran = genie("status")
    assert ran.code == 0 and "leader        10.0.0.5:5555 (genie status" in ran.out


def test_status_of_another_server_says_that_the_own_one_is_not_running(genie, controller, state_dir) -> None:
    MEMBER.write(state_dir)
    controller.replies[GetStatus] = make_status_reply()
    where = f"127.0.0.1:{controller.port}"
    ran = genie("status")
    assert f"this server is not running (start it with 'genie up'); this is the status of {where}" in ran.err
    assert "this server" not in genie("status", "--address", where).err


def test_status_of_a_server_that_waits_for_a_majority_says_so(genie, state_dir) -> None:
    record_process(state_dir, SUPERVISOR, os.getpid(), missing_servers=WAITING)
    ran = genie("status")
    assert ran.code == 255
    assert f"genie: this server is {WAITING}\nhint: it takes part as soon as" in ran.err


def test_standby_shows_why_it_cannot_lead(genie, controller) -> None:
    reply = msgspec.structs.replace(
        make_status_reply(), leading=False, leader="", alarms=("this server cannot lead: it runs 9.0",)
    )
    controller.replies[GetStatus] = reply
    assert "alarm    this server cannot lead: it runs 9.0" in genie("status").out


def test_status_of_a_standby_shows_its_copy_and_the_age(genie, controller) -> None:
    reply = msgspec.structs.replace(
        make_status_reply(), leading=False, leader="10.0.0.5:5555", has_cluster_data=True, age_s=12.3
    )
    controller.replies[GetStatus] = reply
    ran = genie("status")
    assert "role          standby\n" in ran.out and "accelerators  3 free of 4\n" in ran.out
    assert f"from standby 127.0.0.1:{controller.port}, 12 s old: no leader responds\n" in ran.err
    ran = genie("status", "--json")
    assert json.loads(ran.out)["age_s"] == 12.3


@pytest.mark.parametrize(("age_s", "is_shown"), [(0.0, False), (0.9, False), (75.0, True)])
def test_nodes_of_a_standby_are_shown_with_their_age(genie, controller, age_s, is_shown) -> None:
    controller.replies[ListNodes] = NodesReply(nodes=(make_node_view(),), age_s=age_s)
    ran = genie("nodes")
    assert "box" in ran.out
    assert ("75 s old: no leader responds" in ran.err) is is_shown
    assert json.loads(genie("nodes", "--json").out)["age_s"] == age_s


def test_reading_without_a_heartbeat_is_not_shown(genie, controller) -> None:
    view = make_node_view()
    gpu = msgspec.structs.replace(view.info.gpus[0], memory_used_bytes=5 * 1024**3)
    info = msgspec.structs.replace(view.info, last_heartbeat=0.0, gpus=(gpu,))
    controller.replies[ListNodes] = NodesReply(nodes=(msgspec.structs.replace(view, info=info),))
    shown = genie("nodes").out
    assert "ago" not in shown and "5.0 GiB" not in shown


def test_status_prints_json(genie, controller) -> None:
    controller.replies[GetStatus] = make_status_reply()
    document = json.loads(genie("status", "--json").out)
    assert set(document) == {"address", *make_status_reply().__struct_fields__}
    assert document["nodes"] == {"healthy": 1}


def test_nodes_shows_versions_if_they_differ(genie, controller) -> None:
    def make_reply(*versions: str) -> NodesReply:
        view = make_node_view()
        infos = [msgspec.structs.replace(view.info, version=version) for version in versions]
        return NodesReply(nodes=tuple(msgspec.structs.replace(view, info=info) for info in infos))

    controller.replies[ListNodes] = make_reply("0.1.0", "0.1.0")
    assert "VERSION" not in genie("nodes").out
    controller.replies[ListNodes] = make_reply("0.1.0", "0.2.0")
    heading, first, second = genie("nodes").out.split("\n\n")[0].splitlines()
    assert "VERSION" in heading
    assert ("0.1.0" in first, "0.2.0" in second) == (True, True)


def test_nodes_shows_accelerators_and_jobs(genie, controller) -> None:
    controller.replies[ListNodes] = NodesReply(nodes=(make_node_view(),))
    ran = genie("nodes")
    assert ran.code == 0
    nodes, gpus = ran.out.split("\n\n")
    assert "10.0.0.7" in nodes and "healthy" in nodes
    assert "CPUS ALLOCATED" in nodes and "HOST MEMORY ALLOCATED" in nodes, "these are not readings"
    assert "Test GPU" in gpus and "j7 (100%)" in gpus


def test_a_node_is_draining_until_its_last_job_has_ended(genie, controller) -> None:
    busy = msgspec.structs.replace(make_node_view(), drained="draining: new fans")
    controller.replies[ListNodes] = NodesReply(nodes=(busy,))
    assert "draining: new fans" in genie("nodes").out
    assert " draining, 1 job left " in genie("nodes").out.splitlines()[1]
    empty = msgspec.structs.replace(busy, node_holds=NodeHolds(node_id="box"))
    controller.replies[ListNodes] = NodesReply(nodes=(empty,))
    assert "drained: new fans" in genie("nodes").out
    assert genie("nodes").out.splitlines()[1].split()[1] == "drained"
    without_reason = msgspec.structs.replace(empty, drained="draining")
    controller.replies[ListNodes] = NodesReply(nodes=(without_reason,))
    assert genie("nodes").out.splitlines()[1].endswith("  drained")
    accepting = msgspec.structs.replace(empty, drained="")
    controller.replies[ListNodes] = NodesReply(nodes=(accepting,))
    assert "drained" not in genie("nodes").out


def test_jobs_left_on_a_draining_node_are_counted_once_per_job(genie, controller) -> None:
    holds = [
        Hold(job_id=worker, tenant="t", epoch=1, incarnation=1)
        for worker in ("j7.0", "j7.1", "j8", "")  # the last one is of another tenant
    ]
    busy = msgspec.structs.replace(
        make_node_view(), drained="draining", node_holds=NodeHolds(node_id="box", holds=tuple(holds))
    )
    controller.replies[ListNodes] = NodesReply(nodes=(busy,))
    assert " draining, 3 jobs left " in genie("nodes").out


def test_json_of_nodes_has_the_drain_state(genie, controller) -> None:
    def drain_in_json(drained: str, *, is_empty: bool) -> object:
        view = msgspec.structs.replace(make_node_view(), drained=drained)
        if is_empty:
            view = msgspec.structs.replace(view, node_holds=NodeHolds(node_id="box"))
        controller.replies[ListNodes] = NodesReply(nodes=(view,))
        return json.loads(genie("nodes", "--json").out)["nodes"][0]["drain"]

    assert drain_in_json("draining: new fans", is_empty=False) == {
        "state": "draining",
        "reason": "new fans",
        "jobs_left": 1,
    }
    assert drain_in_json("draining", is_empty=True) == {"state": "drained", "reason": "", "jobs_left": 0}
    assert drain_in_json("", is_empty=False) is None


def test_unavailable_accelerator_shows_the_reason(genie, controller) -> None:
    view = make_node_view()
    lost = msgspec.structs.replace(view.info.gpus[0], available=False, reason="it fell off the bus")
    info = msgspec.structs.replace(view.info, gpus=(lost,))
    controller.replies[ListNodes] = NodesReply(nodes=(msgspec.structs.replace(view, info=info),))
    assert "unavailable: it fell off the bus" in genie("nodes").out


def test_racks_and_labels_are_columns_if_a_node_has_any(genie, controller) -> None:
    plain = make_node_view()
    labelled = msgspec.structs.replace(plain.info, node_id="other", labels={"disk": "ssd", "zone": "a"})
    controller.replies[ListNodes] = NodesReply(nodes=(plain,))
    assert "LABELS" not in genie("nodes").out and "RACK" not in genie("nodes").out
    controller.replies[ListNodes] = NodesReply(nodes=(plain, msgspec.structs.replace(plain, info=labelled)))
    nodes = genie("nodes").out.split("\n\n")[0]
    heading, first, second = nodes.splitlines()
    assert "LABELS" in heading and "RACK" not in heading
    assert second.startswith("other") and second.endswith("disk=ssd, zone=a")
    assert first.endswith("-")
    standing = msgspec.structs.replace(labelled, rack="r7", status_reason="too hot")
    controller.replies[ListNodes] = NodesReply(nodes=(msgspec.structs.replace(plain, info=standing),))
    heading, row = genie("nodes").out.split("\n\n")[0].splitlines()
    assert heading.split()[-3:] == ["RACK", "LABELS", "REASON"]
    assert row.endswith("r7    disk=ssd, zone=a  too hot")


def test_nodes_shows_memory_used_by_other_processes(genie, controller) -> None:
    view = make_node_view()
    controller.replies[ListNodes] = NodesReply(nodes=(view,))
    assert "other processes" not in genie("nodes").out
    gpu = msgspec.structs.replace(
        view.info.gpus[0], memory_used_bytes=3 * 1024**3, memory_outside_bytes=1024**3
    )
    info = msgspec.structs.replace(view.info, gpus=(gpu,))
    controller.replies[ListNodes] = NodesReply(nodes=(msgspec.structs.replace(view, info=info),))
    assert "3.0 GiB (1.0 GiB by other processes)" in genie("nodes").out


def test_nodes_prints_json(genie, controller) -> None:
    controller.replies[ListNodes] = NodesReply(nodes=(make_node_view(),))
    (document,) = json.loads(genie("nodes", "--json").out)["nodes"]
    assert document["info"]["gpus"][0]["name"] == "Test GPU"
    assert document["node_holds"]["holds"][0]["job_id"] == "j7"


def test_empty_node_list_has_a_hint(genie, controller) -> None:
    controller.replies[ListNodes] = NodesReply(nodes=())
    ran = genie("nodes")
    assert (ran.code, ran.out) == (0, "")
    assert "genie join" in ran.err
