"""Decides how Ray is started on the nodes, and what its state means. Values in, values out.

`plan()` gives the order for each node, or the reason why there can be no cluster; `view()` makes one
picture of what the nodes have written down and what Ray's head says.

Not for: asking nodes or starting anything (ray_cluster.py).
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
from genie.grid.grid_file import RayKeys

_LOOPBACK = ("127.0.0.1", "::1", "localhost", "")
_HOOK_ADDRESS = "127.0.0.1"
NO_PYTHON = "no_python"
"""The reason of a node on which our part cannot run."""
_WORDS: dict[type[GenieError], str] = {
    TransportError: "unreachable",
    LoginRefusedError: "login refused",
    HostKeyUnknownError: "host key unknown",
    HostKeyChangedError: "host key changed",
}


@dataclass(frozen=True)
class RayRecord:
    """What a node has written down about the Ray that was started there, and how much of it lives."""

    cluster: str
    role: str
    head: str
    dashboard_port: int
    recorded: int
    alive: int

    @classmethod
    def of(cls, answer: Mapping[str, Any] | None) -> RayRecord | None:
        if answer is None:
            return None
        return cls(
            cluster=str(answer["cluster"]),
            role=str(answer["role"]),
            head=str(answer["head"]),
            dashboard_port=int(answer["dashboard_port"]),
            recorded=int(answer["recorded"]),
            alive=int(answer["alive"]),
        )


@dataclass(frozen=True)
class RayFacts:
    """One node before the start. `ray` is '' where there is none; `gpus` None where Ray is to look itself."""

    node: str
    address: str
    ray: str
    version: str
    python: str
    gpus: int | None
    record: RayRecord | None

    @classmethod
    def of(cls, node: str, answer: Mapping[str, Any]) -> RayFacts:
        gpus = answer["gpus"]
        return cls(
            node=node,
            address=str(answer["address"]),
            ray=str(answer["ray"]),
            version=str(answer["version"]),
            python=str(answer["python"]),
            gpus=int(gpus) if gpus is not None else None,
            record=RayRecord.of(answer["record"]),
        )


@dataclass(frozen=True)
class StartOrder:
    """What one node is to be told. `head` is HOST:PORT of the head for all."""

    node: str
    role: str
    ray: str
    head: str
    options: tuple[str, ...]
    free_ports: tuple[tuple[str, int, str], ...]
    loopback: bool

    def args(self, keys: RayKeys) -> dict[str, Any]:
        return {
            "node": self.node,
            "role": self.role,
            "ray": self.ray,
            "head": self.head,
            "options": list(self.options),
            "free_ports": [{"host": host, "port": port, "key": key} for host, port, key in self.free_ports],
            "loopback": self.loopback,
            "dashboard_port": keys.dashboard_port,
            "namespace": keys.namespace,
            "log_level": keys.log_level,
        }


def plan(facts: Sequence[RayFacts], keys: RayKeys, *, head: str | None = None) -> list[StartOrder]:
    """The head's order first. Raises RayError that lists what does not fit, node by node."""
    _check_not_running(facts)
    _check_installed(facts)
    _check_versions(facts)
    ordered = _head_first(facts, head)
    first = ordered[0]
    if not keys.head_bind_all and len(ordered) > 1:
        raise RayError(
            f"ray.head_bind_all is false: the head would listen on loopback, where {len(ordered) - 1} "
            "other nodes cannot reach it",
            hint="set it to true (Ray asks for a token all the same), or name one node with --node",
        )
    if len(ordered) > 1 and first.address in _LOOPBACK:
        raise RayError(
            f"node {first.node} is reached by {first.address or 'no address'}, "
            "which the other nodes cannot use",
            hint="give it a HostName in ~/.ssh/config that all nodes reach, or use --head with another node",
        )
    address = first.address if keys.head_bind_all else _HOOK_ADDRESS
    at = f"[{address}]:{keys.redis_port}" if ":" in address else f"{address}:{keys.redis_port}"
    return [_head_order(first, at, keys), *(_worker_order(each, at) for each in ordered[1:])]


def _check_not_running(facts: Sequence[RayFacts]) -> None:
    running = [each.node for each in facts if each.record is not None and each.record.alive]
    if running:
        raise RayError(
            f"a Ray cluster already runs on {_listed(running)}",
            hint="'grid-cli cluster status' shows it, 'grid-cli cluster stop' ends it",
        )


def _check_installed(facts: Sequence[RayFacts]) -> None:
    without = [each.node for each in facts if not each.ray]
    if without:
        raise RayError(
            f"there is no Ray on {_listed(without)}: neither in grid_env below remote_root, nor 'ray' on the "
            "PATH of a login",
            hint="install it on all nodes with: grid-cli setup --package 'ray[default]'",
        )


