"""Decides how Ray is started on each node, and derives the state of the cluster. Pure.

`plan_start()` returns the start plan of each node, or raises the reason why the cluster cannot start;
`build_ray_cluster_view()` combines the records of the nodes with the node list of Ray's head.

Does not connect to nodes (cluster.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from genie.errors import (
    GenieError,
    HostKeyChangedError,
    HostKeyUnknownError,
    LoginRefusedError,
    NodeRefusedError,
    RayError,
    TransportError,
)
from genie.grid.grid_file import RaySettings
from genie.model.names import address_text

_LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost", "")
"""Hosts that mean another machine on each node. Nodes may share a machine under other loopback addresses."""
_LOOPBACK_ADDRESS = "127.0.0.1"
NO_PYTHON_REASON = "no_python"
"""Error reason of a node on which the helper cannot run."""
_STATE_BY_ERROR_TYPE: dict[type[GenieError], str] = {
    TransportError: "unreachable",
    LoginRefusedError: "login refused",
    HostKeyUnknownError: "host key unknown",
    HostKeyChangedError: "host key changed",
}


@dataclass(frozen=True)
class RayRecordOfNode:
    """A node's record of the Ray processes that were started there, and how many are alive."""

    cluster: str
    role: str
    head: str
    dashboard_port: int
    recorded_count: int
    alive_count: int

    @classmethod
    def from_reply(cls, answer: Mapping[str, Any] | None) -> RayRecordOfNode | None:
        if answer is None:
            return None
        return cls(
            cluster=str(answer["cluster"]),
            role=str(answer["role"]),
            head=str(answer["head"]),
            dashboard_port=int(answer["dashboard_port"]),
            recorded_count=int(answer["recorded"]),
            alive_count=int(answer["alive"]),
        )


@dataclass(frozen=True)
class RayFacts:
    """One node before the start. `ray_program` is '' if not installed; `gpus` is None if Ray detects them."""

    node: str
    address: str
    ray_program: str
    ray_version: str
    python_version: str
    gpus: int | None
    record: RayRecordOfNode | None

    @classmethod
    def from_reply(cls, node: str, answer: Mapping[str, Any]) -> RayFacts:
        gpus = answer["gpus"]
        return cls(
            node=node,
            address=str(answer["address"]),
            ray_program=str(answer["ray"]),
            ray_version=str(answer["version"]),
            python_version=str(answer["python"]),
            gpus=int(gpus) if gpus is not None else None,
            record=RayRecordOfNode.from_reply(answer["record"]),
        )


@dataclass(frozen=True)
class RayStartPlan:
    """How to start Ray on one node. `head` is HOST:PORT of the head."""

    node: str
    role: str
    ray_program: str
    head: str
    options: tuple[str, ...]
    ports_to_check: tuple[tuple[str, int, str], ...]
    loopback: bool

    def to_request_args(self, keys: RaySettings) -> dict[str, Any]:
        return {
            "node": self.node,
            "role": self.role,
            "ray": self.ray_program,
            "head": self.head,
            "options": list(self.options),
            "free_ports": [
                {"host": host, "port": port, "key": key} for host, port, key in self.ports_to_check
            ],
            "loopback": self.loopback,
            "dashboard_port": keys.dashboard_port,
            "namespace": keys.namespace,
            "log_level": keys.log_level,
        }


def plan_start(
    facts: Sequence[RayFacts], keys: RaySettings, *, head: str | None = None
) -> list[RayStartPlan]:
    """Return the start plans, the head's first. Raises RayError with the problems of each node."""
    _check_ray_not_running(facts)
    _check_ray_installed(facts)
    _check_versions_equal(facts)
    ordered = _sort_head_first(facts, head)
    first = ordered[0]
    if keys.head_bind_all is False and len(ordered) > 1:
        raise RayError(
            f"ray.head_bind_all is false: the head would listen on loopback, where {len(ordered) - 1} "
            "other nodes cannot reach it",
            hint="remove the key (Ray still requires a token), or select one node with --node",
        )
    if len(ordered) > 1 and first.address in _LOOPBACK_HOSTS:
        raise RayError(
            f"node {first.node} has the address {first.address or '(unknown)'}, "
            "which other nodes cannot reach",
            hint="set a HostName in ~/.ssh/config that all nodes can reach, or choose another --head",
        )
    address = _LOOPBACK_ADDRESS if keys.head_bind_all is False else first.address
    at = address_text(address, keys.redis_port)
    return [
        _make_head_start_plan(first, at, keys),
        *(_make_worker_start_plan(each, at) for each in ordered[1:]),
    ]


