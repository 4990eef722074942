"""The nodes' health, and which of them is the best for the next piece of work.

`HealthChecker` asks (each node within its own time, side by side); `judge`, `score` and `choose` decide
and are pure. The score of a node is

    (cpu_weight x load per core in percent + gpu_weight x GPU memory in use in percent) / node's weight

with the load of the last minute and the mean over the node's GPUs (0 without one); the lowest is the best.
A node whose readings failed, or that is unhealthy or unreachable, is never chosen.

Not for: reading on the node (remote/health.py, shell_readings.py), or keeping figures (metrics.py).
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
from genie.grid import shell_readings
from genie.grid.grid_file import GridFile, GridNode, HealthKeys
from genie.grid.login_shell import check_login_shell
from genie.grid.remote import health
from genie.grid.ssh_pool import Link, SshPool
from genie.runtime import files
from genie.runtime.tasks import paused

_log = logging.getLogger(__name__)

HOT_C = 90.0
DISK_BYTES_MIN = 1 << 30
DISK_SHARE_MIN = 0.01
XID_AGE_S_MAX = 86400.0
PROGRAM_XIDS = frozenset({13, 31, 43, 45, 68, 69})
"""Errors that a program on the GPU makes; all others speak of the GPU, its driver or its link."""
_PART_SHARE = 0.7
"""Of the time that is left for a node: the rest is for its answer to come back."""
_REACHING_MAX = 256
_REASONS_SHOWN = 20
_HINT = "'grid-cli health --fresh' reads all of them again; --node names one by hand"
_CACHE_BYTES_MAX = 64 << 20
_REASONS_MAX = 64
_REASON_CHARS_MAX = 300

# A node's word is checked: no score may come from a number that cannot be.
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Degrees = Annotated[float, msgspec.Meta(ge=-273.15, le=10000)]


class NodeState(StrEnum):
    OK = "ok"
    DEGRADED = "degraded"  # some reading failed
    UNHEALTHY = "unhealthy"  # work would fail there, or fill its disk
    UNREACHABLE = "unreachable"


class Xid(msgspec.Struct, frozen=True):
    """What the NVIDIA driver told the kernel. `age_s` is None where the log has no times."""

    bus: str
    code: int
    text: str = ""
    age_s: float | None = None


class GpuReading(msgspec.Struct, frozen=True):
    """None is a value that the GPU or its driver does not give."""

    index: int
    name: str = ""
    uuid: str = ""
    memory_total_bytes: _Count | None = None
    memory_used_bytes: _Count | None = None
    utilization_pct: _Amount | None = None
    temperature_c: _Degrees | None = None
    ecc_uncorrected: _Count | None = None
    throttled: tuple[str, ...] = ()

    @property
    def memory_share(self) -> float | None:
        return health.memory_share(self.memory_total_bytes, self.memory_used_bytes, self.utilization_pct)

    @property
    def is_free(self) -> bool:
        return health.is_free(self.memory_total_bytes, self.memory_used_bytes, self.utilization_pct)


class Readings(msgspec.Struct, frozen=True):
    """What a node said. `failed` names what it could not read (load, memory, disk, gpus, xids), and why."""

    load: tuple[_Amount, _Amount, _Amount] | None = None
    cores: _Count | None = None
    memory_total_bytes: _Count | None = None
    memory_available_bytes: _Count | None = None
    disk_total_bytes: _Count | None = None
    disk_free_bytes: _Count | None = None
    unwritable: str | None = None
    """The folder under remote_root where nothing can be made, '' where something can, None: not told."""
    vendor: str = "none"
    gpus: tuple[GpuReading, ...] = ()
    xids: tuple[Xid, ...] | None = None
    xids_unknown: str = ""
    failed: dict[str, str] = {}

    @property
    def load_pct(self) -> float | None:
        """Load of the last minute for each core, in percent."""
        return 100 * self.load[0] / self.cores if self.load is not None and self.cores else None

    @property
    def gpu_memory_pct(self) -> float | None:
        """Mean over the GPUs, 0 without one."""
        shares = [gpu.memory_share for gpu in self.gpus]
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
    """One node at one time (`at`, Unix seconds). `score` is None where a reading for it is missing."""

    name: str
    state: NodeState
    score: float | None
    reasons: tuple[str, ...]
    at: float
    took_s: float = 0.0
    readings: Readings | None = None
    labels: dict[str, str] = {}
    chosen: int = 0
    """How often it was chosen since it was read: the score does not know of that work yet."""

    @property
    def order(self) -> tuple[float, int]:
        """By what is chosen first: the lowest score, and of equals the one that was chosen least."""
        return self.rank, self.chosen

    @property
    def rank(self) -> float:
        """The score, or infinity for a node that is not to be chosen."""
        usable = self.state is NodeState.OK and self.score is not None
        return self.score if usable and self.score is not None else float("inf")

    @property
    def note(self) -> str:
        return "; ".join(self.reasons)


def score(readings: Readings, keys: HealthKeys, weight: float) -> float | None:
    """Lower is better; the formula stands at the top. None where load or GPU memory is not known."""
    load_pct, gpu_pct = readings.load_pct, readings.gpu_memory_pct
    if load_pct is None or gpu_pct is None:
        return None
    return (keys.cpu_weight * load_pct + keys.gpu_weight * gpu_pct) / weight


def judge(readings: Readings) -> tuple[NodeState, tuple[str, ...]]:
    """The state that readings mean, and why. Unhealthy comes before degraded."""
    ill = [*_disk_faults(readings), *_gpu_faults(readings)]
    missing = [f"{part}: {why}" for part, why in readings.failed.items() if part != "xids"]
    if "gpus" not in readings.failed:
        missing += [f"GPU {gpu.index}: no memory told" for gpu in readings.gpus if gpu.memory_share is None]
    if readings.load_pct is None and "load" not in readings.failed:
        missing.append("load: none told")
    remarks = [
        f"GPU {gpu.index} is held down by {', '.join(gpu.throttled)}"
        for gpu in readings.gpus
        if gpu.throttled
    ]
    if ill:
        return NodeState.UNHEALTHY, (*ill, *missing, *remarks)
    return (NodeState.DEGRADED if missing else NodeState.OK), (*missing, *remarks)


def _disk_faults(readings: Readings) -> list[str]:
    found = []
    if readings.unwritable:
        found.append(
            f"remote_root: {readings.unwritable} cannot be written; have it mounted writable or given to "
            "this user, or set another remote_root"
        )
    free, total = readings.disk_free_bytes, readings.disk_total_bytes
    if free is not None and total is not None and free < max(DISK_BYTES_MIN, DISK_SHARE_MIN * total):
        found.append(f"disk: {free / (1 << 30):.1f} GiB free")
    return found


def _gpu_faults(readings: Readings) -> list[str]:
    found = []
    for gpu in readings.gpus:
        if gpu.temperature_c is not None and gpu.temperature_c >= HOT_C:
            found.append(f"GPU {gpu.index} is at {gpu.temperature_c:.0f} C")
        if gpu.ecc_uncorrected:
            found.append(f"GPU {gpu.index} has {gpu.ecc_uncorrected} uncorrected memory errors")
    for xid in readings.xids or ():
        recent = xid.age_s is None or xid.age_s <= XID_AGE_S_MAX
        if recent and xid.code not in PROGRAM_XIDS:
            found.append(f"Xid {xid.code} on {xid.bus}: {xid.text}".rstrip(": "))
    return list(dict.fromkeys(found))


def choose(
    nodes: Sequence[NodeHealth], *, gpus: int = 0, labels: Mapping[str, str] | None = None
) -> NodeHealth:
    """The best node that has the labels and enough free GPUs; of equals the one that was chosen least.

    Raises NoNodeError, with why not for each node; NoNodeReachedError if all that may be chosen are silent.
    """
    fitting = []
    unfit = []
    for node in nodes:
        why = _unfit(node, gpus=gpus, labels=labels or {})
        if why:
            unfit.append(f"{node.name}: {why}")
        else:
            fitting.append(node)
    if fitting:
        return min(fitting, key=lambda node: node.order)
    more = [f"and {len(unfit) - _REASONS_SHOWN} more"] if len(unfit) > _REASONS_SHOWN else []
    meant = [node for node in nodes if not _missing(node, labels or {})]
    silent = bool(meant) and all(node.state is NodeState.UNREACHABLE for node in meant)
    kind = NoNodeReachedError if silent else NoNodeError
    raise kind(
        "\n".join(["no node fits", *unfit[:_REASONS_SHOWN], *more]),
        hint=_HINT if meant else "'grid-cli nodes list' shows the labels that nodes have in the grid's file",
    )


def _unfit(node: NodeHealth, *, gpus: int, labels: Mapping[str, str]) -> str:
    missing = _missing(node, labels)
    if missing:
        return f"it has no label {', '.join(missing)}"
    if node.rank == float("inf"):
        return f"{node.state.value}: {node.note}" if node.note else node.state.value
    free = node.readings.gpus_free if node.readings else 0
    if free < gpus:
        total = len(node.readings.gpus) if node.readings else 0
        return f"{free} of {total} GPUs are free, {gpus} wanted" if total else "it has no GPUs"
    return ""


def _missing(node: NodeHealth, labels: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in labels.items() if node.labels.get(key) != value]


class HealthCache:
    """The last health of each node, for every process of this user. Losing it costs a reading, no more."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "grid" / "health.json"

    def read(self, file: GridFile) -> dict[str, NodeHealth]:
        """Empty when there is none for exactly this file of the grid."""
        try:
            raw = self._path.read_bytes()
            kept = msgspec.json.decode(raw, type=_Kept) if len(raw) <= _CACHE_BYTES_MAX else None
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            _log.info("the kept health cannot be used", extra={"why": str(error)})
            return {}
        if kept is None or kept.identity != identity(file):
            return {}
        return {node.name: node for node in kept.nodes}

    def write(self, file: GridFile, nodes: Sequence[NodeHealth]) -> None:
        kept = _Kept(identity=identity(file), nodes=tuple(nodes))
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.new")
        try:
            files.make_private_directory(self._path.parent)
            # Renamed, not synced: that would take longer than most readings, and a loss costs one reading.
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
                out.write(msgspec.json.encode(kept))
            beside.replace(self._path)
        except (GenieError, OSError) as error:
            _log.warning("the health could not be kept", extra={"why": str(error)})
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


