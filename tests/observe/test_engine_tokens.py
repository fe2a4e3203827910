"""What engines drew and what managers took of it: known over a manager's death where a journal says so."""

from __future__ import annotations

import pytest

from penstock.observe import events
from penstock.observe.engine_tokens import tokens_of_engines

ENGINES = ("engine-0", "engine-1")
STARTED = [events.EngineStarted(ts=0.0, name=name, pid=1, cause="start") for name in ENGINES]
RESTARTED = events.ManagerChanged(ts=2.0, state="restarted", cause="killed by SIGKILL")
WARNED = events.Warned(ts=1.0, where="journal", message="running without a journal: No space left on device")


def gone(name: str, tokens: int) -> events.InstanceChanged:
    return events.InstanceChanged(
        ts=1.0, instance=name, name=name, before="ready", after="gone", cause="cut", tokens_accepted=tokens
    )


def exited(name: str, tokens: int) -> events.EngineExited:
    return events.EngineExited(ts=9.0, name=name, pid=1, exit_code=0, cause="the run ended", tokens_drawn=tokens)


def recovered(**accepted: int) -> events.ManagerRecovered:
    by_name = {name.replace("_", "-"): tokens for name, tokens in accepted.items()}
    return events.ManagerRecovered(ts=3.0, batches=0, samples=0, finished=0, tokens=0, cut_bytes=0, accepted=by_name)


EXITS = [exited("engine-0", 150), exited("engine-1", 70)]


@pytest.mark.parametrize(
    ("log", "taken"),
    [
        # The second manager says what the first had, whether that one could say so before it died or not.
        ([RESTARTED, recovered(engine_0=100, engine_1=40, elsewhere=7), gone("engine-0", 30)], 170),
        ([gone("engine-0", 60), RESTARTED, recovered(engine_0=100, engine_1=40), gone("engine-0", 30)], 170),
        # No journal, or one with gaps: nobody knows.
        ([RESTARTED, gone("engine-0", 30), gone("engine-1", 30)], None),
        ([WARNED, RESTARTED, recovered(engine_0=100, engine_1=40), gone("engine-0", 30)], None),
        # What has no journal has not died.
        ([WARNED, gone("engine-0", 140), gone("engine-1", 60)], 200),
    ],
)
def test_what_managers_took_is_known_where_a_journal_says_so(log: list[events.Event], taken: int | None) -> None:
    drawn, accepted = tokens_of_engines([*STARTED, *log, *EXITS])
    assert (drawn, accepted) == (None if taken is None else 220, taken)


def test_what_engines_drew_in_a_part_that_was_killed_is_not_known() -> None:
    """Their trainer was killed and heard of no end: the figures of the next part alone would be less than was taken."""
    again = [events.EngineStarted(ts=5.0, name=name, pid=2, cause="start") for name in ENGINES]
    ends = [events.EngineExited(ts=9.0, name=name, pid=2, exit_code=0, cause="", tokens_drawn=10) for name in ENGINES]
    log = [*STARTED, *again, recovered(engine_0=100), gone("engine-0", 10), gone("engine-1", 10), *ends]
    assert tokens_of_engines(log) == (None, None)


@pytest.mark.parametrize(("heard", "taken"), [(ENGINES, 160), (ENGINES[:1], None)])
def test_engines_of_a_resumed_part_are_not_taken_for_those_of_the_same_name_before(
    heard: tuple[str, ...], taken: int | None
) -> None:
    begins = events.RunStarted(ts=0.0, run="r", version="0", config={})
    again = [events.EngineStarted(ts=5.0, name=name, pid=2, cause="start") for name in ENGINES]
    ends = [events.EngineExited(ts=9.0, name=name, pid=2, exit_code=0, cause="", tokens_drawn=10) for name in ENGINES]
    first = [begins, *STARTED, *EXITS]
    second = [begins, *again, recovered(engine_0=100, engine_1=40), *(gone(name, 10) for name in heard), *ends]
    assert tokens_of_engines([*first, *second]) == (240, taken)
