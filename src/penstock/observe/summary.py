"""What a run came to, in figures: `summary.json` and the last words on the terminal.

Decides what is worth a line and how it is called; what happened is counted by `summary_tally`. Pure but for writing
the file and printing. A figure that was not measured is None, never zero.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from penstock.errors import StorageError
from penstock.observe.events import Event
from penstock.observe.instances import outcome_words
from penstock.observe.summary_tally import StepTally, SummaryTally

Metrics = Sequence[Mapping[str, float | None]]


class Summary(msgspec.Struct, kw_only=True, frozen=True):
    """Figures of one run. Samples and tokens count training and evaluation alike."""

    run: str
    outcome: str
    """"done", "interrupted", or the error; "unfinished" for a log that breaks off."""
    folder: str
    checkpoint: str
    """Path of the last checkpoint; empty where none was saved."""
    wall_s: float
    steps: int
    accuracy_before: float | None
    """Held-out accuracy of the first evaluation."""
    accuracy_after: float | None
    """Mean of the last two evaluations after the first (of the last one where there is only one)."""
    accuracy_last: float | None
    """Held-out accuracy of the last evaluation, which the live view shows; None where there was only the first."""
    evaluations: int
    reward_first: float | None
    reward_last: float | None
    samples_finished: int
    samples_failed: int
    """Given up with a cause, which the event log has."""
    samples_lost: int
    """Asked for and neither finished nor failed, in batches that ended (in all batches, if the run was done)."""
    samples_unfinished: int
    """Of the batch that was under way when the run was interrupted."""
    samples_unscored: int
    samples_moved: int
    """Continued on another instance from their last token."""
    tokens_generated: int | None
    """Output tokens drawn by all engines of this machine, the killed ones too."""
    tokens_recomputed: int | None
    """Of these, drawn in vain: they never reached the manager and were drawn again, or were no longer wanted."""
    trainer_wait_share: float | None
    """Part of the steps' time in which the trainer waited for rollouts."""
    weight_versions: int
    instances_joined: int
    """That said hello, be it that they still loaded weights when the run ended."""
    instances_lost: int
    """Gone without a goodbye."""
    waited_for_instances_s: float
    manager_losses: int
    """Times that the trainer lost its connection to the manager."""
    manager_restarts: int
    """Times that the manager's process ended by accident and was started again."""
    samples_recovered: int
    """Finished before the trainer or its connection was lost, and not generated again when it was back."""
    warnings: int
    machines_asked: int = 0
    """Of the provisioner."""
    machines_failed: int = 0
    """That never joined, or ended otherwise than they should have."""
    machines_spent: float | None = None
    """Dollars, by the prices that were given; None where nobody added machines."""


def summarise(
    log: Iterable[Event],
    metrics: Metrics,
    *,
    folder: str = "",
    tokens_drawn: int | None = None,
    tokens_accepted: int | None = None,
) -> Summary:
    """Reduces a run's events and its metrics (a line a step), as files have them.

    `tokens_drawn`: by all engines, as each counted; `tokens_accepted`: taken by the manager. Without both the figures
    that need them are None.
    """
    tally = SummaryTally()
    for event in log:
        tally.take(event)
    steps = StepTally()
    for row in tally.standing.of_done(metrics):
        steps.take(row)
    return tally_summary(tally, steps, folder=folder, tokens_drawn=tokens_drawn, tokens_accepted=tokens_accepted)


def tally_summary(
    tally: SummaryTally,
    steps: StepTally | None = None,
    *,
    folder: str = "",
    tokens_drawn: int | None = None,
    tokens_accepted: int | None = None,
) -> Summary:
    """The figures of a tally, for a run whose files can't be read or written: a full disk doesn't take the last words.

    `steps`: of the metrics file; without it, of the steps whose ends the tally heard.
    """
    recomputed = None
    if tokens_drawn is not None and tokens_accepted is not None:
        recomputed = tokens_drawn - tokens_accepted
    steps = tally.steps if steps is None else steps
    done = tally.outcome == "done"
    return Summary(
        run=tally.run,
        outcome=tally.outcome or "unfinished",
        folder=folder,
        checkpoint=tally.checkpoint,
        wall_s=tally.wall_s,
        steps=steps.steps,
        accuracy_before=tally.accuracy_first,
        accuracy_after=_mean(tally.accuracies_last),
        accuracy_last=tally.accuracies_last[-1] if tally.accuracies_last else None,
        evaluations=tally.evaluations,
        reward_first=steps.reward_first,
        reward_last=steps.reward_last,
        samples_finished=tally.samples_finished,
        samples_failed=tally.samples_failed,
        samples_lost=tally.samples_lost + (tally.samples_open if done else 0),
        samples_unfinished=0 if done else tally.samples_open,
        samples_unscored=tally.samples_unscored,
        samples_moved=tally.samples_moved,
        tokens_generated=tokens_drawn,
        tokens_recomputed=recomputed,
        trainer_wait_share=steps.trainer_wait_share,
        weight_versions=tally.weight_versions,
        instances_joined=tally.instances_joined,
        instances_lost=tally.instances_lost,
        waited_for_instances_s=tally.waited_for_instances_s,
        manager_losses=tally.manager_losses,
        manager_restarts=tally.manager_restarts,
        samples_recovered=tally.samples_recovered,
        warnings=tally.warnings,
        machines_asked=tally.machines_asked,
        machines_failed=tally.machines_failed,
        machines_spent=tally.machines_spent,
    )