class _Kept(msgspec.Struct, frozen=True):
    identity: str
    nodes: tuple[NodeHealth, ...]


def identity(file: GridFile) -> str:
    """Changes with everything in the file: other nodes or weights mean other scores."""
    return hashlib.sha256(repr(file).encode()).hexdigest()


class HealthChecker:
    """Asks the nodes. Answers are good for health_check.refresh_interval; `clock` gives Unix seconds.

    With a cache they are that for other processes, too.
    """

    def __init__(
        self, pool: SshPool, file: GridFile, *, clock: Callable[[], float], cache: HealthCache | None = None
    ) -> None:
        self._pool = pool
        self._file = file
        self._clock = clock
        self._cache = cache
        self._known = cache.read(file) if cache is not None else {}
        self._seen: set[str] = set()
        # Not more than there are connections: a node must not spend its time waiting for another's. It
        # takes its place when it has answered at all, so that dead nodes delay nobody.
        keys = file.health_check
        self._places = asyncio.Semaphore(min(keys.max_workers, file.ssh.pool_size))
        self._reaching = asyncio.Semaphore(_reaching_max())

    async def check_all(self, *, fresh: bool = False) -> list[NodeHealth]:
        """One for each node of the file, in its order. Nothing raises: what cannot be reached says so."""
        stale = [node for node in self._file.nodes if fresh or not self._is_good(node.name)]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._ask(node)) for node in stale]
        self._keep([task.result() for task in asked])
        return [self._known[node.name] for node in self._file.nodes]

    async def check(self, name: str, *, fresh: bool = False) -> NodeHealth:
        """Raises NoNodeError for a name that is not in the file."""
        node = self._file.node(name)
        if fresh or not self._is_good(name):
            self._keep([await self._ask(node)])
        return self._known[name]

    def note_chosen(self, name: str) -> None:
        """Work goes to that node now: until it is read again, others that are as good come before it."""
        known = self._known[name]
        self._keep([msgspec.structs.replace(known, chosen=known.chosen + 1)])

    def _is_good(self, name: str) -> bool:
        known = self._known.get(name)
        return known is not None and 0 <= self._clock() - known.at < self._file.health_check.refresh_interval

    def _keep(self, answers: Sequence[NodeHealth]) -> None:
        self._known.update({answer.name: answer for answer in answers})
        if answers and self._cache is not None:
            self._cache.write(self._file, list(self._known.values()))

    async def _ask(self, node: GridNode) -> NodeHealth:
        async with self._reaching:
            loop = asyncio.get_running_loop()
            started = loop.time()
            limit = asyncio.timeout(self._file.health_check.timeout)
            with _Turn(self._places, limit) as turn:
                try:
                    async with limit:
                        readings = await self._read(node, limit, turn)
                    return self._judged(node, readings, took_s=loop.time() - started - turn.waited_s)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    error: GenieError = UnreachableError(
                        f"no answer within {self._file.health_check.timeout:g} s"
                    )
                except GenieError as found:
                    error = found
                return self._unreached(node, error, took_s=loop.time() - started - turn.waited_s)

    async def _read(self, node: GridNode, limit: asyncio.Timeout, turn: _Turn) -> Readings:
        # A first look is one plain command: starting Python costs a node more than the readings do.
        async with self._pool.use(
            node.name,
            timeout_s=self._file.health_check.timeout,
            retries=1,
            bare=node.name not in self._seen,
            turn=turn.take,
        ) as link:
            left_s = max(0.05, (limit.when() or 0.0) - asyncio.get_running_loop().time())
            answer = await _fetch(link, self._file.remote_root, left_s=left_s)
        self._seen.add(node.name)
        try:
            readings = msgspec.convert(answer, Readings)
        except msgspec.ValidationError as error:
            return Readings(failed={"answer": f"not understood: {error}"})
        if len({gpu.index for gpu in readings.gpus}) < len(readings.gpus):
            failed = {**readings.failed, "gpus": "a GPU's number is told twice"}
            return msgspec.structs.replace(readings, gpus=(), failed=failed)
        return readings

    def _judged(self, node: GridNode, readings: Readings, *, took_s: float) -> NodeHealth:
        state, reasons = judge(readings)
        reasons = tuple(reason[:_REASON_CHARS_MAX] for reason in reasons[:_REASONS_MAX])
        found = score(readings, self._file.health_check, node.weight)
        _log.debug("health", extra={"node": node.name, "state": state.value, "score": found})
        return NodeHealth(
            node.name, state, found, reasons, self._clock(), round(took_s, 3), readings, dict(node.labels)
        )

    def _unreached(self, node: GridNode, error: GenieError, *, took_s: float) -> NodeHealth:
        why = error.message.removeprefix(f"node {node.name}: ")
        _log.info("a node cannot be reached", extra={"node": node.name, "why": why})
        hint = f"{why} ({error.hint})" if error.hint else why
        return NodeHealth(
            node.name,
            NodeState.UNREACHABLE,
            None,
            (hint,),
            self._clock(),
            round(took_s, 3),
            None,
            dict(node.labels),
        )


