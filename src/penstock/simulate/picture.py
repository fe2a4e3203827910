"""A picture of a simulated run: the time line of one step, then throughput and cost over the trace.

Decides only how it is drawn; matplotlib is imported when a picture is asked for, and draws without a screen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, MissingExtra, StorageError
from penstock.simulate.baselines import STRATEGIES
from penstock.simulate.outcome import Outcome, StepOutcome
from penstock.simulate.report import in_words
from penstock.simulate.traces import Trace

__all__ = ["check_picture", "draw_run"]

BLUE, GREEN, ORANGE, GREY, INK = "#2a6f97", "#2d936c", "#e09f3e", "#8d99ae", "#333333"
PALE = "#a9d0e6"
"""Pulls weights: on its way to work."""
FAMILIES = {"colocated": "#5c677d", "disaggregated": "#8e44ad", "rlboost": "#c1292e", "penstock": "#161616"}
"""A colour for each strategy and those made of it; none is a machine's."""
OWN = "#7f5539"
"""Of a user's own policies."""
DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5, 2)),
    (0, (5, 2, 1, 2)),
    (0, (9, 2)),
    (0, (5, 2, 1, 2, 1, 2)),
    (0, (3, 4)),
    (0, (1, 2)),
)
"""Of a family's members; dots are for what was asked for."""
MOST_LANES = 24
UNITS = (("seconds", 1.0), ("minutes", 60.0), ("hours", 3600.0))
FEW = 3.0
"""Of a unit: less is told in the one below."""


@dataclass
class Lane:
    """A machine within the step, in seconds of it."""

    name: str
    remote: bool
    works: list[tuple[float, float]] = field(default_factory=list)
    boots: list[tuple[float, float]] = field(default_factory=list)
    pulls: list[tuple[float, float]] = field(default_factory=list)
    preempted: list[float] = field(default_factory=list)

    @property
    def idleness(self) -> int:
        """0: it generated; 1: it was there and did something else; 2: nothing."""
        return 0 if self.works else 1 if self.boots or self.pulls or self.preempted else 2


