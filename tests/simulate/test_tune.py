"""Baselines are tuned to the profile before they are compared: a number of machines, and a first window."""

from __future__ import annotations

import pytest
from simulated import MACHINE, small_profile

from penstock.simulate.baselines import Tuning, make_strategy
from penstock.simulate.profiles import Lengths, Prices, Profile
from penstock.simulate.traces import static_trace
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


def test_a_run_without_reserved_engines_has_no_window_to_tune() -> None:
    profile = small_profile(reserved_instances=0)
    assert tune("rlboost", profile, static_trace(2, EVER), machines=2, steps=1).tuning == Tuning()


@pytest.mark.parametrize("name", ["colocated", "penstock", "rlboost-no-seeding", "mine:Policy"])
def test_what_has_nothing_to_be_tuned_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.simulate.world.simulate", lambda *_, **__: pytest.fail("simulated"))
    tuned = tune(name, small_profile(), static_trace(2, EVER), machines=2)
    assert (tuned.machines, tuned.tuning, tuned.words) == (2, Tuning(), "")
