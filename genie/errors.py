"""The error tree: all errors that Genie raises.

GenieError
├── ConfigError                 a setting is unknown, of the wrong type or out of range
│   └── DuplicateControllerError  the state directory of this controller is a copy of another one
├── UsageError                  an argument of a call or a command is invalid
│   ├── NameInvalidError        a name has characters that are not allowed
│   └── RowTooLargeError        a record is too large for one row of the store
├── SessionError                the state of the session of this process
│   ├── NotInitializedError     a call requires genie.init()
│   └── AlreadyInitializedError a second init() with other arguments
├── TransportError              communication failed
│   ├── UnreachableError        the address does not respond
│   │   └── NothingListensError connection refused: no program listens on the port
│   ├── ConnectionLostError     the connection was closed or reset
│   ├── DeadlineError           timeout
│   │   └── LockTimeoutError    a lock was not acquired in time
│   │       └── LockBusyError   a lock is held by another client, and the caller does not wait
│   ├── ProtocolError           the peer violated the protocol
│   │   ├── FrameTooLargeError  a frame exceeds its maximum size
│   │   └── VersionError        the peer uses another version of the protocol
│   ├── OverloadedError         the peer rejects the request for now: a limit is reached
│   ├── AddressInUseError       the port to listen on is in use
│   └── GossipError             gossip cannot be started or has stopped
├── AccessError                 authentication and authorization
│   ├── TokenMissingError       no token was given or found
│   ├── TokenRefusedError       the token is unknown, invalid, revoked, expired or already used
│   │   ├── NodeRemovedError    the node was removed from the cluster, or its token was revoked
│   │   └── NodeNotAcceptedError  the cluster refuses the node of this machine, which may join again
│   ├── PermissionError_        the token is valid but lacks the permission
│   ├── TlsError                a certificate is missing or untrusted, or TLS is required
│   │   ├── ClockSkewError      a certificate is not valid yet: the clocks of two machines differ
│   │   └── CertificateExpiredError  the certificate of a node has expired
│   └── SshAccessError          SSH: authentication of host and user
│       ├── HostKeyUnknownError known_hosts has no key of the host
│       ├── HostKeyChangedError the key of the host differs from the one in known_hosts
│       └── LoginRefusedError   the host accepts none of our keys
├── StoreError                  the store of the controller
│   ├── StoreUnavailableError   the database does not respond
│   │   ├── StoreAccessError    TLS with the database or the login to it failed
│   │   └── OtherStoreClusterError  a member of another etcd cluster responded
│   ├── StoreFullError          no space left on the disk
│   │   └── BlobSpaceError      the configured space for uploads is used up
│   ├── StoreCorruptError       stored data is damaged
│   ├── StoreVersionError       a version of the database that is known to lose data
│   ├── LeaseLostError          the lease expired or was revoked
│   ├── CompactedError          the requested revision was compacted
│   ├── BackupError             a backup of the store could not be written or read
│   └── StoreNotEmptyError      a backup cannot be restored into a store that has data
├── ReleaseSkewError            other servers or stored rows have another release of Genie
├── LeadershipError             leadership of the cluster
│   ├── NotLeaderError          this controller is not the leader
│   │   └── OutdatedLeaderError  the node or client has seen a later leader
│   ├── ReplyLostError          the leader was lost before its reply to a forwarded request
│   └── FencedError             the request comes from an earlier leader
├── JobError                    a job
│   ├── JobNotFoundError        no job has this ID
│   ├── JobRefusedError         the job can never run on this cluster
│   │   ├── QueueFullError      too many jobs are pending
│   │   └── SpaceQuotaError     the tenant or the cluster stores too much
│   ├── WorkersMissingError     not all workers of the job are ready to start
│   ├── JobStateError           not possible in the current state of the job
│   └── WorkdirError            the working directory is too large, unreadable or invalid
├── NodeError                   a node
│   ├── NodeNotFoundError       no node has this ID
│   ├── LaunchError             an agent rejected a launch or failed to start a process
│   │   └── NodeUnfitError      the node cannot start any process, such as on a full disk
│   └── AgentRunningError       another agent uses this state directory
├── QuotaNotFoundError          the tenant has no quota
├── LockError                   a lock of the cluster
│   ├── LockLostError           the holder has lost the lock, or may have lost it
│   ├── LockLimitError          too many locks are held, or too many clients wait for one
│   └── LockNotFoundError       the lock is not held
├── GridError                   a grid node
│   ├── NodeRefusedError        an operation on the node failed, with the reason
│   ├── NoNodeError             no node matches the request
│   │   └── NoNodeReachedError  no node is reachable
│   ├── RunNotFoundError        no run has this ID
│   ├── RunLostError            a run has ended without an exit code
│   ├── SyncError               a folder could not be copied to a node
│   └── RayError                Ray on the nodes: missing, of another version, or not running
├── HardwareError               an accelerator or its driver does not respond
└── DeviceError                 the torch device
    ├── RemoteOpError           an op failed on the executor
    ├── OpRefusedError          an op or argument is not supported by the protocol
    ├── DeviceUnavailableError  no accelerator for this index
    ├── DeviceLostError         the executor of the tensor was lost
    └── NativeBuildError        the C++ library cannot be compiled or loaded on this machine

Each class has a stable `code`, `retryable` (whether a retry can succeed), and the exit code of commands. The
format for terminals is in cli/, the encoding in runtime/wire.py.
"""