def write_summary(path: Path, summary: Summary) -> None:
    """`summary.json`, whole or not at all. Raises StorageError."""
    whole = path.with_suffix(".json.part")
    try:
        whole.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        os.replace(whole, path)
    except OSError as error:
        whole.unlink(missing_ok=True)
        raise StorageError(f"the summary can't be written to {path}: {error.strerror}") from error


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """What a person wants to read of it: (name, figure)."""
    rows = [
        ("held-out accuracy", f"{_figure(summary.accuracy_before)} before, {_after(summary)}"),
        ("reward", f"{_figure(summary.reward_first)} at first, {_figure(summary.reward_last)} at last"),
        ("samples", f"{summary.samples_finished:,} finished, {_troubles(summary)}"),
    ]
    if summary.tokens_generated is not None:
        rows.append(("tokens generated", f"{summary.tokens_generated:,}"))
    if summary.tokens_recomputed is not None:
        of_all = summary.tokens_recomputed / max(1, summary.tokens_generated or 0)
        rows.append(("generated twice", f"{summary.tokens_recomputed:,} tokens ({100 * of_all:.2f} %)"))
    if summary.trainer_wait_share is not None:
        rows.append(("trainer waited", f"{100 * summary.trainer_wait_share:.0f} % of its time"))
    rows.append(("instances", _instances(summary)))
    if summary.machines_spent is not None:
        failed = f", {summary.machines_failed:,} failed" if summary.machines_failed else ""
        told = f"{summary.machines_asked:,} asked for{failed}; {summary.machines_spent:,.2f} dollars"
        rows.append(("machines", told))
    if summary.manager_losses:
        again = _times(summary.manager_restarts)
        rows.append(("manager", f"lost {_times(summary.manager_losses)}, started again {again}"))
    rows.append(("took", f"{summary.wall_s:.0f} s for {summary.steps:,} steps, {summary.weight_versions:,} versions"))
    rows.append(("folder", summary.folder))
    if summary.checkpoint:
        rows.append(("last checkpoint", summary.checkpoint))
    return rows


def print_summary(summary: Summary, stream: TextIO | None = None) -> None:
    """The last words: a panel where `rich` and a terminal are there, else plain lines."""
    out = sys.stdout if stream is None else stream
    rows = summary_rows(summary)
    curves = Path(summary.folder) / "curves.png"
    if summary.folder and curves.is_file():
        rows.append(("curves", str(curves)))
    # An error in full is told by whoever ends the program, right below.
    title = f"{summary.run}: {outcome_words(summary.outcome)}"
    if out.isatty():
        try:
            from rich.console import Console

            from penstock.observe.draw import draw_summary
        except ImportError:
            pass  # `rich` is an extra; the figures are the same without it.
        else:
            Console(file=out).print(draw_summary(title, rows, good=summary.outcome == "done"))
            return
    width = max(len(name) for name, _ in rows)
    print("\n".join([title, *(f"  {name:<{width}}  {figure}" for name, figure in rows)]), file=out, flush=True)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _after(summary: Summary) -> str:
    """What "after" means is said with it: the live view shows the last evaluation alone."""
    figure = f"{_figure(summary.accuracy_after)} after"
    if summary.evaluations < 3 or summary.accuracy_last is None:
        return figure
    return f"{figure} (mean of the last two evaluations; the last {summary.accuracy_last:.3f})"


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count:,} times")


def _figure(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _troubles(summary: Summary) -> str:
    parts = [f"{summary.samples_lost:,} lost", f"{summary.samples_failed:,} failed"]
    if summary.samples_unscored:
        parts.append(f"{summary.samples_unscored:,} unscored")
    if summary.samples_unfinished:
        parts.append(f"{summary.samples_unfinished:,} unfinished")
    return ", ".join(parts)


def _instances(summary: Summary) -> str:
    text = f"{summary.instances_joined:,} joined, {summary.instances_lost:,} lost"
    return f"{text}; {summary.samples_moved:,} samples went on elsewhere" if summary.samples_moved else text
