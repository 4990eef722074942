"""The problem that is shown for an etcd member that does not answer."""

from __future__ import annotations

import pytest

from genie.controller.etcd import membership
from genie.errors import GenieError, StoreAccessError, StoreUnavailableError, StoreVersionError


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (StoreUnavailableError("UNKNOWN: ipv4:10.0.0.1:2379: Connection refused"), "refused the connection"),
        (StoreUnavailableError("status failed: 'Deadline Exceeded'"), "no response"),
        (StoreUnavailableError("status failed: 'etcdserver: no leader'"), "has no leader"),
        (StoreAccessError("TLS handshake with etcd failed: ipv4:10.0.0.1"), "TLS handshake with etcd failed"),
        (StoreVersionError("etcd is version 3.3.0"), "etcd is version 3.3.0"),
    ],
)
def test_problem_is_one_phrase(error: GenieError, shown: str) -> None:
    assert membership._shorten_problem(error) == shown
