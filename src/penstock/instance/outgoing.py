"""What an engine over a server gives out: chunks gathered into deltas, bounded by their reader, and counted.

Decides when a delta is cut (so long after its first chunk, if its reader keeps up) and when reading must wait. Knows
no server and no weights but the version's number.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from penstock.errors import EngineError
from penstock.instance.dialect import Chunk
from penstock.instance.engine import TokenDelta
from penstock.instance.sequences import Gathering, without

GATHER_S = 0.01
"""Chunks that come within so long of the first one go out in the same delta."""
UNREAD_DELTAS = 2
"""Deltas that may wait for their reader or be in its hands; beyond, the server's answers are not read on.

What came and was not sent is what the loss of a machine costs, so it is bounded here: one delta on its way and one
made meanwhile.
"""
RATE_WINDOW_S = 5.0


class Outgoing:
    """Belongs to the event loop that calls it. `version` is what tokens are drawn with now; `cut` before it changes."""

    def __init__(self) -> None:
        self.version = -1
        self.room = asyncio.Event()
        """Set while more may be read."""
        self.room.set()
        self._gathered = Gathering()
        self._timer: asyncio.TimerHandle | None = None
        self._deltas: deque[TokenDelta] = deque()
        self._unread = 0
        self._news = asyncio.Event()
        self._closed = False
        self._death: EngineError | None = None

    def gather(self, lease: int, begin: int, chunk: Chunk) -> None:
        self._gathered.add(lease, begin, chunk)
        self._cut_later()

    def forget(self, leases: Sequence[int]) -> None:
        """No later delta holds them."""
        self._gathered.forget(leases)
        self._deltas = deque(without(delta, set(leases)) for delta in self._deltas)

    def cut(self) -> None:
        """What was gathered becomes a delta, whatever waits: this is called where there is room, or at an end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._gathered:
            return
        self._deltas.append(self._gathered.cut(self.version))
        self._unread += 1
        if self._unread >= UNREAD_DELTAS:
            self.room.clear()
        self._news.set()

    def end(self, death: EngineError | None = None) -> None:
        """After what was cut nothing comes any more; `death` is for the reader."""
        if death is not None:
            self.cut()
        if self._timer is not None:
            self._timer.cancel()
        self._death, self._closed = death, True
        self._news.set()

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        """Ends after `end`, once every delta has been taken, with the death that was given there."""
        while True:
            while self._deltas:
                delta = self._deltas.popleft()
                try:
                    if delta.leases:
                        yield delta
                finally:
                    # Who comes for the next one, or goes, has done with this one.
                    self._unread -= 1
                    self.room.set()
                    self._cut_later()
            if self._death is not None:
                raise self._death
            if self._closed:
                return
            self._news.clear()
            await self._news.wait()

    def _cut_later(self) -> None:
        if self._gathered and self._timer is None and self._unread < UNREAD_DELTAS:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.cut)


class TokenCount:
    """Tokens that came and how fast. `progress`: 8 bytes that hold the count, which goes on from what stands there."""

    def __init__(self, progress: memoryview | None) -> None:
        self.tokens = 0
        self._progress = progress
        self._before = int(struct.unpack("<Q", progress[:8])[0]) if progress is not None else 0
        self._rate: deque[tuple[float, int]] = deque()

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        if self._progress is not None:
            self._progress[:8] = struct.pack("<Q", self._before + self.tokens)
        now = time.monotonic()
        if not self._rate or now - self._rate[-1][0] > GATHER_S:
            self._rate.append((now, self.tokens))
        while len(self._rate) > 2 and self._rate[0][0] < now - RATE_WINDOW_S:
            self._rate.popleft()

    def per_s(self) -> float:
        """Mean rate over the last seconds, up to now, so that it falls to 0 when nothing runs."""
        now = time.monotonic()
        recent = [(at, tokens) for at, tokens in self._rate if at >= now - RATE_WINDOW_S]
        if not recent or now <= recent[0][0]:
            return 0.0
        return (self.tokens - recent[0][1]) / (now - recent[0][0])
