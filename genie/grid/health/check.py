"""Checks the health of grid nodes and chooses the best node.

`NodeHealthChecker` reads all nodes concurrently, each with its own timeout; `assess_health`, `compute_score`
and `choose_best_node` are pure. The score of a node is

    (cpu_weight x load per core in percent + gpu_weight x GPU memory in use in percent) / node's weight

with the 1-minute load and the mean over the node's GPUs (0 without GPUs); the lowest is the best. A node that
is degraded, unhealthy or unreachable is never chosen.

Does not take readings on the node (remote/health.py, shell_readings.py) or count metrics (metrics.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from genie.errors import GenieError, NoNodeError, NoNodeReachedError, UnreachableError
from genie.grid.grid_file import GridFile, GridNode, HealthSettings
from genie.grid.health import shell_readings
from genie.grid.remote import health
from genie.grid.ssh.login_shell import check_login_shell
from genie.grid.ssh.pool import NodeConnection, SshPool
from genie.model.limits import TEMPERATURE_C_MAX
from genie.processes import files
from genie.processes.tasks import pause_timeout

_log = logging.getLogger(__name__)

THROTTLE_CHECK_TEMPERATURE_C_MIN = TEMPERATURE_C_MAX - 5.0
"""GPUs throttle before they overheat. From this temperature on, throttle reasons are read by nvidia-smi."""
DISK_FREE_BYTES_MIN = 1 << 30
DISK_FREE_FRACTION_MIN = 0.01
RECENT_XID_AGE_S_MAX = 86400.0
PROGRAM_FAULT_XIDS = frozenset({13, 31, 43, 45, 68, 69})
"""Xid errors caused by programs; all others indicate a fault of the GPU, its driver or its link."""
_READING_TIMEOUT_FRACTION = 0.7
"""Timeout of each reading as a fraction of the node's remaining time; the rest is for the response."""
_CONCURRENT_CONNECTS_MAX = 256
_REJECTED_NODES_SHOWN_MAX = 20
_FRESH_READING_HINT = "read all nodes again: grid-cli health --fresh; choose a node yourself: --node NAME"
_NO_GPUS_HINT = "add a node with GPUs: grid-cli nodes add NAME; without --gpus, the command runs on any node"
_CACHE_FILE_BYTES_MAX = 64 << 20
_REASONS_PER_NODE_MAX = 64
_REASON_CHARS_MAX = 300

# Readings are validated, so that no score is computed from an impossible number.
_NonNegativeCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_NonNegativeAmount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_DegreesCelsius = Annotated[float, msgspec.Meta(ge=-273.15, le=10000)]


class HealthState(StrEnum):
    OK = "ok"
    DEGRADED = "degraded"  # a reading failed
    UNHEALTHY = "unhealthy"  # a run would fail or fill the disk
    UNREACHABLE = "unreachable"


class Xid(msgspec.Struct, frozen=True):
    """An error that the NVIDIA driver logged. `age_s` is None if the log has no timestamps."""

    bus: str
    code: int
    text: str = ""
    age_s: float | None = None


class GpuReading(msgspec.Struct, frozen=True):
    """Readings of one GPU; None if the GPU or its driver does not provide the value."""

    index: int
    name: str = ""
    uuid: str = ""
    memory_total_bytes: _NonNegativeCount | None = None
    memory_used_bytes: _NonNegativeCount | None = None
    utilization_pct: _NonNegativeAmount | None = None
    temperature_c: _DegreesCelsius | None = None
    ecc_uncorrected: _NonNegativeCount | None = None
    throttled: tuple[str, ...] = ()

    @property
    def memory_used_fraction(self) -> float | None:
        return health.gpu_memory_used_fraction(
            self.memory_total_bytes, self.memory_used_bytes, self.utilization_pct
        )

    @property
    def is_free(self) -> bool:
        return health.is_gpu_free(self.memory_total_bytes, self.memory_used_bytes, self.utilization_pct)


