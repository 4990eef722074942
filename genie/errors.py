"""The whole error tree. Every error that Genie raises on purpose is here; nothing else is.

GenieError
├── ConfigError                 a setting is unknown, mistyped or out of range
├── UsageError                  an argument of a call or a command is wrong
│   └── NameInvalidError        a name has characters that are not allowed
├── SessionError                the state of this process's session
│   ├── NotInitializedError     a call needs genie.init() first
│   └── AlreadyInitializedError a second init() with other arguments
├── TransportError              bytes did not get through
│   ├── UnreachableError        nothing answers at that address
│   │   └── NothingListensError the machine answers that nobody listens on that port
│   ├── ConnectionLostError     the peer went away in the middle
│   ├── DeadlineError           no answer in time
│   ├── ProtocolError           the peer sent something that is not our wire
│   │   ├── FrameTooLargeError  a frame is over its cap
│   │   └── VersionError        the peer speaks another version
│   └── AddressInUseError       the port to listen on is taken
├── AccessError                 who is asking
│   ├── TokenMissingError       no token was given or found
│   ├── TokenRefusedError       unknown, wrong, revoked, expired or used up
│   ├── PermissionError_        a good token that may not do this
│   ├── TlsError                certificates: missing, untrusted, or TLS is required here
│   └── SshAccessError          SSH: who the host is, and who we are to it
│       ├── HostKeyUnknownError no key of that host is in known_hosts
│       ├── HostKeyChangedError the host shows another key than the one in known_hosts
│       └── LoginRefusedError   the host takes none of our keys
├── StoreError                  the cluster's memory
│   ├── StoreUnavailableError   the engine does not answer
│   ├── StoreFullError          no space left under the engine
│   ├── StoreCorruptError       what was read back is not what was written
│   ├── StoreVersionError       an engine version that is known to lose data
│   ├── LeaseLostError          the lease has expired or was revoked
│   └── CompactedError          the revision asked for is no longer kept
├── LeadershipError             who may decide
│   ├── NotLeaderError          this controller does not lead
│   └── FencedError             a decision by a leader that has been replaced
├── JobError                    one job
│   ├── JobNotFoundError        no job has that id
│   ├── JobRefusedError         it can never run here
│   ├── WorkersMissingError     not all of its workers are ready to start
│   ├── JobStateError           not possible in the job's present state
│   └── WorkdirError            the directory to send along is too large or unreadable
├── NodeError                   one node
│   ├── NodeNotFoundError       no node has that id
│   ├── LaunchError             an agent refused or failed to start something
│   └── AgentRunningError       another agent already runs on this state directory
├── QuotaNotFoundError          no quota is set for that tenant
├── GridError                   one of the SSH nodes of a grid
│   ├── NodeRefusedError        the node could not do what it was asked to; it says why
│   ├── NoNodeError             no node fits what was asked for
│   │   └── NoNodeReachedError  because none of them can be reached
│   ├── RunNotFoundError        no run has that id
│   ├── RunLostError            a run is gone, and nobody knows how it ended
│   ├── SyncError               a tree could not be brought to a node
│   └── RayError                Ray on the nodes: missing, of another version, or not up
├── HardwareError               an accelerator does not answer
└── DeviceError                 the torch device
    ├── RemoteOpError           an op raised on the executor
    ├── OpRefusedError          an op or argument that the wire does not carry
    ├── DeviceUnavailableError  no accelerator for that index
    ├── DeviceLostError         the executor that held the tensor is gone
    └── NativeBuildError        its C++ part cannot be compiled or loaded on this machine

Each class has a stable `code`, says whether trying again can help (`retryable`), and
names the exit code that the command line gives for it. Not for: formatting for
terminals (cli/) and encoding for the wire (runtime/wire.py).
"""

from __future__ import annotations

from typing import ClassVar


class GenieError(Exception):
    """Base of all. `message` says what was tried and what came back; `hint` what the reader can do."""

    code: ClassVar[str] = "genie"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


class ConfigError(GenieError):
    code = "config"
    exit_code = 2


class UsageError(GenieError):
    code = "usage"
    exit_code = 2


class NameInvalidError(UsageError):
    code = "usage.name"


class SessionError(GenieError):
    code = "session"


class NotInitializedError(SessionError):
    code = "session.not_initialized"


class AlreadyInitializedError(SessionError):
    code = "session.already_initialized"


class TransportError(GenieError):
    code = "transport"
    retryable = True
    exit_code = 255


class UnreachableError(TransportError):
    code = "transport.unreachable"


class NothingListensError(UnreachableError):
    code = "transport.unreachable.nothing_listens"


class ConnectionLostError(TransportError):
    code = "transport.lost"


