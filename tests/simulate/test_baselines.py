"""Baselines as their paper has them, their constants tuned, and ablations that each change what happens."""

from __future__ import annotations

import pytest
from simulated import small_profile

from penstock.rollout import plan
from penstock.rollout.balance import InstanceLoad, Move, PlacedSample, Queue, Report
from penstock.rollout.balanced import Balanced
from penstock.rollout.fleet_size import FleetSize
from penstock.rollout.offload import StepTimes, WindowView
from penstock.simulate.baselines import (
    ABLATIONS,
    Algorithm1,
    Algorithm2,
    PaperSize,
    StaticSplit,
    Tuning,
    make_strategy,
    tuned,
)
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


def test_a_number_never_seen_begins_with_the_window_of_the_nearest_one() -> None:
    window = Algorithm1(first_s=100.0, windows={4: 110.0, 8: 50.0})
    generates = {
        fleet: [window.review(WindowView(at_s, fleet, 0.0)).generate for at_s in (0.0, 49.0, 51.0, 109.0, 111.0)]
        for fleet in (5, 7)
    }
    assert generates == {5: [True, True, True, True, False], 7: [True, True, False, False, False]}


def test_a_window_is_of_the_number_that_the_step_began_with() -> None:
    window = Algorithm1(eta=2.0, windows={4: 110.0, 2: 50.0})
    window.review(WindowView(0.0, 4, 0.0))
    assert window.review(WindowView(100.0, 2, 0.5)).generate
    window.ended(StepTimes(2.6, 100.0, 20.0, 50.0, 10.0, 30.0))
    assert window.windows == {4: 100.0, 2: 50.0}


def test_prompts_are_dealt_in_equal_blocks_whose_samples_stay_together() -> None:
    loads = [InstanceLoad(name, 0, 4) for name in "ab"]
    assert StaticSplit(4).assign(Queue(fresh=8, samples_per_prompt=2), loads) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert StaticSplit(4).assign(Queue(fresh=4, first_fresh=4, samples_per_prompt=2), loads) == [1, 1, 1, 1]


def placed(running: int, pending: int) -> list[PlacedSample]:
    return [PlacedSample(k, 10, 20, k < running) for k in range(running + pending)]


def test_pending_ones_of_who_has_most_move_to_those_without_and_leave_it_its_share() -> None:
    loads = [
        InstanceLoad("few", 9, 8, pending=1),
        InstanceLoad("most", 16, 8, pending=8),
        InstanceLoad("free", 4, 8),
        InstanceLoad("empty", 0, 8),
        InstanceLoad("full", 8, 8),
    ]
    moves = Algorithm2(16).moves(3, loads, lambda name: placed(8, 8) if name == "most" else [])
    # Eight among three: two each, and what is left stays.
    assert moves == [Move("most", 8 + k, to) for k, to in enumerate(["free", "empty", "free", "empty"])]


def told(policy: Algorithm2, rates: dict[int, float]) -> None:
    for running, rate in rates.items():
        policy.report(Report("busy", 2.0, running, 100.0, round(2 * rate), 0))


@pytest.mark.parametrize(("samples", "moved"), [(40, 20), (20, 4), (17, 1), (16, 0)])
def test_running_ones_move_to_who_is_idle_beyond_the_batch_at_which_throughput_stops_growing(
    samples: int, moved: int
) -> None:
    """Ten tokens a second for each of the first eight, nine for the next eight, and less than one from there on."""
    policy = Algorithm2(16)
    loads = [InstanceLoad("busy", samples, 64), InstanceLoad("idle", 0, 64), InstanceLoad("other", 3, 64)]

    def moves(waiting: int = 0) -> list[Move]:
        return policy.moves(waiting, loads, lambda name: placed(samples, 0) if name == "busy" else [])

    told(policy, {8: 80.0})
    assert moves() == []
    told(policy, {16: 152.0, 24: 158.0})
    assert moves() == [Move("busy", k, "idle") for k in range(samples - moved, samples)]
    assert moves(waiting=1) == []


def test_rates_follow_what_is_reported_slowly() -> None:
    policy = Algorithm2(16)
    # At 24 it seemed no faster at first; then it is, by half of what the first ones did.
    told(policy, {8: 80.0, 16: 152.0, 24: 152.0})
    assert policy._knee_batch() == 16
    for _ in range(9):
        told(policy, {24: 192.0})
    assert policy._knee_batch() == 24
    assert policy._rates[24] == pytest.approx(192.0 - 40.0 * 0.7**9)


def test_the_paper_s_number_is_what_keeps_its_trainer_busy() -> None:
    size = PaperSize(reserved=2, ceiling=5)
    assert size.wanted == 4
    assert size.ended(StepTimes(3.0, 100.0, 20.0, 60.0, 10.0, 0.0, remote_busy_s=90.0)) == 3
    assert size.cause == "N_prem = 3 of at most 5"
    assert size.ended(StepTimes(3.0, 100.0, 20.0, 60.0, 10.0, 0.0, remote_busy_s=600.0)) == 5
    assert size.ended(StepTimes(3.0, 100.0, 0.0, 60.0, 10.0, 0.0)) == 1
    assert PaperSize(reserved=2, ceiling=3).wanted == 3
    nothing = PaperSize(reserved=2, ceiling=0)
    assert nothing.ended(StepTimes(0.0, 100.0, 20.0, 60.0, 10.0, 0.0)) == 0


def test_strategies_are_put_together_as_they_are_told_on_their_page() -> None:
    profile = small_profile()
    alone, fed = (make_strategy(name, profile) for name in ("colocated", "disaggregated"))
    assert (alone.streaming, alone.size.wanted, alone.differences) == (False, 0, False)
    assert (fed.window, fed.spot, fed.streaming, fed.size.wanted) == (None, False, True, 2)
    assert make_strategy("disaggregated", profile, ceiling=1).size.wanted == 1
    made = {name: make_strategy(name, profile, ceiling=7) for name in ("penstock", *ABLATIONS)}
    assert all(one.differences and one.spot and one.streaming for one in made.values())
    size = made["penstock"].size
    assert isinstance(size, FleetSize)
    config = size.config
    assert (config.reserved_price, config.machine_price, config.start_s) == (40.0, 3.0, 2.0)
    assert (config.floor, config.ceiling, size.reserved_engines) == (0, 7, 2)
    own = {
        name: (type(one.window).__name__, type(one.balance).__name__, type(one.size).__name__)
        for name, one in made.items()
    }
    assert own == {
        "penstock": ("Offload", "Balanced", "FleetSize"),
        "penstock-no-window": ("NoneType", "Balanced", "FleetSize"),
        "penstock-paper-window": ("Algorithm1", "Balanced", "FleetSize"),
        "penstock-no-width": ("Offload", "_AlwaysWide", "FleetSize"),
        "penstock-no-moves": ("Offload", "Balanced", "FleetSize"),
        "penstock-no-look-ahead": ("Offload", "Balanced", "FleetSize"),
        "penstock-paper-size": ("Offload", "Balanced", "PaperSize"),
    }
    still = [name for name, one in made.items() if isinstance(one.balance, Balanced) and not one.balance.max_moves]
    assert still == ["penstock-no-moves"]
    assert [name for name, one in made.items() if not one.looks_ahead] == ["penstock-no-look-ahead"]
    others = ("colocated", "disaggregated", "rlboost", "rlboost-no-seeding", "rlboost-forgetful")
    assert not any(make_strategy(name, profile).looks_ahead for name in others)


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
    training = small_profile().training.model_copy(update={"ahead_share": 0.3})
    profile = small_profile(prompts=48, training=training)
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