def _check_ray_not_running(facts: Sequence[RayFacts]) -> None:
    running = [each.node for each in facts if each.record is not None and each.record.alive_count]
    if running:
        raise RayError(
            f"a Ray cluster is already running on {', '.join(running)}",
            hint="show it: grid-cli cluster status; stop it: grid-cli cluster stop",
        )


def _check_ray_installed(facts: Sequence[RayFacts]) -> None:
    without = [each.node for each in facts if not each.ray_program]
    if without:
        raise RayError(
            f"Ray is not installed on {', '.join(without)}: neither in grid_env below remote_root nor on the "
            "PATH of a login shell",
            hint="install it on all nodes: grid-cli setup --package 'ray[default]'",
        )


def _check_versions_equal(facts: Sequence[RayFacts]) -> None:
    unknown = [f"{each.node}: {each.ray_program}" for each in facts if not each.ray_version]
    if unknown:
        raise RayError("could not determine the version of Ray on these nodes:\n" + "\n".join(unknown))
    rays = {each.ray_version for each in facts}
    pythons = {_major_minor_version(each.python_version) for each in facts if each.python_version}
    if len(rays) > 1 or len(pythons) > 1:
        lines = [
            f"{each.node}: Ray {each.ray_version}, Python {each.python_version or 'unknown'}"
            for each in facts
        ]
        raise RayError(
            "Ray requires the same version of Ray and Python on all nodes; found:\n" + "\n".join(lines),
            hint="install one version: grid-cli setup --package ray[default]==VERSION --python PROGRAM",
        )