from __future__ import annotations

from typing import ClassVar


class GenieError(Exception):
    """Base of all errors. `message`: what failed and why; `hint`: what to do.

    `retry_after_s`: how long to wait before a retry; 0 if that is not known. It is the hint if there is no
    other one.
    """

    code: ClassVar[str] = "genie"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1
    default_retry_after_s: ClassVar[float] = 0.0

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.hint = hint or (f"try again in {self.retry_after_s:g} s" if self.retry_after_s else "")

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle_error, (type(self), self.message, self.hint, self.retry_after_s))


class ConfigError(GenieError):
    code = "config"
    exit_code = 2


class DuplicateControllerError(ConfigError):
    code = "config.duplicate_controller"


class UsageError(GenieError):
    code = "usage"
    exit_code = 2


class NameInvalidError(UsageError):
    code = "usage.name"


class RowTooLargeError(UsageError):
    code = "usage.row_too_large"


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


class LockTimeoutError(DeadlineError):
    code = "transport.deadline.lock"
    exit_code = 124


class LockBusyError(LockTimeoutError):
    code = "transport.deadline.lock.busy"
    exit_code = 75


class ProtocolError(TransportError):
    code = "transport.protocol"
    retryable = False


class FrameTooLargeError(ProtocolError):
    code = "transport.protocol.frame_too_large"


class VersionError(ProtocolError):
    code = "transport.protocol.version"


class OverloadedError(TransportError):
    """A limit on requests, waits or connections is reached. The message names the limit."""

    code = "transport.overloaded"
    default_retry_after_s = 1.0


class AddressInUseError(TransportError):
    code = "transport.address_in_use"
    exit_code = 1


class GossipError(TransportError):
    code = "transport.gossip"


class AccessError(GenieError):
    code = "access"


class TokenMissingError(AccessError):
    code = "access.token_missing"


class TokenRefusedError(AccessError):
    code = "access.token_refused"


class NodeRemovedError(TokenRefusedError):
    code = "access.token_refused.node_removed"


class NodeNotAcceptedError(TokenRefusedError):
    code = "access.token_refused.node_not_accepted"


class PermissionError_(AccessError):  # noqa: N801 - PermissionError is a builtin
    code = "access.permission"


class TlsError(AccessError):
    code = "access.tls"


class ClockSkewError(TlsError):
    code = "access.tls.clock"
    retryable = True


class CertificateExpiredError(TlsError):
    code = "access.tls.expired"


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


class StoreAccessError(StoreUnavailableError):
    """Retryable: the owner replaces the credentials while the controller runs."""

    code = "store.unavailable.access"


class OtherStoreClusterError(StoreUnavailableError):
    """A member of another etcd cluster than that of this process has responded."""

    code = "store.unavailable.other_cluster"


class StoreFullError(StoreError):
    code = "store.full"
    retryable = True


class BlobSpaceError(StoreFullError):
    """The uploads of a tenant, or of all of them, have reached their configured size."""

    code = "store.full.blobs"


