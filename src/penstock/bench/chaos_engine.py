"""A paced engine that fails when it is told to, in the ways that real ones do.

What it draws while it is well is exactly what a paced engine draws.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

from penstock.errors import EngineError
from penstock.instance.engine import TokenDelta
from penstock.instance.paced import PacedEngine
from penstock.instance.sequences import without
from penstock.sample import Finish
from penstock.weights.manifest import StagedWeights

SPOILT_DELTAS = 3
SLOWER = 8


class FaultyEngine(PacedEngine):
    """Options as of `PacedEngine`, `sleep` left out: it is how this one is slowed down and stopped."""

    def __init__(self, *, tokens_per_s: float, max_running: int, frame_steps: int) -> None:
        super().__init__(
            tokens_per_s=tokens_per_s,
            max_running=max_running,
            max_context_tokens=0,
            frame_steps=frame_steps,
            sleep=self._slept,
        )
        self._spoil = ""
        self._spoil_left = 0
        self._breaks: Exception | None = None
        self._swaps_failing = 0
        self._slower = 1.0
        self._stuck = False

    @property
    def tokens_drawn(self) -> int:
        return self._tokens_generated

    # ---- faults

    def crash(self, error: Exception) -> None:
        """Fails with `error` at its next tokens, and for good."""
        self._breaks = error

    def spoil(self, how: str) -> None:
        """`nan`, `vocabulary`, `twice`, `gap` or `abort`, for its next tokens; `ends lost`, for the next last ones."""
        self._spoil, self._spoil_left = how, SPOILT_DELTAS if how in ("nan", "vocabulary") else 1

    def fail_swap(self) -> None:
        """Its next weight version is refused once."""
        self._swaps_failing = 1

    def slow(self, slower: float) -> None:
        self._slower = slower

    def hang(self) -> None:
        """Draws no more, and says nothing of it."""
        self._stuck = True

    # ---- within

    async def _slept(self, seconds: float) -> None:
        if self._stuck:
            await asyncio.Event().wait()  # Until it is closed.
        await asyncio.sleep(seconds * self._slower)

    async def update_weights(self, weights: StagedWeights) -> None:
        if self._swaps_failing:
            self._swaps_failing -= 1
            raise EngineError("this swap fails")
        await super().update_weights(weights)

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        async for delta in super().deltas():
            if self._breaks is not None:
                raise self._breaks
            how = self._spoil if self._spoil_left else ""
            ended = {lease for lease, finish in zip(delta.leases, delta.finishes) if finish}
            if how == "ends lost" and not ended:
                how = ""
            self._spoil_left -= bool(how)
            if how == "gap":
                continue
            if how == "ends lost":
                delta = without(delta, ended)
            elif how == "abort":
                self._abort(delta)
            elif how == "nan":
                delta.logprobs = [math.nan] * len(delta.logprobs)
            elif how == "vocabulary":
                delta.token_ids = [token + (1 << 20) for token in delta.token_ids]
            yield delta
            if how == "twice":
                yield delta

    def _abort(self, delta: TokenDelta) -> None:
        """What still runs is handed back with the tokens that it has."""
        going_on = [row for row, finish in enumerate(delta.finishes) if finish is Finish.RUNNING]
        for row in going_on:
            delta.finishes[row] = Finish.ABORTED
            delta.causes[delta.leases[row]] = "preempted in the engine"
        self.stop([delta.leases[row] for row in going_on])
