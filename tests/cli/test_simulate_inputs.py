"""`penstock simulate`: what the command line says reaches trace, tuning, strategy and prices as it was said."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.simulate.baselines import Algorithm1, Algorithm2, Tuning
from penstock.simulate.outcome import Outcome
from penstock.simulate.profiles import Profile, shipped
from penstock.simulate.strategy import Strategy
from penstock.simulate.traces import Trace, read_trace
from penstock.simulate.tune import Tuned
from penstock.simulate.world import simulate

COUNTS = [9, 2, 8, 1, 6, 3]
"""Every 600 s: an hour."""


@dataclass
class Run:
    """A simulation as it was asked for, and its first step."""

    profile: Profile
    trace: Trace
    strategy: Strategy
    how: dict[str, Any]
    outcome: Outcome


@dataclass
class Seen:
    runs: list[Run]
    tuned: list[dict[str, Any]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen([], [])

    def simulated(profile: Profile, trace: Trace, strategy: Strategy, **how: Any) -> Outcome:
        outcome = simulate(profile, trace, strategy, steps=1)
        found.runs.append(Run(profile, trace, strategy, how, outcome))
        return outcome

    def tuned(*_: object, **how: Any) -> Tuned:
        found.tuned.append(how)
        return Tuned(how["machines"], Tuning(eta=9.0, first_s=33.0, max_pending=7, knee=0.6))

    monkeypatch.setattr("penstock.simulate.world.simulate", simulated)
    monkeypatch.setattr("penstock.simulate.tune.tune", tuned)
    return found


@pytest.fixture
def hour(tmp_path: Path) -> Path:
    path = tmp_path / "hour.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": COUNTS}))
    return path


def test_a_seed_is_of_the_machines_that_go_of_those_kept_of_tuning_and_of_lengths(seen: Seen, hour: Path) -> None:
    words = ["--trace", str(hour), "--strategies", "colocated", "--steps", "1", "--sample", "0.5", "--seed", "5"]
    assert cli.main(["simulate", "qwen3-8b", *words]) == 0
    (run,) = seen.runs
    made = {(of, kept): read_trace(hour, of).sampled(0.5, kept).changes for of in (0, 5) for kept in (0, 5)}
    assert len(set(made.values())) == 4
    assert run.trace.changes == made[5, 5]
    assert run.how["seed"] == seen.tuned[0]["seed"] == 5


def test_steps_have_all_of_the_trace_and_hours_their_part(seen: Seen, hour: Path) -> None:
    words = ["simulate", "qwen3-8b", "--trace", str(hour), "--strategies", "colocated", "--start-h", "0.25"]
    assert cli.main([*words, "--hours", "0.5"]) == 0
    assert cli.main([*words, "--hours", "0.5", "--steps", "3"]) == 0
    part, rest = seen.runs
    assert (part.trace.duration_s, rest.trace.duration_s) == (1800.0, 2700.0)
    assert part.trace.counts() == [(0.0, 2), (300.0, 8), (900.0, 1), (1500.0, 6)]
    assert {key: part.how.get(key) for key in ("steps", "duration_s")} == {"steps": None, "duration_s": 1800.0}
    assert {key: rest.how.get(key) for key in ("steps", "duration_s")} == {"steps": 3, "duration_s": None}
    for run, tuned in zip(seen.runs, seen.tuned, strict=True):
        assert run.how.items() <= tuned.items()


def test_hours_beyond_the_trace_are_told_by_what_is_left_of_it(
    seen: Seen, hour: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "qwen3-8b", "--trace", str(hour), "--strategies", "colocated", "--hours", "0.8"]
    assert cli.main(words) == 0
    assert "note" not in capsys.readouterr().err
    assert cli.main([*words, "--start-h", "0.5"]) == 0
    assert "note: the trace ends after 0.5 hours; its last machines then stay" in capsys.readouterr().err


def test_steps_beyond_the_trace_are_told_once_they_were_simulated(
    hour: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "qwen3-8b", "--trace", str(hour), "--strategies", "colocated", "--steps", "1"]
    assert cli.main(words) == 0
    assert "note" not in capsys.readouterr().err
    assert cli.main([*words, "--start-h", "0.99"]) == 0
    said = capsys.readouterr().err
    assert "note: the trace ends after 0.01 hours; its last machines then stay: colocated on qwen3-8b took 0." in said


def test_what_was_tuned_is_what_is_simulated(seen: Seen) -> None:
    assert cli.main(["simulate", "qwen3-8b", "--machines", "3", "--strategies", "rlboost", "--steps", "1"]) == 0
    strategy = seen.runs[0].strategy
    assert isinstance(strategy.window, Algorithm1)
    assert isinstance(strategy.balance, Algorithm2)
    assert (strategy.window.eta, strategy.window.first_s) == (9.0, 33.0)
    assert (strategy.balance.max_pending, strategy.balance.knee) == (7, 0.6)
    assert strategy.size.wanted == 3


def test_machines_on_demand_are_paid_as_such_and_others_as_spot(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--machines", "2", "--strategies", "disaggregated,rlboost", "--steps", "1", "--json"]
    assert cli.main(["simulate", "qwen3-8b", *words]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    prices = shipped("qwen3-8b").prices
    assert prices.on_demand > prices.spot
    for row, run, price in zip(rows, seen.runs, (prices.on_demand, prices.spot), strict=True):
        paid_h = sum(step.paid_h for step in run.outcome.steps)
        assert row["dollars"] == pytest.approx(prices.reserved * run.outcome.wall_s / 3600 + price * paid_h)
