"""Health checks: score, state and choice, and nodes that hang, send invalid data or are unreachable."""

from __future__ import annotations

import asyncio
import math
import resource
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from genie.errors import NoNodeError, NoNodeReachedError
from genie.grid.grid_file import GridFile, HealthSettings, parse_grid_file
from genie.grid.health.check import (
    THROTTLE_CHECK_TEMPERATURE_C_MIN,
    GpuReading,
    HealthCache,
    HealthState,
    NodeHealth,
    NodeHealthChecker,
    Readings,
    Xid,
    _CheckSlot,
    _concurrent_connects_max,
    assess_health,
    choose_best_node,
    compute_score,
)
from genie.grid.runs.launch import RunLauncher, grid_metrics
from genie.grid.runs.run_client import Runner
from genie.grid.ssh.pool import SshPool
from tests.grid.testbed import SshNode, SshTestbed
from tests.waiting import until

GIB = 1 << 30
HEALTH_SETTINGS = HealthSettings()
# Long enough for a busy machine; tests of a timeout use less.
FILE = "ssh: {connect_timeout: 20}\nhealth_check: {timeout: 20}\n"


def make_gpu_reading(index: int = 0, *, used: float = 0.0, **more: object) -> GpuReading:
    fields = {"utilization_pct": 0.0, "temperature_c": 40.0, "ecc_uncorrected": 0} | more
    return GpuReading(
        index,
        memory_total_bytes=80 * GIB,
        memory_used_bytes=int(used * 80 * GIB),
        **fields,  # type: ignore[arg-type]
    )


def make_readings(**more: object) -> Readings:
    fields: dict[str, object] = {
        "load": (1.0, 1.0, 1.0),
        "cores": 4,
        "disk_total_bytes": 1000 * GIB,
        "disk_free_bytes": 500 * GIB,
        "gpus": (make_gpu_reading(0, used=0.5), make_gpu_reading(1, used=0.0)),
    }
    return Readings(**(fields | more))  # type: ignore[arg-type]


def make_node_health(
    name: str, score: float | None = 1.0, state: HealthState = HealthState.OK, **more: object
) -> NodeHealth:
    return NodeHealth(name, state, score, (), 0.0, **more)  # type: ignore[arg-type]


# --- the score --------------------------------------------------------------------------------


def test_score_is_weighted_sum_of_load_and_gpu_memory() -> None:
    assert compute_score(make_readings(), HEALTH_SETTINGS, 1.0) == 1.0 * 25 + 3.0 * 25
    assert (
        compute_score(make_readings(), HealthSettings(cpu_weight=2, gpu_weight=0.5), 1.0) == 2 * 25 + 0.5 * 25
    )


def test_node_weight_divides_score() -> None:
    assert compute_score(make_readings(), HEALTH_SETTINGS, 2.0) == 50


def test_score_without_gpus_is_load() -> None:
    assert compute_score(make_readings(gpus=()), HEALTH_SETTINGS, 1.0) == 25


@pytest.mark.parametrize(
    "missing",
    [{"load": None}, {"cores": None}, {"failed": {"gpus": "hangs"}, "gpus": ()}, {"gpus": (GpuReading(0),)}],
)
def test_score_is_none_if_a_reading_is_missing(missing: dict[str, object]) -> None:
    assert compute_score(make_readings(**missing), HEALTH_SETTINGS, 1.0) is None


def test_score_uses_utilization_without_gpu_memory() -> None:
    assert (
        compute_score(make_readings(gpus=(GpuReading(0, utilization_pct=50.0),)), HEALTH_SETTINGS, 1.0)
        == 25 + 3 * 50
    )


# --- the state --------------------------------------------------------------------------------


