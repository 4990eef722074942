"""Health and choice: what readings mean, which node wins, and nodes that hang, lie or are not there."""

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
from genie.grid.grid_file import GridFile, HealthKeys, parse_grid_file
from genie.grid.health_check import (
    GpuReading,
    HealthCache,
    HealthChecker,
    NodeHealth,
    NodeState,
    Readings,
    Xid,
    _reaching_max,
    _Turn,
    choose,
    judge,
    score,
)
from genie.grid.launch import Launcher, figures
from genie.grid.runner import Runner
from genie.grid.ssh_pool import SshPool
from tests.grid.bed import Bed, Node
from tests.waiting import until

GIB = 1 << 30
KEYS = HealthKeys()
# Time for a busy machine; tests of a timeout give less.
FILE = "ssh: {connect_timeout: 20}\nhealth_check: {timeout: 20}\n"


def gpu(index: int = 0, *, used: float = 0.0, **more: object) -> GpuReading:
    fields = {"utilization_pct": 0.0, "temperature_c": 40.0, "ecc_uncorrected": 0} | more
    return GpuReading(
        index,
        memory_total_bytes=80 * GIB,
        memory_used_bytes=int(used * 80 * GIB),
        **fields,  # type: ignore[arg-type]
    )


def readings(**more: object) -> Readings:
    fields: dict[str, object] = {
        "load": (1.0, 1.0, 1.0),
        "cores": 4,
        "disk_total_bytes": 1000 * GIB,
        "disk_free_bytes": 500 * GIB,
        "gpus": (gpu(0, used=0.5), gpu(1, used=0.0)),
    }
    return Readings(**(fields | more))  # type: ignore[arg-type]


def health(
    name: str, score: float | None = 1.0, state: NodeState = NodeState.OK, **more: object
) -> NodeHealth:
    return NodeHealth(name, state, score, (), 0.0, **more)  # type: ignore[arg-type]


# --- the score --------------------------------------------------------------------------------


def test_the_score_is_load_and_gpu_memory_by_their_weights() -> None:
    assert score(readings(), KEYS, 1.0) == 1.0 * 25 + 3.0 * 25
    assert score(readings(), HealthKeys(cpu_weight=2, gpu_weight=0.5), 1.0) == 2 * 25 + 0.5 * 25


def test_the_weight_of_a_node_divides_its_score() -> None:
    assert score(readings(), KEYS, 2.0) == 50


def test_without_gpus_the_load_alone_counts() -> None:
    assert score(readings(gpus=()), KEYS, 1.0) == 25


@pytest.mark.parametrize(
    "missing",
    [{"load": None}, {"cores": None}, {"failed": {"gpus": "hangs"}, "gpus": ()}, {"gpus": (GpuReading(0),)}],
)
def test_without_a_reading_that_counts_there_is_no_score(missing: dict[str, object]) -> None:
    assert score(readings(**missing), KEYS, 1.0) is None


def test_memory_that_is_the_hosts_own_is_replaced_by_the_utilisation() -> None:
    assert score(readings(gpus=(GpuReading(0, utilization_pct=50.0),)), KEYS, 1.0) == 25 + 3 * 50


# --- the state --------------------------------------------------------------------------------


def test_good_readings_are_ok() -> None:
    assert judge(readings()) == (NodeState.OK, ())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"gpus": (gpu(temperature_c=90.0),)}, "GPU 0 is at 90 C"),
        ({"gpus": (gpu(ecc_uncorrected=2),)}, "2 uncorrected"),
        ({"disk_free_bytes": GIB - 1}, "disk"),
        ({"disk_free_bytes": 9 * GIB}, "disk: 9.0 GiB free"),
        ({"unwritable": "/home/ada"}, "remote_root: /home/ada cannot be written; have it mounted writable"),
        ({"xids": (Xid("PCI:0000:3b:00", 79, "fell off", 60.0),)}, "Xid 79 on PCI:0000:3b:00: fell off"),
        ({"xids": (Xid("PCI:0000:3b:00", 48),)}, "Xid 48"),
    ],
)
def test_what_makes_a_node_unhealthy(found: dict[str, object], words: str) -> None:
    state, reasons = judge(readings(**found))
    assert state is NodeState.UNHEALTHY
    assert words in reasons[0]