class DeadlineError(TransportError):
    code = "transport.deadline"


class ProtocolError(TransportError):
    code = "transport.protocol"
    retryable = False


class FrameTooLargeError(ProtocolError):
    code = "transport.protocol.frame_too_large"


class VersionError(ProtocolError):
    code = "transport.protocol.version"


class AddressInUseError(TransportError):
    code = "transport.address_in_use"
    exit_code = 1


class AccessError(GenieError):
    code = "access"


class TokenMissingError(AccessError):
    code = "access.token_missing"


class TokenRefusedError(AccessError):
    code = "access.token_refused"


class PermissionError_(AccessError):  # noqa: N801 - the builtin keeps its own name
    code = "access.permission"


class TlsError(AccessError):
    code = "access.tls"


class SshAccessError(AccessError):
    code = "access.ssh"
    exit_code = 255


class HostKeyUnknownError(SshAccessError):
    code = "access.ssh.host_key_unknown"


class HostKeyChangedError(SshAccessError):
    code = "access.ssh.host_key_changed"


class LoginRefusedError(SshAccessError):
    code = "access.ssh.login"


class StoreError(GenieError):
    code = "store"


class StoreUnavailableError(StoreError):
    code = "store.unavailable"
    retryable = True


class StoreFullError(StoreError):
    code = "store.full"
    retryable = True


class StoreCorruptError(StoreError):
    code = "store.corrupt"


class StoreVersionError(StoreError):
    code = "store.version"


class LeaseLostError(StoreError):
    code = "store.lease_lost"


class CompactedError(StoreError):
    code = "store.compacted"


class LeadershipError(GenieError):
    code = "leadership"
    retryable = True


class NotLeaderError(LeadershipError):
    code = "leadership.not_leader"


class FencedError(LeadershipError):
    code = "leadership.fenced"
    retryable = False


class JobError(GenieError):
    code = "job"


class JobNotFoundError(JobError):
    code = "job.not_found"


class JobRefusedError(JobError):
    code = "job.refused"


class WorkersMissingError(JobError):
    """Not all workers of a job are ready to start; they start together."""

    code = "job.workers_missing"
    retryable = True


class JobStateError(JobError):
    code = "job.state"


class WorkdirError(JobError):
    code = "job.workdir"


class NodeError(GenieError):
    code = "node"


class NodeNotFoundError(NodeError):
    code = "node.not_found"


class LaunchError(NodeError):
    code = "node.launch"


class AgentRunningError(NodeError):
    code = "node.agent_running"


class QuotaNotFoundError(GenieError):
    code = "quota_not_found"


class GridError(GenieError):
    code = "grid"


class NodeRefusedError(GridError):
    """`reason` is a word for programs: 'missing', 'exists', 'denied', 'no_space', 'read_only', 'os', ..."""

    code = "grid.node"

    def __init__(self, message: str, *, hint: str = "", reason: str = "os") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class NoNodeError(GridError):
    code = "grid.no_node"


class NoNodeReachedError(NoNodeError):
    code = "grid.no_node.reached"
    retryable = True
    exit_code = 255


class RunNotFoundError(GridError):
    code = "grid.run_not_found"


class RunLostError(GridError):
    code = "grid.run_lost"
    exit_code = 255  # not a code of the run's own: it has none


class SyncError(GridError):
    code = "grid.sync"


class RayError(GridError):
    code = "grid.ray"


class HardwareError(GenieError):
    code = "hardware"


class DeviceError(GenieError, RuntimeError):  # torch's own errors are RuntimeErrors; programs catch that
    code = "device"


class RemoteOpError(DeviceError):
    code = "device.remote_op"


class OpRefusedError(DeviceError):
    code = "device.op_refused"


class DeviceUnavailableError(DeviceError):
    code = "device.unavailable"
    retryable = True


class DeviceLostError(DeviceError):
    code = "device.lost"


class NativeBuildError(DeviceError):
    code = "device.native_build"


def from_code(code: str, message: str, *, hint: str = "") -> GenieError:
    """The error that travelled as `code`; an unknown code becomes its nearest known ancestor."""
    return class_of(code)(message, hint=hint)


def class_of(code: str) -> type[GenieError]:
    """An unknown code becomes its nearest known ancestor."""
    known = {cls.code: cls for cls in all_errors()}
    while code and code not in known:
        code = code.rpartition(".")[0]
    return known.get(code, GenieError)


def all_errors() -> list[type[GenieError]]:
    """Every class of the tree, base first."""
    found: list[type[GenieError]] = [GenieError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return found


def _rebuild(cls: type[GenieError], message: str, hint: str) -> GenieError:
    return cls(message, hint=hint)
