"""How a call of an accelerated function waits for its turn: as a task on its loop, or as a thread.

Decides nothing about whose turn it is (`turns`). A call made inside another one of the same function and key has its
turn already; waiting for that one to end would never end.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import Hashable

from penstock.reward.calling import Call, clock
from penstock.reward.turns import Turns

__all__ = ["HELD", "enter", "wait", "wait_sync"]

HELD: contextvars.ContextVar[frozenset[tuple[int, Hashable]]] = contextvars.ContextVar("turns", default=frozenset())


def enter(turns: Turns, call: Call) -> contextvars.Token[frozenset[tuple[int, Hashable]]] | None:
    """Notes that this context has a turn of this function and key; None where no turn is needed, or it has one."""
    if not turns.limited:
        return None
    held, mine = HELD.get(), (id(turns), call.key)
    return None if mine in held else HELD.set(held | {mine})


async def wait(turns: Turns, call: Call, held: contextvars.Token[frozenset[tuple[int, Hashable]]]) -> None:
    """Waits for a turn; cancellation (and with it the deadline) gives it up."""
    loop = asyncio.get_running_loop()
    woken = asyncio.Event()
    turn = turns.wait(call.key, clock(), call.priority, lambda: loop.call_soon_threadsafe(woken.set))
    try:
        while not turn.granted:
            look_at = turns.look(call.key, clock())
            if turn.granted:
                return
            if look_at == math.inf:
                await woken.wait()
            else:
                handle = loop.call_later(max(0.0, look_at - clock()), woken.set)
                await woken.wait()
                handle.cancel()
            woken.clear()
    except asyncio.CancelledError:
        HELD.reset(held)
        turns.leave(turn, clock())
        raise


def wait_sync(turns: Turns, call: Call, name: str, held: contextvars.Token[frozenset[tuple[int, Hashable]]]) -> None:
    """Waits for a turn in a thread.

    Raises:
        DeadlinePassed: the turn didn't come in time.
    """
    woken = threading.Event()
    turn = turns.wait(call.key, clock(), call.priority, woken.set)
    try:
        while not turn.granted:
            look_at = min(turns.look(call.key, clock()), call.deadline)
            if turn.granted:
                return
            woken.wait(None if look_at == math.inf else max(0.0, look_at - clock()))
            woken.clear()
            if not turn.granted and clock() >= call.deadline:
                raise call.late(name)
    except BaseException:
        HELD.reset(held)
        turns.leave(turn, clock())
        raise
