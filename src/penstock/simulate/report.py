"""A simulated comparison as a table and as JSON. Decides which figures a person is shown; the first row is the base."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.simulate.outcome import Outcome

__all__ = ["NoRow", "Row", "as_json", "in_words", "row_of", "table"]


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy on one setting."""

    setting: str
    strategy: str
    steps: int
    step_s: float
    tokens_per_s: float
    tokens_per_dollar: float
    dollars: float
    mean_asked: float
    """Remote instances that the strategy asked for."""
    last_asked: int
    """What it would ask for next."""
    mean_fleet: float
    """Those that it held: no more than there were."""
    trainer_wait_share: float
    remote_wait_share: float
    """Of the time in which remote instances had the weights."""
    regret: float
    """Mean share by which steps were longer than the clairvoyant bound."""
    moves: int
    preemptions: int
    tuned: str
    """What was tried out for it and taken."""
    stuck: str = ""
    """Why no further step ended; empty where all did."""


@dataclass(frozen=True, slots=True)
class NoRow:
    """A strategy of which no step ended: it has no figures."""

    setting: str
    strategy: str
    stuck: str
    """Why."""
    steps: int = 0


def row_of(outcome: Outcome, setting: str, tuned: str = "") -> Row:
    """Raises ValueError for a run in which no step ended: it has no figures."""
    if not outcome.steps:
        raise ValueError(f"{outcome.strategy} on {setting}: no step ended; simulate longer")
    steps = outcome.steps
    return Row(
        setting=setting,
        strategy=outcome.strategy,
        steps=len(steps),
        step_s=outcome.wall_s / len(steps),
        tokens_per_s=outcome.tokens_per_s,
        tokens_per_dollar=outcome.tokens_per_dollar,
        dollars=outcome.dollars,
        mean_asked=outcome.mean_asked,
        last_asked=outcome.asked[-1].wanted,
        mean_fleet=outcome.mean_fleet,
        trainer_wait_share=outcome.trainer_wait_share,
        remote_wait_share=outcome.remote_wait_share,
        regret=outcome.regret,
        moves=sum(step.moves for step in steps),
        preemptions=sum(step.times.preemptions for step in steps),
        tuned=tuned,
        stuck=outcome.stuck,
    )


_HEADS = (
    "setting",
    "strategy",
    "steps",
    "step",
    "tokens/s",
    "x",
    "M tokens/$",
    "$ x",
    "cost",
    "asked for",
    "held",
    "trainer waits",
    "remote wait",
    "regret",
    "tuned",
)
LEFT = (0, 1, len(_HEADS) - 1)
"""Columns of words."""


def table(rows: Sequence[Row | NoRow]) -> str:
    """Ratios are to the first strategy of the same setting that has figures."""
    base: dict[str, Row] = {}
    lines: list[tuple[str, ...]] = [_HEADS]
    for row in rows:
        if isinstance(row, NoRow):
            dashes = ["-"] * (len(_HEADS) - 4)
            lines.append((row.setting, row.strategy, str(row.steps), *dashes, "no step ended"))
        else:
            lines.append(_line(row, base.setdefault(row.setting, row)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def _line(row: Row, first: Row) -> tuple[str, ...]:
    return (
        row.setting,
        row.strategy,
        str(row.steps),
        f"{in_words(row.step_s)} s",
        f"{row.tokens_per_s:,.0f}",
        f"{row.tokens_per_s / first.tokens_per_s:.2f}",
        # Without prices nothing costs anything.
        f"{row.tokens_per_dollar / 1e6:.3f}" if row.dollars else "-",
        f"{row.tokens_per_dollar / first.tokens_per_dollar:.2f}" if row.dollars and first.dollars else "-",
        f"{row.dollars:,.2f} $" if row.dollars else "-",
        _asked(row),
        f"{row.mean_fleet:.1f}",
        f"{row.trainer_wait_share:.1%}",
        f"{row.remote_wait_share:.1%}",
        f"{row.regret:+.1%}",
        row.tuned,
    )


def in_words(value: float) -> str:
    """Three significant digits, or all before the point."""
    rounded = float(f"{value:.3g}")
    if 0 < abs(rounded) < 0.001:
        return f"{rounded:g}"
    digits = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{value:,.{max(0, digits)}f}"


def _asked(row: Row) -> str:
    """The mean, and what it came to where that is another number as printed."""
    mean = f"{row.mean_asked:.1f}"
    return str(row.last_asked) if mean == f"{row.last_asked:.1f}" else f"{mean}, last {row.last_asked}"


def as_json(rows: Sequence[Row | NoRow], outcomes: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """Rows, and the run behind each that has figures: every step with the causes of its window and of the number asked
    for. Figures of a row that has none are null."""
    return {
        "rows": [{name: getattr(row, name, None) for name in Row.__slots__} for row in rows],
        "runs": [
            {
                "setting": row.setting,
                "strategy": outcome.strategy,
                "profile": outcome.profile,
                "seed": seed,
                "steps": [
                    {
                        "step": step.number,
                        "began_s": step.began_s,
                        "step_s": step.times.step_s,
                        "bound_s": step.bound_s,
                        "window_s": step.times.window_s,
                        "train_s": step.times.train_s,
                        "trainer_wait_s": step.times.trainer_wait_s,
                        "remote_waited_s": step.remote_waited_s,
                        "remote_ready_s": step.remote_ready_s,
                        "wanted": asked.wanted,
                        "wanted_cause": asked.cause,
                        "fleet": step.times.fleet,
                        "tokens": step.tokens,
                        "moves": step.moves,
                        "preemptions": step.times.preemptions,
                        "window": [{"at_s": at, "cause": cause} for at, cause in step.causes],
                    }
                    for step, asked in zip(outcome.steps, outcome.asked)
                ],
            }
            for row, outcome in zip((row for row in rows if isinstance(row, Row)), outcomes, strict=True)
        ],
    }