def test_good_readings_are_ok() -> None:
    assert assess_health(make_readings()) == (HealthState.OK, ())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"gpus": (make_gpu_reading(temperature_c=86.0),)}, "GPU 0 is at 86 C"),
        ({"gpus": (make_gpu_reading(ecc_uncorrected=2),)}, "2 uncorrected"),
        ({"disk_free_bytes": GIB - 1}, "disk"),
        ({"disk_free_bytes": 9 * GIB}, "disk: 9.0 GiB free"),
        ({"unwritable": "/home/ada"}, "remote_root: /home/ada is not writable; mount it read-write"),
        ({"xids": (Xid("PCI:0000:3b:00", 79, "fell off", 60.0),)}, "Xid 79 on PCI:0000:3b:00: fell off"),
        ({"xids": (Xid("PCI:0000:3b:00", 48),)}, "Xid 48"),
    ],
)
def test_fault_makes_node_unhealthy(found: dict[str, object], words: str) -> None:
    state, reasons = assess_health(make_readings(**found))
    assert state is HealthState.UNHEALTHY
    assert words in reasons[0]


@pytest.mark.parametrize(
    "found",
    [
        {"gpus": (make_gpu_reading(temperature_c=85.0, ecc_uncorrected=None),)},
        {"disk_free_bytes": 10 * GIB},
        {"unwritable": ""},
        {"unwritable": None},
        {"xids": (Xid("PCI", 13, "a program's own fault", 1.0),)},
        {"xids": (Xid("PCI", 79, "two days ago", 172800.0),)},
        {"xids": None, "xids_unknown": "not permitted"},
        {"failed": {"xids": "invalid"}},
    ],
)
def test_harmless_reading_keeps_node_ok(found: dict[str, object]) -> None:
    assert assess_health(make_readings(**found)) == (HealthState.OK, ())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"failed": {"disk": "took longer than 2 s"}}, "disk: took longer"),
        ({"failed": {"gpus": "hangs"}, "gpus": ()}, "gpus: hangs"),
        ({"load": None}, "load"),
        ({"gpus": (GpuReading(3),)}, "GPU 3"),
    ],
)
def test_failed_reading_makes_node_degraded(found: dict[str, object], words: str) -> None:
    state, reasons = assess_health(make_readings(**found))
    assert state is HealthState.DEGRADED
    assert words in reasons[0]


def test_unhealthy_takes_precedence_and_all_reasons_are_listed() -> None:
    state, reasons = assess_health(make_readings(disk_free_bytes=0, failed={"gpus": "hangs"}))
    assert state is HealthState.UNHEALTHY
    assert len(reasons) == 2


def test_throttled_gpu_is_reported() -> None:
    assert assess_health(make_readings(gpus=(make_gpu_reading(throttled=("power brake",)),))) == (
        HealthState.OK,
        ("GPU 0 is throttled: power brake",),
    )


@pytest.mark.parametrize(
    ("reading", "free"),
    [
        (make_gpu_reading(used=0.04), True),
        (make_gpu_reading(used=0.06), False),
        (make_gpu_reading(used=0.0, utilization_pct=10.0), False),
        (make_gpu_reading(used=0.0, utilization_pct=None), True),
        (GpuReading(0, memory_total_bytes=4 * GIB, memory_used_bytes=GIB - 1, utilization_pct=0.0), True),
        (GpuReading(0, memory_total_bytes=4 * GIB, memory_used_bytes=GIB, utilization_pct=0.0), False),
        (GpuReading(0), False),
    ],
)
def test_gpu_is_free_with_little_memory_and_utilization(reading: GpuReading, free: bool) -> None:
    assert reading.is_free is free


# --- the choice -------------------------------------------------------------------------------


def test_choose_prefers_lowest_score_then_first() -> None:
    assert (
        choose_best_node(
            [make_node_health("a", 3.0), make_node_health("b", 2.0), make_node_health("c", 2.0)]
        ).name
        == "b"
    )