@pytest.mark.parametrize(
    "found",
    [
        {"gpus": (gpu(temperature_c=89.0, ecc_uncorrected=None),)},
        {"disk_free_bytes": 10 * GIB},
        {"unwritable": ""},
        {"unwritable": None},
        {"xids": (Xid("PCI", 13, "a program's own fault", 1.0),)},
        {"xids": (Xid("PCI", 79, "two days ago", 172800.0),)},
        {"xids": None, "xids_unknown": "not permitted"},
        {"failed": {"xids": "not understood"}},
    ],
)
def test_what_does_not(found: dict[str, object]) -> None:
    assert judge(readings(**found)) == (NodeState.OK, ())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"failed": {"disk": "took longer than 2 s"}}, "disk: took longer"),
        ({"failed": {"gpus": "hangs"}, "gpus": ()}, "gpus: hangs"),
        ({"load": None}, "load"),
        ({"gpus": (GpuReading(3),)}, "GPU 3"),
    ],
)
def test_a_reading_that_failed_makes_a_node_degraded(found: dict[str, object], words: str) -> None:
    state, reasons = judge(readings(**found))
    assert state is NodeState.DEGRADED
    assert words in reasons[0]


def test_unhealthy_comes_before_degraded_and_both_are_told() -> None:
    state, reasons = judge(readings(disk_free_bytes=0, failed={"gpus": "hangs"}))
    assert state is NodeState.UNHEALTHY
    assert len(reasons) == 2


def test_a_gpu_that_is_held_down_is_told() -> None:
    assert judge(readings(gpus=(gpu(throttled=("heat",)),))) == (
        NodeState.OK,
        ("GPU 0 is held down by heat",),
    )


@pytest.mark.parametrize(
    ("reading", "free"),
    [
        (gpu(used=0.04), True),
        (gpu(used=0.06), False),
        (gpu(used=0.0, utilization_pct=10.0), False),
        (gpu(used=0.0, utilization_pct=None), True),
        (GpuReading(0, memory_total_bytes=4 * GIB, memory_used_bytes=GIB - 1, utilization_pct=0.0), True),
        (GpuReading(0, memory_total_bytes=4 * GIB, memory_used_bytes=GIB, utilization_pct=0.0), False),
        (GpuReading(0), False),
    ],
)
def test_a_gpu_is_free_when_hardly_anything_is_on_it(reading: GpuReading, free: bool) -> None:
    assert reading.is_free is free


# --- the choice -------------------------------------------------------------------------------


def test_the_lowest_score_wins_and_of_equals_the_first() -> None:
    assert choose([health("a", 3.0), health("b", 2.0), health("c", 2.0)]).name == "b"


def test_of_equals_the_one_that_was_chosen_least_since_it_was_read(tmp_path: Path) -> None:
    """Each choice with a checker of its own, as separate commands have one."""
    file = parse_grid_file("nodes: [a, b, c, d]", name="f")
    nodes = [health("a"), health("b"), health("c", 0.5), health("d")]
    HealthCache(tmp_path).write(file, [*nodes[:2], health("c", 2.0), nodes[3]])
    taken = []
    for _ in range(7):
        cache = HealthCache(tmp_path)
        checker = HealthChecker(SshPool(file, ssh_config=tmp_path), file, clock=lambda: 1.0, cache=cache)
        taken.append(choose(list(cache.read(file).values())).name)
        checker.note_chosen(taken[-1])
    assert taken == ["a", "b", "d", "a", "b", "d", "a"]
    assert choose([msgspec.structs.replace(each, chosen=9) for each in nodes]).name == "c"


async def test_runs_are_spread_over_nodes_that_are_as_good(tmp_path: Path) -> None:
    file = parse_grid_file("nodes: [a, b, c]", name="f")
    read_at = time.time()
    nodes = [msgspec.structs.replace(health(name), at=read_at) for name in ("a", "b", "c")]
    HealthCache(tmp_path).write(file, nodes)
    async with SshPool(file, ssh_config=tmp_path) as pool:
        launcher = Launcher(pool, file, Runner(pool, file), state_dir=tmp_path)
        assert [await launcher.best_node(without={}) for _ in range(4)] == ["a", "b", "c", "a"]
    kept = await asyncio.to_thread(figures(tmp_path).figures)
    assert kept.scores == {node.name: node.score for node in nodes}


