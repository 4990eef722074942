"""Jobs: what is asked for, where it stands, and every step it took with the reason.

The life cycle is the table at the bottom; nothing else may move a job. Not for: who decides
(scheduler/) and who carries it out (controller/, agent/).
"""

from __future__ import annotations

import enum

import msgspec

from genie.model.record import Record

# gc=False below: values that cannot refer back to themselves need no collector, and a controller
# remembers tens of thousands of them.


class JobState(enum.StrEnum):
    QUEUED = "queued"
    PLACING = "placing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES


class JobKind(enum.StrEnum):
    """A command runs once and ends; a session is an executor that a client holds open."""

    COMMAND = "command"
    SESSION = "session"


class Stop(enum.StrEnum):
    """Why a running job is being ended. What is not NO outlives the controller: its agents are told again."""

    NO = ""
    CANCEL = "cancel"
    PREEMPT = "preempt"
    """It makes room for others, and waits again afterwards."""
    LIMIT = "limit"
    """Its time is up."""
    WORKER = "worker"
    """One of its workers has failed or is lost."""


class Accelerator(enum.StrEnum):
    """Which accelerators count. AUTO is GPUs where the cluster has any, and CPUs otherwise."""

    AUTO = "auto"
    GPU = "gpu"
    CPU = "cpu"


class Within(enum.StrEnum):
    """How near to each other the workers of a job must be."""

    ANYWHERE = "anywhere"
    RACK = "rack"
    NODE = "node"
    ISLAND = "island"
    """All GPUs of all workers in one NVLink island of one node."""


class Spread(enum.StrEnum):
    """PACK puts workers where they fit best; SPREAD gives each a node of its own."""

    PACK = "pack"
    SPREAD = "spread"


class Resources(Record, frozen=True, kw_only=True, gc=False):
    """What one worker holds while it runs: `gpus` accelerators on one node, `gpu_milli` of each."""

    gpus: int = 0
    gpu_milli: int = 1000
    gpu_memory_bytes: int = 0
    """Of each accelerator."""
    cpus: float = 0.0
    memory_bytes: int = 0
    accelerator: Accelerator = Accelerator.AUTO


class Wishes(Record, frozen=True, kw_only=True, gc=False):
    """How, where and when a job is to run, beside what each of its workers holds."""

    workers: int = 1
    workers_min: int = 0
    """An elastic job starts with so many at least; 0 for all of them."""
    within: Within = Within.ANYWHERE
    spread: Spread = Spread.PACK
    near: tuple[str, ...] = ()
    """Only on nodes where a job of the tenant with one of these names runs."""
    apart: tuple[str, ...] = ()
    """Not on nodes where a job of the tenant with one of these names runs."""
    gpu_models: tuple[str, ...] = ()
    """Any of these, as 'genie nodes' shows them; empty for all."""
    vendor: str = ""
    gpu_memory_min_bytes: int = 0
    """The whole memory that an accelerator must have at least."""
    capability_min: tuple[int, int] = (0, 0)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Every one of these labels of a node."""
    priority: int = 0
    preemptible: bool = False
    grace_s: float = 30.0
    """How long it is given to save its state before it must go."""
    time_limit_s: float | None = None
    """It is ended after so long; None: nobody knows how long it takes."""
    deadline_at: float | None = None
    """When it should be over, in seconds since the epoch."""


class Workdir(Record, frozen=True, kw_only=True, gc=False):
    """A directory sent along, named by the SHA-256 of its packed form."""

    digest: str
    size_bytes: int


class JobSpec(Record, frozen=True, kw_only=True, gc=False):
    """What a person asked for. `command` is an argument vector; no shell is ever involved."""

    name: str
    command: tuple[str, ...]
    kind: JobKind = JobKind.COMMAND
    resources: Resources = Resources()
    env: dict[str, str] = msgspec.field(default_factory=dict)
    workdir: Workdir | None = None
    node_id: str = ""
    """Only on this node; empty for anywhere."""
    gpu_ids: tuple[int, ...] = ()
    """Only on these accelerators of that node; empty for any."""
    wishes: Wishes = Wishes()


class Transition(Record, frozen=True, kw_only=True, gc=False):
    state: JobState
    at: float
    reason: str


class Placement(Record, frozen=True, kw_only=True, gc=False):
    """Where one worker of a job runs. `epoch` counts the cluster's decisions: higher is newer, everywhere;
    the workers of a job share it."""

    node_id: str
    incarnation: int
    gpu_ids: tuple[int, ...]
    epoch: int
    outcome: JobState | None = None
    """How this worker ended; None while it has not. What it held is given back then."""
    exit_code: int | None = None


class Run(Record, frozen=True, kw_only=True, gc=False):
    """A time that a job ran and was then queued again, so that its log can still be found."""

    number: int
    """The first is 1."""
    epoch: int
    nodes: tuple[str, ...]
    """Of each worker, by its rank."""
    started_at: float
    ended_at: float


class Job(Record, frozen=True, kw_only=True, gc=False):
    """One job as the store has it."""

    job_id: str
    tenant: str
    owner: str
    """Id of the token that submitted it."""
    spec: JobSpec
    state: JobState
    reason: str
    """Why it is in this state, or what it is waiting for."""
    submitted_at: float
    sequence: int
    """Order of arrival."""
    placements: tuple[Placement, ...] = ()
    """One for each worker, by its rank."""
    exit_code: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    history: tuple[Transition, ...] = ()
    """Every step; of very many the oldest and the newest."""
    request_id: str = ""
    """What its submitter called the request, so that asking twice makes one job."""
    stop: Stop = Stop.NO
    session: str = ""
    """Sessions only: node id of the client that holds it open."""
    ticket_sha256: str = ""
    """Sessions only: hash of what the client shows to the executor."""
    earlier: tuple[Run, ...] = ()
    """How it ran before it was queued again; of many times the newest."""

    @property
    def run(self) -> int:
        """The number of the run that is under way, or of the last, or, where it waits, of the next."""
        return self.earlier[-1].number + 1 if self.earlier else 1

    @property
    def placement(self) -> Placement | None:
        """Of the first worker."""
        return self.placements[0] if self.placements else None

    @property
    def epoch(self) -> int:
        """Of the decision by which it is placed; 0 when it is not."""
        return self.placements[0].epoch if self.placements else 0

    def unit(self, rank: int) -> str:
        """What agents know one of its workers by: the job's id, with the rank where there are several."""
        return unit_name(self.job_id, rank, workers=len(self.placements))


