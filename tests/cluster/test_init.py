"""genie.init() and genie.shutdown(): one session per process, and cleanup after errors."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest

import genie
from genie.cluster import init as init_module
from genie.cluster.events import ClusterEvent, EventType
from genie.cluster.lifecycle import init_phases
from genie.cluster.lifecycle.init_phases import INIT_PHASES
from genie.cluster.lifecycle.session_run import SessionRun
from genie.errors import (
    AlreadyInitializedError,
    ConfigError,
    DeadlineError,
    NotInitializedError,
    ProtocolError,
    SessionError,
    TokenMissingError,
    TokenRefusedError,
    UnreachableError,
    UsageError,
)
from genie.model.messages import OpenDevice, SessionEnd, SessionHeartbeat
from genie.model.node import Vendor
from genie.runtime import ControlDataIntegration, DataPlaneConfig, TransportCoordinator
from tests.cluster.small_controller import (
    QUIET_SETTINGS,
    TOKEN,
    SmallController,
    has_event,
    make_gpu,
    make_node,
)
from tests.waiting import until


def list_session_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("genie-session")]


def assert_no_session_is_left() -> None:
    assert not genie.is_initialized()
    assert list_session_threads() == []


# --- the state that init() returns ------------------------------------------------------------


async def test_init_returns_the_cluster_state(controller: SmallController) -> None:
    controller.nodes = (make_node("n2", make_gpu(0), make_gpu(1)), make_node("n1", make_gpu(0)))
    state = await genie.init("127.0.0.1", controller.port)
    assert isinstance(state, genie.ClusterState)
    assert state.initialized
    assert genie.is_initialized()
    assert genie.get_cluster_state() is state
    assert set(state.nodes) == {"n1", "n2"}
    assert state.nodes["n2"].gpu_count == 2
    assert (state.cluster_id, state.tenant, state.backend) == ("c1", "default", "tcp")
    assert state.config.master_port == controller.port
    assert state.local_node.role is genie.NodeRole.CLIENT
    assert len(state.monitor_tasks) == 3
    assert state.transport_coordinator is not None
    assert len(state.transport_coordinator.accelerator_refs) == 3
    assert isinstance(state.transport_coordinator, TransportCoordinator)
    assert state.transport_coordinator.config == DataPlaneConfig(host="127.0.0.1", port=controller.port)
    assert state.transport_coordinator.selection is state.selection
    assert state.transport_coordinator.discovery is state.discovery
    assert isinstance(state.control_integration, ControlDataIntegration)
    assert state.control_integration.is_open
    assert state.control_integration.where == f"127.0.0.1:{controller.port}"
    await genie.shutdown()
    assert not state.initialized
    assert state.nodes, "the last values stay readable"


async def test_phases_are_published_in_order_with_durations(controller: SmallController) -> None:
    state = await genie.init(**QUIET_SETTINGS)
    published = [event for event in state.events.history() if event.type is EventType.INIT_PHASE]
    assert [(e.facts["phase"], e.facts["name"], e.facts["state"]) for e in published] == [
        (number, name, step) for number, name in enumerate(INIT_PHASES, 1) for step in ("started", "done")
    ]
    assert all(float(e.facts["duration_s"] or 0) >= 0 for e in published)
    assert state.stats["init_s"] > 0
    assert {f"phase_{number}_s" for number in range(1, 6)} <= set(state.stats)


async def test_phases_are_logged(controller: SmallController, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="genie"):
        await genie.init(**QUIET_SETTINGS)
    assert [name for name in INIT_PHASES if f"{name} done" in caplog.text] == list(INIT_PHASES)


OWN_LOGGING = "import logging; logging.basicConfig();"


@pytest.mark.parametrize(
    ("level", "setup", "is_logged"),
    [
        ("", "", True),
        ("info", "", True),
        ("WARNING", "", False),
        ("critical", "", False),
        ("", OWN_LOGGING, False),
        ("INFO", OWN_LOGGING, True),
    ],
)
def test_session_logs_at_info_unless_configured_otherwise(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch, level: str, setup: str, is_logged: bool
) -> None:
    monkeypatch.setenv("GENIE_LOG_LEVEL", level)
    code = f"{setup}import genie; genie.connect('127.0.0.1', {controller.port}, enable_health_checks=False)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == ""
    assert ("init 5/5: monitoring done" in done.stderr) is is_logged
    assert is_logged or done.stderr == ""


async def test_health_and_readings_are_available_when_init_returns(controller: SmallController) -> None:
    state = await genie.init()
    assert state.health is not None
    report = state.health.report
    assert report is not None
    assert state.health_report is report
    assert [check.name for check in report.checks] == ["gpu", "cpu", "network", "peers", "memory", "disk"]
    assert (state.local_node.status, state.local_node.status_reason) == (report.status, report.reason)
    assert state.local_node.memory_total_bytes > 0
    cpu, network = report.check("cpu"), report.check("network")
    assert cpu is not None and cpu.readings["cores"] == os.cpu_count()
    assert state.discovery is not None and state.discovery.interface is not None
    assert state.discovery.interface.name == "lo"
    assert network is not None and network.reason.startswith("connected through lo, ")
    assert (network.readings["received_bytes_per_s"] or 0.0) > 0.0, "the handshake went over loopback"


def test_init_has_the_documented_signature() -> None:
    shown = inspect.signature(genie.init)
    assert str(shown) == (
        "(master_addr: 'str | None' = None, master_port: 'int' = 5555, backend: 'str' = 'auto', "
        "node_id: 'str | None' = None, node_role: 'str' = 'client', timeout: 'float' = 30.0, "
        "**kwargs: 'Any') -> 'ClusterState'"
    )
    assert inspect.iscoroutinefunction(genie.init)


# --- settings ---------------------------------------------------------------------------------


async def test_argument_overrides_environment_and_environment_overrides_file(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "genie.toml"
    file.write_text("[cluster]\nheartbeat_interval = 7\ngpu_poll_interval = 7\nheartbeat_timeout = 70\n")
    monkeypatch.setenv("GENIE_CONFIG", str(file))
    monkeypatch.setenv("GENIE_HEARTBEAT_INTERVAL", "8")
    monkeypatch.setenv("GENIE_GPU_POLL_INTERVAL", "8")
    state = await genie.init(heartbeat_interval=9.0)
    config = state.config
    assert (config.heartbeat_interval, config.gpu_poll_interval, config.heartbeat_timeout) == (9, 8, 70)


async def test_omitted_argument_comes_from_the_environment(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENIE_MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GENIE_MASTER_PORT", str(controller.port))
    monkeypatch.setenv("GENIE_NODE_ID", "my-laptop")
    state = await genie.init()
    assert state.config.master_port == controller.port
    assert state.local_node.node_id == "my-laptop"


async def test_documented_argument_aliases_are_accepted(controller: SmallController) -> None:
    state = await genie.init(enable_gpu_monitor=False, health_interval=3.5)
    assert not state.config.enable_gpu_monitoring
    assert state.config.health_check_interval == 3.5
    assert state.monitor is None


async def test_misspelt_argument_error_suggests_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"heartbeet_interval.*did you mean heartbeat_interval"):
        await genie.init("127.0.0.1", heartbeet_interval=3)
    assert_no_session_is_left()


async def test_out_of_range_error_names_the_argument() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.master_port.*argument master_port.*1 to 65535"):
        await genie.init("127.0.0.1", master_port=70000)


# --- one session per process ------------------------------------------------------------------


async def test_second_init_with_the_same_arguments_returns_the_same_state(
    controller: SmallController,
) -> None:
    first = await genie.init("127.0.0.1", controller.port)
    assert await genie.init(master_addr="127.0.0.1", master_port=controller.port) is first


async def test_second_init_with_other_arguments_reports_the_differences(controller: SmallController) -> None:
    await genie.init("127.0.0.1", controller.port)
    with pytest.raises(AlreadyInitializedError, match=r"heartbeat_interval is 3\.0, was 10\.0"):
        await genie.init("127.0.0.1", controller.port, heartbeat_interval=3.0)
    assert genie.is_initialized()


async def test_second_init_error_does_not_show_the_token(controller: SmallController) -> None:
    await genie.init("127.0.0.1", controller.port)
    with pytest.raises(AlreadyInitializedError, match="token differs") as caught:
        await genie.init("127.0.0.1", controller.port, token=str(TOKEN))
    assert TOKEN.secret not in str(caught.value)


async def test_concurrent_inits_share_one_session(controller: SmallController) -> None:
    states = await asyncio.gather(*(genie.init(**QUIET_SETTINGS) for _ in range(5)))
    assert len({id(state) for state in states}) == 1
    assert controller.count(SessionHeartbeat) == 1


def test_inits_on_several_threads_share_one_session(controller: SmallController) -> None:
    states: list[genie.ClusterState] = []
    threads = [
        threading.Thread(target=lambda: states.append(asyncio.run(genie.init(**QUIET_SETTINGS))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(states) == 4
    assert len({id(state) for state in states}) == 1


async def test_init_works_again_after_shutdown(controller: SmallController) -> None:
    first = await genie.init(**QUIET_SETTINGS)
    await genie.shutdown()
    second = await genie.init(**QUIET_SETTINGS)
    assert second is not first
    assert second.initialized


async def test_init_waits_for_a_running_shutdown(controller: SmallController) -> None:
    first = await genie.init(**QUIET_SETTINGS)
    _, second = await asyncio.gather(genie.shutdown(), genie.init(heartbeat_interval=5.0, **QUIET_SETTINGS))
    assert second is not first
    assert second.config.heartbeat_interval == 5.0


async def test_get_cluster_state_requires_a_session() -> None:
    assert not genie.is_initialized()
    with pytest.raises(NotInitializedError, match=r"genie\.init.*genie\.connect"):
        genie.get_cluster_state()


# --- shutdown ---------------------------------------------------------------------------------


async def test_shutdown_notifies_the_controller_and_leaves_no_session(controller: SmallController) -> None:
    state = await genie.init()
    await genie.shutdown()
    assert [r.node_id for r in controller.asked if isinstance(r, SessionEnd)] == [state.local_node.node_id]
    assert state.events.history()[-1].type is EventType.SHUTDOWN
    assert_no_session_is_left()


async def test_sessions_with_the_same_node_id_are_independent(controller: SmallController) -> None:
    for _ in range(2):
        state = await genie.init(node_id="box", **QUIET_SETTINGS)
        assert state.local_node.node_id == "box"
        assert state.transport_coordinator is not None
        await asyncio.to_thread(state.transport_coordinator.open_executor_blocking, 0)
        await genie.shutdown()
    ended = [r.node_id for r in controller.asked if isinstance(r, SessionEnd)]
    heartbeat_ids = [r.node.node_id for r in controller.asked if isinstance(r, SessionHeartbeat)]
    opened = [r.session_node_id for r in controller.asked if isinstance(r, OpenDevice)]
    assert ended == heartbeat_ids == opened
    assert len(set(ended)) == 2
    assert all(name.startswith("box-") for name in ended)


async def test_shutdown_is_idempotent_and_concurrent(controller: SmallController) -> None:
    await genie.shutdown()
    await genie.init(**QUIET_SETTINGS)
    await asyncio.gather(genie.shutdown(), genie.shutdown())
    await genie.shutdown()
    assert controller.count(SessionEnd) == 1
    assert_no_session_is_left()


async def test_shutdown_during_init_ends_both(controller: SmallController) -> None:
    controller.answers_hello = False
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(_await_error(genie.init(**QUIET_SETTINGS)))
        await until(lambda: len(controller.asked) > 0)
        await genie.shutdown()
    assert isinstance(starting.result(), SessionError)
    assert_no_session_is_left()


async def test_cancelled_init_leaves_no_session(controller: SmallController) -> None:
    controller.answers_hello = False
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await genie.init(**QUIET_SETTINGS)
    assert_no_session_is_left()


async def test_cancelling_one_of_two_inits_keeps_the_session(
    controller: SmallController, caplog: pytest.LogCaptureFixture
) -> None:
    controller.answers_hello = False
    async with asyncio.TaskGroup() as group:
        stays = group.create_task(_await_error(genie.init(timeout=2.0, **QUIET_SETTINGS)))
        goes = group.create_task(genie.init(timeout=2.0, **QUIET_SETTINGS))
        await until(lambda: len(controller.asked) > 0)
        goes.cancel()
    assert isinstance(stays.result(), DeadlineError), "it waited until its own deadline"
    del stays, goes
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_forked_child_has_no_session(controller: SmallController) -> None:
    genie.connect(**QUIET_SETTINGS)
    pid = os.fork()
    if pid == 0:
        os._exit(17 if not genie.is_initialized() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
    assert genie.is_initialized()


def test_forked_child_can_start_its_own_session(controller: SmallController) -> None:
    code = f"""
        import os, genie
        from genie.errors import NotInitializedError
        genie.connect("127.0.0.1", {controller.port})
        parents = genie.get_cluster_state().transport_coordinator
        pid = os.fork()
        if pid == 0:
            import torch
            published = []
            for use in (
                lambda: torch.ones(2, device="remote_accelerator:0"),
                lambda: parents.open_executor_blocking(0),
            ):
                try:
                    use()
                except NotInitializedError:
                    published.append("no session")
            genie.connect("127.0.0.1", {controller.port})
            print(*published, genie.is_initialized(), flush=True)
            os._exit(17)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), genie.is_initialized())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["no session no session True", "17 True"], done.stderr


