"""When a reward function that scores nothing has to end the run.

Decides how many samples in a row may go without a score. Pure: results go in, a verdict comes out. Refuses to know
what a function is or how it is called.
"""

from __future__ import annotations

from penstock.sample import Score, Unscored

__all__ = ["FIRST_SCORE_WITHIN", "MOST_IN_A_ROW", "Drought"]

FIRST_SCORE_WITHIN = 256
"""Samples without a score, and never one before, that show a function broken: a few steps of a small run. Fewer could
be a cold judge or a batch of answers that all miss the format; a run that scores nothing learns nothing meanwhile."""
MOST_IN_A_ROW = 1024
"""The same once it has scored: it has worked, so an outage (a judge that restarts) is given four times as long."""


class Drought:
    """Counts results without a score since the last one with."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._scored = False
        self._last_cause = ""

    def take(self, result: Score | Unscored) -> None:
        if isinstance(result, Score):
            self._scored, self.in_a_row = True, 0
        else:
            self.in_a_row += 1
            self._last_cause = result.cause

    @property
    def verdict(self) -> str:
        """Empty, or why it is no use to go on."""
        if self.in_a_row < (MOST_IN_A_ROW if self._scored else FIRST_SCORE_WITHIN):
            return ""
        which = "the last" if self._scored else "the first"
        return f"none of {which} {self.in_a_row} samples could be scored; the last one's cause: {self._last_cause}"