UNIT_MARK = "."


def unit_name(job_id: str, rank: int, *, workers: int) -> str:
    return job_id if workers == 1 else f"{job_id}{UNIT_MARK}{rank}"


def parse_unit(unit: str) -> tuple[str, int]:
    """The job's id and the rank."""
    job_id, mark, rank = unit.partition(UNIT_MARK)
    return (job_id, int(rank)) if mark and rank.isdecimal() and len(rank) <= RANK_DIGITS_MAX else (unit, 0)


RANK_DIGITS_MAX = 6
HISTORY_MAX = 64
RUNS_KEPT = 4
"""Earlier runs of a job whose logs are kept."""
_WORKERS_OF_RUNS_MAX = 1024
"""So many workers of earlier runs are remembered in all, but those of the newest in any case."""

FINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.LOST})

ALLOWED_MOVES: dict[JobState, frozenset[JobState]] = {
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


def moved(
    job: Job, state: JobState, *, reason: str, at: float, placements: tuple[Placement, ...] | None = None
) -> Job:
    """The job after one step of its life cycle; a step that the table does not allow is a bug. It stays where
    it is placed unless `placements` says otherwise; queued again, it is nowhere."""
    assert state in ALLOWED_MOVES[job.state], f"{job.job_id}: {job.state} -> {state} is not a step"
    step = Transition(state=state, at=at, reason=reason)
    return msgspec.structs.replace(
        job,
        state=state,
        reason=reason,
        history=_trimmed((*job.history, step)),
        started_at=_started_at(job, state, at),
        ended_at=at if state.is_final else job.ended_at,
        placements=() if state is JobState.QUEUED else placements or job.placements,
        stop=Stop.NO if state is JobState.QUEUED else job.stop,
        earlier=_with_run(job, at) if state is JobState.QUEUED else job.earlier,
    )


def _with_run(job: Job, at: float) -> tuple[Run, ...]:
    """What it did until now is an earlier run, if it did anything."""
    if job.started_at is None:
        return job.earlier
    run = Run(
        number=job.run,
        epoch=job.epoch,
        nodes=tuple(placement.node_id for placement in job.placements),
        started_at=job.started_at,
        ended_at=at,
    )
    runs = (*job.earlier, run)[-RUNS_KEPT:]
    while len(runs) > 1 and sum(len(each.nodes) for each in runs) > _WORKERS_OF_RUNS_MAX:
        runs = runs[1:]
    return runs


def _started_at(job: Job, state: JobState, at: float) -> float | None:
    if state is JobState.QUEUED:
        return None
    return at if state is JobState.RUNNING else job.started_at


def _trimmed(history: tuple[Transition, ...]) -> tuple[Transition, ...]:
    if len(history) <= HISTORY_MAX:
        return history
    return (*history[: HISTORY_MAX // 2], *history[-HISTORY_MAX // 2 :])