class Readings(msgspec.Struct, frozen=True):
    """Readings of one node. `failed` maps each failed part (load, memory, disk, gpus, xids) to the reason."""

    load: tuple[_NonNegativeAmount, _NonNegativeAmount, _NonNegativeAmount] | None = None
    cores: _NonNegativeCount | None = None
    memory_total_bytes: _NonNegativeCount | None = None
    memory_available_bytes: _NonNegativeCount | None = None
    disk_total_bytes: _NonNegativeCount | None = None
    disk_free_bytes: _NonNegativeCount | None = None
    unwritable: str | None = None
    """The first existing directory of remote_root if it is not writable, '' if it is, None if unknown."""
    vendor: str = "none"
    gpus: tuple[GpuReading, ...] = ()
    xids: tuple[Xid, ...] | None = None
    xids_unknown: str = ""
    failed: dict[str, str] = {}

    @property
    def load_pct(self) -> float | None:
        """1-minute load per core, in percent."""
        return 100 * self.load[0] / self.cores if self.load is not None and self.cores else None

    @property
    def gpu_memory_pct(self) -> float | None:
        """Mean over the GPUs, 0 without GPUs, None if a reading is missing."""
        shares = [gpu.memory_used_fraction for gpu in self.gpus]
        known = [share for share in shares if share is not None]
        if "gpus" in self.failed or len(known) < len(shares):
            return None
        return 100 * sum(known) / len(known) if known else 0.0

    @property
    def gpus_free(self) -> int:
        return sum(gpu.is_free for gpu in self.gpus)

    @property
    def hottest_c(self) -> float | None:
        return max((gpu.temperature_c for gpu in self.gpus if gpu.temperature_c is not None), default=None)


class NodeHealth(msgspec.Struct, frozen=True):
    """Health of one node at one time (`at`, Unix seconds). `score` is None if a reading for it is missing."""

    name: str
    state: HealthState
    score: float | None
    reasons: tuple[str, ...]
    at: float
    took_s: float = 0.0
    readings: Readings | None = None
    labels: dict[str, str] = {}
    chosen: int = 0
    """How often it was chosen since the last reading; the score does not include that work yet."""

    @property
    def sort_key(self) -> tuple[float, int]:
        """Sort key: lowest score first, then the node that was chosen least."""
        return self.effective_score, self.chosen

    @property
    def effective_score(self) -> float:
        """The score, or infinity if the node must not be chosen."""
        usable = self.state is HealthState.OK and self.score is not None
        return self.score if usable and self.score is not None else float("inf")

    @property
    def note(self) -> str:
        return "; ".join(self.reasons)


def compute_score(readings: Readings, keys: HealthSettings, weight: float) -> float | None:
    """Return the score (see the module docstring), or None if load or GPU memory is unknown."""
    load_pct, gpu_pct = readings.load_pct, readings.gpu_memory_pct
    if load_pct is None or gpu_pct is None:
        return None
    return (keys.cpu_weight * load_pct + keys.gpu_weight * gpu_pct) / weight


def assess_health(readings: Readings) -> tuple[HealthState, tuple[str, ...]]:
    """Return the state of a node and the reasons. Unhealthy takes precedence over degraded."""
    faults = [*_disk_faults(readings), *_gpu_faults(readings)]
    missing = [f"{part}: {why}" for part, why in readings.failed.items() if part != "xids"]
    if "gpus" not in readings.failed:
        missing += [
            f"GPU {gpu.index}: no memory reading" for gpu in readings.gpus if gpu.memory_used_fraction is None
        ]
    if readings.load_pct is None and "load" not in readings.failed:
        missing.append("load: no reading")
    remarks = [
        f"GPU {gpu.index} is throttled: {', '.join(gpu.throttled)}" for gpu in readings.gpus if gpu.throttled
    ]
    if faults:
        return HealthState.UNHEALTHY, (*faults, *missing, *remarks)
    return (HealthState.DEGRADED if missing else HealthState.OK), (*missing, *remarks)


def _disk_faults(readings: Readings) -> list[str]:
    found = []
    if readings.unwritable:
        found.append(
            f"remote_root: {readings.unwritable} is not writable; mount it read-write, change its owner, "
            "or set another remote_root"
        )
    free, total = readings.disk_free_bytes, readings.disk_total_bytes
    if (
        free is not None
        and total is not None
        and free < max(DISK_FREE_BYTES_MIN, DISK_FREE_FRACTION_MIN * total)
    ):
        found.append(f"disk: {free / (1 << 30):.1f} GiB free")
    return found


