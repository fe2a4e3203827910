"""`curves.png`: what a run did over its steps, with the accidents marked.

Decides only how it is drawn; matplotlib is imported when a picture is asked for, and draws without a screen.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import MissingExtra, StorageError
from penstock.observe import events
from penstock.observe.events import Event
from penstock.observe.instances import is_loss
from penstock.observe.metrics import CLIP_FRACTION, ENTROPY, REWARD_MEAN, ROLLOUT_TOKENS_PER_S, STEP_S, TRAINER_WAIT_S
from penstock.observe.standing import Standing

Metrics = Sequence[Mapping[str, float | None]]
Points = tuple[list[float], list[float]]

BLUE, GREEN, ORANGE, RED, GREY = "#2a6f97", "#2d936c", "#e09f3e", "#c1292e", "#8d99ae"
STAGE_GROUPS = (
    ("learning", BLUE, ("forward_backward", "advantages", "optimizer")),
    ("rollouts", ORANGE, ("rollout_wait",)),
    ("scores", RED, ("scoring_wait",)),
    ("weights, checkpoints", GREY, ("publish", "checkpoint")),
    ("evaluation", GREEN, ("evaluation",)),
    ("other", "#d9dde2", ("other",)),
)
"""What a step's time is drawn as: words, colour, stages."""
MOST_SETS = 6
MOST_MARKS = 40
"""Above so many accidents a mark for each would hide the curves; the latest are marked."""


def draw_curves(path: Path, log: Sequence[Event], metrics: Metrics, title: str = "") -> None:
    """Writes a PNG over the steps: reward and held-out accuracy, where the time went, entropy and clipping, tokens/s.

    Raises MissingExtra without matplotlib, StorageError where the file can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "train", "curves.png") from error
    metrics = _heard(log).of_done(metrics)
    figure = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(figure)
    top, times, policy, bottom = figure.subplots(4, 1, sharex=True, height_ratios=[3, 1.2, 1, 1])
    _draw_learning(top, log, metrics)
    _draw_times(times, metrics)
    _draw_policy(policy, metrics)
    _draw_line(bottom, column(metrics, ROLLOUT_TOKENS_PER_S), "rollout tokens/s", BLUE)
    bottom.set_xlabel("step")
    for axes in (top, times, policy, bottom):
        _draw_marks(axes, marks(log), named=axes is top)
        _calm(axes)
    if title:
        top.set_title(title, loc="left", fontsize=12)
    part = path.with_name(f".{path.name}.part")
    try:
        # A resumed run's older picture is there until this one is whole.
        figure.savefig(part, dpi=120, format="png")
        part.replace(path)
    except OSError as error:
        raise StorageError(f"{path} can't be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


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
    evaluated = _heard(log).evaluations
    axes.plot(
        [event.step for event in evaluated],
        [event.accuracy for event in evaluated],
        color=GREEN,
        marker="o",
        markersize=5,
        linewidth=1.8,
        label="held-out accuracy",
    )
    _draw_sets(axes, evaluated)
    if all(0.0 <= value <= 1.0 for value in rewards):
        axes.set_ylim(0.0, 1.02)
    axes.legend(loc="upper left", frameon=False)


def _heard(log: Sequence[Event]) -> Standing:
    standing = Standing()
    for event in log:
        standing.take(event)
    return standing


def _draw_sets(axes: Any, evaluated: Sequence[events.Evaluated]) -> None:
    """Each held-out set's accuracy, where there are several."""
    names = sorted({name for event in evaluated for name in event.sets})
    if len(names) < 2:
        return
    for name, style in zip(names[:MOST_SETS], itertools.cycle(("--", ":", "-."))):
        points = [(event.step, event.sets[name].accuracy) for event in evaluated if name in event.sets]
        steps, values = zip(*points)
        axes.plot(steps, values, color=GREEN, linewidth=1, linestyle=style, alpha=0.8, label=name)


def time_shares(metrics: Metrics) -> tuple[list[float], dict[str, list[float]]]:
    """(steps, part of each step's time by group of stages), of the steps whose stages were told."""
    steps: list[float] = []
    found: dict[str, list[float]] = {name: [] for name, _, _ in STAGE_GROUPS}
    for row in metrics:
        step, step_s = row.get("step"), row.get(STEP_S)
        if step is None or not step_s or row.get(f"time/{STAGE_GROUPS[0][2][0]}_s") is None:
            continue
        steps.append(step)
        for name, _, stages in STAGE_GROUPS:
            found[name].append(sum(row.get(f"time/{stage}_s") or 0.0 for stage in stages) / step_s)
    return steps, found


def _draw_times(axes: Any, metrics: Metrics) -> None:
    steps, found = time_shares(metrics)
    if not steps:
        # Of a run that told no more.
        _draw_line(axes, shares(metrics), "trainer waits", ORANGE, whole=1.0)
        return
    colours = [colour for _, colour, _ in STAGE_GROUPS]
    axes.stackplot(steps, *found.values(), labels=list(found), colors=colours, alpha=0.75, linewidth=0)
    axes.set_ylim(0, 1)
    axes.set_ylabel("step's time")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 0.98), frameon=False, fontsize=8, ncols=len(found))


def _draw_policy(axes: Any, metrics: Metrics) -> None:
    steps, entropy = column(metrics, ENTROPY)
    axes.plot(steps, entropy, color=GREEN, linewidth=1.2)
    axes.set_ylabel("entropy, nats", color=GREEN)
    if entropy:
        axes.set_ylim(0, max(entropy) * 1.1 or 1.0)
    steps, clipped = column(metrics, CLIP_FRACTION)
    if any(clipped):
        beside = axes.twinx()
        beside.plot(steps, clipped, color=ORANGE, linewidth=1.2)
        beside.set_ylabel("clipped", color=ORANGE)
        beside.set_ylim(0, max(clipped) * 1.1)
        beside.yaxis.set_major_formatter(lambda value, _: f"{value:.2%}")
        _calm(beside)
        beside.grid(visible=False)


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
