"""Fair turns at one event loop: decides how much work is done between two looks at the sockets.

A pass of the loop wakes whoever has something to do, and each goes on until it has nothing left. Behind 256 agents with
a backlog that is seconds of work, which whoever asks next waits for. So a frame is taken in its turn: in each pass as
many as fit `budget_s`, in the order in which they came to wait, one for each waiting peer. Who asks for something else
(operators, the trainer) takes no turn, and waits for one pass at most.

Refuses to know what is done in a turn; the time that it took is told.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Turns"]

BUDGET_S = 0.005
"""Of one pass. Shorter ones look at the sockets more often, which costs more than it is worth below a few frames."""
MEMORY = 0.1
"""Weight of the last turn in the mean of what one takes."""


class Turns:
    """Belongs to one event loop."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._left_s = budget_s
        self._mean_s = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._called = False
        """The next pass is going to begin a budget of its own."""

    async def wait(self) -> None:
        """Returns when the caller's turn has come; at once while there is time left and nobody waits."""
        if self._left_s > 0 and not self._waiting:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._call()
        await turn

    def spent(self, seconds: float) -> None:
        """A turn has taken so long."""
        self._left_s -= seconds
        self._mean_s += (MEMORY if self._mean_s else 1.0) * (seconds - self._mean_s)
        self._call()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        """What the last pass took beyond its budget is forgotten: others had their turn since, whatever it was."""
        self._called = False
        self._left_s = self._budget_s
        turns = max(1, int(self._budget_s / self._mean_s)) if self._mean_s > 0 else 1
        while self._waiting and turns:
            turn = self._waiting.popleft()
            # One that was cancelled meanwhile, as its connection ended, needs none.
            if not turn.done():
                turn.set_result(None)
                turns -= 1
        if self._waiting:
            self._call()