def _gpu_faults(readings: Readings) -> list[str]:
    found = []
    for gpu in readings.gpus:
        if gpu.temperature_c is not None and gpu.temperature_c > TEMPERATURE_C_MAX:
            found.append(f"GPU {gpu.index} is at {gpu.temperature_c:.0f} C")
        if gpu.ecc_uncorrected:
            found.append(f"GPU {gpu.index} has {gpu.ecc_uncorrected} uncorrected ECC errors")
    for xid in readings.xids or ():
        recent = xid.age_s is None or xid.age_s <= RECENT_XID_AGE_S_MAX
        if recent and xid.code not in PROGRAM_FAULT_XIDS:
            found.append(f"Xid {xid.code} on {xid.bus}: {xid.text}".rstrip(": "))
    return list(dict.fromkeys(found))


def choose_best_node(
    nodes: Sequence[NodeHealth], *, gpus: int = 0, labels: Mapping[str, str] | None = None
) -> NodeHealth:
    """Return the best node with these labels and enough free GPUs; among equals the one chosen least.

    Raises NoNodeError with a reason per node; NoNodeReachedError if no node with the labels is reachable.
    """
    fitting = []
    rejected = []
    for node in nodes:
        why = _why_rejected(node, gpus=gpus, labels=labels or {})
        if why:
            rejected.append(f"{node.name}: {why}")
        else:
            fitting.append(node)
    if fitting:
        return min(fitting, key=lambda node: node.sort_key)
    more = (
        [f"and {len(rejected) - _REJECTED_NODES_SHOWN_MAX} more"]
        if len(rejected) > _REJECTED_NODES_SHOWN_MAX
        else []
    )
    labelled = [node for node in nodes if not _missing_labels(node, labels or {})]
    unreachable = bool(labelled) and all(node.state is HealthState.UNREACHABLE for node in labelled)
    kind = NoNodeReachedError if unreachable else NoNodeError
    raise kind(
        "\n".join(["no node fits", *rejected[:_REJECTED_NODES_SHOWN_MAX], *more]),
        hint=_no_node_hint(labelled),
    )


def _no_node_hint(labelled: Sequence[NodeHealth]) -> str:
    """What helps if none of the nodes with the requested labels was chosen."""
    if not labelled:
        return "list the nodes and their labels: grid-cli nodes list"
    if all(node.state is HealthState.OK and node.readings and not node.readings.gpus for node in labelled):
        return _NO_GPUS_HINT
    return _FRESH_READING_HINT


def _why_rejected(node: NodeHealth, *, gpus: int, labels: Mapping[str, str]) -> str:
    missing = _missing_labels(node, labels)
    if missing:
        return f"missing label {', '.join(missing)}"
    if node.effective_score == float("inf"):
        return f"{node.state.value}: {node.note}" if node.note else node.state.value
    free = node.readings.gpus_free if node.readings else 0
    if free < gpus:
        total = len(node.readings.gpus) if node.readings else 0
        return f"{free} of {total} GPUs are free, {gpus} requested" if total else "no GPUs"
    return ""


def _missing_labels(node: NodeHealth, labels: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in labels.items() if node.labels.get(key) != value]


class HealthCache:
    """The last health of each node, shared by all processes of this user. Losing it costs only readings."""

    def __init__(self, state_dir: Path) -> None:
        self._cache_file = state_dir / "grid" / "health.json"

    def read(self, file: GridFile) -> dict[str, NodeHealth]:
        """Return the cached health by node name; empty if the cache is for a different grid file."""
        try:
            raw = self._cache_file.read_bytes()
            cached = msgspec.json.decode(raw, type=_CacheFile) if len(raw) <= _CACHE_FILE_BYTES_MAX else None
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            _log.info("ignored an unreadable health cache", extra={"why": str(error)})
            return {}
        if cached is None or cached.identity != grid_file_digest(file):
            return {}
        return {node.name: node for node in cached.nodes}

    def write(self, file: GridFile, nodes: Sequence[NodeHealth]) -> None:
        cached = _CacheFile(identity=grid_file_digest(file), nodes=tuple(nodes))
        temporary = self._cache_file.with_name(f".{self._cache_file.name}.{os.getpid()}.new")
        try:
            files.make_private_directory(self._cache_file.parent)
            # Renamed without fsync, which would take longer than most readings.
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                out.write(msgspec.json.encode(cached))
            temporary.replace(self._cache_file)
        except (GenieError, OSError) as error:
            _log.warning("could not write the health cache", extra={"why": str(error)})
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def delete(self) -> None:
        with contextlib.suppress(OSError):
            self._cache_file.unlink(missing_ok=True)


