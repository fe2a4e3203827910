"""The picture of a simulated run: who is shown, what of each machine, and in which colours."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from simulated import MACHINE, small_profile

from penstock.errors import StorageError
from penstock.rollout.balance import ShortestQueue
from penstock.rollout.offload import StepTimes
from penstock.simulate.baselines import STRATEGIES, make_strategy
from penstock.simulate.outcome import Asked, Outcome, StepOutcome
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
from penstock.simulate.report import in_words
from penstock.simulate.strategy import FixedSize, Strategy
from penstock.simulate.traces import Change, Trace, from_counts, static_trace
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
    draw_run(tmp_path / "run.svg", [outcome], trace)
    text = words_of(tmp_path / "run.svg")
    assert f"+{42 - (MOST_LANES - 1)} more" in text
    assert f"{working - (MOST_LANES - 1)} of them generated" in text


def test_the_legend_says_what_bars_and_lines_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outcome, trace = coming_and_going()
    draw_run(tmp_path / "run.svg", [outcome], trace, step=0)
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


Drawn = Callable[[Sequence[Outcome], Trace, int | None], list[Any]]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Draws a picture and gives its panels."""
    figure = pytest.importorskip("matplotlib.figure")
    figures: list[Any] = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])

    def panels(outcomes: Sequence[Outcome], trace: Trace, step: int | None = None) -> list[Any]:
        draw_run(tmp_path / "run.png", outcomes, trace, step)
        return list(figures[-1].axes)

    return panels


def test_lines_stay_below_the_top_of_their_panel(drawn: Drawn) -> None:
    profile = small_profile()
    trace = static_trace(2, 1e9)
    outcome = simulate(profile, trace, make_strategy("rlboost", profile, machines=2), steps=2)
    for axes in drawn([outcome], trace, None)[1:]:
        top = max(max(line.get_ydata()) for line in axes.lines)
        assert axes.get_ylim()[1] > 1.05 * top


def bars(axes: Any, label: str) -> dict[str, list[tuple[float, float]]]:
    """Bars of one kind by the name of their lane: (from, to)."""
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    found: dict[str, list[tuple[float, float]]] = {}
    for part in (part for part in axes.collections if part.get_label() == label):
        for path in part.get_paths():
            (x0, y0), (x1, y1) = path.get_extents().min, path.get_extents().max
            found.setdefault(names[round((y0 + y1) / 2)], []).append((x0, x1))
    return found


def test_a_lane_s_bars_are_what_its_machine_did_in_seconds_of_the_step(drawn: Drawn) -> None:
    colors = pytest.importorskip("matplotlib.colors")
    profile, trace = small_profile(), static_trace(2, 1e9)
    outcome = simulate(profile, trace, make_strategy("rlboost", profile, machines=2), steps=3)
    step = outcome.steps[1]
    axes = drawn([outcome], trace, 1)[0]
    kinds = {"remote instance generates": (True, BLUE), "reserved engine generates": (False, GREEN)}
    for label, (remote, colour) in kinds.items():
        lanes = [lane for lane in lanes_of(outcome, step) if lane.remote is remote]
        assert len(lanes) == 2
        assert bars(axes, label) == {lane.name: [pytest.approx(part) for part in lane.works] for lane in lanes}
        for part in (part for part in axes.collections if part.get_label() == label):
            assert part.get_facecolor()[0] == pytest.approx(colors.to_rgba(colour))
    spans = [pytest.approx((a - step.began_s, b - step.began_s)) for a, b in step.trainer_spans]
    assert bars(axes, "trains") == {"trainer": spans}
    (bound,) = (line for line in axes.lines if line.get_linestyle() == "--")
    assert list(bound.get_xdata()) == [step.bound_s] * 2
    assert axes.get_xlim() == (0, step.times.step_s)
    times = step.times
    title = axes.get_title("left")
    assert f"step 1: {in_words(times.step_s)} s; reserved engines generate {in_words(times.window_s)} s" in title
    assert title.endswith(f"the trainer waits {in_words(times.trainer_wait_s)} s")
    assert len({f"{value:.0f}" for value in (times.step_s, times.window_s, times.train_s)}) == 3


