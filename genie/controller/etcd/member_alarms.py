"""Alarms for etcd members that do not respond or belong to another etcd cluster.

The leading controller updates them every few seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genie.controller.etcd.membership import MemberStatus  # needs gRPC

_log = logging.getLogger(__name__)

_FAILED_CHECKS_MIN = 2
"""One check may fail because the member is busy, such as while it is defragmented."""


@dataclass(slots=True)
class _UnresponsiveMember:
    label: str
    endpoint: str
    since: float
    """Time of the first check that failed, in seconds since 1970."""
    belongs_to_other_cluster: bool
    failed_checks: int = 0
    is_reported: bool = False


class EtcdMemberAlarms:
    """Empty while this controller does not lead: the leader reports them."""

    def __init__(self) -> None:
        self._unresponsive: dict[int, _UnresponsiveMember] = {}
        """By member ID; bounded by the members of the cluster."""
        self._member_count = 0

    def alarms(self) -> list[str]:
        """What the owner should know, one text per member."""
        return [self._describe(member) for member in self._unresponsive.values() if member.is_reported]

    def clear(self) -> None:
        self._unresponsive.clear()

    def record_statuses(self, statuses: Sequence[MemberStatus], *, now: float) -> None:
        """Update the alarms with the statuses of all members."""
        silent = {status.info.member_id: status for status in statuses if status.problem}
        self._member_count = len(statuses)
        for member_id in self._unresponsive.keys() - silent.keys():
            member = self._unresponsive.pop(member_id)
            if member.is_reported:
                _log.info("etcd member %s responds again, or was removed", member.label)
        for member_id, status in silent.items():
            info = status.info
            member = self._unresponsive.setdefault(
                member_id,
                _UnresponsiveMember(info.label, info.endpoint, now, status.belongs_to_other_cluster),
            )
            if member.belongs_to_other_cluster != status.belongs_to_other_cluster:
                member.belongs_to_other_cluster, member.is_reported = status.belongs_to_other_cluster, False
            member.failed_checks += 1
            if member.failed_checks >= _FAILED_CHECKS_MIN and not member.is_reported:
                member.is_reported = True
                _log.warning("%s (%s)", self._describe(member), status.problem)

    def _describe(self, member: _UnresponsiveMember) -> str:
        where = f" ({member.endpoint})" if member.endpoint else ""
        if member.belongs_to_other_cluster:
            return (
                f"etcd member {member.label}{where} belongs to another etcd cluster, such as after 'genie "
                "store restore' there: stop one of the two clusters with 'genie down' on its servers; to "
                f"keep this one, run 'genie etcd remove {member.label}' here, then join that server again"
            )
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(member.since))
        others = self._member_count - len(self._unresponsive)
        return (
            f"etcd member {member.label}{where} has not responded since {since}, {others} of "
            f"{self._member_count} respond: run 'genie up' on that server, or, if it is lost, "
            f"'genie etcd remove {member.label}' on another one"
        )