@pytest.mark.parametrize("state", [NodeState.DEGRADED, NodeState.UNHEALTHY, NodeState.UNREACHABLE])
def test_a_node_that_is_not_ok_is_never_the_best(state: NodeState) -> None:
    assert choose([health("a", 0.0, state), health("b", 500.0)]).name == "b"
    assert health("a", 0.0, state).rank == math.inf


def test_a_node_without_a_score_is_never_the_best() -> None:
    assert choose([health("a", None), health("b", 500.0)]).name == "b"


def test_labels_and_free_gpus_come_before_the_score() -> None:
    nodes = [
        health("a", 1.0, labels={"zone": "x"}, readings=readings(gpus=(gpu(),))),
        health("b", 2.0, labels={"zone": "y"}, readings=readings(gpus=(gpu(), gpu(1)))),
        health("c", 3.0, labels={"zone": "x"}, readings=readings(gpus=(gpu(), gpu(1)))),
    ]
    assert choose(nodes).name == "a"
    assert choose(nodes, gpus=2).name == "b"
    assert choose(nodes, gpus=2, labels={"zone": "x"}).name == "c"


def test_when_none_fits_each_node_has_its_reason() -> None:
    nodes = [
        health("a", labels={"zone": "x"}),
        health("b", 1.0, readings=readings(gpus=(gpu(used=0.5), gpu(1)))),
        NodeHealth("c", NodeState.UNREACHABLE, None, ("no route",), 0.0),
    ]
    with pytest.raises(NoNodeError) as caught:
        choose(nodes, gpus=2)
    text = caught.value.message
    assert "a: it has no GPUs" in text
    assert "b: 1 of 2 GPUs are free, 2 wanted" in text
    assert "c: unreachable: no route" in text
    assert "health --fresh" in caught.value.hint
    with pytest.raises(NoNodeError, match="a: it has no label zone=y") as caught:
        choose(nodes, labels={"zone": "y"})
    assert "'grid-cli nodes list' shows the labels" in caught.value.hint


def test_when_all_that_may_be_chosen_are_silent_it_is_a_matter_of_transport() -> None:
    silent = NodeHealth("a", NodeState.UNREACHABLE, None, ("no route",), 0.0, labels={"zone": "x"})
    other = health("b", labels={"zone": "y"})
    with pytest.raises(NoNodeReachedError, match="a: unreachable: no route") as caught:
        choose([silent, other], labels={"zone": "x"})
    assert caught.value.exit_code == 255
    with pytest.raises(NoNodeError) as several:
        choose([silent, other], gpus=1)
    assert several.value.exit_code == 1


def test_the_reasons_of_many_nodes_are_cut() -> None:
    with pytest.raises(NoNodeError, match="and 80 more") as caught:
        choose([health(f"n{n}", None, NodeState.UNREACHABLE) for n in range(100)])
    assert len(caught.value.message.splitlines()) == 22


# --- asking real nodes ------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def file_of(bed: Bed, more: str = FILE) -> GridFile:
    return parse_grid_file(bed.grid_yaml(more=more), name="grid.yaml")


@pytest_asyncio.fixture
async def own_pool(own_bed: Bed) -> AsyncIterator[SshPool]:
    async with SshPool(file_of(own_bed), ssh_config=own_bed.ssh_config) as pool:
        yield pool


async def test_all_nodes_are_read_in_the_order_of_the_file(bed: Bed) -> None:
    bed["gpu3"].gpus(2)
    try:
        async with SshPool(file_of(bed), ssh_config=bed.ssh_config) as pool:
            found = await HealthChecker(pool, file_of(bed), clock=Clock()).check_all()
    finally:
        bed["gpu3"].gpus(0)
    assert [node.name for node in found] == [f"gpu{n}" for n in range(1, 11)]
    assert {node.state for node in found} == {NodeState.OK}
    third = found[2].readings
    assert third is not None
    assert [each.name for each in third.gpus] == ["NVIDIA H100 80GB HBM3"] * 2
    assert (third.gpus_free, found[2].at) == (2, 1000.0)
    with pytest.raises(NoNodeError, match="gpu4: it has no GPUs"):
        choose(found, gpus=3)
    assert choose(found, gpus=2).name == "gpu3"


