"""How an end is read from its record: an instance that left in order or was lost, a run that is done or failed."""

from __future__ import annotations

from penstock.observe.events import Event, InstanceChanged

RUN_ENDED = "the run ended"
"""The cause of an engine's exit that the run itself asked for, when it was over."""


def is_end(event: Event) -> bool:
    return isinstance(event, InstanceChanged) and event.after == "gone"


def is_loss(event: Event) -> bool:
    """Gone, and not in good order."""
    return isinstance(event, InstanceChanged) and event.after == "gone" and not event.orderly


def outcome_words(outcome: str) -> str:
    """A run's outcome in a word or two; the whole error is told once, elsewhere."""
    return outcome if outcome in ("", "done", "interrupted") else f"ended by {outcome.partition(':')[0]}"
