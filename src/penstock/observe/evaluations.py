"""Which evaluations stand: a run that goes on from an earlier checkpoint takes back what was learned behind it.

Pure: events go in, in the order of the log.
"""

from __future__ import annotations

from penstock.observe.events import Evaluated, Event, StepStarted

__all__ = ["Evaluations"]


class Evaluations:
    """Grows by an event an evaluation."""

    def __init__(self) -> None:
        self.standing: list[Evaluated] = []
        """Their steps ascend."""

    def take(self, event: Event) -> None:
        """Any of the run's events."""
        match event:
            case StepStarted(step=step):
                # An evaluation of so many steps is of the weights that this one begins with.
                self._take_back(step + 1)
            case Evaluated(step=step):
                self._take_back(step)
                self.standing.append(event)

    def _take_back(self, first: int) -> None:
        while self.standing and self.standing[-1].step >= first:
            self.standing.pop()
