"""The picture of a simulated run: who is shown, what of each machine, and in which colours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from simulated import MACHINE, small_profile

from penstock.rollout.balance import ShortestQueue
from penstock.simulate.baselines import STRATEGIES, make_strategy
from penstock.simulate.outcome import Outcome
from penstock.simulate.picture import (
    BLUE,
    GREEN,
    MOST_LANES,
    ORANGE,
    PALE,
    Lane,
    draw_run,
    lanes_of,
    shown_lanes,
    style_of,
)
from penstock.simulate.strategy import FixedSize, Strategy
from penstock.simulate.traces import Change, Trace, static_trace
from penstock.simulate.world import simulate


def coming_and_going() -> tuple[Outcome, Trace]:
    """Machine `a` all the time, `b` for a second of work, `c` from a second on."""
    # It gets the weights after 0.8 s, and boots for 2 s.
    changes = (
        Change(0.0, "a", True),
        Change(0.0, "b", True),
        Change(1.0, "c", True),
        Change(1.8, "b", False),
    )
    trace = Trace(changes, 1e9)
    strategy = Strategy("penstock", ShortestQueue(8), None, FixedSize(3))
    return simulate(small_profile(), trace, strategy, steps=2), trace


def test_a_lane_tells_what_its_machine_did() -> None:
    outcome, _ = coming_and_going()
    lanes = {lane.name: lane for lane in lanes_of(outcome, outcome.steps[0])}
    assert list(lanes) == ["reserved0", "reserved1", "a", "b", "c"]
    pull_s = 0.8
    assert lanes["a"].boots == lanes["a"].preempted == []
    assert lanes["a"].pulls == [pytest.approx((0.0, pull_s))]
    assert lanes["a"].works[0][0] == pytest.approx(pull_s)
    assert lanes["c"].boots == [pytest.approx((1.0, 1.0 + MACHINE.boot_s))]
    assert lanes["c"].pulls == [pytest.approx((3.0, 3.0 + pull_s))]
    assert lanes["b"].preempted == [pytest.approx(1.8)]
    assert lanes["b"].works, "who was taken away within a step is shown with what it did"
    assert max(end for _, end in lanes["b"].works) == pytest.approx(1.8)
    second = {lane.name: lane for lane in lanes_of(outcome, outcome.steps[1])}
    assert "b" not in second
    assert second["c"].boots == []
    assert second["c"].pulls[0][0] == 0.0


def test_a_machine_that_is_taken_away_and_comes_again_keeps_what_it_did_before() -> None:
    changes = (Change(0.0, "a", True), Change(0.0, "b", True), Change(1.8, "b", False), Change(2.0, "b", True))
    strategy = Strategy("penstock", ShortestQueue(8), None, FixedSize(2))
    outcome = simulate(small_profile(), Trace(changes, 1e9), strategy, steps=1)
    (lane,) = (lane for lane in lanes_of(outcome, outcome.steps[0]) if lane.name == "b")
    assert lane.works[0][0] < 1.8
    assert lane.boots == [pytest.approx((2.0, 4.0))]
    assert lane.preempted == [pytest.approx(1.8)]


def test_idle_lanes_are_left_out_before_working_ones() -> None:
    reserved = [Lane(f"reserved{k}", False) for k in range(4)]
    booting = [Lane(f"node{k}", True, boots=[(0.0, 1.0)]) for k in range(20)]
    working = [Lane(f"node{k}", True, works=[(0.0, 1.0)]) for k in range(20, 40)]
    shown, left_out = shown_lanes([*reserved, *booting, *working])
    assert len(shown) == MOST_LANES - 1
    assert set(map(id, working)) < set(map(id, shown))
    assert not any(lane.idleness == 2 for lane in shown)
    assert len(left_out) == 44 - len(shown)
    shown, left_out = shown_lanes([*reserved, *working])
    assert (len(shown), left_out) == (24, [])


def test_the_rest_of_many_lanes_is_counted_on_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    profile = small_profile(prompts=48)
    trace = static_trace(40, 1e9)
    outcome = simulate(profile, trace, Strategy("x", ShortestQueue(8), None, FixedSize(40)), steps=1)
    working = sum(lane.idleness == 0 for lane in lanes_of(outcome, outcome.steps[0]))
    assert working > MOST_LANES
    draw_run(tmp_path / "run.svg", [outcome], profile, trace)
    text = words_of(tmp_path / "run.svg")
    assert f"+{42 - (MOST_LANES - 1)} more" in text
    assert f"{working - (MOST_LANES - 1)} of them generated" in text


def test_the_legend_says_what_bars_and_lines_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outcome, trace = coming_and_going()
    draw_run(tmp_path / "run.svg", [outcome], small_profile(), trace, step=0)
    text = words_of(tmp_path / "run.svg")
    for words in (
        "boots",
        "pulls weights",
        "remote instance generates",
        "trains",
        "preempted",
        "available",
        "held by penstock",
        "asked for by penstock",
    ):
        assert words in text, words


def test_a_strategy_looks_the_same_whatever_it_is_compared_with_and_like_no_other() -> None:
    own = ["mine:A", "mine:B"]
    names = [*STRATEGIES, *own]
    assert len({style_of(name, names) for name in names}) == len(names)
    for name in STRATEGIES:
        assert style_of(name, [name]) == style_of(name, names)
        assert style_of(name, names)[0] not in (BLUE, GREEN, ORANGE, PALE)


def test_lines_stay_below_the_top_of_their_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))[1])
    profile = small_profile()
    trace = static_trace(2, 1e9)
    outcome = simulate(profile, trace, make_strategy("rlboost", profile, machines=2), steps=2)
    draw_run(tmp_path / "run.png", [outcome], profile, trace)
    for axes in drawn[0].axes[1:]:
        top = max(max(line.get_ydata()) for line in axes.lines)
        assert axes.get_ylim()[1] > 1.05 * top


def words_of(path: Path) -> str:
    """An SVG with the words that it draws as shapes."""
    return re.sub(r"<!--\s*(.*?)\s*-->", r"\1", path.read_text())
