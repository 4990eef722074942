"""Opens the client of commands that show the cluster, and reports replies that are not those of a leader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from genie.cli import output
from genie.cli.quantities import format_duration

if TYPE_CHECKING:
    from genie.cluster.client import ClusterClient
    from genie.config import Settings
    from genie.model.messages import StatusReply

SHOWN_AGE_S_MIN = 1.0


@asynccontextmanager
async def open_client_and_report_age(settings: Settings) -> AsyncIterator[ClusterClient]:
    """Open a client for the block. At its end, print the age of its replies if a standby gave them from its
    copy."""
    from genie.cluster.client import open_client

    async with open_client(settings) as client:
        yield client
        if client.reply_age_s > SHOWN_AGE_S_MIN:
            age = format_duration(client.reply_age_s)
            output.print_message(f"from standby {client.where}, {age} old: no leader responds")


def is_without_leader(reply: StatusReply) -> bool:
    """Whether the controller of this reply neither leads nor reaches a leader, because of its store."""
    return not (reply.leading or reply.store_ok) and (reply.age_s > 0 or not reply.has_cluster_data)
