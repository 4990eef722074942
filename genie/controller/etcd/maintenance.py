"""Maintenance of the local etcd member by the controller: certificate, endpoints, defragmentation. The leader
also checks that all members respond."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from genie.controller.etcd.local_member import LocalMember, etcd_certificate_and_key_paths
from genie.controller.etcd.member_alarms import EtcdMemberAlarms
from genie.controller.etcd.membership import EtcdCluster, MemberStatus, open_etcd_cluster
from genie.controller.nodes.admission import Certificates
from genie.controller.store.etcd import EtcdStore
from genie.errors import GenieError
from genie.processes.clock import Clock
from genie.runtime import tls

_log = logging.getLogger(__name__)

_MAINTENANCE_INTERVAL_S = 5.0
_DEFRAGMENTATION_INTERVAL_S = 600.0
FRAGMENTED_BYTES_MIN = 64 * 1024**2
"""Less is not worth a pause of the member."""


class EtcdMaintenance:
    """`is_leading`: only the leading controller defragments, so that never two members pause at once.
    `member_alarms` is updated while it leads."""

    def __init__(
        self,
        store: EtcdStore,
        certificates: Certificates,
        *,
        state_dir: Path,
        clock: Clock,
        is_leading: Callable[[], bool],
        member_alarms: EtcdMemberAlarms,
    ) -> None:
        self._store = store
        self._certificates = certificates
        self._state_dir = state_dir
        self._clock = clock
        self._is_leading = is_leading
        self._member_alarms = member_alarms
        self._next_defragmentation_s = clock.monotonic_s() + _DEFRAGMENTATION_INTERVAL_S

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                await self.run_maintenance_once()
            except GenieError as error:
                _log.warning("maintenance of the etcd member failed: %s", error)
            except Exception:  # a task boundary: failed maintenance must not end the controller
                _log.exception("maintenance of the etcd member failed")
            await self._clock.sleep(_MAINTENANCE_INTERVAL_S)

    async def run_maintenance_once(self) -> None:
        member = LocalMember.read(self._state_dir)
        if member is None:
            return
        is_renewed = self._renew_certificate_if_due()
        async with open_etcd_cluster(member.address(self._state_dir), clock=self._clock) as cluster:
            found = await cluster.list_members()
            known = member.with_endpoints({each.endpoint for each in found if each.endpoint})
            if known != member:
                known.write(self._state_dir)
            address = known.address(self._state_dir)
            if is_renewed or set(address.endpoints) != set(self._store.address.endpoints):
                _log.info("the members of the store are %s", ", ".join(each.name for each in found))
                await self._store.replace_address(address)
            if not self._is_leading():
                self._member_alarms.clear()
                return
            self._member_alarms.record_statuses(await cluster.fetch_statuses(), now=self._clock.wall_s())
            if self._clock.monotonic_s() >= self._next_defragmentation_s:
                self._next_defragmentation_s = self._clock.monotonic_s() + _DEFRAGMENTATION_INTERVAL_S
                await defragment_most_fragmented_member(cluster)

    def _renew_certificate_if_due(self) -> bool:
        """etcd reads its certificate for every handshake; only the clients of this process need a reload."""
        certificate, key = etcd_certificate_and_key_paths(self._state_dir)
        certificate_pem = certificate.read_text("utf-8")
        if tls.renewal_due_in_s(certificate_pem, now=self._clock.wall_s()) > 0:
            return False
        self._certificates.write_etcd_certificate(
            certificate, key, addresses=tls.certificate_addresses(certificate_pem)
        )
        _log.info("renewed the certificate of the etcd member")
        return True


async def defragment_most_fragmented_member(cluster: EtcdCluster) -> MemberStatus | None:
    """Defragments the most fragmented member if it is worth it and all members answer; the leader last.

    Returns the member.
    """
    statuses = await cluster.fetch_statuses()
    if any(status.problem for status in statuses):
        return None  # with one member down, pausing another would stop the store
    wasteful = [status for status in statuses if is_fragmented(status)]
    if not wasteful:
        return None
    chosen = min(wasteful, key=lambda status: (status.is_leader, -status.fragmented_bytes))
    _log.info("defragmenting etcd member %s", chosen.info.name)
    await cluster.defragment(chosen.info.endpoint)
    return chosen


def is_fragmented(status: MemberStatus) -> bool:
    return status.fragmented_bytes >= max(FRAGMENTED_BYTES_MIN, status.size_bytes // 2)