def test_choose_prefers_node_chosen_least_among_equals(tmp_path: Path) -> None:
    """Each choice uses its own checker, like separate commands."""
    file = parse_grid_file("nodes: [a, b, c, d]", name="f")
    nodes = [make_node_health("a"), make_node_health("b"), make_node_health("c", 0.5), make_node_health("d")]
    HealthCache(tmp_path).write(file, [*nodes[:2], make_node_health("c", 2.0), nodes[3]])
    taken = []
    for _ in range(7):
        cache = HealthCache(tmp_path)
        checker = NodeHealthChecker(SshPool(file, ssh_config=tmp_path), file, clock=lambda: 1.0, cache=cache)
        taken.append(choose_best_node(list(cache.read(file).values())).name)
        checker.record_choice(taken[-1])
    assert taken == ["a", "b", "d", "a", "b", "d", "a"]
    assert choose_best_node([msgspec.structs.replace(each, chosen=9) for each in nodes]).name == "c"


async def test_runs_are_spread_over_equally_good_nodes(tmp_path: Path) -> None:
    file = parse_grid_file("nodes: [a, b, c]", name="f")
    read_at = time.time()
    nodes = [msgspec.structs.replace(make_node_health(name), at=read_at) for name in ("a", "b", "c")]
    HealthCache(tmp_path).write(file, nodes)
    async with SshPool(file, ssh_config=tmp_path) as pool:
        launcher = RunLauncher(pool, file, Runner(pool, file), state_dir=tmp_path)
        assert [await launcher.choose_best_node(without={}) for _ in range(4)] == ["a", "b", "c", "a"]
    metrics = await asyncio.to_thread(grid_metrics(tmp_path).read_snapshot)
    assert metrics.scores == {node.name: node.score for node in nodes}


@pytest.mark.parametrize("state", [HealthState.DEGRADED, HealthState.UNHEALTHY, HealthState.UNREACHABLE])
def test_node_that_is_not_ok_is_never_chosen(state: HealthState) -> None:
    assert choose_best_node([make_node_health("a", 0.0, state), make_node_health("b", 500.0)]).name == "b"
    assert make_node_health("a", 0.0, state).effective_score == math.inf


def test_node_without_score_is_never_chosen() -> None:
    assert choose_best_node([make_node_health("a", None), make_node_health("b", 500.0)]).name == "b"


def test_choose_requires_labels_and_free_gpus() -> None:
    nodes = [
        make_node_health("a", 1.0, labels={"zone": "x"}, readings=make_readings(gpus=(make_gpu_reading(),))),
        make_node_health(
            "b",
            2.0,
            labels={"zone": "y"},
            readings=make_readings(gpus=(make_gpu_reading(), make_gpu_reading(1))),
        ),
        make_node_health(
            "c",
            3.0,
            labels={"zone": "x"},
            readings=make_readings(gpus=(make_gpu_reading(), make_gpu_reading(1))),
        ),
    ]
    assert choose_best_node(nodes).name == "a"
    assert choose_best_node(nodes, gpus=2).name == "b"
    assert choose_best_node(nodes, gpus=2, labels={"zone": "x"}).name == "c"


def test_choose_error_has_a_reason_per_node() -> None:
    nodes = [
        make_node_health("a", labels={"zone": "x"}),
        make_node_health(
            "b", 1.0, readings=make_readings(gpus=(make_gpu_reading(used=0.5), make_gpu_reading(1)))
        ),
        NodeHealth("c", HealthState.UNREACHABLE, None, ("no route",), 0.0),
    ]
    with pytest.raises(NoNodeError) as caught:
        choose_best_node(nodes, gpus=2)
    text = caught.value.message
    assert "a: no GPUs" in text
    assert "b: 1 of 2 GPUs are free, 2 requested" in text
    assert "c: unreachable: no route" in text
    assert "health --fresh" in caught.value.hint
    with pytest.raises(NoNodeError, match="a: no GPUs") as caught:
        choose_best_node([make_node_health("a", 1.0, readings=make_readings(gpus=()))], gpus=1)
    assert "without --gpus" in caught.value.hint and "--fresh" not in caught.value.hint
    with pytest.raises(NoNodeError, match="a: missing label zone=y") as caught:
        choose_best_node(nodes, labels={"zone": "y"})
    assert "grid-cli nodes list" in caught.value.hint


