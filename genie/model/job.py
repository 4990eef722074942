"""Jobs: specification, state, and history of states with reasons.

ALLOWED_TRANSITIONS defines the life cycle; `with_state` is the only function that changes the state. The
decisions are in scheduler/, their execution in controller/ and agent/.
"""

from __future__ import annotations

import enum

import msgspec

from genie.model.limits import REASON_BYTES_MAX
from genie.model.record import Record

# gc=False below: these values cannot contain reference cycles, and a controller has tens of thousands of
# them.


class JobState(enum.StrEnum):
    QUEUED = "queued"
    PLACING = "placing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    is_final: bool
    """An attribute of each state, not a property: every change of a job reads it several times."""

    def __init__(self, value: str) -> None:
        self.is_final = value in ("succeeded", "failed", "cancelled", "lost")


class JobKind(enum.StrEnum):
    """A command runs once; a session is an executor that a client keeps open."""

    COMMAND = "command"
    SESSION = "session"


class StopReason(enum.StrEnum):
    """Why a running job is being stopped. Stored, so that a new leader notifies the agents again."""

    NONE = ""
    CANCEL = "cancel"
    CLOSED = "closed"
    """Sessions only: the client has closed it, so it has succeeded."""
    PREEMPT = "preempt"
    """Preempted by a job of higher priority, or moved from a draining node; it is queued again."""
    TIME_LIMIT = "limit"
    """Its time limit is exceeded."""
    WORKER_ENDED = "worker"
    """One of its workers failed or was lost."""


class Accelerator(enum.StrEnum):
    """The kind of accelerator. AUTO: GPUs if the cluster has any, otherwise CPUs."""

    AUTO = "auto"
    GPU = "gpu"
    CPU = "cpu"


class Within(enum.StrEnum):
    """How close to each other the workers of a job must be."""

    ANYWHERE = "anywhere"
    RACK = "rack"
    NODE = "node"
    ISLAND = "island"
    """All GPUs of all workers in one NVLink island of one node."""


class Spread(enum.StrEnum):
    """PACK uses the best fit; SPREAD places each worker on a separate node."""

    PACK = "pack"
    SPREAD = "spread"


class Resources(Record, frozen=True, kw_only=True, gc=False):
    """The resources of one worker: `gpus` accelerators on one node, `gpu_milli` thousandths of each."""

    gpus: int = 0
    gpu_milli: int = 1000
    gpu_memory_bytes: int = 0
    """On each accelerator."""
    cpus: float = 0.0
    memory_bytes: int = 0
    accelerator: Accelerator = Accelerator.AUTO


