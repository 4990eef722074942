"""Indices of accelerators, and opening executors on them."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

import genie
from genie.cluster import devices as devices_module
from genie.cluster.devices import DeviceBroker, list_accelerators
from genie.cluster.init import shutdown_blocking
from genie.device import registry
from genie.errors import (
    DeviceUnavailableError,
    JobNotFoundError,
    NotInitializedError,
    UnreachableError,
)
from genie.model.job import JobState
from genie.model.messages import CancelJob, DeviceReply, OpenDevice, SessionHeartbeat, WaitDevice
from genie.model.node import NodeStatus, Vendor
from tests.cluster.small_controller import (
    QUIET_SETTINGS,
    SmallController,
    make_gpu,
    make_node,
    make_session_job,
)
from tests.fakes.controller import HOST
from tests.waiting import wait_until


def list_accelerator_ids(*nodes: genie.NodeInfo) -> list[tuple[str, int]]:
    return [(ref.node_id, ref.gpu.gpu_id) for ref in list_accelerators(nodes)]


def get_broker() -> DeviceBroker:
    found = genie.get_cluster_state().transport_coordinator
    assert found is not None
    return found


def test_accelerators_are_sorted_by_node_and_gpu_id() -> None:
    nvidia = [make_gpu(number, vendor=Vendor.NVIDIA) for number in (1, 0)]
    listed = [make_node("b", *nvidia), make_node("a", *nvidia)]
    assert (
        list_accelerator_ids(*listed)
        == list_accelerator_ids(*reversed(listed))
        == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    )


def test_cpu_accelerators_are_used_only_without_gpus() -> None:
    cpu, nvidia = make_node("a", make_gpu(0)), make_node("b", make_gpu(0, vendor=Vendor.NVIDIA))
    assert list_accelerator_ids(cpu, nvidia) == [("b", 0)]
    assert list_accelerator_ids(cpu) == [("a", 0)]


def test_accelerators_of_a_disconnected_node_have_no_index() -> None:
    assert list_accelerator_ids(
        make_node("a", make_gpu(0), status=NodeStatus.DISCONNECTED), make_node("b", make_gpu(0))
    ) == [("b", 0)]


def test_new_gpus_get_the_next_indices_and_new_cpus_get_none(controller: SmallController) -> None:
    nvidia = [make_gpu(number, vendor=Vendor.NVIDIA) for number in range(2)]
    controller.nodes = (make_node("m", *nvidia),)
    genie.connect(**QUIET_SETTINGS)
    devices = get_broker()
    disconnected = make_node("m", *nvidia, status=NodeStatus.DISCONNECTED)
    cpu, more = make_node("c", make_gpu(0)), make_node("a", *nvidia)
    assert devices.add_new_accelerators([disconnected, cpu]) == ()
    assert [ref.node_id for ref in devices.add_new_accelerators([disconnected, cpu, more])] == ["a", "a"]
    assert devices.add_new_accelerators([controller.nodes[0], more]) == ()
    assert [(ref.node_id, ref.gpu.gpu_id) for ref in devices.accelerator_refs] == [
        ("m", 0),
        ("m", 1),
        ("a", 0),
        ("a", 1),
    ]
    assert len(registry.device_slots()) == 4


def test_number_of_indices_is_limited(controller: SmallController) -> None:
    nvidia = [make_gpu(number, vendor=Vendor.NVIDIA) for number in range(100)]
    controller.nodes = (make_node("a", *nvidia),)
    genie.connect(**QUIET_SETTINGS)
    devices = get_broker()
    assert len(devices.add_new_accelerators([*controller.nodes, make_node("b", *nvidia)])) == 27
    assert devices.add_new_accelerators([*controller.nodes, make_node("b", *nvidia)]) == ()
    assert len(registry.device_slots()) == registry.DEVICES_MAX == 127


def test_open_requests_the_accelerator_and_returns_the_executor_address(
    controller: SmallController,
) -> None:
    controller.nodes = (make_node("n1", make_gpu(0), make_gpu(1)),)
    state = genie.connect(**QUIET_SETTINGS)
    address = get_broker().open_executor_blocking(1)
    (asked,) = [request for request in controller.asked if isinstance(request, OpenDevice)]
    assert (asked.node_id, asked.gpu_id, asked.session_node_id) == ("n1", 1, state.local_node.node_id)
    assert (address.port, address.ticket, address.ssl_context) == (1, "the-ticket", None)
    assert address.server_name == "j-1.executor.genie.internal"


def test_executor_is_lost_when_its_session_job_has_ended(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[tuple[int, str]] = []
    monkeypatch.setattr(
        registry.DeviceSlot, "disconnect_lost_executor", lambda slot, why: lost.append((slot.index, why))
    )
    controller.nodes = (make_node("n1", make_gpu(0), make_gpu(1)), make_node("n2", make_gpu(0)))
    genie.connect(heartbeat_interval=0.05, **QUIET_SETTINGS)
    get_broker().open_executor_blocking(0)
    get_broker().open_executor_blocking(2)
    with socket.create_server((HOST, 0)) as executor:
        _set_executor_port(controller, executor.getsockname()[1])
        controller.nodes = (
            make_node("n1", make_gpu(0), make_gpu(1), status=NodeStatus.DISCONNECTED),
            make_node("n2", make_gpu(0)),
        )
        wait_until(lambda: controller.count(WaitDevice) >= 3)
        assert (lost, controller.count(CancelJob)) == ([], 0), "it can be reached, and its job has not ended"
    over = make_session_job("j-1", JobState.LOST, reason="its node is gone")
    controller.device = DeviceReply(job=over, endpoint=None)
    wait_until(lambda: lost)
    seen = controller.count(WaitDevice)
    beats = controller.count(SessionHeartbeat)
    wait_until(lambda: controller.count(SessionHeartbeat) > beats + 1)
    assert (lost, controller.count(WaitDevice)) == ([(0, "its node is gone")], seen), "reported once"


def test_executor_on_a_disconnected_node_is_lost_if_it_cannot_be_reached(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []
    monkeypatch.setattr(registry.DeviceSlot, "disconnect_lost_executor", lambda slot, why: lost.append(why))
    monkeypatch.setattr(devices_module, "UNREACHABLE_EXECUTOR_TIMEOUT_S", 0.2)
    genie.connect(heartbeat_interval=0.05, **QUIET_SETTINGS)
    get_broker().open_executor_blocking(0)
    with socket.create_server((HOST, 0)) as executor:
        _set_executor_port(controller, executor.getsockname()[1])
    node = get_broker().accelerator_refs[0].node_id
    controller.nodes = (make_node(node, make_gpu(0), status=NodeStatus.DISCONNECTED),)
    wait_until(lambda: lost)
    assert lost == ["its node does not respond, and the executor cannot be reached"]
    assert controller.count(CancelJob) == 1


def test_executor_on_a_node_that_is_isolated_for_a_short_time_is_not_lost(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new leader declares a node lost before it would reclaim its accelerators."""
    assert devices_module.UNREACHABLE_EXECUTOR_TIMEOUT_S >= 22.5
    lost: list[str] = []
    monkeypatch.setattr(registry.DeviceSlot, "disconnect_lost_executor", lambda slot, why: lost.append(why))
    genie.connect(heartbeat_interval=0.05, **QUIET_SETTINGS)
    get_broker().open_executor_blocking(0)
    with socket.create_server((HOST, 0)) as executor:
        _set_executor_port(controller, executor.getsockname()[1])
    node = get_broker().accelerator_refs[0].node_id
    controller.nodes = (make_node(node, make_gpu(0), status=NodeStatus.DISCONNECTED),)
    wait_until(lambda: controller.count(WaitDevice) >= 5)
    controller.nodes = (make_node(node, make_gpu(0)),)
    beats = controller.count(SessionHeartbeat)
    wait_until(lambda: controller.count(SessionHeartbeat) > beats + 2)
    assert (lost, controller.count(CancelJob)) == ([], 0)


