"""An asyncio loop on a virtual clock: it waits by moving its clock, so an hour takes no time."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Skip(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.skip = _Skip()
        self.timers = 0
        """Timers that were ever set."""
        super().__init__(self.skip)

    def time(self) -> float:
        return self.skip.now

    def call_at(self, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self.timers += 1
        return super().call_at(*args, **kwargs)