def _check_versions(facts: Sequence[RayFacts]) -> None:
    unknown = [f"{each.node}: {each.ray}" for each in facts if not each.version]
    if unknown:
        raise RayError("the version of Ray cannot be told on these nodes:\n" + "\n".join(unknown))
    rays = {each.version for each in facts}
    pythons = {_minor(each.python) for each in facts if each.python}
    if len(rays) > 1 or len(pythons) > 1:
        lines = [f"{each.node}: Ray {each.version}, Python {each.python or 'unknown'}" for each in facts]
        raise RayError(
            "Ray needs one version of itself and of Python on all nodes; there are:\n" + "\n".join(lines),
            hint="'grid-cli setup --package ray[default]==VERSION --python PROGRAM' makes them the same",
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _head_first(facts: Sequence[RayFacts], head: str | None) -> list[RayFacts]:
    if head is None:
        return list(facts)
    chosen = [each for each in facts if each.node == head]
    if not chosen:
        raise RayError(f"node {head} is not one of those that would start: {_listed(e.node for e in facts)}")
    return chosen + [each for each in facts if each.node != head]


def _head_order(facts: RayFacts, at: str, keys: RayKeys) -> StartOrder:
    loopback = not keys.head_bind_all
    options = (
        "--head",
        f"--port={keys.redis_port}",
        "--include-dashboard=true",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={keys.dashboard_port}",
        *_common_options(facts, address=_HOOK_ADDRESS if loopback else facts.address),
    )
    everywhere = _HOOK_ADDRESS if loopback else ("::" if ":" in facts.address else "0.0.0.0")  # noqa: S104 - Ray does
    ports = (
        (everywhere, keys.redis_port, "ray.redis_port"),
        ("127.0.0.1", keys.dashboard_port, "ray.dashboard_port"),
    )
    return StartOrder(facts.node, "head", facts.ray, at, options, ports, loopback)


def _worker_order(facts: RayFacts, at: str) -> StartOrder:
    options = (f"--address={at}", *_common_options(facts, address=facts.address))
    return StartOrder(facts.node, "worker", facts.ray, at, options, (), loopback=False)


def _common_options(facts: RayFacts, *, address: str) -> list[str]:
    options = [f"--node-name={facts.node}", "--disable-usage-stats", "--dashboard-agent-listen-port=0"]
    if address:
        options.append(f"--node-ip-address={address}")
    if facts.gpus is not None:
        options.append(f"--num-gpus={facts.gpus}")
    return options


# --- what there is ---


@dataclass(frozen=True)
class RayNode:
    """One node of the picture.

    `state`: alive, failing (some of its daemons have ended), dead, joining, stray, not started; where the
    node told nothing: unreachable, login refused, host key unknown, host key changed, no python, refused.
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
class ClusterView:
    """`state` is 'running', 'broken' (some of it is dead) or 'stopped'. Where no node tells anything it is
    'unreachable' if none answers, else 'unknown'; `exit_code` is then that of the worst error, else 0.
    """

    state: str
    cluster: str = ""
    head: str = ""
    version: str = ""
    dashboard_port: int = 0
    nodes: tuple[RayNode, ...] = ()
    exit_code: int = 0


def view(
    records: Mapping[str, RayRecord | None],
    failed: Mapping[str, GenieError],
    told: Sequence[Mapping[str, Any]] | None,
    *,
    version: str = "",
) -> ClusterView:
    """`failed` are nodes that told nothing. `told` is what Ray's head says of its nodes; None if silent."""
    head = next(
        ((name, rec) for name, rec in records.items() if rec is not None and rec.role == "head"), None
    )
    names = [*records, *(name for name in failed if name not in records)]
    known = _by_name(told or [])
    rows = []
    for name in names:
        if name in failed:
            row = RayNode(name, _word(failed[name]), message=failed[name].message)
        else:
            cluster = head[1].cluster if head else None
            row = _row(name, records[name], known.get(name), cluster=cluster, silent=told is None)
        rows.append(_with_resources(row, known.get(name)))
    if rows and len(failed) == len(rows):
        state = "unreachable" if all(row.state == "unreachable" for row in rows) else "unknown"
        worst = max(error.exit_code for error in failed.values())
        return ClusterView(state, nodes=tuple(rows), exit_code=worst)
    if head is None:
        left = any(row.state in ("stray", "dead") for row in rows)
        return ClusterView("broken" if left else "stopped", nodes=tuple(rows))
    fine = told is not None and all(
        row.node in failed or row.state in ("alive", "not started") for row in rows
    )
    return ClusterView(
        "running" if fine else "broken",
        cluster=head[1].cluster,
        head=head[0],
        version=version,
        dashboard_port=head[1].dashboard_port,
        nodes=tuple(rows),
    )


def _word(error: GenieError) -> str:
    if isinstance(error, NodeRefusedError) and error.reason == NO_PYTHON:
        return "no python"
    return next((word for kind, word in _WORDS.items() if isinstance(error, kind)), "refused")


def _row(
    name: str,
    record: RayRecord | None,
    told: Mapping[str, Any] | None,
    *,
    cluster: str | None,
    silent: bool,
) -> RayNode:
    if record is None:
        return RayNode(name, "not started")
    row = RayNode(name, "", record.role, recorded=record.recorded, alive=record.alive)
    if cluster is not None and record.cluster != cluster:
        return replace(row, state="stray", message=f"it belongs to another cluster, {record.cluster}")
    if record.alive == 0:
        return replace(row, state="dead", message="none of the processes that were started here lives")
    if cluster is None:
        return replace(row, state="stray", message="the head of its cluster is gone")
    if told is None:
        why = "Ray's head does not answer" if silent else "Ray's head does not know it"
        return replace(row, state="failing" if silent else "joining", message=why)
    if told.get("state") != "ALIVE":
        return replace(
            row, state="dead", message=str(told.get("state_message") or "Ray says that it is dead")
        )
    if record.alive < record.recorded:
        ended = record.recorded - record.alive
        return replace(row, state="failing", message=f"{ended} of the processes started here have ended")
    return replace(row, state="alive")


def _with_resources(row: RayNode, told: Mapping[str, Any] | None) -> RayNode:
    if told is None:
        return row
    total = told.get("resources_total") or {}
    return replace(
        row,
        address=str(told.get("node_ip", "")),
        cpus=float(total.get("CPU", 0)),
        gpus=float(total.get("GPU", 0)),
    )


def _by_name(told: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """A node that came back is told of twice; the one that lives counts."""
    found: dict[str, Mapping[str, Any]] = {}
    for each in told:
        name = str(each.get("node_name", ""))
        if name not in found or each.get("state") == "ALIVE":
            found[name] = each
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
