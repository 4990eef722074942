"""A run: one command on one node, which continues without a connection. Its values, ID and parsing.

Runs are started and followed by run_client.py.
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from genie.errors import NameInvalidError, ProtocolError
from genie.grid.ssh.node_helper import MALFORMED_REPLY_ERRORS

_RUN_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_RUN_ID_RANDOM_CHARS = 10
_RUN_ID_PATTERN = re.compile(r"r-[a-z2-7]{10}")
_REPORTED_RUN_ID_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_EXIT_CODE_MAX = 255
_UNIX_TIME_S_MAX = 1e11
_RUN_ID_PREFIX_PATTERN = re.compile(r"r(-[a-z2-7]{0,10})?")


class RunState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"
    """It ended without an exit record: the node went down, or its supervisor was killed."""


@dataclass(frozen=True, kw_only=True)
class OutputChunk:
    """Output of a run from some offset on. `is_last`: the run has ended and all output was read."""

    out: bytes
    err: bytes
    state: RunState
    exit_code: int | None
    signal: int | None
    error: str
    """Why the command could not be started; empty if it was."""
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """As last reported by the node. `exit_code` is 128+n after signal n, 124 after the run's timeout."""

    run_id: str
    node: str
    command: str
    state: RunState
    started: float
    cwd: str = ""
    requester: str = ""
    gpus: tuple[int, ...] = ()
    ended: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    error: str = ""
    """Why the command could not be started; empty if it was."""
    output_if_ended: OutputChunk | None = field(default=None, compare=False, repr=False)
    """All output, if the run had ended when the node replied to the start."""

    @property
    def has_ended(self) -> bool:
        return self.state in (RunState.EXITED, RunState.LOST)


def new_run_id() -> str:
    return "r-" + "".join(secrets.choice(_RUN_ID_ALPHABET) for _ in range(_RUN_ID_RANDOM_CHARS))


def is_run_id(text: str) -> bool:
    """True for a complete run ID."""
    return _RUN_ID_PATTERN.fullmatch(text) is not None


def validate_run_id(text: str) -> str:
    """Returns a valid run ID. Raises NameInvalidError; IDs become part of paths."""
    if not is_run_id(text):
        raise NameInvalidError(f"{text[:80]!r} is not a run ID", hint="IDs look like r-7k2m4xabcd")
    return text


def validate_run_id_prefix(text: str) -> str:
    """Returns a valid prefix of a run ID. Raises NameInvalidError; IDs become part of paths."""
    if not _RUN_ID_PREFIX_PATTERN.fullmatch(text):
        raise NameInvalidError(
            f"{text[:80]!r} is not a run ID",
            hint="IDs look like r-7k2m4xabcd, and a unique prefix is enough; 'grid-cli ps' lists them",
        )
    return text


def parse_run(node: str, reply: Any) -> Run:
    """Parses a reply of a node, which is not trusted. Raises ProtocolError."""
    try:
        return Run(
            run_id=_validate_reported_run_id(reply["id"]),
            node=node,
            command=str(reply["command"]),
            state=RunState(reply["state"]),
            started=_validate_unix_time(reply["started"]),
            cwd=str(reply.get("cwd", "")),
            requester=str(reply.get("who", "")),
            gpus=tuple(int(each) for each in reply.get("gpus") or ()),
            ended=None if reply.get("ended") is None else _validate_unix_time(reply["ended"]),
            exit_code=_validate_exit_code(reply.get("exit_code")),
            signal=_validate_exit_code(reply.get("signal")),
            error=str(reply.get("error", "")),
        )
    except MALFORMED_REPLY_ERRORS as error:
        raise ProtocolError(f"node {node}: invalid run data: {error!r}") from None


def parse_output_chunk(node: str, reply: Any, data: bytes) -> OutputChunk:
    try:
        out, err = int(reply["out"]), int(reply["err"])
        if min(out, err) < 0 or out + err != len(data):
            raise ValueError(
                f"{out} bytes of stdout and {err} of stderr were announced, {len(data)} bytes received"
            )
        return OutputChunk(
            out=data[:out],
            err=data[out:],
            state=RunState(reply["state"]),
            exit_code=_validate_exit_code(reply.get("exit_code")),
            signal=_validate_exit_code(reply.get("signal")),
            error=str(reply.get("error", "")),
            is_last=bool(reply["end"]),
        )
    except MALFORMED_REPLY_ERRORS as error:
        raise ProtocolError(f"node {node}: invalid output data: {error!r}") from None


def _validate_reported_run_id(value: Any) -> str:
    """Accepts IDs of other programs, too: they are shown, and become part of paths on their node."""
    if not isinstance(value, str) or not _REPORTED_RUN_ID_PATTERN.fullmatch(value):
        raise ValueError("invalid run ID")
    return value


def _validate_unix_time(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds) or abs(seconds) > _UNIX_TIME_S_MAX:
        raise ValueError(f"invalid timestamp {seconds} s")
    return seconds


def _validate_exit_code(value: Any) -> int | None:
    """Accepts 0 to 255: 256 would become 0 as our own exit code."""
    if value is not None and not 0 <= int(value) <= _EXIT_CODE_MAX:
        raise ValueError(f"invalid exit code {value}")
    return None if value is None else int(value)


class OutputCollector:
    """Callback for `Runner.follow_until_end`: collects the first `bytes_max` bytes of each output stream."""

    def __init__(self, *, bytes_max: int) -> None:
        self._bytes_per_stream_max = bytes_max
        self._collected_by_stream = {"out": bytearray(), "err": bytearray()}
        self.truncated = False

    def __call__(self, stream: str, data: bytes) -> None:
        kept = self._collected_by_stream[stream]
        remaining = self._bytes_per_stream_max - len(kept)
        self.truncated = self.truncated or len(data) > remaining
        kept += data[: max(0, remaining)]

    def text(self, stream: str) -> str:
        return self._collected_by_stream[stream].decode(errors="replace")