def lanes_of(outcome: Outcome, step: StepOutcome) -> list[Lane]:
    """One for each machine of a step: reserved engines first, by number."""
    began, end = step.began_s, step.began_s + step.times.step_s
    lanes: dict[str, Lane] = {}

    def parts(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        inside = ((max(a, began), min(b, end)) for a, b in spans)
        return [(a - began, b - began) for a, b in inside if b > a]

    for name, spans in step.machine_spans.items():
        lanes[name] = Lane(name, not name.startswith("reserved"), parts(spans))
    for stay in outcome.stays[step.number]:
        lane = lanes.setdefault(stay.node, Lane(stay.node, True))
        until = end if stay.left_at is None else stay.left_at
        up = until if stay.connected_at is None else stay.connected_at
        lane.boots += parts([(stay.taken_at, up)])
        lane.pulls += parts([(up, until if stay.ready_at is None else stay.ready_at)])
        if stay.preempted:
            lane.preempted.append(until - began)
    return sorted(lanes.values(), key=lambda lane: (lane.remote, _natural(lane.name)))


def shown_lanes(lanes: Sequence[Lane], most: int = MOST_LANES) -> tuple[list[Lane], list[Lane]]:
    """Those that are drawn, in order, and those left out: idle ones first, then the last ones of either side."""
    if len(lanes) <= most:
        return list(lanes), []
    ranks: dict[str, tuple[int, int]] = {}
    met: dict[tuple[bool, int], int] = {}
    for lane in lanes:
        kind = (lane.remote, lane.idleness)
        met[kind] = met.get(kind, 0) + 1
        ranks[lane.name] = (lane.idleness, met[kind])
    # One lane says how many more there are.
    kept = {lane.name for lane in sorted(lanes, key=lambda lane: ranks[lane.name])[: most - 1]}
    return [lane for lane in lanes if lane.name in kept], [lane for lane in lanes if lane.name not in kept]


def style_of(name: str, names: Sequence[str]) -> tuple[str, Any]:
    """Colour and dashes of a strategy: the same whatever it is compared with. `names`: all, for policies of a user."""
    if ":" in name:
        own = [other for other in dict.fromkeys(names) if ":" in other]
        return OWN, DASHES[own.index(name) % len(DASHES)]
    family = name.partition("-")[0]
    kin = [other for other in STRATEGIES if other.partition("-")[0] == family]
    return FAMILIES.get(family, INK), DASHES[kin.index(name) % len(DASHES) if name in kin else 0]


def unit_of(span_s: float) -> tuple[str, float]:
    """In which a time line is told, and its seconds."""
    return next((unit for unit in reversed(UNITS) if span_s >= FEW * unit[1]), UNITS[0])


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
    was_there, part = path.exists(), _part(path)
    try:
        for tried in (path, part):
            tried.open("ab").close()
    except OSError as error:
        raise ConfigError(f"--picture {path}: can't be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
        if not was_there:
            path.unlink(missing_ok=True)


def draw_run(path: Path, outcomes: Sequence[Outcome], trace: Trace, step: int | None = None) -> None:
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
    unit, unit_s = unit_of(max(outcome.end_s for outcome in outcomes))
    _draw_fleet(fleet, outcomes, trace, unit_s)
    _draw_over_time(speed, money, outcomes, unit_s)
    money.set_xlabel(unit)
    fleet.sharex(money)
    speed.sharex(money)
    for axes in (fleet, speed):
        axes.tick_params(labelbottom=False)
    for axes in (lanes, fleet, speed, money):
        _calm(axes)
    part = _part(path)
    try:
        # An older picture of that name is there until this one is whole.
        figure.savefig(part, dpi=110, format=path.suffix[1:].lower())
        part.replace(path)
    except OSError as error:
        raise StorageError(f"{path} can't be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _draw_step(axes: Any, outcome: Outcome, step: StepOutcome) -> None:
    shown, left_out = shown_lanes(lanes_of(outcome, step))
    bar = {"linewidth": 0}
    hatched = {"facecolor": "white", "edgecolor": GREY, "hatch": "/////", "linewidth": 0.5}

    def draw(lane: int, parts: Sequence[tuple[float, float]], label: str, height: float = 0.72, **look: Any) -> None:
        bars = [(a, b - a) for a, b in parts]
        if bars:
            axes.broken_barh(bars, (lane - height / 2, height), label=label, **look)

    training = [(a - step.began_s, b - step.began_s) for a, b in step.trainer_spans]
    draw(0, training, "trains", color=ORANGE, **bar)
    for at, lane in enumerate(shown, 1):
        draw(at, lane.boots, "boots", 0.5, **hatched)
        draw(at, lane.pulls, "pulls weights", 0.5, color=PALE, **bar)
        if lane.remote:
            draw(at, lane.works, "remote instance generates", color=BLUE, **bar)
        else:
            draw(at, lane.works, "reserved engine generates", color=GREEN, **bar)
        if lane.preempted:
            places = [at] * len(lane.preempted)
            axes.plot(lane.preempted, places, "x", color=INK, markersize=7, markeredgewidth=1.8, label="preempted")
    names = ["trainer", *(lane.name for lane in shown)]
    if left_out:
        worked = sum(bool(lane.works) for lane in left_out)
        names.append(f"+{len(left_out)} more")
        axes.annotate(
            f"not drawn; {worked or 'none'} of them generated in this step",
            (0.005, len(names) - 1),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.set_yticks(range(len(names)), names)
    # Room for a line of text below the last lane.
    axes.set_ylim(len(names) + 0.1, -0.6)
    _legend_above(axes)
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
        f"{outcome.profile}, {outcome.strategy}, step {step.number}: {in_words(times.step_s)} s; reserved engines "
        f"generate {in_words(times.window_s)} s, the trainer waits {in_words(times.trainer_wait_s)} s",
        loc="left",
        fontsize=11,
        pad=24,
    )


def _draw_fleet(axes: Any, outcomes: Sequence[Outcome], trace: Trace, unit_s: float) -> None:
    until = max(outcome.end_s for outcome in outcomes)
    points = [(at, count) for at, count in trace.counts() if at <= until]
    most: float = max((count for _, count in points), default=0)
    if points:
        times = [at / unit_s for at, _ in points] + [until / unit_s]
        counts = [count for _, count in points] + [points[-1][1]]
        axes.fill_between(times, counts, step="post", color=GREY, alpha=0.25, linewidth=0, label="available")
    names = [outcome.strategy for outcome in outcomes]
    for outcome in outcomes:
        held = [step.times.fleet for step in outcome.steps]
        _steps(axes, outcome, held, style_of(outcome.strategy, names), f"held by {outcome.strategy}", unit_s)
        most = max(most, *held) if held else most
    last = outcomes[-1]
    asked = [float(asked.wanted) for asked, _ in zip(last.asked, last.steps)]
    if asked:
        look = (style_of(last.strategy, names)[0], (0, (1, 1.5)))
        _steps(axes, last, asked, look, f"asked for by {last.strategy}", unit_s, linewidth=1.1)
        most = max(most, *asked)
    axes.set_ylabel("instances")
    axes.set_ylim(0, 1.15 * most + 0.3)
    _legend_above(axes)


def _draw_over_time(speed: Any, money: Any, outcomes: Sequence[Outcome], unit_s: float) -> None:
    names = [outcome.strategy for outcome in outcomes]
    for outcome in outcomes:
        look = style_of(outcome.strategy, names)
        rates = [step.tokens / step.times.step_s / 1000 for step in outcome.steps]
        _steps(speed, outcome, rates, look, outcome.strategy, unit_s)
        costs = [step.dollars / (step.tokens / 1e6) for step in outcome.steps]
        _steps(money, outcome, costs, look, outcome.strategy, unit_s)
    speed.set_ylabel("thousand tokens/s")
    money.set_ylabel("$ per million tokens")
    for axes in (speed, money):
        # Room above the highest line.
        axes.set_ylim(0, 1.1 * max(axes.dataLim.y1, 1e-9))
    money.set_xlim(0, None)
    _legend_above(speed)


def _steps(
    axes: Any,
    outcome: Outcome,
    values: Sequence[float],
    look: tuple[str, Any],
    label: str,
    unit_s: float,
    linewidth: float = 1.6,
) -> None:
    times = [step.began_s / unit_s for step in outcome.steps]
    if outcome.steps:
        last = outcome.steps[-1]
        times.append((last.began_s + last.times.step_s) / unit_s)
        values = [*values, values[-1]]
    colour, dashes = look
    axes.plot(times, values, drawstyle="steps-post", color=colour, linestyle=dashes, linewidth=linewidth, label=label)


def _legend_above(axes: Any) -> None:
    """Each label once, over the panel, where it covers nothing."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    axes.legend(
        handles.values(),
        handles.keys(),
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        frameon=False,
        fontsize=8,
        ncols=min(6, max(1, len(handles))),
        columnspacing=1.4,
        handlelength=2.6,
    )


def _natural(name: str) -> tuple[str, int]:
    found = re.search(r"\d+$", name)
    return (name[: found.start()], int(found.group())) if found else (name, 0)


def _calm(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors="#444444", labelsize=9)
