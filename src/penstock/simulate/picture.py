"""A picture of a simulated run: the time line of one step, then throughput and cost over the trace.

Decides only how it is drawn; matplotlib is imported when a picture is asked for, and draws without a screen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, MissingExtra, StorageError
from penstock.simulate.outcome import Outcome, StepOutcome
from penstock.simulate.profiles import Profile
from penstock.simulate.traces import Trace

__all__ = ["check_picture", "draw_run"]

BLUE, GREEN, ORANGE, GREY, INK = "#2a6f97", "#2d936c", "#e09f3e", "#8d99ae", "#333333"
COLOURS = (GREY, ORANGE, "#c1292e", BLUE, GREEN)
MOST_LANES = 24


def check_picture(path: Path) -> None:
    """To be asked before minutes are spent: raises ConfigError where no picture can be drawn there."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise MissingExtra("matplotlib", "train", "the picture of a simulation") from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise ConfigError(f"--picture {path}: a picture's name ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise ConfigError(f"--picture {path}: there is no folder {path.parent}")


def draw_run(path: Path, outcomes: Sequence[Outcome], profile: Profile, trace: Trace, step: int | None = None) -> None:
    """Writes a picture: the last outcome's step (by default the middle one), and all outcomes over time.

    Raises MissingExtra without matplotlib, StorageError where the file can't be written, ValueError without a step.
    """
    check_picture(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = outcomes[-1]
    if not shown.steps:
        raise ValueError(f"{shown.strategy}: no step ended; there is nothing to draw")
    number = len(shown.steps) // 2 if step is None else min(step, len(shown.steps) - 1)
    figure = Figure(figsize=(11, 10), layout="constrained")
    FigureCanvasAgg(figure)
    lanes, fleet, speed, money = figure.subplots(4, 1, height_ratios=[3.2, 1, 1.3, 1.3])
    _draw_step(lanes, shown, shown.steps[number])
    _draw_fleet(fleet, outcomes, trace)
    _draw_over_time(speed, money, outcomes, profile)
    fleet.sharex(money)
    speed.sharex(money)
    for axes in (fleet, speed):
        axes.tick_params(labelbottom=False)
    for axes in (lanes, fleet, speed, money):
        _calm(axes)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise StorageError(f"{path} can't be written: {error.strerror}") from error


def _draw_step(axes: Any, outcome: Outcome, step: StepOutcome) -> None:
    end = step.began_s + step.times.step_s
    rows: list[tuple[str, str, list[tuple[float, float]]]] = []
    for name, spans in step.machine_spans.items():
        inside = [(max(a, step.began_s), min(b, end)) for a, b in spans if b > step.began_s and a < end]
        remote = not name.startswith("reserved")
        rows.append((name, BLUE if remote else GREEN, inside))
    rows.sort(key=lambda row: (row[0].startswith("reserved"), _natural(row[0])), reverse=True)
    rows = [("trainer", ORANGE, list(step.trainer_spans)), *rows][: MOST_LANES + 1]
    for lane, (_, colour, parts) in enumerate(rows):
        bars = [(a - step.began_s, b - a) for a, b in parts]
        axes.broken_barh(bars, (lane - 0.36, 0.72), color=colour, linewidth=0)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    # Room for a line of text below the last lane.
    axes.set_ylim(len(rows) + 0.1, -0.6)
    axes.set_xlim(0, step.times.step_s)
    axes.axvline(step.bound_s, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        "no policy ends sooner",
        (step.bound_s, 0.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )
    axes.set_xlabel("seconds of the step")
    times = step.times
    axes.set_title(
        f"{outcome.profile}, {outcome.strategy}, step {step.number}: {times.step_s:.0f} s; reserved engines generate "
        f"{times.window_s:.0f} s, the trainer waits {times.trainer_wait_s:.0f} s",
        loc="left",
        fontsize=11,
    )


def _draw_fleet(axes: Any, outcomes: Sequence[Outcome], trace: Trace) -> None:
    until = max(outcome.end_s for outcome in outcomes)
    points = [(at, count) for at, count in trace.counts() if at <= until]
    if points:
        times = [at / 60 for at, _ in points] + [until / 60]
        counts = [count for _, count in points] + [points[-1][1]]
        axes.fill_between(times, counts, step="post", color=GREY, alpha=0.25, linewidth=0, label="available")
    for outcome, colour in zip(outcomes, _colours(len(outcomes))):
        _steps(axes, outcome, [step.times.fleet for step in outcome.steps], colour, "")
    axes.set_ylabel("instances")
    axes.set_ylim(0, None)
    axes.legend(loc="upper right", frameon=False, fontsize=8)


def _draw_over_time(speed: Any, money: Any, outcomes: Sequence[Outcome], profile: Profile) -> None:
    for outcome, colour in zip(outcomes, _colours(len(outcomes))):
        rates = [step.tokens / step.times.step_s / 1000 for step in outcome.steps]
        _steps(speed, outcome, rates, colour, outcome.strategy)
        instance = profile.prices.on_demand if outcome.strategy == "disaggregated" else profile.prices.spot
        costs = [
            (profile.prices.reserved * step.times.step_s / 3600 + instance * step.paid_h) / (step.tokens / 1e6)
            for step in outcome.steps
        ]
        _steps(money, outcome, costs, colour, outcome.strategy)
    speed.set_ylabel("thousand tokens/s")
    money.set_ylabel("$ per million tokens")
    money.set_xlabel("minutes")
    speed.set_ylim(0, None)
    money.set_ylim(0, None)
    money.set_xlim(0, None)
    speed.legend(loc="lower right", frameon=False, fontsize=8, ncols=len(outcomes))


def _steps(axes: Any, outcome: Outcome, values: Sequence[float], colour: str, label: str) -> None:
    times = [step.began_s / 60 for step in outcome.steps]
    if outcome.steps:
        last = outcome.steps[-1]
        times.append((last.began_s + last.times.step_s) / 60)
        values = [*values, values[-1]]
    axes.plot(times, values, drawstyle="steps-post", color=colour, linewidth=1.6, label=label or None)


def _colours(count: int) -> Sequence[str]:
    return (
        COLOURS[len(COLOURS) - count :] if count <= len(COLOURS) else [COLOURS[k % len(COLOURS)] for k in range(count)]
    )


def _natural(name: str) -> tuple[str, int]:
    found = re.search(r"\d+$", name)
    return (name[: found.start()], int(found.group())) if found else (name, 0)


def _calm(axes: Any) -> None:
    axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors="#444444", labelsize=9)
