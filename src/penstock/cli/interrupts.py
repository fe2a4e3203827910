"""A run that is told to end: Ctrl-C, SIGTERM and a lost terminal, once."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Interrupt", "interruptible"]


@dataclass
class Interrupt:
    at: float | None = None
    """When this process was told to end, as time.monotonic() has it."""


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """SIGTERM and a lost terminal end a run as Ctrl-C does; while it ends, further ones do not interrupt that."""
    told = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return

    def interrupt(number: int, frame: Any) -> None:
        if told.at is None:
            told.at = time.monotonic()
            raise KeyboardInterrupt

    before: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, interrupt)
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
