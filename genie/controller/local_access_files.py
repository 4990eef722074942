"""The files by which commands on this machine find the cluster: its address and its CA."""

from __future__ import annotations

import logging
from pathlib import Path

from genie.config import ControllerConfig
from genie.controller.ledger import Ledger
from genie.controller.nodes.admission import Certificates, local_host
from genie.errors import StoreFullError
from genie.runtime.credentials import LocalCluster, store_trusted_ca

_log = logging.getLogger(__name__)


class LocalAccessFiles:
    """Written once per process. A failure affects only commands on this machine."""

    def __init__(
        self, config: ControllerConfig, ledger: Ledger, certificates: Certificates, *, state_dir: Path
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._certificates = certificates
        self._state_dir = state_dir
        self._are_written = False
        self.alarm = ""
        """Why they could not be written; empty if they were."""

    def try_write(self, *, port: int) -> None:
        if self._are_written:
            return
        try:
            self._write(port)
        except StoreFullError as error:
            if not self.alarm:
                _log.error("commands on this machine may not find the cluster: %s", error)
            self.alarm = f"commands on this machine may not find the cluster: {error.message}"
        else:
            self.alarm, self._are_written = "", True

    def _write(self, port: int) -> None:
        record = self._ledger.cluster.get("")
        local = LocalCluster(
            host=local_host(self._config), port=port, cluster_id=record.cluster_id if record else ""
        )
        if self._certificates.are_enabled:
            store_trusted_ca(self._certificates.ca_pem, state_dir=self._state_dir)
        local.write(self._state_dir)
