"""The picture of a run: a RunView in, something that `rich` draws out.

Pure but for `rich` itself: no terminal, thread or clock. Decides what is shown when room is short: the notices give
way first, then idle and gone instances, then the height of the charts; of a line the less useful part is left out, and
causes are wrapped. Colour is never the only sign of anything.
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.observe.instances import RUN_ENDED, outcome_words
from penstock.observe.notices import Mood, Notice, printable
from penstock.observe.state import InstanceRow, RunView

BLOCKS = " ▁▂▃▄▅▆▇█"
NARROW = 64
"""Columns below which charts and rate bars are left out."""
COMPACT = 52
"""Columns below which the instances' weight versions are left out."""
INSTANCE_COLUMNS = (0, 8, 7, 7, 9, 0)
"""Widths of state, version, peak and tokens/s; the name and what stands at the end take what is left."""
LOW = 24
"""Lines below which charts are one line high."""
CHART_LINES = 3
MOST_INSTANCES = 12
MOST_NOTICES = 8
CAUSE_LINES = 2
"""Of one instance's end or one notice, at most."""
WAITING_LINES = 4
WINDOW_LINES = 2
SINCE_COLUMNS = 9
"""When a notice was given, and the space behind it."""
LABEL_COLUMNS = 19
FIGURE_COLUMNS = 8

_MOOD_STYLE: dict[Mood, str] = {"plain": "default", "good": "green", "trouble": "yellow"}
_STATE_SIGN = {"ready": ("●", "green"), "loading": ("◌", "cyan"), "joining": ("◌", "cyan"), "draining": ("◐", "yellow")}
_GONE_SIGN = ("×", "red")
_LEFT_SIGN = ("○", "dim")
_STATE_ORDER = {"ready": 0, "loading": 1, "joining": 2, "draining": 3}


def draw(view: RunView, width: int = 100, height: int = 40) -> RenderableType:
    """The whole picture, for a terminal of `width` columns and `height` lines."""
    inner = max(20, width - 4)
    wide = inner >= NARROW
    chart_lines = CHART_LINES if height >= LOW else 1
    parts: list[RenderableType] = [_head(view, inner), _bar(view, inner), Text()]
    parts += [_curves(view, inner, chart_lines if wide else 0), Text()]
    parts += [_figures(view, inner), Text()]
    used = 12 + 2 * (chart_lines - 1)
    rows = max(2, min(MOST_INSTANCES, height - used - 4))
    instances, lines = _instances(view, inner, rows, wide)
    parts.append(instances)
    used += lines + 2
    if view.fleet.window and not view.outcome:
        window = Text(_wrapped(printable(view.fleet.window), inner, WINDOW_LINES), style="dim")
        parts += [Text(), window]
        used += 2 + window.plain.count("\n")
    if view.waiting_for:
        waiting = _waiting(view, inner)
        parts += [Text(), waiting]
        used += 1 + waiting.plain.count("\n")
    notices = _notices(view, inner, max(1, min(MOST_NOTICES, height - used)))
    if notices:
        parts += [Text(), *notices]
    frame = Table.grid(padding=(0, 2))
    frame.add_column(width=inner)
    frame.add_row(Group(*parts))
    return Group(Text(), _indented(frame))


def render_text(view: RunView, width: int = 100, height: int = 40) -> str:
    """The picture as plain text, for tests and logs."""
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(draw(view, width, height))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def render_svg(view: RunView, width: int = 100, height: int = 40) -> str:
    """The picture as SVG, with colours: what a person sees on a terminal."""
    console = Console(
        file=io.StringIO(), width=width, height=height, record=True, force_terminal=True, color_system="truecolor"
    )
    console.print(draw(view, width, height))
    return console.export_svg(title=f"penstock train: {view.run}" if view.run else "penstock train")


def spark(values: Sequence[float], low: float, high: float, lines: int = 1) -> list[str]:
    """Bars of `lines` characters' height, one column a value; top line first. A NaN is a gap.

    `low` is drawn as the lowest visible bar, `high` as the full height; values beyond are cut.
    """
    levels = 8 * lines
    span = high - low
    bars = []
    for value in values:
        if value != value:
            bars.append(0)
            continue
        share = min(1.0, max(0.0, (value - low) / span)) if span > 0 else 0.5
        bars.append(1 + round(share * (levels - 1)))
    return ["".join(BLOCKS[min(8, max(0, bar - 8 * line))] for bar in bars) for line in reversed(range(lines))]