def _set_executor_port(controller: SmallController, port: int) -> None:
    endpoint = controller.device.endpoint
    assert endpoint is not None
    controller.device = msgspec.structs.replace(
        controller.device, endpoint=msgspec.structs.replace(endpoint, port=port)
    )


def test_executor_is_lost_when_its_session_job_is_unknown(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []
    monkeypatch.setattr(registry.DeviceSlot, "disconnect_lost_executor", lambda slot, why: lost.append(why))
    genie.connect(heartbeat_interval=0.05, **QUIET_SETTINGS)
    get_broker().open_executor_blocking(0)
    controller.refusals[WaitDevice] = JobNotFoundError("there is no job j-1")
    controller.nodes = ()
    wait_until(lambda: lost)
    assert lost == ["the controller no longer has its session"]


def test_open_waits_until_the_executor_listens(controller: SmallController) -> None:
    genie.connect(**QUIET_SETTINGS)
    ready = controller.device
    controller.device = DeviceReply(job=make_session_job("j-1", JobState.PLACING), endpoint=None)
    got: list[str] = []
    waiting = threading.Thread(target=lambda: got.append(get_broker().open_executor_blocking(0).ticket))
    waiting.start()
    wait_until(lambda: controller.count(WaitDevice) >= 1)
    controller.device = ready
    waiting.join(30)
    assert got == ["the-ticket"]


def test_open_timeout_reports_the_pending_reason(controller: SmallController) -> None:
    genie.connect(timeout=2.0, **QUIET_SETTINGS)
    job = make_session_job("j-9", JobState.QUEUED, reason="accelerator 0 of n1 is held by job j-3")
    controller.device = DeviceReply(job=job, endpoint=None)
    with pytest.raises(DeviceUnavailableError, match=r"within 2 s: queued: .* held by job j-3"):
        get_broker().open_executor_blocking(0)
    assert controller.count(CancelJob) == 1, "an abandoned request must not take the accelerator later"


def test_open_timeout_reports_the_status_of_the_executor(controller: SmallController) -> None:
    genie.connect(timeout=2.0, **QUIET_SETTINGS)
    job = make_session_job("j-9", JobState.RUNNING, reason="compiling its library for torch 2.11")
    controller.device = DeviceReply(job=job, endpoint=None)
    with pytest.raises(
        DeviceUnavailableError, match=r"node n1.*: compiling its library for torch 2\.11 \(retry in a"
    ):
        get_broker().open_executor_blocking(0)


def test_failed_open_cancels_its_session_job(controller: SmallController) -> None:
    genie.connect(**QUIET_SETTINGS)
    controller.device = DeviceReply(job=make_session_job("j-9", JobState.QUEUED), endpoint=None)
    controller.refusals[WaitDevice] = JobNotFoundError("there is no job j-9")
    with pytest.raises(JobNotFoundError):
        get_broker().open_executor_blocking(0)
    assert controller.count(CancelJob) == 1


def test_open_without_reply_is_retried_with_the_same_request_id(controller: SmallController) -> None:
    genie.connect(**QUIET_SETTINGS)
    controller.refusals[OpenDevice] = UnreachableError("the node does not answer")
    with pytest.raises(UnreachableError):
        get_broker().open_executor_blocking(0)
    del controller.refusals[OpenDevice]
    get_broker().open_executor_blocking(0)
    get_broker().open_executor_blocking(0)
    ids = [request.request_id for request in controller.asked if isinstance(request, OpenDevice)]
    assert ids[0] == ids[1] != ids[2], "the third is for another executor"


def test_rejected_open_is_retried_with_a_new_request_id(controller: SmallController) -> None:
    genie.connect(**QUIET_SETTINGS)
    controller.refusals[OpenDevice] = DeviceUnavailableError("not this one")
    for _ in range(2):
        with pytest.raises(DeviceUnavailableError):
            get_broker().open_executor_blocking(0)
    ids = [request.request_id for request in controller.asked if isinstance(request, OpenDevice)]
    assert ids[0] != ids[1]


def test_open_reports_why_the_executor_ended(controller: SmallController) -> None:
    genie.connect(**QUIET_SETTINGS)
    job = make_session_job("j-9", JobState.FAILED, reason="exit code 3")
    controller.device = DeviceReply(job=job, endpoint=None)
    with pytest.raises(DeviceUnavailableError, match=r"exit code 3.*genie logs j-9"):
        get_broker().open_executor_blocking(0)


def test_open_fails_when_the_session_ends(controller: SmallController) -> None:
    genie.connect(**QUIET_SETTINGS)
    controller.device = msgspec.structs.replace(
        controller.device, job=make_session_job("j-1", JobState.PLACING), endpoint=None
    )
    errors: list[BaseException] = []
    holder = get_broker()
    waiting = threading.Thread(target=lambda: errors.append(_get_open_error(holder)))
    waiting.start()
    wait_until(lambda: controller.count(WaitDevice) >= 1)
    shutdown_blocking()
    waiting.join(30)
    assert [type(error) for error in errors] == [NotInitializedError]


def _get_open_error(holder: DeviceBroker) -> BaseException:
    with pytest.raises(NotInitializedError) as caught:
        holder.open_executor_blocking(0)
    return caught.value