def test_choose_raises_transport_error_if_all_candidates_are_unreachable() -> None:
    unreachable = NodeHealth("a", HealthState.UNREACHABLE, None, ("no route",), 0.0, labels={"zone": "x"})
    other = make_node_health("b", labels={"zone": "y"})
    with pytest.raises(NoNodeReachedError, match="a: unreachable: no route") as caught:
        choose_best_node([unreachable, other], labels={"zone": "x"})
    assert caught.value.exit_code == 255
    with pytest.raises(NoNodeError) as several:
        choose_best_node([unreachable, other], gpus=1)
    assert several.value.exit_code == 1


def test_choose_error_truncates_many_reasons() -> None:
    with pytest.raises(NoNodeError, match="and 80 more") as caught:
        choose_best_node([make_node_health(f"n{n}", None, HealthState.UNREACHABLE) for n in range(100)])
    assert len(caught.value.message.splitlines()) == 22


# --- checks of real nodes ---------------------------------------------------------------------


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_grid_file(testbed: SshTestbed, more: str = FILE) -> GridFile:
    return parse_grid_file(testbed.grid_yaml(more=more), name="grid.yaml")


@pytest_asyncio.fixture
async def own_pool(own_testbed: SshTestbed) -> AsyncIterator[SshPool]:
    async with SshPool(make_grid_file(own_testbed), ssh_config=own_testbed.ssh_config) as pool:
        yield pool


async def test_check_all_returns_nodes_in_file_order(testbed: SshTestbed) -> None:
    testbed["gpu3"].gpus(2)
    try:
        async with SshPool(make_grid_file(testbed), ssh_config=testbed.ssh_config) as pool:
            found = await NodeHealthChecker(
                pool, make_grid_file(testbed), clock=ManualClock()
            ).check_all_in_file_order()
    finally:
        testbed["gpu3"].gpus(0)
    assert [node.name for node in found] == [f"gpu{n}" for n in range(1, 11)]
    assert {node.state for node in found} == {HealthState.OK}
    third = found[2].readings
    assert third is not None
    assert [each.name for each in third.gpus] == ["NVIDIA H100 80GB HBM3"] * 2
    assert (third.gpus_free, found[2].at) == (2, 1000.0)
    with pytest.raises(NoNodeError, match="gpu4: no GPUs"):
        choose_best_node(found, gpus=3)
    assert choose_best_node(found, gpus=2).name == "gpu3"


async def test_hanging_node_costs_only_its_own_timeout(own_testbed: SshTestbed) -> None:
    # One slot for both.
    file = make_grid_file(
        own_testbed, "ssh: {connect_timeout: 20, pool_size: 1}\nhealth_check: {timeout: 4}\n"
    )
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        checker = NodeHealthChecker(pool, file, clock=ManualClock())
        with own_testbed["gpu1"].suspended():
            first, second = await checker.check_all_in_file_order()
        assert (first.state, second.state) == (HealthState.UNREACHABLE, HealthState.OK)
        assert "within 4 s" in first.note
        assert choose_best_node([first, second]).name == "gpu2"


async def test_node_hanging_before_login_does_not_delay_others(own_testbed: SshTestbed) -> None:
    file = make_grid_file(own_testbed, "ssh: {pool_size: 1}\nhealth_check: {timeout: 600, max_workers: 1}\n")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        checker = NodeHealthChecker(pool, file, clock=ManualClock())
        with own_testbed["gpu1"].suspended():
            hanging = asyncio.create_task(checker.check("gpu1"))
            async with asyncio.timeout(60):
                assert (await checker.check("gpu2")).state is HealthState.OK
            assert not hanging.done()
            hanging.cancel()
            await asyncio.wait([hanging])


@pytest.mark.parametrize(
    ("allowed", "at_once"), [(256, 128), (1024, 256), (1 << 20, 256), (resource.RLIM_INFINITY, 256), (1, 1)]
)
def test_concurrent_connections_are_limited_by_open_files(
    monkeypatch: pytest.MonkeyPatch, allowed: int, at_once: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, resource.RLIM_INFINITY))
    assert _concurrent_connects_max() == at_once


