"""The rehearsed accident: it kills once, in mid-generation, and starts another engine once, later."""

from __future__ import annotations

import pytest

from penstock.cli.drill import PATIENCE_STEPS, Action, Drill, Order
from penstock.config.run import DrillConfig


def test_nothing_happens_without_a_drill() -> None:
    drill = Drill(DrillConfig(), steps=10)
    assert drill.over
    assert all(drill.decide(step, {"engine-0": 5}) is None for step in range(10))


def test_the_busiest_engine_is_killed_half_way_and_another_started_later() -> None:
    drill = Drill(DrillConfig(kill_at=0.5, restart_at=0.8), steps=10)
    running = {"engine-0": 3, "engine-1": 7}
    orders = [(step, drill.decide(step, running)) for step in range(10)]
    assert [(step, order) for step, order in orders if order] == [
        (5, Order(Action.KILL, "engine-1")),
        (8, Order(Action.START)),
    ]
    assert drill.over


def test_an_idle_engine_is_not_worth_killing() -> None:
    drill = Drill(DrillConfig(kill_at=0.5, restart_at=0.6), steps=10)
    assert drill.decide(5, {"engine-0": 0}) is None
    assert drill.decide(5, {}) is None
    assert drill.decide(6, {"engine-0": 0}) is None, "no start before the kill"
    assert drill.decide(7, {"engine-0": 1}) == Order(Action.KILL, "engine-0")
    assert drill.decide(7, {}) == Order(Action.START)


def test_where_no_engine_is_ever_seen_at_work_an_idle_one_is_killed_in_the_end() -> None:
    drill = Drill(DrillConfig(kill_at=0.5), steps=20)
    orders = [drill.decide(step, {"engine-0": 0, "engine-1": 0}) for step in range(20)]
    assert [step for step, order in enumerate(orders) if order] == [10 + PATIENCE_STEPS]
    assert drill.over


def test_without_a_kill_there_is_nothing_to_replace() -> None:
    drill = Drill(DrillConfig(kill_at=None, restart_at=0.5), steps=10)
    assert drill.over
    assert not any(drill.due(step) or drill.decide(step, {"engine-0": 1}) for step in range(10))


def test_a_start_before_the_kill_is_refused() -> None:
    with pytest.raises(ValueError, match="after"):
        DrillConfig(kill_at=0.5, restart_at=0.4)
