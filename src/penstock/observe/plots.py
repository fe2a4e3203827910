"""`curves.png`: what a run did over its steps, with the accidents marked.

Decides only how it is drawn; matplotlib is imported when a picture is asked for, and draws without a screen.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import MissingExtra, StorageError
from penstock.observe import events
from penstock.observe.events import Event
from penstock.observe.instances import is_loss
from penstock.observe.metrics import REWARD_MEAN, ROLLOUT_TOKENS_PER_S, STEP_S, TRAINER_WAIT_S

Metrics = Sequence[Mapping[str, float | None]]
Points = tuple[list[float], list[float]]

BLUE, GREEN, ORANGE, RED, GREY = "#2a6f97", "#2d936c", "#e09f3e", "#c1292e", "#8d99ae"
MOST_MARKS = 40
"""Above so many accidents a mark for each would hide the curves; the latest are marked."""


def draw_curves(path: Path, log: Sequence[Event], metrics: Metrics, title: str = "") -> None:
    """Writes a PNG: reward and held-out accuracy, the trainer's waiting, tokens/s, over the steps.

    Raises MissingExtra without matplotlib, StorageError where the file can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "train", "curves.png") from error
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])
    _draw_learning(top, log, metrics)
    _draw_line(middle, shares(metrics), "trainer waits", ORANGE, whole=1.0)
    _draw_line(bottom, column(metrics, ROLLOUT_TOKENS_PER_S), "rollout tokens/s", BLUE)
    bottom.set_xlabel("step")
    for axes in (top, middle, bottom):
        _draw_marks(axes, marks(log), named=axes is top)
        _calm(axes)
    if title:
        top.set_title(title, loc="left", fontsize=12)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise StorageError(f"{path} can't be written: {error.strerror}") from error


def column(metrics: Metrics, name: str) -> Points:
    """(steps, values) of one metric, where it was measured."""
    pairs = [(row.get("step"), row.get(name)) for row in metrics]
    known = [(step, value) for step, value in pairs if step is not None and value is not None]
    return [step for step, _ in known], [value for _, value in known]


def shares(metrics: Metrics) -> Points:
    """(steps, part of each step in which the trainer waited)."""
    steps, values = [], []
    for row in metrics:
        step, wait_s, step_s = row.get("step"), row.get(TRAINER_WAIT_S), row.get(STEP_S)
        if step is not None and wait_s is not None and step_s:
            steps.append(step)
            values.append(wait_s / step_s)
    return steps, values


def marks(log: Sequence[Event]) -> list[tuple[float, str, str]]:
    """(step, words, colour) of each instance lost, and each one that joined after the first step."""
    starts = [(event.ts, event.step) for event in log if isinstance(event, events.StepStarted)]
    times = [ts for ts, _ in starts]
    seen: set[str] = set()
    found = []
    for event in log:
        if not isinstance(event, events.InstanceChanged):
            continue
        at = bisect.bisect_right(times, event.ts) - 1
        joined = event.after == "ready" and event.instance not in seen
        if event.after == "ready":
            seen.add(event.instance)
        if at >= 0 and is_loss(event):
            found.append((float(starts[at][1]), f"{event.name} lost", RED))
        elif at >= 1 and joined:
            found.append((float(starts[at][1]), f"{event.name} joined", GREEN))
    return found[-MOST_MARKS:]


def _draw_learning(axes: Any, log: Sequence[Event], metrics: Metrics) -> None:
    steps, rewards = column(metrics, REWARD_MEAN)
    axes.plot(steps, rewards, color=BLUE, alpha=0.35, linewidth=1)
    axes.plot(steps, smooth(rewards), color=BLUE, linewidth=1.8, label="reward (mean of a step; smoothed)")
    evaluated = [event for event in log if isinstance(event, events.Evaluated)]
    axes.plot(
        [event.step for event in evaluated],
        [event.accuracy for event in evaluated],
        color=GREEN,
        marker="o",
        markersize=5,
        linewidth=1.8,
        label="held-out accuracy",
    )
    if all(0.0 <= value <= 1.0 for value in rewards):
        axes.set_ylim(0.0, 1.02)
    axes.legend(loc="upper left", frameon=False)


def smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential mean, corrected for its start (as in Adam; Kingma and Ba 2015, section 3)."""
    mean, smoothed = 0.0, []
    for number, value in enumerate(values, start=1):
        mean = weight * mean + (1 - weight) * value
        smoothed.append(mean / (1 - weight**number))
    return smoothed


def _draw_line(axes: Any, points: Points, name: str, colour: str, whole: float | None = None) -> None:
    steps, values = points
    axes.fill_between(steps, values, color=colour, alpha=0.2, linewidth=0)
    axes.plot(steps, values, color=colour, linewidth=1.2)
    axes.set_ylabel(name)
    axes.set_ylim(0, whole)
    if whole is not None:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_marks(axes: Any, found: Sequence[tuple[float, str, str]], named: bool) -> None:
    for step, words, colour in found:
        axes.axvline(step, color=colour, linewidth=1, linestyle=(0, (4, 3)))
        if named:
            axes.annotate(
                words,
                (step, 0.0),
                xycoords=("data", "axes fraction"),
                xytext=(-3, 4),
                textcoords="offset points",
                rotation=90,
                va="bottom",
                ha="right",
                fontsize=8,
                color=colour,
            )


def _calm(axes: Any) -> None:
    axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors="#444444", labelsize=9)
