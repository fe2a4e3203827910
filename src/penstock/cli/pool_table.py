"""The table of a pool's endpoints: redrawn in place on a terminal, printed as lines elsewhere.

Decides what fits a width and what a rate is (sent between two looks). Needs nothing but ANSI's cursor movement.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from penstock.reward.report import EndpointRow

__all__ = ["PoolTable", "Screen"]

HEALTH = {"closed": "ok", "open": "out", "half open": "probing"}
"""A breaker's word, which few read the right way round, to the table's."""
LEFT_OUT = ("done", "mean s", "spent", "429s", "rate/limit s", "broken", "in flight", "health")
"""Columns in the order in which a narrow terminal loses them: what says that something is wrong stays longest."""
LEAST_NAME = 12
"""Characters of an endpoint's name that are always shown."""


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


class PoolTable:
    """Lines for a pool's rows. Remembers what was sent before, so as to say how much is sent a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}

    def _rate(self, row: EndpointRow) -> float:
        """Attempts sent a second since the last look, at least half a second ago."""
        now = self._clock()
        at, sent = self._before.setdefault(row.endpoint, (now, row.sent))
        if now - at >= 0.5:
            self._rates[row.endpoint] = (row.sent - sent) / (now - at)
            self._before[row.endpoint] = (now, row.sent)
        return self._rates.get(row.endpoint, 0.0)

    def lines(self, rows: Sequence[EndpointRow], waiting: int, width: int) -> list[str]:
        """The table, no line wider than `width`: names are cut first, then columns left out by `LEFT_OUT`."""
        heads = ["health", "in flight", "rate/limit s", "429s", "mean s", "spent", "done", "broken"]
        cells = [
            [
                HEALTH.get(row.health, row.health),
                f"{row.in_flight}/{'-' if row.cap is None else row.cap}",
                f"{self._rate(row):.1f}/{_number(row.rate_limit, 1)}",
                str(row.refused),
                _number(row.latency_s, 2),
                f"{row.spent:.4g}",
                str(row.done),
                str(row.broken),
            ]
            for row in rows
        ]
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        shown = set(range(len(heads)))
        for head in LEFT_OUT:
            if sum(widths[n] + 2 for n in shown) + LEAST_NAME > width:
                shown.remove(heads.index(head))
        heads, widths = [heads[n] for n in sorted(shown)], [widths[n] for n in sorted(shown)]
        cells = [[values[n] for n in sorted(shown)] for values in cells]
        longest = max([8, *(len(row.endpoint) for row in rows)])
        name = max(LEAST_NAME, min(longest, width - sum(widths) - 2 * len(widths)))

        def line(label: str, values: Sequence[str]) -> str:
            cut = label if len(label) <= name else "…" + label[1 - name :]
            return "  ".join([cut.ljust(name), *(v.rjust(w) for v, w in zip(values, widths, strict=True))])[:width]

        table = [line("endpoint", heads), *(line(row.endpoint, values) for row, values in zip(rows, cells))]
        return [*table, f"{waiting} waiting"[:width]]


class Screen:
    """Where a picture stands: the last one is overwritten on a terminal, and stays where it is anywhere else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.redraws = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._drawn: list[int] = []
        """Characters of each line of the last picture."""

    @property
    def width(self) -> int:
        """Columns of the terminal; 120 where there is none."""
        return shutil.get_terminal_size((80, 24)).columns - 1 if self.redraws else 120

    def draw(self, lines: Sequence[str]) -> None:
        """Shows a picture in the place of the last one."""
        self._write(self._up() + "".join(line + "\n" for line in lines))
        self._drawn = [len(line) for line in lines] if self.redraws else []

    def say(self, text: str) -> None:
        """A message that stays, above the picture that is drawn next."""
        self._write(self._up() + text + "\n")
        self._drawn = []

    def _up(self) -> str:
        """To the picture's first row. In a terminal that has become narrower, a line takes up several."""
        if not self._drawn:
            return ""
        columns = max(1, shutil.get_terminal_size((80, 24)).columns)
        rows = sum(max(1, -(-length // columns)) for length in self._drawn)
        return f"\r\x1b[{rows}A\x1b[J"

    def _write(self, text: str) -> None:
        """A reader that has gone (a closed terminal, an ended `tee`) must not end the work that is shown."""
        try:
            print(text, end="", file=self._stream, flush=True)
        except OSError:
            self.redraws = False
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
