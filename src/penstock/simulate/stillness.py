"""Whether a simulated step can still end: decides when to stop one that nobody works on and that nothing will change.

A policy may give nobody anything, or there may be no machine that could work. Time alone goes on then, for ever. But a
policy may also wait for a machine that the trace brings in some hours. So a step is given up only after `STILL_S` in
which no event was pending that brings something about (a change of the trace, a boot, a pull of weights, training, a
reward) and not one token was drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.simulate.world import Step, World

__all__ = ["STILL_S", "Stillness"]

STILL_S = 3600.0
"""Simulated. No policy that waits for a moment waits so long, and it takes a second to simulate."""
HELD = 6.0
"""So many times as long while machines hold samples: during a prefill, too, no token is drawn."""


class Stillness:
    """Looks at one world, as often as it ticks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since_s = 0.0
        self._seen: tuple[float, ...] = ()

    def look(self, step: Step) -> str:
        """Why the step can't end, in words; empty while it may."""
        world = self._world
        now = world.clock.now
        if world.clock.pending:
            self._since_s = now
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
            f"{len(world.remotes.held())} remote machines and {len(world.reserved)} reserved ones, and none is to come"
        )

    def _progress(self, step: Step) -> tuple[float, ...]:
        """What grows while anybody works."""
        machines = self._world.machines()
        drawn = sum(sample.done for sample in step.samples)
        drawn += sum(int(m.progress(sample)) - sample.done for m in machines for sample in m.running.values())
        return step.number, step.finished, step.scored, step.trained_groups, drawn
