"""Whether a simulated step can still end: decides when to stop one that nobody works on and that nothing will change.

A policy may give nobody anything, or there may be no machine that could work. Time alone goes on then, for ever. But a
policy may also wait for a machine that the trace brings in some hours. So a step is given up only after `STILL_S` in
which not one token was drawn and no event was to come within `FAR_S` that brings something about (a change of the
trace, a boot, a pull of weights, training, a reward).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.simulate.outcome import Outcome
    from penstock.simulate.world import Step, World

__all__ = ["FAR_S", "STILL_S", "Stillness", "StuckError"]

STILL_S = 3600.0
"""Simulated. No policy that waits for a moment waits so long, and it takes a second to simulate."""
HELD = 6.0
"""So many times as long while machines hold samples: during a prefill, too, no token is drawn."""
DAY_S = 86_400.0
FAR_S = 7 * DAY_S
"""Longer than a trace leaves a run without machines, and minutes to simulate: what takes longer is a profile's slip."""


class StuckError(PenstockError):
    """A step can't end; `outcome` has those before it."""

    def __init__(self, words: str, outcome: Outcome) -> None:
        super().__init__(words)
        self.outcome = outcome


class Stillness:
    """Looks at one world, as often as it ticks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since_s = 0.0
        self._seen: tuple[float, ...] | None = None
        """What was done when the stillness began; None: something is to come."""

    def look(self, step: Step) -> str:
        """Why the step can't end, in words; empty while it may."""
        world = self._world
        now = world.clock.now
        if world.clock.due_s - now <= FAR_S:
            self._seen = None
            return ""
        if self._seen is None:
            self._seen, self._since_s = self._progress(step), now
            return ""
        waiting = len(step.moved) + len(step.samples) - step.fresh
        placed = len(step.samples) - step.finished - waiting
        if now - self._since_s < STILL_S * (HELD if placed else 1.0) + 2 * world.profile.training.switch_s:
            return ""
        seen = self._progress(step)
        if seen != self._seen:
            self._seen, self._since_s = seen, now
            return ""
        return (
            f"step {step.number} can't end: no token was drawn for {now - self._since_s:.0f} s, until {now:.0f} s; "
            f"{waiting} of {len(step.samples)} samples wait and {placed} are with machines; there are "
            f"{len(world.remotes.held())} remote machines and {len(world.reserved)} reserved ones, and "
            f"{self._to_come()}"
        )

    def _to_come(self) -> str:
        world = self._world
        if math.isinf(world.clock.due_s):
            return "none is to come"
        remotes = world.remotes
        pull_s = max((remotes.pull_s(machine.name) for machine in remotes.held() if not machine.ready), default=0.0)
        if pull_s > FAR_S:
            return f"a pull of the weights takes {pull_s / DAY_S:,.0f} days"
        return f"nothing comes for {(world.clock.due_s - world.clock.now) / DAY_S:,.0f} days"

    def _progress(self, step: Step) -> tuple[float, ...]:
        """What grows while anybody works."""
        machines = self._world.machines()
        drawn = sum(sample.done for sample in step.samples)
        drawn += sum(int(m.progress(sample)) - sample.done for m in machines for sample in m.running.values())
        return step.number, step.finished, step.scored, step.trained_groups, drawn