def _major_minor_version(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _sort_head_first(facts: Sequence[RayFacts], head: str | None) -> list[RayFacts]:
    if head is None:
        return list(facts)
    chosen = [each for each in facts if each.node == head]
    if not chosen:
        raise RayError(f"node {head} is not among the nodes to start: {', '.join(e.node for e in facts)}")
    return chosen + [each for each in facts if each.node != head]


def _make_head_start_plan(facts: RayFacts, at: str, keys: RaySettings) -> RayStartPlan:
    loopback = keys.head_bind_all is False
    everywhere = "::" if ":" in facts.address else "0.0.0.0"  # noqa: S104 - configured in the grid file
    dashboard = everywhere if keys.head_bind_all else _LOOPBACK_ADDRESS
    options = (
        "--head",
        f"--port={keys.redis_port}",
        "--include-dashboard=true",
        f"--dashboard-host={dashboard}",
        f"--dashboard-port={keys.dashboard_port}",
        *_common_start_options(facts, address=_LOOPBACK_ADDRESS if loopback else facts.address),
    )
    ports = (
        (_LOOPBACK_ADDRESS if loopback else everywhere, keys.redis_port, "ray.redis_port"),
        (dashboard, keys.dashboard_port, "ray.dashboard_port"),
    )
    return RayStartPlan(facts.node, "head", facts.ray_program, at, options, ports, loopback)


def _make_worker_start_plan(facts: RayFacts, at: str) -> RayStartPlan:
    options = (f"--address={at}", *_common_start_options(facts, address=facts.address))
    return RayStartPlan(facts.node, "worker", facts.ray_program, at, options, (), loopback=False)


def _common_start_options(facts: RayFacts, *, address: str) -> list[str]:
    options = [f"--node-name={facts.node}", "--disable-usage-stats", "--dashboard-agent-listen-port=0"]
    if address:
        options.append(f"--node-ip-address={address}")
    if facts.gpus is not None:
        options.append(f"--num-gpus={facts.gpus}")
    return options


# --- the state of the cluster ---


@dataclass(frozen=True)
class RayNodeView:
    """The state of one node.

    `state`: alive, failing (some of its daemons have ended), dead, joining, stray, not started; if it could
    not be queried: unreachable, login refused, host key unknown, host key changed, no python, refused.
    """

    node: str
    state: str
    role: str = ""
    address: str = ""
    cpus: float = 0
    gpus: float = 0
    recorded: int = 0
    alive: int = 0
    message: str = ""


@dataclass(frozen=True)
class RayClusterView:
    """`state` is 'running', 'broken' (a part is dead) or 'stopped'. If no node could be queried, it is
    'unreachable' or 'unknown', and `exit_code` is that of the worst error; otherwise 0.
    """

    state: str
    cluster: str = ""
    head: str = ""
    version: str = ""
    dashboard_port: int = 0
    nodes: tuple[RayNodeView, ...] = ()
    exit_code: int = 0


def build_ray_cluster_view(
    records: Mapping[str, RayRecordOfNode | None],
    failed: Mapping[str, GenieError],
    ray_nodes: Sequence[Mapping[str, Any]] | None,
    *,
    version: str = "",
) -> RayClusterView:
    """Combine records, errors and Ray's node list, which is None if the head does not respond."""
    head = next(
        ((name, rec) for name, rec in records.items() if rec is not None and rec.role == "head"), None
    )
    names = [*records, *(name for name in failed if name not in records)]
    known = _index_ray_nodes_by_name(ray_nodes or [])
    rows = []
    for name in names:
        if name in failed:
            row = RayNodeView(name, _state_of_error(failed[name]), message=failed[name].message)
        else:
            cluster = head[1].cluster if head else None
            row = _build_node_row(
                name, records[name], known.get(name), cluster=cluster, no_list=ray_nodes is None
            )
        rows.append(_with_resources(row, known.get(name)))
    if rows and len(failed) == len(rows):
        state = "unreachable" if all(row.state == "unreachable" for row in rows) else "unknown"
        worst = max(error.exit_code for error in failed.values())
        return RayClusterView(state, nodes=tuple(rows), exit_code=worst)
    if head is None:
        left = any(row.state in ("stray", "dead") for row in rows)
        return RayClusterView("broken" if left else "stopped", nodes=tuple(rows))
    is_running = ray_nodes is not None and all(
        row.node in failed or row.state in ("alive", "not started") for row in rows
    )
    return RayClusterView(
        "running" if is_running else "broken",
        cluster=head[1].cluster,
        head=head[0],
        version=version,
        dashboard_port=head[1].dashboard_port,
        nodes=tuple(rows),
    )


def _state_of_error(error: GenieError) -> str:
    if isinstance(error, NodeRefusedError) and error.reason == NO_PYTHON_REASON:
        return "no python"
    return next((state for kind, state in _STATE_BY_ERROR_TYPE.items() if isinstance(error, kind)), "refused")


def _build_node_row(
    name: str,
    record: RayRecordOfNode | None,
    ray_node: Mapping[str, Any] | None,
    *,
    cluster: str | None,
    no_list: bool,
) -> RayNodeView:
    if record is None:
        return RayNodeView(name, "not started")
    row = RayNodeView(name, "", record.role, recorded=record.recorded_count, alive=record.alive_count)
    if cluster is not None and record.cluster != cluster:
        return replace(row, state="stray", message=f"belongs to another cluster, {record.cluster}")
    if record.alive_count == 0:
        return replace(row, state="dead", message="all Ray processes on this node have ended")
    if cluster is None:
        return replace(row, state="stray", message="its cluster has no head")
    if ray_node is None:
        why = "Ray's head does not respond" if no_list else "not listed by Ray's head"
        return replace(row, state="failing" if no_list else "joining", message=why)
    if ray_node.get("state") != "ALIVE":
        return replace(
            row, state="dead", message=str(ray_node.get("state_message") or "Ray reports it as dead")
        )
    if record.alive_count < record.recorded_count:
        ended = record.recorded_count - record.alive_count
        return replace(
            row, state="failing", message=f"{ended} of {record.recorded_count} Ray processes have ended"
        )
    return replace(row, state="alive")


def _with_resources(row: RayNodeView, ray_node: Mapping[str, Any] | None) -> RayNodeView:
    if ray_node is None:
        return row
    total = ray_node.get("resources_total") or {}
    return replace(
        row,
        address=str(ray_node.get("node_ip", "")),
        cpus=float(total.get("CPU", 0)),
        gpus=float(total.get("GPU", 0)),
    )


def _index_ray_nodes_by_name(ray_nodes: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Index the nodes by name. A restarted node is listed twice; the one that is alive is used."""
    found: dict[str, Mapping[str, Any]] = {}
    for each in ray_nodes:
        name = str(each.get("node_name", ""))
        if name not in found or each.get("state") == "ALIVE":
            found[name] = each
    return found
