"""Defects of failover, leases, fencing and restores, to plant into the simulated code. See defects.py."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from genie.agent.agent import Agent
from genie.agent.heartbeats import HeartbeatActions, actions_from_heartbeat_reply
from genie.agent.journal import Journal
from genie.controller.backups import restore
from genie.controller.connection import Connection
from genie.controller.election import Election
from genie.controller.jobs import launches
from genie.controller.jobs.submission import JobSubmission
from genie.controller.ledger import Ledger
from genie.controller.ledger.write_batch import WriteBatch
from genie.controller.nodes.membership import Membership
from genie.controller.requests.service import RequestService
from genie.controller.rows import ClusterRecord
from genie.controller.store import Compare, Delete, Put
from genie.model.messages import ExitReport, HeartbeatAck
from genie.model.messages.handshake import Hello, Welcome
from tests.sim.defect import Defect

# -- leases and terms -------------------------------------------------------------------------------


def _plant_reclaim_before_suspicion(patch: pytest.MonkeyPatch) -> None:
    """The jobs of a node are reclaimed before it is suspect."""

    def reclaimable_in_s(self: Membership, node_id: str, now_s: float, *, deadman_timeout_s: float) -> float:
        return self._suspect_after_s / 2 - self.time_since_heartbeat_s(node_id, now_s)

    patch.setattr(Membership, "reclaimable_in_s", reclaimable_in_s)


def _plant_no_grace_in_a_new_term(patch: pytest.MonkeyPatch) -> None:
    """A new leader does not grant every node its full time to live."""

    def begin_term(self: Membership, now_s: float) -> None:
        self._term_began_s = float("-inf")
        for listener in self._term_listeners:
            listener()

    patch.setattr(Membership, "begin_term", begin_term)


def _plant_leading_without_a_lease(patch: pytest.MonkeyPatch) -> None:
    """A leader that cannot renew its lease continues to lead."""

    async def wait(self: Election) -> None:
        await self._term_ended_event.wait()

    patch.setattr(Election, "_step_down_at_deadline", wait)
    patch.setattr(
        Election, "is_leading", property(lambda self: self._fencing_token > 0 and self._lease_deadline_s > 0)
    )
    patch.setattr(
        Election,
        "is_leading_with_token",
        lambda self, token: token == self._fencing_token > 0 and self._lease_deadline_s > 0,
    )


def _plant_standby_that_claims_to_lead(patch: pytest.MonkeyPatch) -> None:
    real = RequestService._handle_hello

    async def handle_hello(self: RequestService, connection: Connection, request: Hello) -> Welcome:
        return msgspec.structs.replace(await real(self, connection, request), leading=True)

    patch.setattr(RequestService, "_handle_hello", handle_hello)


# -- writes -----------------------------------------------------------------------------------------


def _plant_writes_that_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """A write compares neither the leader's key nor the rows that it changes."""
    real = WriteBatch.as_compares_and_operations.fget  # type: ignore[attr-defined]

    def without_compares(self: WriteBatch) -> tuple[list[Compare], list[Put | Delete]]:
        return [], real(self)[1]

    patch.setattr(WriteBatch, "as_compares_and_operations", property(without_compares))


def _plant_no_reload_after_unknown_outcomes(patch: pytest.MonkeyPatch) -> None:
    """The tables are not read again after a commit without a reply."""
    never = property(lambda self: False, lambda self, value: None)
    patch.setattr(Ledger, "_needs_reload", never, raising=False)


def _plant_exits_reported_only_once(patch: pytest.MonkeyPatch) -> None:
    """The agent forgets an exit when it has sent it, even if it was not stored."""
    real = Agent._exits_for_next_message

    def exits_for_next_message(self: Agent) -> tuple[ExitReport, ...]:
        reports = real(self)
        self._jobs.settle_exits([report.job_id for report in reports])
        return reports

    patch.setattr(Agent, "_exits_for_next_message", exits_for_next_message)