@pytest.mark.parametrize("leave", ["", "raise SystemExit(3)", "1 / 0"])
def test_open_session_ends_quietly_at_interpreter_exit(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    monkeypatch.setenv("GENIE_LOG_LEVEL", "ERROR")
    code = f"""
        import asyncio, genie
        state = asyncio.run(genie.init("127.0.0.1", {controller.port}))
        {leave}
    """
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )
    expected = {"": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[leave]
    assert done.returncode == expected
    assert done.stdout == ""
    # In development mode, asyncio reports callbacks that are slow, as on a busy machine.
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
    assert [line for line in lines if "genie" in line or "Warning" in line] == []
    assert controller.count(SessionEnd) == 1


# --- errors -----------------------------------------------------------------------------------


async def _await_error(work: object) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the caller looks at it
        await work  # type: ignore[misc]
    return caught.value


async def test_unreachable_error_names_the_address(controller: SmallController, unused_tcp_port: int) -> None:
    with pytest.raises(UnreachableError, match=f"127.0.0.1:{unused_tcp_port}.*refused"):
        await genie.init("127.0.0.1", unused_tcp_port)
    assert_no_session_is_left()


async def test_progress_gets_all_phases_including_the_failed_one(
    controller: SmallController, unused_tcp_port: int
) -> None:
    seen: list[ClusterEvent] = []
    with pytest.raises(UnreachableError):
        await genie.init("127.0.0.1", unused_tcp_port, progress=seen.append)
    steps = [(event.facts["phase"], event.facts["state"]) for event in seen]
    assert steps == [(1, "started"), (1, "done"), (2, "started"), (2, "done"), (3, "started"), (3, "failed")]


async def test_progress_is_not_compared_between_inits(controller: SmallController) -> None:
    seen: list[ClusterEvent] = []
    first = await genie.init(progress=seen.append, **QUIET_SETTINGS)
    assert await genie.init(progress=print, **QUIET_SETTINGS) is first
    assert genie.connect(progress=print, **QUIET_SETTINGS) is first
    await until(lambda: len(seen) == 10)
    await genie.shutdown()


async def test_progress_must_be_callable(controller: SmallController) -> None:
    with pytest.raises(UsageError, match="callable"):
        await genie.init(progress="yes", **QUIET_SETTINGS)
    assert_no_session_is_left()


async def test_waiting_for_the_previous_session_counts_against_the_timeout(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(
        "genie.cluster.lifecycle.init_phases._request_session_end",
        lambda *_: asyncio.to_thread(gate.wait, 10),
    )
    await genie.init(**QUIET_SETTINGS)
    async with asyncio.TaskGroup() as group:
        group.create_task(genie.shutdown())
        await until(lambda: not genie.is_initialized())
        with pytest.raises(DeadlineError, match=r"did not end within 0\.2 s"):
            await genie.init(timeout=0.2, **QUIET_SETTINGS)
        with pytest.raises(DeadlineError, match=r"did not end within 0\.2 s"):
            await asyncio.to_thread(lambda: genie.connect(timeout=0.2, **QUIET_SETTINGS))
        gate.set()


async def test_time_before_the_phases_counts_against_the_timeout(controller: SmallController) -> None:
    settings = init_module.load_settings_from_init_arguments((), {"timeout": 5.0, **QUIET_SETTINGS})
    run, _ = init_module.get_or_start_session_and_is_new(settings, began_s=time.monotonic() - 5.0)
    assert isinstance(await _await_error(asyncio.wrap_future(run.ready)), DeadlineError)
    await asyncio.wrap_future(run.finished)


async def test_close_timeout_of_a_worker_includes_the_grace_period(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENIE_AGENT_STOP_GRACE_S", "100")
    settings = init_module.load_settings_from_init_arguments((), {"node_role": "worker"})
    run = SessionRun(settings, began_s=0.0, on_end=lambda _: None)
    assert run.end_timeout_s > 100


async def test_failed_phase_is_the_last_event(controller: SmallController, unused_tcp_port: int) -> None:
    seen: list[ClusterEvent] = []
    run, _ = init_module.get_or_start_session_and_is_new(
        init_module.load_settings_from_init_arguments(("127.0.0.1", unused_tcp_port), QUIET_SETTINGS),
        began_s=time.monotonic(),
    )
    run._events.subscribe(EventType.INIT_PHASE, seen.append)
    with pytest.raises(UnreachableError):
        await asyncio.wrap_future(run.ready)
    last = run._events.history()[-1]
    assert (last.facts["phase"], last.facts["state"]) == (3, "failed")


async def test_missing_address_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"no cluster.*GENIE_MASTER_ADDR"):
        await genie.init()
    assert_no_session_is_left()


async def test_port_without_address_must_be_that_of_the_default_cluster(
    controller: SmallController, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the program would use another cluster than the one that it names."""
    expected = f"master_port = {unused_tcp_port} without master_addr: .* at 127.0.0.1:{controller.port}"
    with pytest.raises(ConfigError, match=expected):
        await genie.init(master_port=unused_tcp_port)
    assert_no_session_is_left()
    await genie.init(master_port=controller.port, **QUIET_SETTINGS)
    await genie.shutdown()
    monkeypatch.setenv("GENIE_MASTER_PORT", str(unused_tcp_port))
    await genie.init(**QUIET_SETTINGS)  # a variable may be for other addresses


async def test_address_of_the_controller_is_logged(
    controller: SmallController, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="genie")
    await genie.init(**QUIET_SETTINGS)
    assert f"connecting to the controller at 127.0.0.1:{controller.port}\n" in caplog.text


async def test_missing_token_error_explains_how_to_get_one(controller: SmallController) -> None:
    (Path(os.environ["GENIE_STATE_DIR"]) / "owner.token").unlink()
    with pytest.raises(TokenMissingError, match="genie token create"):
        await genie.init("127.0.0.1", controller.port)
    assert_no_session_is_left()


async def test_rejected_token_is_not_retried(controller: SmallController) -> None:
    wrong = str(TOKEN).replace(TOKEN.secret, TOKEN.secret[::-1])
    with pytest.raises(TokenRefusedError) as caught:
        await genie.init("127.0.0.1", controller.port, token=wrong)
    assert TOKEN.secret[::-1] not in str(caught.value)
    assert_no_session_is_left()


async def test_protocol_mismatch_is_reported(controller: SmallController) -> None:
    async with await asyncio.start_server(_send_http_error, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ProtocolError, match="does not speak the Genie protocol"):
            await genie.init("127.0.0.1", port)
    assert_no_session_is_left()


async def _send_http_error(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


async def test_timeout_covers_all_phases_and_names_the_current_one(
    controller: SmallController,
) -> None:
    controller.answers_hello = False
    with pytest.raises(DeadlineError, match=r"within 2 s.*phase 4 of 5, backend"):
        await genie.init(timeout=2.0)
    assert_no_session_is_left()


async def test_timeout_in_the_first_health_check_leaves_no_pending_coroutine(
    controller: SmallController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        init_phases.SessionStartup,
        "_create_health_checker_and_check_once",
        lambda *_: asyncio.get_running_loop().create_future(),
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(DeadlineError, match="phase 5 of 5, monitoring"):
            await genie.init(timeout=2.0)
        assert_no_session_is_left()
        gc.collect()
    assert [str(warning.message) for warning in seen] == []


async def test_unresponsive_server_causes_a_timeout(controller: SmallController) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DeadlineError, match="phase 4 of 5"):
        await genie.init("127.0.0.1", silent.getsockname()[1], timeout=2.0)
    assert_no_session_is_left()


async def test_unavailable_backend_is_rejected_with_the_reason(controller: SmallController) -> None:
    with pytest.raises(ConfigError, match="backend 'rdma'"):
        await genie.init(backend="rdma")
    assert_no_session_is_left()


async def test_shutdown_works_without_a_controller(controller: SmallController) -> None:
    state = await genie.init(heartbeat_interval=0.1, **QUIET_SETTINGS)
    controller.stop()
    await until(lambda: has_event(state, EventType.CONNECTION_LOST))
    await genie.shutdown()
    assert_no_session_is_left()


# --- the device -------------------------------------------------------------------------------


async def test_init_attaches_the_device_without_importing_torch(controller: SmallController) -> None:
    code = f"""
        import asyncio, sys, genie
        from genie.device import registry
        asyncio.run(genie.init("127.0.0.1", {controller.port}))
        imported = ["torch" in sys.modules, "rich" in sys.modules, "typer" in sys.modules]
        print(len(registry.device_slots()), *imported)
    """
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.split() == ["1", "False", "False", "False"], done.stderr


async def test_shutdown_detaches_the_device(controller: SmallController) -> None:
    from genie.device import registry

    controller.nodes = (
        make_node("n1", make_gpu(0, vendor=Vendor.NVIDIA), make_gpu(1, vendor=Vendor.NVIDIA)),
    )
    await genie.init(**QUIET_SETTINGS)
    assert [slot.device.gpu_id for slot in registry.device_slots()] == ["0", "1"]
    await genie.shutdown()
    assert registry.device_slots() == ()