class PlacementConstraints(Record, frozen=True, kw_only=True, gc=False):
    """Requirements of a job beyond the resources of its workers: nodes, topology, priority and time."""

    workers: int = 1
    workers_min: int = 0
    """Minimum number of workers to start an elastic job; 0 for all."""
    within: Within = Within.ANYWHERE
    spread: Spread = Spread.PACK
    near: tuple[str, ...] = ()
    """Only on nodes with a running job of the tenant that has one of these names."""
    apart: tuple[str, ...] = ()
    """Not on nodes with a running job of the tenant that has one of these names."""
    gpu_models: tuple[str, ...] = ()
    """Allowed models, as shown by 'genie nodes'; empty for all."""
    vendor: str = ""
    gpu_memory_min_bytes: int = 0
    """Minimum total memory per accelerator."""
    capability_min: tuple[int, int] = (0, 0)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Labels that the nodes must have."""
    priority: int = 0
    preemptible: bool = False
    grace_s: float = 30.0
    """Grace period on preemption."""
    time_limit_s: float | None = None
    """Time limit, after which the job is stopped; None for no limit."""
    deadline_at: float | None = None
    """When the job should finish, in seconds since the epoch."""


class Workdir(Record, frozen=True, kw_only=True, gc=False):
    """An uploaded working directory, named by the SHA-256 of its archive."""

    digest: str
    size_bytes: int


class JobSpec(Record, frozen=True, kw_only=True, gc=False):
    """The specification of a job. `command` is an argument vector; no shell is used."""

    name: str
    command: tuple[str, ...]
    kind: JobKind = JobKind.COMMAND
    resources: Resources = Resources()
    env: dict[str, str] = msgspec.field(default_factory=dict)
    workdir: Workdir | None = None
    node_id: str = ""
    """Only on this node; empty for any."""
    gpu_ids: tuple[int, ...] = ()
    """Only on these accelerators of that node; empty for any."""
    constraints: PlacementConstraints = msgspec.field(default=PlacementConstraints(), name="wishes")

    @property
    def is_restartable(self) -> bool:
        """Whether the controller queues the job again when its node is lost: a preemptible command. Such a
        job ends at the dead-man time; any other one keeps running while no leader can be found."""
        return self.constraints.preemptible and self.kind is JobKind.COMMAND


class Transition(Record, frozen=True, kw_only=True, gc=False):
    state: JobState
    at: float
    reason: str


class Placement(Record, frozen=True, kw_only=True, gc=False):
    """Where one worker of a job runs. `epoch` increases with every placement in the cluster; the workers of a
    job share it."""

    node_id: str
    incarnation: int
    gpu_ids: tuple[int, ...]
    epoch: int
    outcome: JobState | None = None
    """Final state of this worker; None before. Its resources are released then."""
    exit_code: int | None = None
    never_started: bool = False
    """It has ended, and its command certainly has not run."""


class PastRun(Record, frozen=True, kw_only=True, gc=False):
    """An earlier run of a job that was queued again; needed to find its log."""

    number: int
    """The first is 1."""
    epoch: int
    nodes: tuple[str, ...]
    """Node of each worker, by rank."""
    started_at: float
    ended_at: float


class Job(Record, frozen=True, kw_only=True, gc=False):
    """A job, as stored."""

    job_id: str
    tenant: str
    owner: str
    """ID of the token that submitted it."""
    spec: JobSpec
    state: JobState
    reason: str
    """Why it is in this state, or its pending reason."""
    submitted_at: float
    sequence: int
    """Order of arrival."""
    placements: tuple[Placement, ...] = ()
    """One for each worker, by rank."""
    exit_code: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    history: tuple[Transition, ...] = ()
    """All transitions; if there are too many, the oldest and the newest."""
    request_id: str = ""
    """Idempotency key of the submission: the same key gives the same job."""
    stop: StopReason = StopReason.NONE
    session: str = ""
    """Sessions only: node ID of the client."""
    ticket_sha256: str = ""
    """Sessions only: hash of the ticket of the client."""
    earlier: tuple[PastRun, ...] = ()
    """The latest runs before it was queued again."""

    @property
    def run_number(self) -> int:
        """Number of the current or last run; of a queued job, that of the next."""
        return self.earlier[-1].number + 1 if self.earlier else 1

    @property
    def placement(self) -> Placement | None:
        """The placement of the first worker."""
        return self.placements[0] if self.placements else None

    @property
    def epoch(self) -> int:
        """The epoch of its placement; 0 without one."""
        return self.placements[0].epoch if self.placements else 0

    def worker_name(self, rank: int) -> str:
        """The name of a worker for agents: the job ID, with the rank if there are several workers."""
        return make_worker_name(self.job_id, rank, workers=len(self.placements))


WORKER_RANK_SEPARATOR = "."


def make_worker_name(job_id: str, rank: int, *, workers: int) -> str:
    return job_id if workers == 1 else f"{job_id}{WORKER_RANK_SEPARATOR}{rank}"


def parse_worker_name(name: str) -> tuple[str, int]:
    """Job ID and rank."""
    job_id, mark, rank = name.partition(WORKER_RANK_SEPARATOR)
    return (
        (job_id, int(rank))
        if mark and rank.isascii() and rank.isdecimal() and len(rank) <= RANK_DIGITS_MAX
        else (name, 0)
    )


RANK_DIGITS_MAX = 6
JOB_HISTORY_MAX = 64
CLIENT_LOST_EXIT_CODE = 74
"""Exit code of an executor whose client did not return; the reason of its exit report says more."""
RUNS_KEPT = 4
"""Number of earlier runs whose logs are kept."""
_STORED_BYTES_OF_CHARACTER_MAX = 4
"""Of a printable character: UTF-8, or an escaped quote."""
_TRUNCATION_MARK = "..."
_REMOVED_COMMAND = "(removed: the stored job was too large)"
_SHRUNK_HISTORY_STEPS_PER_END = 4
_WORKERS_OF_EARLIER_RUNS_MAX = 1024
"""Maximum number of workers of earlier runs to keep; those of the newest run are always kept."""

FINAL_STATES = frozenset(state for state in JobState if state.is_final)
# Members of an enum are slow to look up, and every change of a job compares them.
_QUEUED, _RUNNING, _NO_STOP = JobState.QUEUED, JobState.RUNNING, StopReason.NONE

ALLOWED_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.PLACING, JobState.CANCELLED}),
    JobState.PLACING: frozenset(
        {JobState.QUEUED, JobState.RUNNING, JobState.FAILED, JobState.CANCELLED, JobState.LOST}
    ),
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.LOST}
    ),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
    JobState.LOST: frozenset(),
}


def with_state(
    job: Job, state: JobState, *, reason: str, at: float, placements: tuple[Placement, ...] | None = None
) -> Job:
    """The job after a transition to `state`; a transition that ALLOWED_TRANSITIONS does not contain is a bug.

    It keeps its placements unless new ones are given; a queued job has none.
    """
    assert state in ALLOWED_TRANSITIONS[job.state], (
        f"{job.job_id}: {job.state} -> {state} is not an allowed transition"
    )
    reason = truncate_reason(reason)
    transition = Transition(state=state, at=at, reason=reason)
    history = _trim_history((*job.history, transition))
    if state is _QUEUED:
        return msgspec.structs.replace(
            job,
            state=state,
            reason=reason,
            history=history,
            started_at=None,
            placements=(),
            stop=_NO_STOP,
            earlier=_with_current_run(job, at),
        )
    return msgspec.structs.replace(
        job,
        state=state,
        reason=reason,
        history=history,
        started_at=at if state is _RUNNING else job.started_at,
        ended_at=at if state.is_final else job.ended_at,
        placements=placements or job.placements,
    )


def truncate_reason(text: str) -> str:
    """The text as one line of at most REASON_BYTES_MAX bytes as stored; control characters become spaces or
    question marks, because JSON encodes each of them as six bytes."""
    if len(text) <= REASON_BYTES_MAX // _STORED_BYTES_OF_CHARACTER_MAX and text.isprintable():
        return text
    text = "".join(
        char if char.isprintable() else " " if char.isspace() else "?" for char in text[:REASON_BYTES_MAX]
    )
    if len(msgspec.json.encode(text)) <= REASON_BYTES_MAX:
        return text
    while len(msgspec.json.encode(text)) > REASON_BYTES_MAX - len(_TRUNCATION_MARK):
        text = text[: len(text) * 9 // 10]
    return text + _TRUNCATION_MARK


def shrink_oversized_job(job: Job) -> Job:
    """A job whose row is too large to be changed, with less of its specification and history: enough to end
    it, but not to run it again. Only rows of earlier versions are that large."""
    spec = msgspec.structs.replace(
        job.spec,
        command=(_REMOVED_COMMAND,),
        env={},
        constraints=msgspec.structs.replace(
            job.spec.constraints, gpu_models=(), labels={}, near=(), apart=()
        ),
    )
    steps = (
        *job.history[:_SHRUNK_HISTORY_STEPS_PER_END],
        *job.history[_SHRUNK_HISTORY_STEPS_PER_END:][-_SHRUNK_HISTORY_STEPS_PER_END:],
    )
    history = tuple(msgspec.structs.replace(step, reason=truncate_reason(step.reason)) for step in steps)
    return msgspec.structs.replace(
        job, spec=spec, history=history, earlier=(), reason=truncate_reason(job.reason)
    )


def is_shrunk_job(job: Job) -> bool:
    return job.spec.command == (_REMOVED_COMMAND,)


def _with_current_run(job: Job, at: float) -> tuple[PastRun, ...]:
    """The earlier runs, including the current one if it has started."""
    if job.started_at is None:
        return job.earlier
    run = PastRun(
        number=job.run_number,
        epoch=job.epoch,
        nodes=tuple(placement.node_id for placement in job.placements),
        started_at=job.started_at,
        ended_at=at,
    )
    runs = (*job.earlier, run)[-RUNS_KEPT:]
    while len(runs) > 1 and sum(len(each.nodes) for each in runs) > _WORKERS_OF_EARLIER_RUNS_MAX:
        runs = runs[1:]
    return runs


def _trim_history(history: tuple[Transition, ...]) -> tuple[Transition, ...]:
    if len(history) <= JOB_HISTORY_MAX:
        return history
    return (*history[: JOB_HISTORY_MAX // 2], *history[-JOB_HISTORY_MAX // 2 :])
