"""A fake controller whose replies are scripted by request type, for tests of commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from genie.model.messages import Message
from genie.model.messages.handshake import Hello
from genie.model.tenant import TokenKind
from genie.tenancy.access import NO_PIN, Token, new_token
from tests.fakes.controller import OWNER_TOKEN, ThreadedController

Reply = Message | Exception | Callable[..., Message]


@dataclass
class ScriptedController(ThreadedController):
    """`replies` by request type: a reply, an error, or a function of the request."""

    only_token: Token | None = OWNER_TOKEN
    replies: dict[type[Message], Reply] = field(default_factory=dict)

    @property
    def requests(self) -> list[Message]:
        """All requests except Hello."""
        return [request for request in self.asked if not isinstance(request, Hello)]

    def _answer_client(self, request: Message) -> Message:
        reply = self.replies[type(request)]
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, Message) else reply(request)


def make_unknown_token(*, pin: str = NO_PIN) -> Token:
    """Return a well-formed token that the controller does not know."""
    return new_token(TokenKind.OWNER, token_id="owner1", secret=b"\x02" * 32, pin=pin)