async def test_a_hanging_node_costs_only_its_own_timeout(own_bed: Bed) -> None:
    # One place for both.
    file = file_of(own_bed, "ssh: {connect_timeout: 20, pool_size: 1}\nhealth_check: {timeout: 6}\n")
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        checker = HealthChecker(pool, file, clock=Clock())
        with own_bed["gpu1"].hanging():
            first, second = await checker.check_all()
        assert (first.state, second.state) == (NodeState.UNREACHABLE, NodeState.OK)
        assert "within 6 s" in first.note
        assert choose([first, second]).name == "gpu2"


async def test_nodes_that_hang_before_the_login_delay_no_other(own_bed: Bed) -> None:
    file = file_of(own_bed, "ssh: {pool_size: 1}\nhealth_check: {timeout: 600, max_workers: 1}\n")
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        checker = HealthChecker(pool, file, clock=Clock())
        with own_bed["gpu1"].hanging():
            silent = asyncio.create_task(checker.check("gpu1"))
            async with asyncio.timeout(60):
                assert (await checker.check("gpu2")).state is NodeState.OK
            assert not silent.done()
            silent.cancel()
            await asyncio.wait([silent])


@pytest.mark.parametrize(
    ("allowed", "at_once"), [(256, 128), (1024, 256), (1 << 20, 256), (resource.RLIM_INFINITY, 256), (1, 1)]
)
def test_no_more_nodes_are_tried_at_once_than_files_may_be_open(
    monkeypatch: pytest.MonkeyPatch, allowed: int, at_once: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, resource.RLIM_INFINITY))
    assert _reaching_max() == at_once


async def test_waiting_for_a_turn_takes_nothing_from_a_nodes_time() -> None:
    places = asyncio.Semaphore(0)
    async with asyncio.timeout(60) as limit:
        with _Turn(places, limit) as turn:
            waiting = asyncio.create_task(turn.take())
            await until(lambda: limit.when() is None, what="the limit to be paused")
            places.release()
            await waiting
            assert limit.when() is not None
            assert turn.waited_s > 0
            assert places.locked()
            await turn.take()  # a second attempt keeps the place
        assert not places.locked()


async def test_a_node_that_hangs_after_the_login_is_unreachable(own_bed: Bed) -> None:
    file = file_of(own_bed, "ssh: {connect_timeout: 20}\nhealth_check: {timeout: 2, refresh_interval: 0}\n")
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        async with pool.use("gpu1", timeout_s=20):
            pass
        with own_bed["gpu1"].hanging():
            found = await HealthChecker(pool, file, clock=Clock()).check("gpu1")
    assert (found.state, found.score) == (NodeState.UNREACHABLE, None)


async def test_nodes_with_and_without_nvml_have_the_same_readings(own_bed: Bed, own_pool: SshPool) -> None:
    lines = ["0, H200, GPU-a, 143771, 5, 0, 33, 0", "1, H200, GPU-b, 143771, 90000, 88, 84, [N/A]"]
    own_bed["gpu2"].nvml(None)
    found = []
    for node in own_bed.nodes:
        node.gpus(2, lines=lines, reasons=["1, 0x20"])
        async with own_pool.use(node.name) as link:
            answer, _ = await link.call("health.read", {"root": "~", "timeout_s": 20}, timeout_s=40)
        found.append((answer["vendor"], answer["gpus"], answer["failed"]))
    assert found[0] == found[1]
    assert [gpu["throttled"] for gpu in found[0][1]] == [[], ["heat"]]