class _CacheFile(msgspec.Struct, frozen=True):
    identity: str
    nodes: tuple[NodeHealth, ...]


def grid_file_digest(file: GridFile) -> str:
    """Return a digest of the grid file: other nodes or weights mean other scores."""
    return hashlib.sha256(repr(file).encode()).hexdigest()


class NodeHealthChecker:
    """Reads the health of nodes. Results are valid for health_check.refresh_interval, with a cache also for
    other processes. `clock` returns Unix seconds.
    """

    def __init__(
        self, pool: SshPool, file: GridFile, *, clock: Callable[[], float], cache: HealthCache | None = None
    ) -> None:
        self._pool = pool
        self._grid_file = file
        self._clock = clock
        self._health_cache = cache
        self._result_by_node = cache.read(file) if cache is not None else {}
        self._nodes_read_by_this_checker: set[str] = set()
        # At most as many as pool connections, so that no node's timeout passes while it waits for one. A
        # node takes its slot after the SSH banner, so that unreachable nodes do not delay others.
        keys = file.health_check
        self._check_slots = asyncio.Semaphore(min(keys.max_workers, file.ssh.pool_size))
        self._connect_slots = asyncio.Semaphore(_concurrent_connects_max())

    async def check_all_in_file_order(self, *, fresh: bool = False) -> list[NodeHealth]:
        """Return one result per node in file order. Raises nothing; an unreachable node has that state."""
        stale = [node for node in self._grid_file.nodes if fresh or not self._has_current_result(node.name)]
        async with asyncio.TaskGroup() as group:
            checks = [group.create_task(self._check_node_now(node)) for node in stale]
        self._store_results([task.result() for task in checks])
        return [self._result_by_node[node.name] for node in self._grid_file.nodes]

    async def check_all_nodes(self, *, fresh: bool = False) -> list[NodeHealth]:
        """Like check_all_in_file_order, but the best node first, nodes that must not be chosen last."""
        return sorted(await self.check_all_in_file_order(fresh=fresh), key=lambda node: node.sort_key)

    async def check(self, name: str, *, fresh: bool = False) -> NodeHealth:
        """Raises NoNodeError for a name that is not in the file."""
        node = self._grid_file.node(name)
        if fresh or not self._has_current_result(name):
            self._store_results([await self._check_node_now(node)])
        return self._result_by_node[name]

    def record_choice(self, name: str) -> None:
        """Rank this node after equally good ones until its next reading, because it gets work now."""
        known = self._result_by_node[name]
        self._store_results([msgspec.structs.replace(known, chosen=known.chosen + 1)])

    def _has_current_result(self, name: str) -> bool:
        known = self._result_by_node.get(name)
        return (
            known is not None
            and 0 <= self._clock() - known.at < self._grid_file.health_check.refresh_interval
        )

    def _store_results(self, results: Sequence[NodeHealth]) -> None:
        self._result_by_node.update({result.name: result for result in results})
        if results and self._health_cache is not None:
            self._health_cache.write(self._grid_file, list(self._result_by_node.values()))

    async def _check_node_now(self, node: GridNode) -> NodeHealth:
        async with self._connect_slots:
            loop = asyncio.get_running_loop()
            started = loop.time()
            limit = asyncio.timeout(self._grid_file.health_check.timeout)
            with _CheckSlot(self._check_slots, limit) as slot:
                try:
                    async with limit:
                        readings = await self._connect_and_fetch_readings(node, limit, slot)
                    return self._make_health_result(
                        node, readings, took_s=loop.time() - started - slot.waited_s
                    )
                except TimeoutError:
                    if not limit.expired():
                        raise
                    error: GenieError = UnreachableError(
                        f"no response within {self._grid_file.health_check.timeout:g} s"
                    )
                except GenieError as found:
                    error = found
                return self._make_unreachable_result(
                    node, error, took_s=loop.time() - started - slot.waited_s
                )

    async def _connect_and_fetch_readings(
        self, node: GridNode, limit: asyncio.Timeout, slot: _CheckSlot
    ) -> Readings:
        # The first check is one shell command: starting Python costs a node more than the readings.
        async with self._pool.connect(
            node.name,
            timeout_s=self._grid_file.health_check.timeout,
            retries=1,
            without_helper=node.name not in self._nodes_read_by_this_checker,
            before_login=slot.acquire,
        ) as link:
            left_s = max(0.05, (limit.when() or 0.0) - asyncio.get_running_loop().time())
            answer = await _fetch_readings(link, self._grid_file.remote_root, left_s=left_s)
        self._nodes_read_by_this_checker.add(node.name)
        try:
            readings = msgspec.convert(answer, Readings)
        except msgspec.ValidationError as error:
            return Readings(failed={"answer": f"invalid: {error}"})
        if len({gpu.index for gpu in readings.gpus}) < len(readings.gpus):
            failed = {**readings.failed, "gpus": "duplicate GPU index"}
            return msgspec.structs.replace(readings, gpus=(), failed=failed)
        return readings

    def _make_health_result(self, node: GridNode, readings: Readings, *, took_s: float) -> NodeHealth:
        state, reasons = assess_health(readings)
        reasons = tuple(reason[:_REASON_CHARS_MAX] for reason in reasons[:_REASONS_PER_NODE_MAX])
        found = compute_score(readings, self._grid_file.health_check, node.weight)
        _log.debug("checked the health of node %s", node.name, extra={"state": state.value, "score": found})
        return NodeHealth(
            node.name, state, found, reasons, self._clock(), round(took_s, 3), readings, dict(node.labels)
        )

    def _make_unreachable_result(self, node: GridNode, error: GenieError, *, took_s: float) -> NodeHealth:
        why = error.message.removeprefix(f"node {node.name}: ")
        _log.info("node %s is unreachable: %s", node.name, why)
        hint = f"{why} ({error.hint})" if error.hint else why
        return NodeHealth(
            node.name,
            HealthState.UNREACHABLE,
            None,
            (hint,),
            self._clock(),
            round(took_s, 3),
            None,
            dict(node.labels),
        )


