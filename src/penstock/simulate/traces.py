"""Spot traces: when which machine could be had. Four published forms in, one typed series out.

Decides how each form is read and how counts without names become machines with names; refuses to know what a machine
costs and who wants it. Forms (all told apart by their first line):

- `milliseconds,add|remove,node` (Bamboo's CSV): nodes have names.
- `date, time, count` (Bamboo's GCP text): live instances now and then; lines may be out of order.
- `{"metadata": {"gap_seconds": g}, "data": [n, ...]}` (SkyPilot's JSON, availability and preemption): a count every g
  seconds.

Where a form has counts only, a rise adds fresh names and a fall takes away random ones (seeded): a cloud doesn't tell
whom it will take next.
"""

from __future__ import annotations

import datetime
import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

__all__ = ["Change", "Trace", "read_trace", "static_trace"]

FORMS = "a trace has lines of `milliseconds,add|remove,node` or `date, time, count`, or is SkyPilot's JSON"


@dataclass(frozen=True, slots=True)
class Change:
    """One machine becomes available (`there`) or is taken away."""

    at_s: float
    node: str
    there: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """Changes in order of time, from 0 to `duration_s`. Nothing changes after the end."""

    changes: tuple[Change, ...]
    duration_s: float

    def counts(self) -> list[tuple[float, int]]:
        """(seconds, machines available from then on), one for each moment at which something changes."""
        series: list[tuple[float, int]] = []
        count = 0
        for change in self.changes:
            count += 1 if change.there else -1
            if series and series[-1][0] == change.at_s:
                series[-1] = (change.at_s, count)
            else:
                series.append((change.at_s, count))
        return series

    def available(self, at_s: float) -> set[str]:
        """Machines that are there at a moment."""
        there: set[str] = set()
        for change in self.changes:
            if change.at_s > at_s:
                break
            (there.add if change.there else there.discard)(change.node)
        return there

    def window(self, start_s: float, duration_s: float) -> Trace:
        """A part of it, beginning at 0 with whatever is there at `start_s`.

        What happens at its very end is another part's, but for the trace's own end: nothing comes after that.
        """
        changes = [Change(0.0, node, True) for node in sorted(self.available(start_s))]
        end_s = min(start_s + duration_s, self.duration_s)
        changes += [
            Change(change.at_s - start_s, change.node, change.there)
            for change in self.changes
            if start_s < change.at_s < end_s or start_s < change.at_s == end_s == self.duration_s
        ]
        return Trace(tuple(changes), max(0.0, end_s - start_s))

    def sampled(self, share: float, seed: int = 0) -> Trace:
        """Each machine kept with probability `share`, for its whole life under that name."""
        rng = random.Random(seed)
        nodes = sorted({change.node for change in self.changes}, key=lambda node: (len(node), node))
        kept = {node for node in nodes if rng.random() < share}
        return Trace(tuple(change for change in self.changes if change.node in kept), self.duration_s)

    def densest(self, windows: int, duration_s: float, step_s: float = 600.0) -> list[float]:
        """Starts of the windows that do not overlap and have the most changes after their start, most first."""
        starts: list[tuple[int, float]] = []
        at_s = 0.0
        while at_s + duration_s <= self.duration_s:
            inside = sum(at_s < change.at_s < at_s + duration_s for change in self.changes)
            starts.append((inside, at_s))
            at_s += step_s
        chosen: list[float] = []
        for _, start in sorted(starts, key=lambda pair: (-pair[0], pair[1])):
            if len(chosen) < windows and all(abs(start - other) >= duration_s for other in chosen):
                chosen.append(start)
        return chosen


