"""A run: one command on one node, which goes on there without us. What it is, and how its id looks.

Not for: starting and following runs (runner.py).
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from genie.errors import NameInvalidError, ProtocolError

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_RANDOM_CHARACTERS = 10
_ID = re.compile(r"r-[a-z2-7]{10}")
_TOLD_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_CODE_MAX = 255
_TIME_S_MAX = 1e11
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What reading an answer of another shape than was agreed on raises."""
_ID_BEGINNING = re.compile(r"r(-[a-z2-7]{0,10})?")


class RunState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"
    """It is gone and nobody knows how it ended: the node went down, or someone killed its supervisor."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Output of a run from some offset on. `end`: there is no more, and never will be."""

    out: bytes
    err: bytes
    state: RunState
    exit_code: int | None
    signal: int | None
    error: str
    end: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """As the node last told it. `exit_code` is 128+n after signal n, 124 after the run's own time limit."""

    run_id: str
    node: str
    command: str
    state: RunState
    started: float
    cwd: str = ""
    who: str = ""
    gpus: tuple[int, ...] = ()
    ended: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    error: str = ""
    first: Chunk | None = field(default=None, compare=False, repr=False)
    """All that it wrote, where it was over by the time the node answered that it has begun."""

    @property
    def is_over(self) -> bool:
        return self.state in (RunState.EXITED, RunState.LOST)


def new_run_id() -> str:
    return "r-" + "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_CHARACTERS))


def is_run_id(text: str) -> bool:
    """Whether it is a whole one."""
    return _ID.fullmatch(text) is not None


def checked_run_id(text: str) -> str:
    """Raises NameInvalidError before it gets into any path."""
    if not is_run_id(text):
        raise NameInvalidError(f"{text[:80]!r} is not the id of a run", hint="ids look like r-7k2m4xabcd")
    return text


def checked_id_beginning(text: str) -> str:
    """The beginning of a run's id, or all of it. Raises NameInvalidError before it gets into any path."""
    if not _ID_BEGINNING.fullmatch(text):
        raise NameInvalidError(
            f"{text[:80]!r} is not the id of a run",
            hint="ids look like r-7k2m4xabcd, and their beginning is enough; 'grid-cli ps' lists them",
        )
    return text


def run_of(node: str, answer: Any) -> Run:
    """What a node said. It is not trusted: raises ProtocolError."""
    try:
        return Run(
            run_id=_id(answer["id"]),
            node=node,
            command=str(answer["command"]),
            state=RunState(answer["state"]),
            started=_time(answer["started"]),
            cwd=str(answer.get("cwd", "")),
            who=str(answer.get("who", "")),
            gpus=tuple(int(each) for each in answer.get("gpus") or ()),
            ended=None if answer.get("ended") is None else _time(answer["ended"]),
            exit_code=_code(answer.get("exit_code")),
            signal=_code(answer.get("signal")),
            error=str(answer.get("error", "")),
        )
    except MALFORMED as error:
        raise ProtocolError(f"node {node}: a run is told in a way that we do not know: {error!r}") from None


def chunk_of(node: str, answer: Any, data: bytes) -> Chunk:
    try:
        out, err = int(answer["out"]), int(answer["err"])
        if min(out, err) < 0 or out + err != len(data):
            raise ValueError(f"{out} and {err} of {len(data)} bytes")
        return Chunk(
            out=data[:out],
            err=data[out:],
            state=RunState(answer["state"]),
            exit_code=_code(answer.get("exit_code")),
            signal=_code(answer.get("signal")),
            error=str(answer.get("error", "")),
            end=bool(answer["end"]),
        )
    except MALFORMED as error:
        raise ProtocolError(f"node {node}: output is told in a way that we do not know: {error!r}") from None


def _id(value: Any) -> str:
    """Also those that others gave: they are shown, and get into paths on the node that told them."""
    if not isinstance(value, str) or not _TOLD_ID.fullmatch(value):
        raise ValueError("an id that is none")
    return value


def _time(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds) or abs(seconds) > _TIME_S_MAX:
        raise ValueError(f"a time of {seconds} s")
    return seconds


def _code(value: Any) -> int | None:
    """256 would become 0 when our own process ends with it."""
    if value is not None and not 0 <= int(value) <= _CODE_MAX:
        raise ValueError(f"a code of {value}")
    return None if value is None else int(value)


class Collected:
    """The beginning of both streams of a run, `bytes_max` of each at most. Takes what `Runner.wait` gives."""

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._streams = {"out": bytearray(), "err": bytearray()}
        self.truncated = False

    def __call__(self, stream: str, data: bytes) -> None:
        kept = self._streams[stream]
        room = self._bytes_max - len(kept)
        self.truncated = self.truncated or len(data) > room
        kept += data[: max(0, room)]

    def text(self, stream: str) -> str:
        return self._streams[stream].decode(errors="replace")