def columns_of(points: Iterable[tuple[int, float]], steps: int, width: int, hold: bool = False) -> list[float]:
    """(step, value) points spread over `width` columns of a run of `steps`: means, NaN where there is none.

    A column without a point repeats the one before it if points are rarer than columns or with `hold`, up to the
    last point.
    """
    sums, counts = [0.0] * width, [0] * width
    for step, value in points:
        column = min(width - 1, step * width // max(1, steps))
        if value == value:
            sums[column] += value
            counts[column] += 1
    filled = [total / count if count else float("nan") for total, count in zip(sums, counts)]
    last = max((column for column, count in enumerate(counts) if count), default=-1)
    for column in range(1, last + 1):
        if not counts[column] and (hold or steps < width):
            filled[column] = filled[column - 1]
    return filled


def clock(seconds: float) -> str:
    """`1:05`, `1:01:05`."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _indented(content: RenderableType) -> RenderableType:
    grid = Table.grid(padding=(0, 0))
    grid.add_column(width=2)
    grid.add_column()
    grid.add_row("", content)
    return grid


def _head(view: RunView, width: int) -> RenderableType:
    left = Text.assemble(("Penstock", "bold cyan"), "  ", (view.run or "run", "bold"))
    remaining = view.remaining_s
    if view.outcome:
        time = f"{clock(view.elapsed_s)}, {outcome_words(printable(view.outcome))}"
    elif remaining is None:
        time = clock(view.elapsed_s)
    else:
        time = f"{clock(view.elapsed_s)}, about {clock(remaining)} left"
    return _ends(left, Text(time, style="dim"), width)


def _bar(view: RunView, width: int) -> Text:
    label = f"  step {view.step:,} of {view.steps:,}" if view.steps else f"  step {view.step:,}"
    room = max(5, width - len(label))
    done = round(room * view.step / view.steps) if view.steps else 0
    return Text.assemble(("━" * done, "cyan"), ("─" * (room - done), "bright_black"), label)


def _curves(view: RunView, width: int, lines: int) -> Table:
    """Reward and held-out accuracy: figure, curve over the whole run, where it began."""
    steps = view.steps or view.step
    ending = 16
    room = max(0, width - LABEL_COLUMNS - FIGURE_COLUMNS - ending - 4)
    rewards, accuracies = list(view.rewards), list(view.accuracies)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=LABEL_COLUMNS, vertical="bottom")
    table.add_column(width=FIGURE_COLUMNS, justify="right", vertical="bottom")
    table.add_column(width=room if lines else 0)
    table.add_column(width=ending, vertical="bottom")
    low, high = _bounds([value for _, value in rewards])
    for label, points, bounds, style, hold in (
        ("reward", rewards, (low, high), "cyan", False),
        ("held-out accuracy", accuracies, (0.0, 1.0), "green", True),
    ):
        figure = f"{points[-1][1]:.3f}" if points else "–"
        first = f"from {points[0][1]:.3f}" if len(points) > 1 else ""
        curve = Text()
        if lines and points:
            curve = _curve(spark(columns_of(points, steps, room, hold), *bounds, lines), style)
        table.add_row(label, Text(figure, style="bold"), curve, Text(first, style="dim"))
    return table


def _curve(chart: Sequence[str], style: str) -> Text:
    """The edge of the area bright, what lies below it dim."""
    text = Text()
    for number, line in enumerate(chart):
        above = chart[number - 1] if number else " " * len(line)
        for covered, run in itertools.groupby(zip(line, above), key=lambda pair: pair[1] != " "):
            text.append("".join(character for character, _ in run), style=f"dim {style}" if covered else style)
        text.append("\n" if number < len(chart) - 1 else "")
    return text


def _figures(view: RunView, width: int) -> Table:
    share = view.trainer_wait_share
    room = max(0, width - LABEL_COLUMNS - FIGURE_COLUMNS - 2)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=LABEL_COLUMNS)
    table.add_column(width=FIGURE_COLUMNS, justify="right")
    table.add_column(width=max(1, room), no_wrap=True, overflow="ellipsis")
    waits = "–" if share is None else f"{share:.0%}".replace("%", " %")
    rate = f"{view.tokens_per_s:,.0f}"
    for label, figure, beside in (
        ("trainer waits", waits, _of_its_time(view, room)),
        ("tokens/s", rate, _total(view, room)),
        ("in flight, peak", f"{view.running_peak:,}", _sample_counts(view, room)),
        ("weight version", f"{view.weight_version:,}", Text()),
    ):
        table.add_row(label, Text(figure, style="bold"), beside)
    return table


def _of_its_time(view: RunView, room: int) -> Text:
    step_s, wait_s = view.step_metrics.get("step_s"), view.step_metrics.get("trainer_wait_s")
    told = ["of its time"]
    if step_s is not None and wait_s is not None:
        told.insert(0, f"of its time ({wait_s:.2f} of {step_s:.2f} s in the last step)")
    return Text(_first_fitting(told, room), style="dim")


def _total(view: RunView, room: int) -> Text:
    total = view.fleet.tokens_accepted
    return Text(_first_fitting([f"({total:,} so far)"], room) if total else "", style="dim")


def _sample_counts(view: RunView, room: int) -> Text:
    """What went wrong is told first where not everything fits."""
    fleet = view.fleet
    troubles = [f"{count:,} {word}" for count, word in ((fleet.failed, "failed"), (view.unscored, "unscored")) if count]
    queued, finished = f"{fleet.queued:,} queued", f"{fleet.finished:,} finished"
    moved = [f"{view.samples_moved:,} moved"] if view.samples_moved else []
    options = [[queued, finished, *troubles, *moved], [queued, finished, *troubles], [queued, *troubles], troubles]
    if not troubles:
        options[-1] = [finished]
    text = Text(_first_fitting([f"({', '.join(option)})" for option in options], room), style="dim")
    for trouble in troubles:
        text.highlight_words([trouble], "not dim bold yellow")
    return text


def _first_fitting(options: Sequence[str], room: int) -> str:
    """The first that fits, none where none does: half a figure is worse than no figure."""
    return next((option for option in options if len(option) <= room), "")


def _wrapped(text: str, room: int, lines: int) -> str:
    """`text` over at most so many lines of `room` columns; what is left out shows as an ellipsis."""
    return "\n".join(textwrap.wrap(text, max(1, room), max_lines=lines, placeholder=" …" if room > 2 else ""))


def _instances(view: RunView, width: int, most: int, wide: bool) -> tuple[RenderableType, int]:
    """The instances that live as a table, those that ended below it with their causes; and how many lines that is."""
    rows = sorted(view.levelled(), key=lambda row: (_STATE_ORDER.get(row.state, 9), row.name, row.age_s))
    if not rows:
        return Text("no instances yet", style="dim"), 1
    shown, hidden = (rows, 0) if len(rows) <= most else (rows[: most - 1], len(rows) - most + 1)
    living = [row for row in shown if not _ended(row, view)]
    parts: list[RenderableType] = [_living(living, width, wide)] if living else []
    ends = [_end(row, view, width) for row in shown if _ended(row, view)]
    parts += ends
    if hidden:
        parts.append(Text(f"and {hidden:,} more", style="dim"))
    return Group(*parts), len(living) + sum(1 + end.plain.count("\n") for end in ends) + bool(hidden)


def _ended(row: InstanceRow, view: RunView) -> bool:
    return row.state == "gone" or row.name in view.ended_with_run


def _living(rows: Sequence[InstanceRow], width: int, wide: bool) -> Table:
    fastest = max((row.tokens_per_s for row in rows), default=0.0)
    columns = [0, 1, 2, 3, 4, 5] if wide else [0, 1, 2, 3, 4] if width >= COMPACT else [0, 1, 3, 4]
    taken = sum(INSTANCE_COLUMNS[k] + 1 for k in columns[1:5])
    name = LABEL_COLUMNS if wide else max(6, width - taken)
    end = max(1, width - name - taken - 1)
    widths = (name, *INSTANCE_COLUMNS[1:5], end)
    table = Table.grid(padding=(0, 1))
    for k in columns:
        justify: Literal["left", "right"] = "right" if 2 <= k <= 4 else "left"
        table.add_column(width=widths[k], justify=justify, no_wrap=True, overflow="ellipsis")
    header = ("instance", "state", "version", "peak", "tokens/s", "")
    table.add_row(*(Text(header[k], style="dim") for k in columns))
    room = max(4, min(24, width - LABEL_COLUMNS - 36))
    for row in rows:
        cells = _living_cells(row, fastest, room)
        table.add_row(*(cells[k] for k in columns))
    return table


def _living_cells(row: InstanceRow, fastest: float, room: int) -> list[Text]:
    sign, style = _STATE_SIGN.get(row.state, _GONE_SIGN)
    version = f"{row.version:,}" if row.version >= 0 else "–"
    return [
        Text.assemble((sign, style), " ", printable(row.name)),
        Text(row.state),
        Text(version),
        Text(f"{row.running:,}"),
        Text(f"{row.tokens_per_s:,.0f}"),
        Text(_rate_bar(row.tokens_per_s, fastest, room), style="cyan"),
    ]


def _end(row: InstanceRow, view: RunView, width: int) -> Text:
    """`× engine-1 is gone: 3 heartbeats missed`, or calmly that it left."""
    if row.name in view.ended_with_run and (row.state != "gone" or row.orderly):
        sign, words = _LEFT_SIGN, f"left, {RUN_ENDED}"
    elif row.orderly:
        sign, words = _LEFT_SIGN, f"left: {row.cause}" if row.cause else "left"
    else:
        sign, words = _GONE_SIGN, f"is gone: {row.cause}" if row.cause else "is gone"
    told = _wrapped(printable(f"{row.name} {words}"), width - 2, CAUSE_LINES).replace("\n", "\n  ")
    return Text.assemble(sign, " ", (told, "dim" if sign is _LEFT_SIGN else "default"))


def _rate_bar(rate: float, fastest: float, room: int) -> str:
    """In half characters; the fastest instance has the full length."""
    halves = round(2 * room * rate / fastest) if fastest > 0 else 0
    return "━" * (halves // 2) + "╸" * (halves % 2)


def _waiting(view: RunView, width: int) -> Text:
    samples = f"; {view.waiting_samples:,} samples wait" if view.waiting_samples else ""
    told = _wrapped(f"waiting for {printable(view.waiting_for)}{samples}", width, WAITING_LINES)
    return Text(told, style="bold yellow")


def _notices(view: RunView, width: int, lines: int) -> list[Text]:
    """The latest notices that fit into so many lines, oldest first; the last one in any case."""
    told: list[Text] = []
    for notice in reversed(view.notices.last(lines)):
        text = _notice(notice, view, width)
        lines -= 1 + text.plain.count("\n")
        if told and lines < 0:
            break
        told.insert(0, text)
    return told


def _notice(notice: Notice, view: RunView, width: int) -> Text:
    since = clock(max(0.0, notice.ts - view.started_ts)) if view.started_ts else ""
    told = _wrapped(str(notice), width - SINCE_COLUMNS, CAUSE_LINES).replace("\n", "\n" + " " * SINCE_COLUMNS)
    return Text.assemble((f"{since:>{SINCE_COLUMNS - 2}}  ", "dim"), (told, _MOOD_STYLE[notice.mood]))


def _ends(left: Text, right: Text, width: int) -> Text:
    """One line with something at both ends; the right gives way."""
    room = width - left.cell_len - right.cell_len
    return left if room < 2 else Text.assemble(left, " " * room, right)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """0 to 1 where all values lie in it, else from the least to the greatest."""
    real = [value for value in values if value == value]
    if not real or (min(real) >= 0.0 and max(real) <= 1.0):
        return 0.0, 1.0
    return min(real), max(real)


def draw_summary(title: str, rows: Sequence[tuple[str, str]], good: bool) -> RenderableType:
    """The figures of a run that ended, in a frame."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, figure in rows:
        table.add_row(name, Text(figure))
    style = "green" if good else "yellow"
    return Panel(table, title=Text(title, style=f"bold {style}"), title_align="left", border_style=style, expand=False)