async def test_a_reading_by_nvml_starts_no_program(own_bed: Bed, own_pool: SshPool) -> None:
    node = own_bed["gpu1"]
    node.gpus(2)
    (node.bin / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    async with own_pool.use("gpu1"):
        pass  # the first reading of a node that nobody has used is one by its shell
    found = await HealthChecker(own_pool, file_of(own_bed), clock=Clock()).check("gpu1")
    assert found.state is NodeState.OK, found
    assert found.readings is not None and len(found.readings.gpus) == 2


async def test_a_driver_that_hangs_leaves_the_other_readings(own_bed: Bed) -> None:
    own_bed["gpu1"].gpus(2)
    own_bed["gpu1"].nvml_state(["hangs=1"])
    file = file_of(own_bed, "ssh: {connect_timeout: 20}\nhealth_check: {timeout: 3}\n")
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        async with pool.use("gpu1", timeout_s=20):
            pass
        checker = HealthChecker(pool, file, clock=Clock())
        found = await checker.check("gpu1")
        again = await checker.check("gpu1", fresh=True)
    assert (found.state, again.state) == (NodeState.DEGRADED, NodeState.DEGRADED)
    assert found.note.startswith("gpus: took longer than")
    assert again.note == "gpus: an earlier reading still hangs"
    assert found.readings is not None and found.readings.load is not None


async def test_a_hung_nvidia_smi_leaves_the_other_readings(own_bed: Bed) -> None:
    own_bed["gpu1"].gpus(2)
    own_bed["gpu1"].nvml(None)
    (own_bed["gpu1"].folder / "smi-hangs").touch()
    file = file_of(own_bed, "ssh: {connect_timeout: 20}\nhealth_check: {timeout: 3}\n")
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        for name in ("gpu1", "gpu2"):
            async with pool.use(name, timeout_s=20):
                pass  # connecting is not what is tested
        first, second = await HealthChecker(pool, file, clock=Clock()).check_all()
    assert (first.state, first.score) == (NodeState.DEGRADED, None)
    assert "nvidia-smi took longer" in first.note
    assert first.readings is not None and first.readings.load is not None
    assert choose([first, second]).name == "gpu2"


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("0, Orin, GPU-a, [N/A], [N/A], 3, [N/A], [N/A]", NodeState.OK),
        ("0, T4, GPU-a, 100, 10, [Not Supported], 40, [N/A]", NodeState.OK),
        ("0, T4, GPU-a, [Unknown Error], [Unknown Error], [Unknown Error], 40, 0", NodeState.DEGRADED),
        ("Unable to determine the device handle", NodeState.DEGRADED),
        ("0, T4, GPU-a, 100, 10, 5, 95, 0", NodeState.UNHEALTHY),
        ("0, T4, GPU-a, 100, 10, 5, 40, 3", NodeState.UNHEALTHY),
    ],
)
async def test_values_that_a_real_tool_prints(
    own_bed: Bed, own_pool: SshPool, line: str, state: NodeState
) -> None:
    own_bed["gpu1"].gpus(1, lines=[line])
    found = await HealthChecker(own_pool, file_of(own_bed), clock=Clock()).check("gpu1")
    assert found.state is state, found


async def test_a_node_without_python_is_read_by_its_shell(own_bed: Bed, own_pool: SshPool) -> None:
    node = own_bed["gpu1"]
    node.gpus(2)
    (node.bin / "python3").write_text("#!/bin/sh\nexit 127\n")
    (node.bin / "python3").chmod(0o755)
    found = await HealthChecker(own_pool, file_of(own_bed), clock=Clock()).check("gpu1")
    assert found.state is NodeState.OK
    assert found.readings is not None
    assert (len(found.readings.gpus), found.readings.failed) == (2, {})
    assert found.score is not None


async def test_an_xid_in_the_kernels_log_makes_the_node_unhealthy(own_bed: Bed, own_pool: SshPool) -> None:
    node = own_bed["gpu1"]
    node.gpus(1)
    log = node.folder / "kmsg"
    log.write_text("6,1,1000000,-;booted\n4,2,2000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU lost\n")
    # The time in the file is that of this machine's start, which may be longer ago than a day.
    log.write_text(log.read_text().replace("2000000", str(_uptime_us())))
    node.restart(before=f"mount --bind {log} /dev/kmsg")
    (node.bin / "dmesg").write_text(
        f"#!/bin/sh\necho '[{_uptime_us() / 1e6:.1f}] NVRM: Xid (PCI:0000:3b:00): 79, GPU lost'\n"
    )
    (node.bin / "dmesg").chmod(0o755)
    checker = HealthChecker(own_pool, file_of(own_bed), clock=Clock())
    for _ in range(2):  # by the shell, and then by the helper, which reads the log itself
        found = await checker.check("gpu1", fresh=True)
        assert found.state is NodeState.UNHEALTHY
        assert "Xid 79 on PCI:0000:3b:00" in found.note


def _uptime_us() -> int:
    return int(float(Path("/proc/uptime").read_text().split()[0]) * 1e6)


