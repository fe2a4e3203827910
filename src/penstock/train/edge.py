"""The background thread with the asyncio loop on which the rollout client and the scorer live.

Decides nothing. The trainer's main thread computes and must not be held up by sockets, nor they by it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from penstock.errors import DeadlineExceeded

__all__ = ["EdgeLoop"]

T = TypeVar("T")

STOP_S = 2.0
# Ctrl-C reaches a waiting main thread at the latest after this long.
_SLICE_S = 0.2


class EdgeLoop:
    """An asyncio loop in a thread of its own. Use as a context manager, or call `start` and `close`."""

    def __init__(self, name: str = "penstock-edge") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> EdgeLoop:
        self._thread.start()
        return self

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        what: str,
        timeout_s: float,
        watch: Callable[[], None] | None = None,
    ) -> T:
        """Runs `coroutine` on the loop and waits for its result; `watch` is called meanwhile, and may raise.

        Raises DeadlineExceeded, naming `what`, after `timeout_s`; the coroutine is then cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        waited_s = 0.0
        while True:
            try:
                return future.result(timeout=min(_SLICE_S, max(0.0, timeout_s - waited_s)))
            except concurrent.futures.TimeoutError:
                if future.done():
                    # The coroutine's own TimeoutError, or a result that came just now.
                    return future.result()
                waited_s += _SLICE_S
                if waited_s >= timeout_s:
                    future.cancel()
                    raise DeadlineExceeded(f"{what} took longer than {timeout_s:g} s") from None
                if watch is not None:
                    watch()
            except BaseException:
                future.cancel()
                raise

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Has `function` called on the loop, and doesn't wait."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancels what still runs and ends the thread, within about two seconds."""
        if not self._thread.is_alive():
            if not self.loop.is_closed():
                self.loop.close()
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_S)

    def __enter__(self) -> EdgeLoop:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=STOP_S / 2))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