async def test_waiting_for_a_slot_pauses_the_timeout() -> None:
    slots = asyncio.Semaphore(0)
    async with asyncio.timeout(60) as limit:
        with _CheckSlot(slots, limit) as slot:
            waiting = asyncio.create_task(slot.acquire())
            await until(lambda: limit.when() is None, what="the timeout to be paused")
            slots.release()
            await waiting
            assert limit.when() is not None
            assert slot.waited_s > 0
            assert slots.locked()
            await slot.acquire()  # a second attempt keeps the slot
        assert not slots.locked()


async def test_node_hanging_after_login_is_unreachable(own_testbed: SshTestbed) -> None:
    file = make_grid_file(
        own_testbed, "ssh: {connect_timeout: 20}\nhealth_check: {timeout: 2, refresh_interval: 0}\n"
    )
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        async with pool.connect("gpu1", timeout_s=20):
            pass
        with own_testbed["gpu1"].suspended():
            found = await NodeHealthChecker(pool, file, clock=ManualClock()).check("gpu1")
    assert (found.state, found.score) == (HealthState.UNREACHABLE, None)


async def test_nodes_with_and_without_nvml_have_the_same_readings(
    own_testbed: SshTestbed, own_pool: SshPool
) -> None:
    lines = ["0, H200, GPU-a, 143771, 5, 0, 33, 0", "1, H200, GPU-b, 143771, 90000, 88, 84, [N/A]"]
    own_testbed["gpu2"].nvml(None)
    found = []
    for node in own_testbed.nodes:
        node.gpus(2, lines=lines, reasons=["1, 0x20"])
        async with own_pool.connect(node.name) as link:
            arguments = {"root": "~", "timeout_s": 20, "throttle_check_c": THROTTLE_CHECK_TEMPERATURE_C_MIN}
            answer, _ = await link.call("health.read", arguments, timeout_s=40)
        found.append((answer["vendor"], answer["gpus"], answer["failed"]))
    assert found[0] == found[1]
    assert [gpu["throttled"] for gpu in found[0][1]] == [[], ["software thermal slowdown"]]


async def test_nvml_reading_starts_no_program(own_testbed: SshTestbed, own_pool: SshPool) -> None:
    node = own_testbed["gpu1"]
    node.gpus(2)
    (node.bin / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    async with own_pool.connect("gpu1"):
        pass  # the first reading of an unused node is taken by the shell script
    found = await NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=ManualClock()).check("gpu1")
    assert found.state is HealthState.OK, found
    assert found.readings is not None and len(found.readings.gpus) == 2


async def test_hanging_driver_fails_only_gpu_readings(own_testbed: SshTestbed) -> None:
    own_testbed["gpu1"].gpus(2)
    own_testbed["gpu1"].nvml_state(["hangs=1"])
    file = make_grid_file(own_testbed, "ssh: {connect_timeout: 20}\nhealth_check: {timeout: 3}\n")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        async with pool.connect("gpu1", timeout_s=20):
            pass
        checker = NodeHealthChecker(pool, file, clock=ManualClock())
        found = await checker.check("gpu1")
        again = await checker.check("gpu1", fresh=True)
    assert (found.state, again.state) == (HealthState.DEGRADED, HealthState.DEGRADED)
    assert found.note.startswith("gpus: took longer than")
    assert again.note == "gpus: a previous reading still hangs"
    assert found.readings is not None and found.readings.load is not None