async def test_a_full_disk_makes_the_node_unhealthy(own_bed: Bed, own_pool: SshPool) -> None:
    own_bed["gpu1"].restart(before="mount -t tmpfs -o size=1m tmpfs /root")
    found = await HealthChecker(own_pool, file_of(own_bed), clock=Clock()).check("gpu1")
    assert found.state is NodeState.UNHEALTHY
    assert found.note.startswith("disk: 0.0 GiB free")


@pytest.mark.parametrize("fault", ["read-only", "another user's", "a file in its place", "none"])
async def test_a_home_that_cannot_be_written_makes_the_node_unhealthy(own_bed: Bed, fault: str) -> None:
    node = own_bed["gpu1"]
    if fault == "read-only":
        node.restart(before="mount -o remount,bind,ro /root")
    elif fault == "another user's":
        for program in ("sh", "python3"):
            _run_as_nobody(node, program)
    elif fault == "a file in its place":
        (node.home / "ws").write_text("no folder")
    folder = {"none": "", "a file in its place": "/root/ws"}.get(fault, "/root")
    file = file_of(own_bed, FILE + "remote_root: ~/ws/deeper\n")
    async with SshPool(file, ssh_config=own_bed.ssh_config) as pool:
        checker = HealthChecker(pool, file, clock=Clock())
        for started in (False, True):  # by the shell, and then by the helper
            found = await checker.check("gpu1", fresh=True)
            assert bool(node.processes("python3 -ISc")) is started
            assert found.readings is not None
            assert (found.readings.unwritable, found.readings.failed) == (folder, {})
            assert found.state is (NodeState.UNHEALTHY if folder else NodeState.OK)
            assert found.note.startswith(f"remote_root: {folder} cannot be written" if folder else "")


def _run_as_nobody(node: Node, program: str) -> None:
    real = shutil.which(program, path="/usr/local/bin:/usr/bin:/bin")
    path = node.bin / program
    path.write_text(f'#!/bin/sh\nexec setpriv --reuid 65534 --clear-groups {real} "$@"\n')
    path.chmod(0o755)


async def test_a_swapped_host_key_is_unreachable_and_says_why(own_bed: Bed, own_pool: SshPool) -> None:
    own_bed["gpu1"].write_host_key()
    own_bed["gpu1"].restart()
    first, second = await HealthChecker(own_pool, file_of(own_bed), clock=Clock()).check_all()
    assert (first.state, second.state) == (NodeState.UNREACHABLE, NodeState.OK)
    assert "another host key" in first.note and "ssh-keygen -f" in first.note


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
async def test_a_node_that_answers_with_nonsense_is_degraded(
    own_bed: Bed, own_pool: SshPool, monkeypatch, answer: object
) -> None:
    async def nonsense(link: object, root: str, *, left_s: float) -> object:
        return answer

    monkeypatch.setattr("genie.grid.health_check._fetch", nonsense)
    found = await HealthChecker(own_pool, file_of(own_bed), clock=Clock()).check("gpu1")
    assert (found.state, found.score) == (NodeState.DEGRADED, None)
    assert "not understood" in found.note


async def test_a_gpu_that_is_told_twice_counts_for_none(own_bed: Bed, own_pool: SshPool, monkeypatch) -> None:
    answer = msgspec.to_builtins(readings(gpus=(gpu(0), gpu(1), gpu(1))))

    async def twice(link: object, root: str, *, left_s: float) -> object:
        return answer

    monkeypatch.setattr("genie.grid.health_check._fetch", twice)
    found = await HealthChecker(own_pool, file_of(own_bed), clock=Clock()).check("gpu1")
    assert (found.state, found.score) == (NodeState.DEGRADED, None)
    assert "a GPU's number is told twice" in found.note
    assert found.readings is not None
    assert found.readings.gpus_free == 0


async def test_words_of_a_node_without_end_are_cut(own_bed: Bed, own_pool: SshPool, monkeypatch) -> None:
    async def chatter(link: object, root: str, *, left_s: float) -> object:
        return {"failed": {f"part{number}": "x" * 10_000 for number in range(1000)}}

    monkeypatch.setattr("genie.grid.health_check._fetch", chatter)
    found = await HealthChecker(own_pool, file_of(own_bed), clock=Clock()).check("gpu1")
    assert len(found.note) < 20_000