def _reaching_max() -> int:
    """Each takes an open file, and a system may allow few of them: all else here needs some, too."""
    import resource  # late: not every system has it

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return _REACHING_MAX
    return max(1, min(_REACHING_MAX, allowed // 2))


class _Turn:
    """One node's place among those that are asked. Waiting for it takes nothing from the node's time."""

    def __init__(self, places: asyncio.Semaphore, limit: asyncio.Timeout) -> None:
        self._places = places
        self._limit = limit
        self._has_place = False
        self.waited_s = 0.0

    async def take(self) -> None:
        """Once; who connects again keeps the place."""
        if not self._has_place:
            loop = asyncio.get_running_loop()
            before = loop.time()
            try:
                with paused(self._limit):
                    self._has_place = await self._places.acquire()
            finally:
                self.waited_s += loop.time() - before

    def __enter__(self) -> _Turn:
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_place:
            self._places.release()


async def _fetch(link: Link, root: str, *, left_s: float) -> Any:  # Any: a node's JSON, not yet checked
    part_s = _PART_SHARE * left_s
    if link.has_helper:
        answer, _ = await link.call("health.read", {"root": root, "timeout_s": part_s}, timeout_s=left_s)
        return answer
    done = await link.command(
        "exec sh", stdin=shell_readings.script(root, timeout_s=part_s), timeout_s=left_s
    )
    if shell_readings.MARK.encode() not in done.stdout:
        await check_login_shell(link, timeout_s=left_s)
    return shell_readings.parse(done.stdout.decode("utf-8", "replace"))
