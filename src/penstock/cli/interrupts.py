"""A run that is told to end: Ctrl-C, SIGTERM and a lost terminal, once; held back where a moment later is better."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["HOLD_S", "Interrupt", "interruptible"]

HOLD_S = 3.0
"""An interrupt is held back for so long at most: a run's processes are to be gone within five seconds of it."""


class Interrupt:
    """That this process was told to end. Its main thread's."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self.at: float | None = None
        """When, as time.monotonic() has it."""
        self._hold_s = hold_s
        self._held = self._due = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """An interrupt that comes within is raised at the end, or after `hold_s`."""
        self._held = True
        error = None
        try:
            yield
        except BaseException as found:
            error = found
            raise
        finally:
            self._held = False
            if self._due:
                signal.setitimer(signal.ITIMER_REAL, 0)
                self._due = False
                if not isinstance(error, KeyboardInterrupt):
                    raise KeyboardInterrupt from error

    def told(self, number: int, frame: Any) -> None:
        """Handles a signal. While a run ends, further ones do not interrupt that."""
        if self.at is not None:
            return
        self.at = time.monotonic()
        self._due = True
        if self._held:
            signal.setitimer(signal.ITIMER_REAL, self._hold_s)
        else:
            self._raise()

    def waited(self, number: int, frame: Any) -> None:
        """Handles the end of `hold_s`."""
        if self._due:
            self._raise()

    def _raise(self) -> None:
        self._due = False
        raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible(hold_s: float = HOLD_S) -> Iterator[Interrupt]:
    """SIGTERM and a lost terminal end a run as Ctrl-C does."""
    interrupt = Interrupt(hold_s)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), interrupt.told)
    handlers[signal.SIGALRM] = interrupt.waited
    before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    for number, handler in handlers.items():
        before[number] = signal.signal(number, handler)
    try:
        yield interrupt
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
