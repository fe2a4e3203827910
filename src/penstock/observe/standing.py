"""Which steps and evaluations stand: a run that goes on from an earlier checkpoint takes back what came behind it.

Pure: events go in, in the order of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.observe.events import Evaluated, Event, StepFinished, StepStarted

__all__ = ["Standing"]


class Standing:
    """Grows by an event an evaluation."""

    def __init__(self) -> None:
        self.evaluations: list[Evaluated] = []
        """Their steps ascend."""
        self._steps: int | None = None
        """So many are done; None where no step was heard of."""

    def take(self, event: Event) -> None:
        """Any of the run's events."""
        match event:
            case StepStarted(step=step):
                # An evaluation of so many steps is of the weights that this one begins with.
                self._take_back(step + 1)
                self._steps = step
            case StepFinished(step=step):
                self._steps = step + 1
            case Evaluated(step=step):
                self._take_back(step)
                self.evaluations.append(event)

    def of_done(self, metrics: Sequence[Mapping[str, float | None]]) -> list[Mapping[str, float | None]]:
        """Lines of metrics without those of steps that were done once and are to be done again."""
        steps = self._steps
        if steps is None:
            return list(metrics)
        return [row for row in metrics if (step := row.get("step")) is None or step < steps]

    def _take_back(self, first: int) -> None:
        while self.evaluations and self.evaluations[-1].step >= first:
            self.evaluations.pop()
