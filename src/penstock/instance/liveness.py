"""When an agent comes back to its manager, what a server gets done, and when an engine counts as stuck; pure.

`now` is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.instance.engine import EngineLoad

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
STABLE_S = 10.0
"""A session that lasted so long proves that the manager is well: the next loss starts counting afresh."""


class Reconnect:
    """Pauses between attempts: doubled each time, bounded, and scaled by the caller's jitter."""

    def __init__(self, give_up_s: float, now: float) -> None:
        self._give_up_s = give_up_s
        self._since = now
        self._welcomed_at: float | None = None
        self._pause_s = FIRST_PAUSE_S

    def welcomed(self, now: float) -> None:
        self._welcomed_at = now

    def lost(self, now: float, jitter: float) -> float | None:
        """Seconds to pause before the next attempt, or None to give up. `jitter` is between 0.5 and 1."""
        if self._welcomed_at is not None and now - self._welcomed_at >= STABLE_S:
            self._since = now
            self._pause_s = FIRST_PAUSE_S
        self._welcomed_at = None
        left = self._since + self._give_up_s - now
        if left <= 0:
            return None
        pause_s = min(self._pause_s * jitter, left)
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        return pause_s


BUSY_S = 0.1
"""Processor time between two questions that a server which waits does not come to, and one that computes does."""


class ServerWork:
    """Counts what a server gets done between two tokens, by what it says of itself.

    Figures that differ from those before are one unit: a chunk of a long prefill fills some of the KV cache, and no
    token tells of it. A server that hangs goes on saying the same, or nothing. On a CPU, where one step may take
    minutes, its processor time tells more; on a GPU it says nothing, since waiting for the device takes it too.
    """

    def __init__(self) -> None:
        self.done = 0
        self._figures: tuple[float, ...] = ()
        self._cpu_s = 0.0

    def said(self, figures: Sequence[float]) -> None:
        """`figures` as the server gave them, in one order; empty where it gave none."""
        if figures and tuple(figures) != self._figures:
            self._figures = tuple(figures)
            self.done += 1

    def computed(self, cpu_s: float) -> None:
        """`cpu_s`: processor time of a server on a CPU so far, asked for again and again; 0 where it is not known."""
        if cpu_s - self._cpu_s >= BUSY_S:
            self.done += 1
        self._cpu_s = cpu_s


class StallWatch:
    """Tells an engine that works from one that is stuck, by what it counts.

    An engine with sequences must draw a token, end a prefill or get on within a step (`EngineLoad.work_done`) at
    least every `stall_s` seconds; one without is well. How long a step takes is not looked at: the prefill of a long
    prompt on a slow machine may take minutes. What it was given and has not ended is work too, though it may know
    nothing of it any more: an engine that loses the last tokens of a sequence is idle, and nobody would ever hear.
    """

    def __init__(self, stall_s: float, now: float) -> None:
        self._stall_s = stall_s
        self._moved_at = now
        self._counted = (-1, -1, -1)

    def stalled_for(self, load: EngineLoad, now: float, leases: int = 0) -> float:
        """Seconds without progress where they are too many, else 0. `leases`: sequences of which no end has come."""
        counted = (load.tokens_generated, load.tokens_prefilled, load.work_done)
        if counted != self._counted or not (load.running or load.waiting or leases):
            self._counted = counted
            self._moved_at = now
        silent_s = now - self._moved_at
        return silent_s if silent_s > self._stall_s else 0.0

    def excuse(self, now: float) -> None:
        """Time spent on loading weights, or on sending what it drew, is not held against the engine."""
        self._moved_at = now
