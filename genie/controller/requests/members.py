"""The list of members. Every server answers from its own view of gossip, without leader and store."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from genie.controller.connection import Connection, Handlers
from genie.controller.requests.reply_size import truncate_to_reply
from genie.model.messages import ListMembers, MembersReply


class MemberRequests:
    """`get_members` returns all members, also more than fit into a reply."""

    def __init__(self, get_members: Callable[[], MembersReply]) -> None:
        self._get_members = get_members

    def handlers(self) -> Handlers:
        return {ListMembers: self.list_members}

    async def list_members(self, connection: Connection, request: ListMembers) -> MembersReply:
        reply = self._get_members()
        fitting, more = truncate_to_reply(reply.members)
        return msgspec.structs.replace(reply, members=fitting, more=more)