async def test_a_name_that_is_not_in_the_file_is_an_error(own_bed: Bed, own_pool: SshPool) -> None:
    with pytest.raises(NoNodeError):
        await HealthChecker(own_pool, file_of(own_bed), clock=Clock()).check("gpu9")


# --- what is kept -----------------------------------------------------------------------------


async def test_readings_are_good_for_the_refresh_interval(own_bed: Bed, own_pool: SshPool) -> None:
    clock = Clock()
    checker = HealthChecker(own_pool, file_of(own_bed), clock=clock)
    before = await checker.check_all()
    own_bed["gpu1"].gpus(1)
    clock.now += 59
    assert await checker.check_all() == before
    assert await checker.check("gpu1") == before[0]
    clock.now += 1
    after = await checker.check_all()
    assert after[0].readings is not None and len(after[0].readings.gpus) == 1


async def test_fresh_asks_at_once(own_bed: Bed, own_pool: SshPool) -> None:
    checker = HealthChecker(own_pool, file_of(own_bed), clock=Clock())
    await checker.check_all()
    own_bed["gpu1"].gpus(1)
    found = await checker.check("gpu1", fresh=True)
    assert found.readings is not None and len(found.readings.gpus) == 1


async def test_another_process_uses_what_is_kept(own_bed: Bed, own_pool: SshPool, tmp_path: Path) -> None:
    clock = Clock()
    cache = HealthCache(tmp_path)
    first = await HealthChecker(own_pool, file_of(own_bed), clock=clock, cache=cache).check_all()
    for node in own_bed.nodes:
        node.stop()
    again = HealthChecker(own_pool, file_of(own_bed), clock=clock, cache=HealthCache(tmp_path))
    assert await again.check_all() == first
    assert (tmp_path / "grid" / "health.json").stat().st_mode & 0o777 == 0o600


def kept(tmp_path: Path, file: GridFile) -> HealthCache:
    cache = HealthCache(tmp_path)
    cache.write(file, [health(node.name) for node in file.nodes])
    return cache


def test_a_file_that_was_edited_has_nothing_kept(tmp_path: Path) -> None:
    cache = kept(tmp_path, parse_grid_file("nodes: [a, b]", name="f"))
    assert set(cache.read(parse_grid_file("nodes: [a, b] # why", name="f"))) == {"a", "b"}
    assert cache.read(parse_grid_file("nodes: [a, {name: b, weight: 2}]", name="f")) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"identity": 1}'])
def test_a_kept_file_that_is_broken_is_as_none(tmp_path: Path, text: str) -> None:
    file = parse_grid_file("nodes: [a, b]", name="f")
    cache = kept(tmp_path, file)
    (tmp_path / "grid" / "health.json").write_text(text)
    assert cache.read(file) == {}


def test_what_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "grid").write_text("a file where the folder should be")
    kept(tmp_path, parse_grid_file("nodes: [a]", name="f"))


def test_what_could_not_be_kept_leaves_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    kept(tmp_path, parse_grid_file("nodes: [a]", name="f"))
    assert list((tmp_path / "grid").iterdir()) == []


def test_health_goes_through_json_unchanged() -> None:
    node = health("a", readings=readings(xids=(Xid("PCI", 79),), unwritable="/x"), labels={"zone": "x"})
    text = msgspec.json.encode(node)
    assert msgspec.json.decode(text, type=NodeHealth) == node
    kept_before = text.replace(b'"unwritable":"/x",', b"")
    assert kept_before != text
    before = msgspec.json.decode(kept_before, type=NodeHealth).readings
    assert before is not None and before.unwritable is None


async def test_a_first_look_starts_no_python_on_the_node_and_later_ones_use_the_helper(
    own_bed: Bed, own_pool: SshPool
) -> None:
    checker = HealthChecker(own_pool, file_of(own_bed), clock=Clock())
    first = await checker.check("gpu1", fresh=True)
    assert not own_bed["gpu1"].processes("python3 -ISc")
    second = await checker.check("gpu1", fresh=True)
    assert own_bed["gpu1"].processes("python3 -ISc")
    assert first.readings is not None
    assert second.readings is not None
    assert first.readings.cores == second.readings.cores
    assert first.readings.memory_total_bytes == second.readings.memory_total_bytes
