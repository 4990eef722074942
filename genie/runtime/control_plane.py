"""The control plane: requests from this process to the controller.

`ControlDataIntegration` is the interface of `state.control_integration`; controller_connection.py implements
it with a connection that reconnects. Programs without a session use `genie.cluster.open_client`. The
messages are in model/messages/; tensors use the data plane (data_plane.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from genie.model.messages import Message, Request

_Reply = TypeVar("_Reply", bound=Message)


class ControlDataIntegration(ABC):
    """A connection to the controller. Bound to the event loop of the session."""

    reconnects: int
    """Number of times that the connection was restored."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Address of the controller, HOST:PORT."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether the connection is up now. While it is down, calls wait for it until their timeout."""

    @abstractmethod
    async def call(self, request: Request[_Reply], *, timeout_s: float, idempotent: bool = True) -> _Reply:
        """Returns the reply of the controller. `idempotent`: the request may be sent twice.

        Raises ConnectionLostError if the connection was lost and `idempotent` is False, DeadlineError if
        there was no connection before the timeout, and otherwise the error of the reply.
        """