async def test_hanging_nvidia_smi_fails_only_gpu_readings(own_testbed: SshTestbed) -> None:
    own_testbed["gpu1"].gpus(2)
    own_testbed["gpu1"].nvml(None)
    (own_testbed["gpu1"].folder / "smi-hangs").touch()
    file = make_grid_file(own_testbed, "ssh: {connect_timeout: 20}\nhealth_check: {timeout: 3}\n")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        for name in ("gpu1", "gpu2"):
            async with pool.connect(name, timeout_s=20):
                pass  # connecting is not part of the test
        first, second = await NodeHealthChecker(pool, file, clock=ManualClock()).check_all_in_file_order()
    assert (first.state, first.score) == (HealthState.DEGRADED, None)
    assert "took longer" in first.note  # the tool, or on a busy machine the whole reading
    assert first.readings is not None and first.readings.load is not None
    assert choose_best_node([first, second]).name == "gpu2"


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("0, Orin, GPU-a, [N/A], [N/A], 3, [N/A], [N/A]", HealthState.OK),
        ("0, T4, GPU-a, 100, 10, [Not Supported], 40, [N/A]", HealthState.OK),
        ("0, T4, GPU-a, [Unknown Error], [Unknown Error], [Unknown Error], 40, 0", HealthState.DEGRADED),
        ("Unable to determine the device handle", HealthState.DEGRADED),
        ("0, T4, GPU-a, 100, 10, 5, 95, 0", HealthState.UNHEALTHY),
        ("0, T4, GPU-a, 100, 10, 5, 40, 3", HealthState.UNHEALTHY),
    ],
)
async def test_real_nvidia_smi_values_give_expected_state(
    own_testbed: SshTestbed, own_pool: SshPool, line: str, state: HealthState
) -> None:
    own_testbed["gpu1"].gpus(1, lines=[line])
    found = await NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=ManualClock()).check("gpu1")
    assert found.state is state, found


async def test_node_without_python_is_read_by_shell_script(
    own_testbed: SshTestbed, own_pool: SshPool
) -> None:
    node = own_testbed["gpu1"]
    node.gpus(2)
    (node.bin / "python3").write_text("#!/bin/sh\nexit 127\n")
    (node.bin / "python3").chmod(0o755)
    found = await NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=ManualClock()).check("gpu1")
    assert found.state is HealthState.OK
    assert found.readings is not None
    assert (len(found.readings.gpus), found.readings.failed) == (2, {})
    assert found.score is not None


async def test_xid_in_kernel_log_makes_node_unhealthy(own_testbed: SshTestbed, own_pool: SshPool) -> None:
    node = own_testbed["gpu1"]
    node.gpus(1)
    log = node.folder / "kmsg"
    log.write_text("6,1,1000000,-;booted\n4,2,2000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU lost\n")
    # The timestamp counts from boot, which may be more than a day ago.
    log.write_text(log.read_text().replace("2000000", str(_read_uptime_us())))
    node.restart(before=f"mount --bind {log} /dev/kmsg")
    (node.bin / "dmesg").write_text(
        f"#!/bin/sh\necho '[{_read_uptime_us() / 1e6:.1f}] NVRM: Xid (PCI:0000:3b:00): 79, GPU lost'\n"
    )
    (node.bin / "dmesg").chmod(0o755)
    checker = NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=ManualClock())
    for _ in range(2):  # by the shell script, then by the helper, which reads the log itself
        found = await checker.check("gpu1", fresh=True)
        assert found.state is HealthState.UNHEALTHY
        assert "Xid 79 on PCI:0000:3b:00" in found.note


def _read_uptime_us() -> int:
    return int(float(Path("/proc/uptime").read_text().split()[0]) * 1e6)


async def test_full_disk_makes_node_unhealthy(own_testbed: SshTestbed, own_pool: SshPool) -> None:
    own_testbed["gpu1"].restart(before="mount -t tmpfs -o size=1m tmpfs /root")
    found = await NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=ManualClock()).check("gpu1")
    assert found.state is HealthState.UNHEALTHY
    assert found.note.startswith("disk: 0.0 GiB free")


