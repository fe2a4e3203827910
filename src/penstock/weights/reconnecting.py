"""A link that outlives its connections: opened when needed, left where it breaks, and opened again after a pause.

Decides how long to wait and when an instance that passes weights on is left for the trainer's store; refuses to know
what is asked of either.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.errors import WeightError
from penstock.weights.protocol import LinkLost
from penstock.weights.transport import CONNECT_S, WeightLink, WeightTransport

__all__ = ["RELAY_CONNECT_S", "Reconnecting"]

BACKOFF_S = (0.05, 1.0)
"""First and longest pause before a broken connection is opened again."""
RELAY_CONNECT_S = 2.0
"""An instance that does not answer by then is left for the trainer's store."""

T = TypeVar("T")


class Reconnecting:
    """A link that is opened when needed and again after it broke, ever more slowly, until the pull's deadline.

    With `relay`, that instance is asked first; any trouble with it, and the link is to `source` from then on.
    """

    def __init__(self, source: str, transport: WeightTransport, note: Callable[[str], None], relay: str = "") -> None:
        self._source = source
        self._relay = relay
        self._transport = transport
        self._note = note
        self._link: WeightLink | None = None
        self._pause_s = BACKOFF_S[0]

    async def __aenter__(self) -> Reconnecting:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._link is not None:
            # All that was asked for has been read: the next version can be asked for on it.
            self._transport.keep(self._relay or self._source, self._link)
            self._link = None
        self.drop()

    @property
    def on_relay(self) -> bool:
        return bool(self._relay)

    async def link(self) -> WeightLink:
        if self._link is None:
            connect_s = RELAY_CONNECT_S if self._relay else CONNECT_S
            self._link = await self._transport.connect(self._relay or self._source, connect_s, bool(self._relay))
            self._pause_s = BACKOFF_S[0]
        return self._link

    async def broke(self, error: WeightError) -> None:
        """Drops the link and pauses (with jitter, so that a fleet does not come back as one)."""
        kept = self._link is not None and self._link.kept
        self.drop()
        if kept and isinstance(error, LinkLost):
            return  # It may have died long ago; the source has not been asked yet.
        self._note(str(error))
        if self._relay:
            self._relay = ""
            return
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(self._pause_s * 2, BACKOFF_S[1])

    async def call(self, request: Callable[[WeightLink], Awaitable[T]]) -> T:
        while True:
            try:
                return await request(await self.link())
            except LinkLost as error:
                await self.broke(error)

    def drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