def test_lines_over_the_trace_are_by_step_in_minutes_at_each_strategy_s_cost(drawn: Drawn) -> None:
    def outcome(name: str, fleet: float, dollars: float) -> Outcome:
        walls, made = (120.0, 240.0), Outcome(name, "small", end_s=420.0)
        for number, wall_s in enumerate(walls):
            times = StepTimes(fleet + number, wall_s, 0.0, wall_s / 2, 0.0, 0.0)
            began_s = sum(walls[:number])
            spent = dollars * (1 + number)
            made.steps.append(StepOutcome(number, began_s, times, 2_400_000, 0.5, spent, 0, lambda: 1.0))
            made.stays.append(())
        made.asked = [Asked(4, "why"), Asked(6, "why"), Asked(9, "why")]
        return made

    trace = from_counts([(0.0, 5), (60.0, 2), (1e4, 9)], 2e4)
    _, fleet, speed, money = drawn([outcome("disaggregated", 1.0, 6.0), outcome("rlboost", 2.0, 2.7)], trace, None)
    lines = [{line.get_label(): line for line in axes.lines} for axes in (fleet, speed, money)]
    for line in (line for panel in lines for line in panel.values()):
        assert list(line.get_xdata()) == [0.0, 2.0, 6.0]
    shown = [{label: list(line.get_ydata()) for label, line in panel.items()} for panel in lines]
    assert shown == [
        {
            "held by disaggregated": [1.0, 2.0, 2.0],
            "held by rlboost": [2.0, 3.0, 3.0],
            "asked for by rlboost": [4.0, 6.0, 6.0],
        },
        {name: [20.0, 10.0, 10.0] for name in ("disaggregated", "rlboost")},
        {
            "disaggregated": pytest.approx([2.5, 5.0, 5.0]),
            "rlboost": pytest.approx([1.125, 2.25, 2.25]),
        },
    ]
    (available,) = fleet.collections
    corners = {(round(float(x), 6), float(y)) for path in available.get_paths() for x, y in path.vertices}
    assert {(0.0, 5.0), (1.0, 5.0), (1.0, 2.0), (7.0, 2.0)} <= corners
    assert max(x for x, _ in corners) == 7.0


@pytest.mark.parametrize(
    ("step_s", "unit", "end"), [(1.5, "seconds", 3.0), (170.0, "minutes", 340 / 60), (9000.0, "hours", 5.0)]
)
def test_the_axis_over_the_trace_has_a_unit_that_suits_its_length(
    step_s: float, unit: str, end: float, drawn: Drawn
) -> None:
    made = Outcome("rlboost", "small", end_s=2 * step_s, asked=[Asked(1, "why")] * 3)
    for number in range(2):
        times = StepTimes(1.0, step_s, 0.0, step_s / 2, 0.0, 0.0)
        made.steps.append(StepOutcome(number, number * step_s, times, 1000, 0.5, 6.0, 0, lambda: 1.0))
        made.stays.append(())
    lanes, fleet, _, money = drawn([made], static_trace(1, 1e9), None)
    assert money.get_xlabel() == unit
    for axes in (fleet, money):
        assert axes.lines[0].get_xdata()[-1] == pytest.approx(end)
    assert max(x for path in fleet.collections[0].get_paths() for x, _ in path.vertices) == pytest.approx(end)
    assert f"step 1: {in_words(step_s)} s;" in lanes.get_title("left")


def test_a_picture_that_can_t_be_written_to_its_end_leaves_the_older_one_and_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    outcome, trace = coming_and_going()

    def full(_: object, path: Path, **how: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(figure.Figure, "savefig", full)
    there = tmp_path / "there.png"
    there.write_bytes(b"an older picture")
    for path in (there, tmp_path / "fresh.png"):
        with pytest.raises(StorageError, match=rf"{path.name} can't be written: No space left on device"):
            draw_run(path, [outcome], trace)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"there.png": b"an older picture"}


def words_of(path: Path) -> str:
    """An SVG with the words that it draws as shapes."""
    return re.sub(r"<!--\s*(.*?)\s*-->", r"\1", path.read_text())