def _plant_requests_forgotten_in_a_failover(patch: pytest.MonkeyPatch) -> None:
    """A new leader does not know which requests have already created jobs."""
    real = JobSubmission._replace_index

    def replace_index(self: JobSubmission) -> None:
        real(self)
        self._staged_index.job_id_by_request.clear()

    patch.setattr(JobSubmission, "_replace_index", replace_index)


def _plant_launches_of_an_earlier_placement(patch: pytest.MonkeyPatch) -> None:
    """A late confirmation starts a worker whose job was placed again since."""
    patch.setattr(
        launches,
        "is_current_placement",
        lambda job, rank, node_id, epoch: not job.state.is_final and rank < len(job.placements),
    )


# -- fencing tokens and restores --------------------------------------------------------------------


def _plant_agents_that_accept_any_leader(patch: pytest.MonkeyPatch) -> None:
    def accept(self: Journal, leader_token: int, *, message_name: str) -> bool:
        self.leader_token = leader_token
        return True

    def actions(
        ack: HeartbeatAck,
        *,
        live_epochs: Mapping[str, int],
        ended_epochs: Mapping[str, int],
        leader_token_seen: int,
    ) -> HeartbeatActions:
        return actions_from_heartbeat_reply(
            ack, live_epochs=live_epochs, ended_epochs=ended_epochs, leader_token_seen=0
        )

    patch.setattr(Journal, "accept_leader_token_and_check_new", accept)
    patch.setattr("genie.agent.agent.actions_from_heartbeat_reply", actions)


def _plant_restore_in_the_same_generation(patch: pytest.MonkeyPatch) -> None:
    real = restore._raise_generation

    def raise_generation(written_last: dict[str, bytes], generation: int) -> ClusterRecord:
        before = msgspec.json.decode(written_last["cluster"], type=ClusterRecord)
        cluster = real(written_last, generation)
        written_last["cluster"] = msgspec.json.encode(before)
        return msgspec.structs.replace(cluster, generation=before.generation)

    patch.setattr(restore, "_raise_generation", raise_generation)


FAILOVER_DEFECTS = {
    "reclaim before suspicion": Defect(
        _plant_reclaim_before_suspicion, "recovery", ("power_servers",), (1, 25), "without a fault"
    ),
    "no grace in a new term": Defect(
        _plant_no_grace_in_a_new_term, "recovery", ("power_servers",), (1, 3), "without a fault"
    ),
    "leading without a lease": Defect(
        _plant_leading_without_a_lease, "recovery", ("cut_any_link",), (5,), "has disappeared"
    ),
    "standby that claims to lead": Defect(
        _plant_standby_that_claims_to_lead, "power", ("hang_store",), (3, 8), "without a fault"
    ),
    "writes that are not fenced": Defect(
        _plant_writes_that_are_not_fenced, "recovery", ("cut_any_link",), (5, 13), "ledger has"
    ),
    "no reload after unknown outcomes": Defect(
        _plant_no_reload_after_unknown_outcomes, "store", ("lose_reply",), (0,), "have not ended"
    ),
    "exits reported only once": Defect(
        _plant_exits_reported_only_once, "store", ("lose_store", "hang_store"), (8, 12), "without a fault"
    ),
    "requests forgotten in a failover": Defect(
        _plant_requests_forgotten_in_a_failover,
        "store",
        ("lose_reply", "restart_controller"),
        (1, 2),
        "submissions",
    ),
    "launches of an earlier placement": Defect(
        _plant_launches_of_an_earlier_placement,
        "disk",
        ("slow_disk", "lose_store"),
        (156, 229),
        "epoch",
    ),
    "agents that accept any leader": Defect(
        _plant_agents_that_accept_any_leader,
        "recovery",
        ("restore_beside_old_controller",),
        (5, 6),
        "without a fault",
    ),
    "restore in the same generation": Defect(
        _plant_restore_in_the_same_generation,
        "recovery",
        ("restore_beside_old_controller",),
        (5, 6),
        "without a fault",
    ),
}