@pytest.mark.parametrize("fault", ["read-only", "another user's", "a file in its place", "none"])
async def test_unwritable_home_makes_node_unhealthy(own_testbed: SshTestbed, fault: str) -> None:
    node = own_testbed["gpu1"]
    if fault == "read-only":
        node.restart(before="mount -o remount,bind,ro /root")
    elif fault == "another user's":
        for program in ("sh", "python3"):
            _make_program_run_as_nobody(node, program)
    elif fault == "a file in its place":
        (node.home / "ws").write_text("no folder")
    folder = {"none": "", "a file in its place": "/root/ws"}.get(fault, "/root")
    file = make_grid_file(own_testbed, FILE + "remote_root: ~/ws/deeper\n")
    async with SshPool(file, ssh_config=own_testbed.ssh_config) as pool:
        checker = NodeHealthChecker(pool, file, clock=ManualClock())
        for started in (False, True):  # by the shell script, then by the helper
            found = await checker.check("gpu1", fresh=True)
            assert bool(node.processes("python3 -ISc")) is started
            assert found.readings is not None
            assert (found.readings.unwritable, found.readings.failed) == (folder, {})
            assert found.state is (HealthState.UNHEALTHY if folder else HealthState.OK)
            assert found.note.startswith(f"remote_root: {folder} is not writable" if folder else "")


def _make_program_run_as_nobody(node: SshNode, program: str) -> None:
    real = shutil.which(program, path="/usr/local/bin:/usr/bin:/bin")
    path = node.bin / program
    path.write_text(f'#!/bin/sh\nexec setpriv --reuid 65534 --clear-groups {real} "$@"\n')
    path.chmod(0o755)


async def test_changed_host_key_makes_node_unreachable(own_testbed: SshTestbed, own_pool: SshPool) -> None:
    own_testbed["gpu1"].write_host_key()
    own_testbed["gpu1"].restart()
    first, second = await NodeHealthChecker(
        own_pool, make_grid_file(own_testbed), clock=ManualClock()
    ).check_all_in_file_order()
    assert (first.state, second.state) == (HealthState.UNREACHABLE, HealthState.OK)
    assert "host key of" in first.note and "has changed" in first.note and "ssh-keygen -f" in first.note


@pytest.mark.parametrize(
    "answer",
    [
        {"load": "high", "cores": 1},
        {"load": [math.nan, 0, 0], "cores": 1},
        {"load": [-5.0, 0, 0], "cores": 1},
        {"load": [1, 1, 1], "cores": -1},
        {"gpus": [{"index": 0, "memory_total_bytes": 1, "memory_used_bytes": -9}]},
        [],
    ],
)
async def test_invalid_readings_make_node_degraded(
    own_testbed: SshTestbed, own_pool: SshPool, monkeypatch, answer: object
) -> None:
    async def invalid(link: object, root: str, *, left_s: float) -> object:
        return answer

    monkeypatch.setattr("genie.grid.health.check._fetch_readings", invalid)
    found = await NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=ManualClock()).check("gpu1")
    assert (found.state, found.score) == (HealthState.DEGRADED, None)
    assert "answer: invalid" in found.note


async def test_duplicate_gpu_index_invalidates_gpu_readings(
    own_testbed: SshTestbed, own_pool: SshPool, monkeypatch
) -> None:
    answer = msgspec.to_builtins(
        make_readings(gpus=(make_gpu_reading(0), make_gpu_reading(1), make_gpu_reading(1)))
    )

    async def twice(link: object, root: str, *, left_s: float) -> object:
        return answer

    monkeypatch.setattr("genie.grid.health.check._fetch_readings", twice)
    found = await NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=ManualClock()).check("gpu1")
    assert (found.state, found.score) == (HealthState.DEGRADED, None)
    assert "duplicate GPU index" in found.note
    assert found.readings is not None
    assert found.readings.gpus_free == 0


async def test_long_reasons_are_truncated(own_testbed: SshTestbed, own_pool: SshPool, monkeypatch) -> None:
    async def long_reasons(link: object, root: str, *, left_s: float) -> object:
        return {"failed": {f"part{number}": "x" * 10_000 for number in range(1000)}}

    monkeypatch.setattr("genie.grid.health.check._fetch_readings", long_reasons)
    found = await NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=ManualClock()).check("gpu1")
    assert len(found.note) < 20_000


async def test_unknown_node_name_raises(own_testbed: SshTestbed, own_pool: SshPool) -> None:
    with pytest.raises(NoNodeError):
        await NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=ManualClock()).check("gpu9")


# --- the cache --------------------------------------------------------------------------------