def _concurrent_connects_max() -> int:
    """At most half of the open files that the system allows; each connection takes one."""
    import resource  # late: not available on every system

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return _CONCURRENT_CONNECTS_MAX
    return max(1, min(_CONCURRENT_CONNECTS_MAX, allowed // 2))


class _CheckSlot:
    """One node's slot among the concurrent checks. Waiting for it pauses the node's timeout."""

    def __init__(self, slots: asyncio.Semaphore, limit: asyncio.Timeout) -> None:
        self._slots = slots
        self._node_timeout = limit
        self._is_held = False
        self.waited_s = 0.0

    async def acquire(self) -> None:
        """Idempotent: a reconnecting node keeps its slot."""
        if not self._is_held:
            loop = asyncio.get_running_loop()
            before = loop.time()
            try:
                with pause_timeout(self._node_timeout):
                    self._is_held = await self._slots.acquire()
            finally:
                self.waited_s += loop.time() - before

    def __enter__(self) -> _CheckSlot:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_held:
            self._slots.release()


async def _fetch_readings(
    link: NodeConnection, root: str, *, left_s: float
) -> Any:  # Any: a node's JSON, not validated yet
    part_s = _READING_TIMEOUT_FRACTION * left_s
    if link.has_helper:
        arguments = {"root": root, "timeout_s": part_s, "throttle_check_c": THROTTLE_CHECK_TEMPERATURE_C_MIN}
        answer, _ = await link.call("health.read", arguments, timeout_s=left_s)
        return answer
    done = await link.run_command(
        "exec sh", stdin=shell_readings.make_readings_script(root, timeout_s=part_s), timeout_s=left_s
    )
    if shell_readings.SECTION_MARK.encode() not in done.stdout:
        await check_login_shell(link, timeout_s=left_s)
    return shell_readings.parse_readings(done.stdout.decode("utf-8", "replace"))
