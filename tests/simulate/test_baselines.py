"""Baselines as their paper has them, their constants tuned, and ablations that each change what happens."""

from __future__ import annotations

import pytest
from simulated import small_profile

from penstock.rollout import plan
from penstock.rollout.offload import StepTimes, WindowView
from penstock.simulate.baselines import ABLATIONS, Algorithm1, Tuning, make_strategy, tuned
from penstock.simulate.traces import from_counts, static_trace
from penstock.simulate.world import simulate


def ended(window: Algorithm1, fleet: int, trainer_s: float, remote_s: float) -> None:
    window.review(WindowView(0.0, fleet, 0.0))
    window.ended(StepTimes(fleet, 100.0, 20.0, 50.0, trainer_s, remote_s))


def test_the_window_follows_both_waits_and_is_remembered_by_number_of_instances() -> None:
    window = Algorithm1(eta=2.0, first_s=100.0)
    ended(window, 4, 30.0, 10.0)
    ended(window, 2, 0.0, 40.0)
    assert window.windows == {4: 110.0, 2: 90.0}


def test_without_memory_there_is_one_window_for_all() -> None:
    window = Algorithm1(eta=2.0, first_s=100.0, remembers=False)
    ended(window, 4, 30.0, 10.0)
    ended(window, 2, 0.0, 40.0)
    assert window.windows == {0: 90.0}
    assert window.review(WindowView(95.0, 7, 0.0)).generate is False


def test_tuning_takes_the_best_of_each_constant_in_turn() -> None:
    asked: list[Tuning] = []

    def throughput(tuning: Tuning) -> float:
        asked.append(tuning)
        return -abs(tuning.eta - 6) - abs(tuning.first_s - 100) / 100 - tuning.knee

    best = tuned(throughput)
    assert (best.eta, best.first_s, best.knee, best.max_pending) == (6.0, 100.0, 0.1, 16)
    assert asked[0] == Tuning()


def test_each_ablation_changes_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # The same for all, and quicker.
    monkeypatch.setattr(plan, "TRIES", 3)
    monkeypatch.setattr(plan, "CHANCES", 1)
    profile = small_profile(prompts=48)
    trace = from_counts([(0.0, 3), (25.0, 2), (60.0, 4)], 1e6)

    def walls(name: str) -> tuple[float, ...]:
        strategy = make_strategy(name, profile, ceiling=4)
        return tuple(step.times.step_s for step in simulate(profile, trace, strategy, steps=5).steps)

    whole = walls("penstock")
    changed = [name for name in ABLATIONS if walls(name) != whole]
    assert set(changed) >= set(ABLATIONS) - {"penstock-no-moves", "penstock-paper-size"}


def test_without_seeding_the_reserved_machines_only_train() -> None:
    profile = small_profile()
    strategy = make_strategy("rlboost-no-seeding", profile, machines=2)
    outcome = simulate(profile, static_trace(2, 1e9), strategy, steps=2)
    assert all(step.times.window_s == 0 for step in outcome.steps)