async def test_readings_are_valid_for_refresh_interval(own_testbed: SshTestbed, own_pool: SshPool) -> None:
    clock = ManualClock()
    checker = NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=clock)
    before = await checker.check_all_in_file_order()
    own_testbed["gpu1"].gpus(1)
    clock.now += 59
    assert await checker.check_all_in_file_order() == before
    assert await checker.check("gpu1") == before[0]
    clock.now += 1
    after = await checker.check_all_in_file_order()
    assert after[0].readings is not None and len(after[0].readings.gpus) == 1


async def test_fresh_ignores_previous_readings(own_testbed: SshTestbed, own_pool: SshPool) -> None:
    checker = NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=ManualClock())
    await checker.check_all_in_file_order()
    own_testbed["gpu1"].gpus(1)
    found = await checker.check("gpu1", fresh=True)
    assert found.readings is not None and len(found.readings.gpus) == 1


async def test_another_process_uses_the_cache(
    own_testbed: SshTestbed, own_pool: SshPool, tmp_path: Path
) -> None:
    clock = ManualClock()
    cache = HealthCache(tmp_path)
    first = await NodeHealthChecker(
        own_pool, make_grid_file(own_testbed), clock=clock, cache=cache
    ).check_all_in_file_order()
    for node in own_testbed.nodes:
        node.stop()
    again = NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=clock, cache=HealthCache(tmp_path))
    assert await again.check_all_in_file_order() == first
    assert (tmp_path / "grid" / "health.json").stat().st_mode & 0o777 == 0o600


def write_health_cache(tmp_path: Path, file: GridFile) -> HealthCache:
    cache = HealthCache(tmp_path)
    cache.write(file, [make_node_health(node.name) for node in file.nodes])
    return cache


def test_cache_is_ignored_after_grid_file_changed(tmp_path: Path) -> None:
    cache = write_health_cache(tmp_path, parse_grid_file("nodes: [a, b]", name="f"))
    assert set(cache.read(parse_grid_file("nodes: [a, b] # why", name="f"))) == {"a", "b"}
    assert cache.read(parse_grid_file("nodes: [a, {name: b, weight: 2}]", name="f")) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"identity": 1}'])
def test_damaged_cache_is_ignored(tmp_path: Path, text: str) -> None:
    file = parse_grid_file("nodes: [a, b]", name="f")
    cache = write_health_cache(tmp_path, file)
    (tmp_path / "grid" / "health.json").write_text(text)
    assert cache.read(file) == {}


def test_cache_write_error_is_not_raised(tmp_path: Path) -> None:
    (tmp_path / "grid").write_text("a file instead of the directory")
    write_health_cache(tmp_path, parse_grid_file("nodes: [a]", name="f"))


def test_failed_cache_write_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    write_health_cache(tmp_path, parse_grid_file("nodes: [a]", name="f"))
    assert list((tmp_path / "grid").iterdir()) == []


def test_node_health_round_trips_through_json() -> None:
    node = make_node_health(
        "a", readings=make_readings(xids=(Xid("PCI", 79),), unwritable="/x"), labels={"zone": "x"}
    )
    text = msgspec.json.encode(node)
    assert msgspec.json.decode(text, type=NodeHealth) == node
    old_text = text.replace(b'"unwritable":"/x",', b"")
    assert old_text != text
    old = msgspec.json.decode(old_text, type=NodeHealth).readings
    assert old is not None and old.unwritable is None


async def test_first_check_uses_shell_and_later_ones_the_helper(
    own_testbed: SshTestbed, own_pool: SshPool
) -> None:
    checker = NodeHealthChecker(own_pool, make_grid_file(own_testbed), clock=ManualClock())
    first = await checker.check("gpu1", fresh=True)
    assert not own_testbed["gpu1"].processes("python3 -ISc")
    second = await checker.check("gpu1", fresh=True)
    assert own_testbed["gpu1"].processes("python3 -ISc")
    assert first.readings is not None
    assert second.readings is not None
    assert first.readings.cores == second.readings.cores
    assert first.readings.memory_total_bytes == second.readings.memory_total_bytes
