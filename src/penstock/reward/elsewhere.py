"""A caller on one event loop that waits for work, or for a stream, on another, which may end or
stand still meanwhile.

`asyncio.wrap_future` alone would leave it waiting for ever where the other loop is closed, and would cancel it where
that loop cancels all of its tasks at its end. Knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from penstock.reward.failures import DeadlinePassed, JobFailed

__all__ = ["carried", "carried_stream"]

LOOK_S = 0.25
"""Between two looks whether the other loop is still there."""


async def carried(future: Future[Any], home: asyncio.AbstractEventLoop, ends_at: float) -> bool:
    """Waits for work on another loop; False where that loop has ended and the work with it.

    `ends_at` is in the time of the caller's loop. A caller that is cancelled takes the work along.

    Raises:
        DeadlinePassed: the other loop neither runs nor is closed, or has dropped the work, when the time is up.
    """
    here = asyncio.get_running_loop()
    done = asyncio.Event()

    def ended(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits there any more
            here.call_soon_threadsafe(done.set)

    future.add_done_callback(ended)
    try:
        while not future.done() or future.cancelled():
            if home.is_closed():
                return False
            if here.time() > ends_at and (future.cancelled() or not home.is_running()):
                raise DeadlinePassed("the loop that the pool runs on stands still: close it, or keep it running")
            done.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), LOOK_S)
        return True
    finally:
        if not home.is_closed():
            future.cancel()


async def carried_stream(
    read: Callable[[], AsyncGenerator[bytes, None]], home: asyncio.AbstractEventLoop
) -> AsyncGenerator[bytes, None]:
    """The pieces that are read on another loop, as they come. Whoever leaves it ends the reading, too.

    Raises:
        JobFailed: the other loop has ended with the stream half read; what was said can't be unsaid.
    """
    here = asyncio.get_running_loop()
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def hand_over(piece: bytes | None) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody reads there any more
            here.call_soon_threadsafe(pieces.put_nowait, piece)

    async def read_there() -> None:
        async with contextlib.aclosing(read()) as coming:
            async for piece in coming:
                hand_over(piece)

    reading = asyncio.run_coroutine_threadsafe(read_there(), home)
    reading.add_done_callback(lambda _: hand_over(None))
    try:
        while not home.is_closed() or not pieces.empty():
            try:
                piece = await asyncio.wait_for(pieces.get(), LOOK_S)
            except TimeoutError:
                continue
            if piece is None:
                break
            yield piece
        try:
            reading.result(0)
        except (CancelledError, TimeoutError):
            raise JobFailed("the loop that the stream was read on has ended") from None
    finally:
        if not home.is_closed():
            reading.cancel()