class StoreCorruptError(StoreError):
    code = "store.corrupt"


class StoreVersionError(StoreError):
    code = "store.version"


class LeaseLostError(StoreError):
    code = "store.lease_lost"


class CompactedError(StoreError):
    code = "store.compacted"


class BackupError(StoreError):
    code = "store.backup"


class StoreNotEmptyError(StoreError):
    code = "store.not_empty"


class ReleaseSkewError(GenieError):
    code = "release_skew"


class LeadershipError(GenieError):
    code = "leadership"
    retryable = True


class NotLeaderError(LeadershipError):
    """The request was not carried out. The hint may name the leader."""

    code = "leadership.not_leader"

    _LEADER_HINT = "the leader is "

    @classmethod
    def naming_leader(cls, message: str, *, leader: str) -> NotLeaderError:
        """`leader`: HOST:PORT, or empty if there is none."""
        hint = f"{cls._LEADER_HINT}{leader}" if leader else "no controller leads yet; try again in a moment"
        return cls(message, hint=hint)

    @property
    def leader(self) -> str:
        """HOST:PORT of the leader; empty if the hint does not name it."""
        if not self.hint.startswith(self._LEADER_HINT):
            return ""
        return self.hint.removeprefix(self._LEADER_HINT)


class OutdatedLeaderError(NotLeaderError):
    code = "leadership.not_leader.outdated"


class ReplyLostError(LeadershipError):
    """The request was forwarded to the leader; it may or may not have been carried out."""

    code = "leadership.reply_lost"


class FencedError(LeadershipError):
    code = "leadership.fenced"
    retryable = False


class JobError(GenieError):
    code = "job"


class JobNotFoundError(JobError):
    code = "job.not_found"


class JobRefusedError(JobError):
    code = "job.refused"


class QueueFullError(JobRefusedError):
    code = "job.refused.queue_full"
    retryable = True
    default_retry_after_s = 5.0


class SpaceQuotaError(JobRefusedError):
    code = "job.refused.space"
    retryable = True
    default_retry_after_s = 30.0


class WorkersMissingError(JobError):
    """Not all workers of a job are ready to start. They start together."""

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


class NodeUnfitError(LaunchError):
    """The node, not the job, is the cause; another node may start the job."""

    code = "node.launch.unfit"
    retryable = True


class AgentRunningError(NodeError):
    code = "node.agent_running"


class QuotaNotFoundError(GenieError):
    code = "quota_not_found"


class LockError(GenieError):
    code = "lock"


class LockLostError(LockError):
    """Another client may hold the lock. What it protects must not be changed any more."""

    code = "lock.lost"


class LockLimitError(LockError):
    code = "lock.limit"
    retryable = True
    default_retry_after_s = 1.0


class LockNotFoundError(LockError):
    code = "lock.not_found"


class GridError(GenieError):
    code = "grid"


class NodeRefusedError(GridError):
    """`reason` is for programs: 'missing', 'exists', 'denied', 'no_space', 'read_only', 'os', ..."""

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
    exit_code = 255  # the run has no exit code


class SyncError(GridError):
    code = "grid.sync"


class RayError(GridError):
    code = "grid.ray"


class HardwareError(GenieError):
    code = "hardware"


class DeviceError(GenieError, RuntimeError):  # as the errors of torch, which programs catch
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


def error_from_code(code: str, message: str, *, hint: str = "", retry_after_s: float = 0.0) -> GenieError:
    """The error with this `code`; for an unknown code the nearest known ancestor."""
    return _unpickle_error(error_class_of(code), message, hint, retry_after_s)


def error_class_of(code: str) -> type[GenieError]:
    """The class with this code; for an unknown code the nearest known ancestor."""
    known = {cls.code: cls for cls in all_errors()}
    while code and code not in known:
        code = code.rpartition(".")[0]
    return known.get(code, GenieError)


def all_errors() -> list[type[GenieError]]:
    """All classes of the tree, base first."""
    found: list[type[GenieError]] = [GenieError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return found


def _unpickle_error(cls: type[GenieError], message: str, hint: str, retry_after_s: float) -> GenieError:
    error = cls(message, hint=hint)
    error.retry_after_s = retry_after_s
    return error
