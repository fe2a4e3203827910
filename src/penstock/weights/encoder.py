"""One thread on which a store's encodings are made, those of the newest version first.

Whoever publishes faster than this encodes has work waiting here that a newer version has overtaken: it gets its turn
when nothing newer waits, and may then find that nobody wants it any more, which is its own to look at. Decides nothing
about what is encoded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["Encoder"]

T = TypeVar("T")


class Encoder:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "weight-encode")
        self._lock = threading.Lock()
        self._waiting: dict[Future[Any], tuple[int, Callable[[], Any]]] = {}
        """(version, work), in the order in which it was asked for."""

    def submit(self, version: int, work: Callable[[], T]) -> Future[T]:
        """`work` for `version`, once no newer one's waits. Raises RuntimeError after `close`."""
        done: Future[T] = Future()
        with self._lock:
            self._pool.submit(self._next)
            self._waiting[done] = version, work
        return done

    def made(self, done: Future[T]) -> T:
        """On its own thread: the result of other work, which is done at once if it still waits."""
        with self._lock:
            waiting = self._waiting.pop(done, None)
        if waiting is not None:
            _carry_out(done, waiting[1])
        return done.result()

    def close(self) -> None:
        """What waits is cancelled; what is being done comes to its end."""
        with self._lock:
            self._pool.shutdown(wait=False, cancel_futures=True)
            waiting, self._waiting = self._waiting, {}
        for done in waiting:
            done.cancel()

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # It was done ahead of its turn, by `made`.
            done = max(self._waiting, key=lambda one: self._waiting[one][0])
            _, work = self._waiting.pop(done)
        _carry_out(done, work)


def _carry_out(done: Future[T], work: Callable[[], T]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        found = work()
    except BaseException as error:  # noqa: BLE001  As an executor does: it is whoever waits for it that hears of it.
        done.set_exception(error)
    else:
        done.set_result(found)