def read_trace(path: Path, seed: int = 0) -> Trace:
    """Any of the forms. Raises ConfigError that names the file and the line that makes no sense."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read as a trace: {error}") from None
    if text.lstrip().startswith("{"):
        return _skypilot(path, text, seed)
    rows = [(number, line.split(",")) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not rows:
        raise ConfigError(f"{path}: is empty; {FORMS}")
    for number, cells in rows:
        if len(cells) != 3:
            raise ConfigError(f"{path}:{number}: {','.join(cells)[:60]!r} is no line of a trace; {FORMS}")
    if rows[0][1][1].strip() in ("add", "remove"):
        return _bamboo(path, rows)
    return _counted(path, rows, seed)


def static_trace(machines: int | Iterable[str], duration_s: float) -> Trace:
    """So many machines, or those of these names, all the time."""
    nodes = [f"node{k}" for k in range(machines)] if isinstance(machines, int) else machines
    return Trace(tuple(Change(0.0, node, True) for node in nodes), duration_s)


def from_counts(series: Iterable[tuple[float, int]], duration_s: float, seed: int = 0) -> Trace:
    """Counts at moments (in order) as machines with names."""
    rng = random.Random(seed)
    changes: list[Change] = []
    live: list[str] = []
    born = 0
    for at_s, count in series:
        while len(live) < count:
            born += 1
            live.append(f"node{born}")
            changes.append(Change(at_s, live[-1], True))
        while len(live) > max(0, count):
            changes.append(Change(at_s, live.pop(rng.randrange(len(live))), False))
    return Trace(tuple(changes), duration_s)


def _bamboo(path: Path, rows: list[tuple[int, list[str]]]) -> Trace:
    changes: list[Change] = []
    there: set[str] = set()
    for number, (at_ms, what, node) in rows:
        node, what = node.strip(), what.strip()
        try:
            at_s = int(at_ms) / 1000
        except ValueError:
            raise ConfigError(f"{path}:{number}: {at_ms!r} is no time in milliseconds") from None
        if at_s < 0 or not node:
            raise ConfigError(f"{path}:{number}: {at_ms.strip()!r}, {node!r}: a time from 0 on and a name are needed")
        if what not in ("add", "remove") or (what == "add") == (node in there):
            raise ConfigError(f"{path}:{number}: {what!r} of {node!r}, which is {'' if node in there else 'not '}there")
        if changes and at_s < changes[-1].at_s:
            raise ConfigError(f"{path}:{number}: goes back in time")
        (there.add if what == "add" else there.discard)(node)
        changes.append(Change(at_s, node, what == "add"))
    return Trace(tuple(changes), changes[-1].at_s)


def _counted(path: Path, rows: list[tuple[int, list[str]]], seed: int) -> Trace:
    points: list[tuple[datetime.datetime, int]] = []
    for number, (day, clock, count) in rows:
        try:
            points.append((datetime.datetime.fromisoformat(f"{day.strip()}T{clock.strip()}"), int(count)))
            if int(count) < 0:
                raise ValueError
        except ValueError:
            raise ConfigError(f"{path}:{number}: {','.join((day, clock, count))!r} is no `date, time, count`") from None
    # Lines are polls written by overlapping watchers; of one moment, the last line counts.
    by_time = sorted(dict(points).items())
    first = by_time[0][0]
    series = [((at - first).total_seconds(), count) for at, count in by_time]
    return from_counts(series, series[-1][0], seed)


def _lack(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _skypilot(path: Path, text: str, seed: int) -> Trace:
    try:
        table = json.loads(text)
        gap_s, counts = float(table["metadata"]["gap_seconds"]), [int(count) for count in table["data"]]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path}: no trace of SkyPilot's form: {_lack(error)}") from None
    if not (0 < gap_s < math.inf) or not counts or min(counts) < 0:
        raise ConfigError(
            f"{path}: no trace of SkyPilot's form: gap_seconds {gap_s:g} must be above 0, and `data` have counts of 0 "
            f"or more (has {len(counts)}, the least {min(counts, default=0)})"
        )
    series = [(k * gap_s, count) for k, count in enumerate(counts)]
    return from_counts(series, len(counts) * gap_s, seed)
