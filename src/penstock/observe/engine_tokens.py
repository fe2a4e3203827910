"""How many tokens a run's engines drew and how many were taken, by its events."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.observe import events

__all__ = ["tokens_of_engines"]


def tokens_of_engines(log: Iterable[events.Event]) -> tuple[int | None, int | None]:
    """Output tokens that this machine's engines drew, and how many of them the manager took; None if unknown."""
    drawn: list[int | None] = []
    accepted = 0
    local: set[str] = set()
    exited: set[str] = set()
    gone: set[str] = set()
    running: set[tuple[str, int]] = set()
    """Left over of a run that was killed and went on: what its engines had drawn, they told nobody."""
    journaled = whole = True
    """What managers that died had taken is known."""
    told = True
    """So is what earlier parts of the run had."""
    resumed = False
    for event in log:
        if isinstance(event, events.RunStarted):
            # Engines have the names of those of the part before.
            told, resumed = told and exited <= gone, bool(local)
            exited.clear()
            gone.clear()
        elif isinstance(event, events.EngineStarted):
            local.add(event.name)
            running.add((event.name, event.pid))
        elif isinstance(event, events.EngineExited):
            running.discard((event.name, event.pid))
            drawn.append(event.tokens_drawn)
            if event.tokens_drawn:
                exited.add(event.name)
        elif isinstance(event, events.ManagerChanged) and event.state == "restarted":
            # What it had of each engine when it died, its journal says, or nobody.
            journaled = resumed = False
        elif isinstance(event, events.Warned) and event.where == "journal":
            # Tokens were taken that it has not, or had to be left out.
            whole = False
        elif isinstance(event, events.ManagerRecovered):
            journaled = whole
            accepted = sum(tokens for name, tokens in event.accepted.items() if name in local)
            if resumed:
                told = whole
            else:
                gone |= event.accepted.keys()
        elif isinstance(event, events.InstanceChanged) and event.after == "gone" and event.name in local:
            accepted += event.tokens_accepted
            gone.add(event.name)
    known = [count for count in drawn if count is not None]
    if not known or len(known) < len(drawn) or running or not journaled:
        return None, None
    # A run that breaks off may not hear what the manager had of its engines.
    return sum(known), accepted if told and exited <= gone else None
