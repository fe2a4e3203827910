"""Where a step's time goes: seconds by stage, each second in one stage alone.

Decides how nested stages share time: the inner one has it. Refuses to know what the stages are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

__all__ = ["Stages"]


class Stages:
    """A stopwatch of the main thread. What is spent outside of every stage is counted nowhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._since = 0.0
        self._spent: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def move(self, source: str, target: str, seconds: float) -> None:
        """Counts what was spent in `source` for `target`; no more than was."""
        seconds = min(seconds, self._spent.get(source, 0.0))
        if seconds > 0:
            self._spent[source] -= seconds
            self._spent[target] = self._spent.get(target, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds by stage since they were last asked for."""
        self._settle()
        spent, self._spent = self._spent, {}
        return spent

    def _settle(self) -> None:
        now = self._clock()
        if self._open:
            self._spent[self._open[-1]] = self._spent.get(self._open[-1], 0.0) + now - self._since
        self._since = now
