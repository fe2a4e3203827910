"""How many samples a slower engine is given beside the fastest one of its kind, of which limits speak.

A decode step of n sequences takes `base + n * c` seconds. Give a token the same worth on every engine, and a sample's
second the same price. Then the best pace of an engine that is slower by a factor f throughout is sqrt(f) times the
fastest one's, for what n sequences are worth, `n * (token / pace - second)`, is greatest where `pace^2 = base * token /
second`. So it is given fewer samples, and none where a single one would be slower than that: an answer that began there
would end last, while engines that could have had it sooner idle. That is for a step that goes on; engines that shall
end together have the same pace. What is taken lies between the two, a pace slower by `f ** PACE`.

Decides nothing else; refuses to know limits, plans and instances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.rollout.curves import Speed

__all__ = ["ALIKE", "Beside", "compared"]

PACE = 0.25
"""Over sixteen fleets with slow machines 0, 0.25 and 0.5 gave 0.975, 0.963 and 0.964 of the time that their fast ones
take alone, and 1.03, 1.02 and 1.04 at worst (`docs/decisions.md`)."""
ALIKE = 1.1
"""Engines whose decode steps take less than this times the fastest one's are alike: learned speeds differ by chance."""
LEAST_S = 1e-9
"""Of a sequence in a decode step, where nothing at all was learned."""
NARROW = 0.25
"""Of an engine's places, at which they are compared."""


@dataclass(frozen=True, slots=True)
class Beside:
    """An engine beside the fastest one of its kind."""

    slower: float = 1.0
    """Times as long as the fastest one's its decode step takes; 1 where they are alike."""
    knee: float = 0.0
    """Sequences with which the fastest one's decode step takes twice as long as with none."""
    fit: float = math.inf
    """Sequences of which the fastest one has memory for the context."""

    def samples(self, limit: int) -> int:
        """That it may hold where the fastest one may hold `limit`; 0 where it is too slow for any."""
        if self.slower <= 1:
            return limit
        return max(0, round(min(limit, self.fit) * self.slower ** (PACE - 1) - self.handicap))

    @property
    def handicap(self) -> float:
        """Samples that it counts as holding beside those it has."""
        return self.knee * (1 - self.slower ** (PACE - 1))

    def rate(self, samples: float) -> float:
        """Tokens in a time, beside the fastest one's, where that holds so many: few are not worth a slow engine's step.

        Simulated steps had of four engines that were slower by 1.5, 2 and 3 what 0.6, 0.4 and 0.17 fast ones each would
        have done, with 100 samples an engine, and this says 0.59, 0.39 and 0.2; with 26 next to nothing
        (`docs/decisions.md`).
        """
        most = min(samples, self.fit)
        if self.slower <= 1:
            return 1.0
        if math.isinf(most):
            return 1 / self.slower
        held = most * self.slower ** (PACE - 1) - self.handicap
        return max(0.0, held / max(most, LEAST_S)) * self.slower**-PACE

    def load(self, samples: int) -> float:
        """What so many samples are for it, beside so many for the fastest one."""
        return (samples + self.handicap) * self.slower


def compared(engines: Sequence[tuple[Speed, int, float]], context: float) -> list[Beside]:
    """Each of some engines of one kind, given as (speed, places, tokens of memory), beside the fastest of them.

    `context`: tokens of a running sequence, on the mean.
    """
    running = NARROW * sum(places for _, places, _ in engines) / max(1, len(engines))
    steps_s = [speed.step_s(running, running * context) for speed, _, _ in engines]
    least_s = min(steps_s, default=0.0)
    if max(steps_s, default=0.0) <= ALIKE * least_s:
        return [Beside()] * len(engines)
    speed, _, memory = engines[steps_s.index(least_s)]
    per_sequence_s = speed.sequence_s + context * speed.context_s
    knee = speed.base_s / max(per_sequence_s, LEAST_S)
    fit = memory / context if context > 0 else math.inf
    return [Beside(step_s / least_s, knee, fit) if step_s > ALIKE * least_s else Beside() for step_s in steps_s]
