"""Baselines are tuned to the profile before they are compared: a number of machines, and a first window."""

from __future__ import annotations

import pytest
from simulated import MACHINE, small_profile

from penstock.simulate.baselines import Algorithm1, Tuning, make_strategy
from penstock.simulate.outcome import Outcome
from penstock.simulate.profiles import Lengths, Prices, Profile
from penstock.simulate.strategy import Strategy
from penstock.simulate.traces import Trace, static_trace
from penstock.simulate.tune import best_number, tune
from penstock.simulate.world import simulate

EVER = 1e9


@pytest.mark.parametrize(
    ("peak", "most", "found"), [(1, 32, 1), (3, 32, 3), (6, 32, 6), (8, 32, 8), (32, 20, 20), (9, 0, 0)]
)
def test_the_number_with_the_most_tokens_per_dollar_is_found(peak: int, most: int, found: int) -> None:
    asked: list[int] = []

    def worth(count: int) -> tuple[float, float]:
        asked.append(count)
        return float(count), 1.0 / (1 + abs(count - peak))

    assert best_number(worth, most) == found
    assert len(asked) == len(set(asked)) <= 8
    assert max(asked) <= most


def test_without_prices_the_fewest_that_are_about_as_fast_as_the_fastest_are_taken() -> None:
    assert best_number(lambda count: (min(count, 5.0), 0.0), 32) == 6
    # Four are within four hundredths of the fastest, and three are not.
    speeds = {1: 1.0, 2: 1.8, 3: 1.9, 4: 1.97, 6: 1.98, 8: 2.0, 12: 2.0, 16: 2.0}
    assert best_number(lambda count: (speeds[count], 0.0), 16) == 4


def test_disaggregated_has_a_number_of_its_own_for_each_profile_and_keeps_the_ceiling() -> None:
    """Where machines on demand cost next to nothing more pay; one that is given stays."""
    trace = static_trace(0, EVER)
    dear = small_profile(prices=Prices(reserved=40.0, spot=3.0, on_demand=40.0))
    cheap = small_profile(prices=Prices(reserved=40.0, spot=3.0, on_demand=0.01))
    few, many = (tune("disaggregated", profile, trace).machines or 0 for profile in (dear, cheap))
    assert 0 < few < many
    assert tune("disaggregated", cheap, trace, ceiling=2).machines == 2
    given = tune("disaggregated", cheap, trace, machines=5, ceiling=2)
    assert (given.machines, given.words) == (5, "")
    assert tune("disaggregated", dear, trace).words == f"{few} on demand"


def short_steps() -> Profile:
    """Steps of seconds, whose remote machines could do all the work."""
    return small_profile(
        spot=MACHINE.model_copy(update={"boot_s": 0.0}),
        lengths=Lengths(prompt_tokens=32, median_tokens=300, spread=0.3, max_tokens=900),
    )


@pytest.mark.parametrize("name", ["rlboost", "rlboost-forgetful"])
def test_rlboost_s_first_window_fits_the_profile_and_makes_it_faster(name: str) -> None:
    profile, trace = short_steps(), static_trace(8, EVER)

    def speed(tuning: Tuning) -> float:
        strategy = make_strategy(name, profile, machines=8, tuning=tuning)
        return simulate(profile, trace, strategy, steps=3).tokens_per_s

    tuned = tune(name, profile, trace, machines=8, steps=3)
    assert tuned.tuning.first_s < 20 < Tuning().first_s
    assert tuned.words == f"first window {tuned.tuning.first_s:.3g} s"
    assert speed(tuned.tuning) > 1.1 * speed(Tuning())


@pytest.mark.parametrize("name", ["rlboost", "rlboost-forgetful"])
@pytest.mark.parametrize(("asked", "most"), [(3, 3), (50, 10), (None, 10)])
def test_first_windows_are_tried_as_they_are_used_and_of_equal_ones_the_code_s_own_is_taken(
    name: str, asked: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, trace = short_steps(), static_trace(8, EVER)
    tried: list[tuple[bool, float]] = []
    alone: list[Outcome] = []

    def simulated(profile: Profile, on: Trace, strategy: Strategy, **how: object) -> Outcome:
        if strategy.name == "colocated":
            assert how == {"steps": 1, "seed": 5}
            alone.append(simulate(profile, on, strategy, steps=1, seed=5))
            return alone[0]
        assert isinstance(strategy.window, Algorithm1)
        tried.append((strategy.window.remembers, strategy.window.first_s))
        assert on is trace
        assert how == {"steps": most, "duration_s": 70.0, "seed": 5}
        assert strategy.size.wanted == 6
        return Outcome(name, "small")

    monkeypatch.setattr("penstock.simulate.world.simulate", simulated)
    found = tune(name, profile, trace, machines=6, steps=asked, duration_s=70.0, seed=5)
    generating_s = alone[0].steps[0].times.window_s
    assert generating_s > 0
    assert [first_s for _, first_s in tried] == [200.0, *(share * generating_s for share in (0.0, 0.1, 0.25, 0.5))]
    assert {remembers for remembers, _ in tried} == {name == "rlboost"}
    assert found.tuning == Tuning()


def test_a_number_on_demand_is_tried_on_the_seed_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[object] = []

    def simulated(*_: object, **how: object) -> Outcome:
        seeds.append(how["seed"])
        return Outcome("disaggregated", "small")

    monkeypatch.setattr("penstock.simulate.world.simulate", simulated)
    tune("disaggregated", small_profile(), static_trace(0, EVER), seed=5)
    assert set(seeds) == {5}


def test_a_run_without_reserved_engines_has_no_window_to_tune() -> None:
    profile = small_profile(reserved_instances=0)
    assert tune("rlboost", profile, static_trace(2, EVER), machines=2, steps=1).tuning == Tuning()


@pytest.mark.parametrize("name", ["colocated", "penstock", "rlboost-no-seeding", "mine:Policy"])
def test_what_has_nothing_to_be_tuned_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.simulate.world.simulate", lambda *_, **__: pytest.fail("simulated"))
    tuned = tune(name, small_profile(), static_trace(2, EVER), machines=2)
    assert (tuned.machines, tuned.tuning, tuned.words) == (2, Tuning(), "")
