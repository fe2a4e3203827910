"""How an end is read from its record: an instance that left in order or was lost, a run that is done or failed."""

from __future__ import annotations

from penstock.observe.events import Event, InstanceChanged

GOODBYE = "said goodbye"
"""How the manager begins the cause of an end that the agent itself announced."""
RUN_ENDED = "the run ended"
"""The cause of an engine's exit that the run itself asked for, when it was over."""


def is_end(event: Event) -> bool:
    return isinstance(event, InstanceChanged) and event.after == "gone"


def is_loss(event: Event) -> bool:
    """Gone without a goodbye and without having been asked to leave."""
    if not isinstance(event, InstanceChanged) or event.after != "gone":
        return False
    return event.before != "draining" and not event.cause.startswith(GOODBYE)


def is_goodbye(cause: str) -> bool:
    return cause.startswith(GOODBYE)


def goodbye_words(cause: str) -> str:
    """`got SIGTERM` of `said goodbye: got SIGTERM`."""
    return cause.removeprefix(GOODBYE).removeprefix(": ")


def outcome_words(outcome: str) -> str:
    """A run's outcome in a word or two; the whole error is told once, elsewhere."""
    return outcome if outcome in ("", "done", "interrupted") else f"ended by {outcome.partition(':')[0]}"
