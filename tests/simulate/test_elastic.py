"""`penstock bench elastic`: what its rows are made of, on a fleet of a few minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.bench import elastic
from penstock.simulate.profiles import Profile, shipped
from penstock.simulate.traces import Change, Trace

WINDOW = Trace(
    (*(Change(0.0, f"n{k}", True) for k in range(4)), Change(250.0, "n0", False), Change(500.0, "n4", True)), 700.0
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Profile:
    """A sixteenth of the prompts, so that a step takes seconds."""
    monkeypatch.setattr(elastic, "WINDOW_S", WINDOW.duration_s)
    return shipped("qwen3-8b").model_copy(update={"prompts": 8})


def test_a_ceiling_that_bounds_nobody_is_what_is_there_at_once() -> None:
    assert elastic._most([WINDOW, WINDOW.window(300.0, 100.0)]) == 4


def test_each_strategy_chooses_its_number_where_nothing_bounds_it(small: Profile) -> None:
    bounded = {row.what: row for row in elastic._dense(small, [WINDOW], True, 1, "one")}
    free = {row.what: row for row in elastic._dense(small, [WINDOW], True, 4, "any")}
    assert len(bounded) == len(free) == 8
    asked = [
        float(row.note.removesuffix(" machines asked for"))
        for row in (
            bounded["one: Penstock / colocated, tokens per dollar"],
            free["any: Penstock / colocated, tokens per dollar"],
        )
    ]
    assert 0 <= asked[0] <= 1 < asked[1] <= 4
    for rows, name in ((bounded, "one"), (free, "any")):
        # What both sides are compared by: more machines are no slower, and nobody passes the bound.
        assert 0 < (rows[f"{name}: Penstock / the clairvoyant bound, throughput"].value or 0) <= 1
    one, any_number = bounded["one: Penstock / colocated, throughput"], free["any: Penstock / colocated, throughput"]
    assert (any_number.value or 0) > (one.value or 0) > 1


def test_all_machines_are_held_by_both(small: Profile) -> None:
    row = elastic._all_there(small, [WINDOW], 4)
    assert row.value is not None
    assert row.value > 0.9
    assert row.note.count(" x ") == 2
    assert "RLBoost with its code's constants" in row.note


def test_parts_by_name_and_what_a_quick_run_leaves_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PENSTOCK_SPOT_TRACES", raising=False)
    assert elastic.run_part("numbers-32b", quick=True) == []
    (row,) = elastic.run_part("numbers-8b", quick=True)
    assert row.value is None
    assert "PENSTOCK_SPOT_TRACES" in row.note
    assert set(elastic.NUMBERS) < set(elastic.PARTS)
