"""A controller that answers what a test tells it to, over the real wire, on a thread of its own.

Not for: proving anything about controllers (tests/controller, tests/integration do that).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from genie.errors import TokenRefusedError
from genie.model.messages import CONTROLLER_REQUESTS, Hello, Message, Request, Welcome
from genie.model.tenant import DEFAULT_TENANT, TokenKind
from genie.runtime import rpc, wire
from genie.runtime.credentials import OWNER_TOKEN_FILE, LocalCluster
from genie.runtime.files import write_private
from genie.runtime.network import Channel, TcpNetwork
from genie.tenancy.access import NO_PIN, Token, new_token

Answer = Message | Exception | Callable[..., Message]


class ScriptedController:
    """`answers` by request type: a reply, an error, or a function of the request. Requests are kept."""

    def __init__(self) -> None:
        self.token = _token(b"\x01")
        self.answers: dict[type[Request], Answer] = {}
        self.asked: list[Message] = []
        self.port = 0
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="scripted-controller")
        self._stop: Callable[[], object] = lambda: None

    def __enter__(self) -> ScriptedController:
        self._thread.start()
        assert self._listening.wait(10)
        return self

    def __exit__(self, *ignored: object) -> None:
        self._stop()
        self._thread.join(10)

    def announce(self, state_dir: Path) -> None:
        """What a real controller leaves in the state directory, so that commands find it."""
        write_private(state_dir / OWNER_TOKEN_FILE, str(self.token).encode())
        LocalCluster(host="127.0.0.1", port=self.port, cluster_id="c1").write(state_dir)

    async def _serve(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await TcpNetwork().serve("127.0.0.1", 0, self._accept, tls=None, on_listening=self._is_listening)

    def _is_listening(self, port: int) -> None:
        self.port = port
        self._listening.set()

    async def _accept(self, channel: Channel) -> None:
        await rpc.Peer(channel, requests=CONTROLLER_REQUESTS, handler=self._handle).run()

    async def _handle(self, peer: rpc.Peer, request: Message) -> Message:
        if isinstance(request, Hello):
            return self._greet(peer, request)
        self.asked.append(request)
        answer = self.answers[type(request)]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Message) else answer(request)

    def _greet(self, peer: rpc.Peer, hello: Hello) -> Welcome:
        if hello.token != str(self.token):
            raise TokenRefusedError("token is unknown here or its secret is wrong", hint="make another")
        peer.channel.cap_bytes = wire.FRAME_BYTES_MAX
        return Welcome(
            cluster_id="c1", version="0.0", tenant=DEFAULT_TENANT, kind=TokenKind.OWNER, leading=True
        )


def other_token(*, pin: str = NO_PIN) -> Token:
    """A token of the right shape that the controller does not know."""
    return _token(b"\x02", pin=pin)


def _token(byte: bytes, *, pin: str = NO_PIN) -> Token:
    return new_token(TokenKind.OWNER, token_id="owner1", secret=byte * 32, pin=pin)
