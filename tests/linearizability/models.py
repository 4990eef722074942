"""Sequential specifications of a register, of locks, and of jobs, for `check_linearizable`.

Each model defines its inputs and outputs; the outputs of pending operations are ignored.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from genie.model.job import FINAL_STATES, JobState
from tests.linearizability.checker import Operation

# --- A register -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """Output: the value."""

    register: str = "register"


@dataclass(frozen=True)
class Write:
    """Output: None."""

    value: Hashable
    register: str = "register"


@dataclass(frozen=True)
class CompareAndSet:
    """Output: whether the value was `expected` and is now `value`."""

    expected: Hashable
    value: Hashable
    register: str = "register"


class RegisterModel:
    """Registers that contain None at first."""

    def partition_key(self, operation: Operation) -> Hashable:
        assert isinstance(operation.input, (Read, Write, CompareAndSet))
        return operation.input.register

    def initial_state(self) -> Hashable:
        return None

    def apply_operation(self, state: Hashable, operation: Operation) -> Iterable[Hashable]:
        match operation.input:
            case Read():
                return (state,) if operation.is_pending or operation.output == state else ()
            case Write(value):
                return (value,)
            case CompareAndSet(expected, value):
                is_equal = state == expected
                if not operation.is_pending and operation.output != is_equal:
                    return ()
                return (value if is_equal else state,)
        raise AssertionError(operation.input)


# --- Locks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acquire:
    """Output: the fencing token, or None if the lock was held by another holder."""

    lock: str
    holder: str


@dataclass(frozen=True)
class Release:
    """Output: whether the lock was held with this token until now."""

    lock: str
    holder: str
    token: int


@dataclass(frozen=True)
class Expire:
    """The lock may be granted to others from the call on, at any time or never; record it as pending. Called
    when the holder learned that it has lost the lock or that its lease may have expired, or ended without
    a release. Without a token: of any grant, also of one whose reply was lost."""

    lock: str
    holder: str
    token: int | None = None


@dataclass(frozen=True)
class BreakLock:
    """A release by the administrator. Output: whether there was a holder."""

    lock: str


@dataclass(frozen=True)
class ReadLock:
    """Output: (holder, token), or None if the lock is free."""

    lock: str


@dataclass(frozen=True)
class LockState:
    """`token_min`: lower bound of the last token; it is the token if `is_token_known`."""

    holder: str | None = None
    token_min: int = 0
    is_token_known: bool = True

    def matches_token(self, token: int) -> bool:
        return token == self.token_min if self.is_token_known else token >= self.token_min


class LockModel:
    """Each lock has at most one holder, and each grant a higher token than every earlier one."""

    def partition_key(self, operation: Operation) -> Hashable:
        assert isinstance(operation.input, (Acquire, Release, Expire, BreakLock, ReadLock))
        return operation.input.lock

    def initial_state(self) -> LockState:
        return LockState()

    def apply_operation(self, state: LockState, operation: Operation) -> Iterable[LockState]:
        is_pending, output = operation.is_pending, operation.output
        match operation.input:
            case Acquire(_, holder):
                return self._acquire(state, holder, is_pending=is_pending, token=output)
            case Release(_, holder, token):
                is_held = state.holder == holder and state.matches_token(token)
                if not is_pending and output != is_held:
                    return ()
                return (LockState(None, token),) if is_held else (state,)
            case Expire(_, holder, token):
                is_held = state.holder == holder and (token is None or state.matches_token(token))
                return (replace(state, holder=None),) if is_held else (state,)
            case BreakLock():
                if not is_pending and output != (state.holder is not None):
                    return ()
                return (replace(state, holder=None),)
            case ReadLock():
                return self._read(state, is_pending=is_pending, output=output)
        raise AssertionError(operation.input)

    def _acquire(
        self, state: LockState, holder: str, *, is_pending: bool, token: int | None
    ) -> Iterable[LockState]:
        if not is_pending and token is None:
            return (state,) if state.holder is not None else ()
        if state.holder is not None:
            return (state,) if is_pending else ()
        if is_pending:
            return (LockState(holder, state.token_min + 1, is_token_known=False),)
        assert token is not None
        return (LockState(holder, token),) if token > state.token_min else ()

    def _read(
        self, state: LockState, *, is_pending: bool, output: tuple[str, int] | None
    ) -> Iterable[LockState]:
        if is_pending:
            return (state,)
        if output is None:
            return (state,) if state.holder is None else ()
        holder, token = output
        is_same = state.holder == holder and state.matches_token(token)
        return (LockState(holder, token),) if is_same else ()


# --- Jobs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submit:
    """Output: the job ID. `request_id` is the idempotency key and identifies the job in every input."""

    request_id: str


@dataclass(frozen=True)
class Cancel:
    """Output: (job ID, state) after the request, or None if there is no such job."""

    request_id: str


@dataclass(frozen=True)
class ReadJob:
    """Output: (job ID, state), or None if there is no such job."""

    request_id: str


@dataclass(frozen=True)
class SubmittedJob:
    """`job_id` is None while only pending operations are known to have created the job. `final_state` is
    None until it is known."""

    job_id: str | None = None
    is_cancelled: bool = False
    final_state: JobState | None = None


class JobModel:
    """A job exists from its submission on, once per idempotency key. It may end at any time; its final state
    never changes. After a cancellation it is not queued again."""

    def partition_key(self, operation: Operation) -> Hashable:
        assert isinstance(operation.input, (Submit, Cancel, ReadJob))
        return operation.input.request_id

    def initial_state(self) -> SubmittedJob | None:
        return None

    def apply_operation(
        self, state: SubmittedJob | None, operation: Operation
    ) -> Iterable[SubmittedJob | None]:
        is_pending, output = operation.is_pending, operation.output
        match operation.input:
            case Submit():
                if is_pending:
                    return (state or SubmittedJob(),)
                return self._with_job_id(state or SubmittedJob(), output)
            case Cancel():
                if is_pending or state is None:
                    return self._cancel_without_output(state, is_possible=is_pending or output is None)
                return self._read(replace(state, is_cancelled=True), output)
            case ReadJob():
                if is_pending or state is None:
                    return (state,) if is_pending or output is None else ()
                return self._read(state, output)
        raise AssertionError(operation.input)

    def _cancel_without_output(
        self, state: SubmittedJob | None, *, is_possible: bool
    ) -> Iterable[SubmittedJob | None]:
        if state is None:
            return (None,) if is_possible else ()
        return (replace(state, is_cancelled=True),)

    def _with_job_id(self, state: SubmittedJob, job_id: str) -> Iterable[SubmittedJob]:
        return (replace(state, job_id=job_id),) if state.job_id in (None, job_id) else ()

    def _read(self, state: SubmittedJob, output: tuple[str, JobState] | None) -> Iterable[SubmittedJob]:
        if output is None:
            return ()
        job_id, job_state = output
        if state.final_state is not None:
            is_possible = job_state is state.final_state
        else:
            is_possible = not (job_state is JobState.QUEUED and state.is_cancelled)
        if not is_possible:
            return ()
        if job_state in FINAL_STATES:
            state = replace(state, final_state=job_state)
        return self._with_job_id(state, job_id)


REGISTERS = RegisterModel()
LOCKS = LockModel()
JOBS = JobModel()
