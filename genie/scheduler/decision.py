"""What a scheduler is given and what it answers. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from genie.model.allocation import NodeLedger
from genie.model.job import Job
from genie.model.node import NodeInfo, Vendor


@dataclass(frozen=True)
class NodeState:
    """One node as the scheduler may use it. `closed` says why nothing may be placed there, if so."""

    info: NodeInfo
    ledger: NodeLedger
    closed: str = ""

    @property
    def node_id(self) -> str:
        return self.info.node_id


@dataclass(frozen=True)
class ClusterView:
    """Every registered node, the closed ones too: they say what the cluster could give one day."""

    nodes: Mapping[str, NodeState]

    @classmethod
    def of(cls, nodes: Sequence[NodeState]) -> ClusterView:
        return cls({node.node_id: node for node in nodes})

    @cached_property
    def has_gpus(self) -> bool:
        return any(gpu.vendor is not Vendor.CPU for node in self.nodes.values() for gpu in node.info.gpus)


@dataclass(frozen=True)
class Place:
    """Run it there, on these accelerators."""

    job_id: str
    node_id: str
    gpu_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Wait:
    """Not now. `reason` says what it waits for."""

    job_id: str
    reason: str


Decision = Place | Wait


class Scheduler(Protocol):
    def decide(self, queue: Sequence[Job], cluster: ClusterView, now: float) -> list[Decision]:
        """One decision for each queued job, in the order in which they are to be carried out.

        `queue` is in order of arrival. All placements together fit into `cluster`. The same
        arguments give the same answer. `now` is in seconds since the epoch.
        """
        ...
