"""Reserved engines that generate beside the trainer all the time, as in a run whose window is off."""

from __future__ import annotations

import pytest
from simulated import MACHINE, small_profile

from penstock.errors import ConfigError
from penstock.simulate.baselines import STRATEGIES, make_strategy
from penstock.simulate.grid import with_values
from penstock.simulate.outcome import Outcome
from penstock.simulate.profiles import Profile, Training
from penstock.simulate.traces import Change, Trace, static_trace
from penstock.simulate.world import simulate

STEPS = 3


def run(profile: Profile, machines: int, name: str = "penstock") -> Outcome:
    strategy = make_strategy(name, profile, machines=machines)
    return simulate(profile, static_trace(machines, 1e9), strategy, steps=STEPS)


@pytest.mark.parametrize("name", ["disaggregated", "penstock-no-window"])
@pytest.mark.parametrize("machines", [0, 1, 3])
def test_they_do_what_as_many_machines_of_a_trace_would(machines: int, name: str) -> None:
    """But for what these cost, for who counts as the fleet, and for whose the store's link is."""
    beside = run(small_profile(reserved_beside=True, store_gbit_s=400.0), machines, name)
    apart = run(small_profile(reserved_instances=0, store_gbit_s=400.0), machines + 2, name)
    for own, other in zip(beside.steps, apart.steps, strict=True):
        assert own.times.step_s == pytest.approx(other.times.step_s)
        assert own.times.trainer_wait_s == pytest.approx(other.times.trainer_wait_s)
        assert own.times.fleet == pytest.approx(machines)
        busy_s = own.times.remote_busy_s + 2 * own.times.window_s
        assert busy_s == pytest.approx(other.times.remote_busy_s)
        assert own.paid_h == pytest.approx(machines * own.times.step_s / 3600)
    assert beside.steps[0].times.window_s > 0


def test_without_reserved_engines_no_step_waits_for_a_window() -> None:
    profile = small_profile(reserved_instances=0)
    for step, other in zip(run(profile, 3).steps, run(profile, 3, "penstock-no-window").steps, strict=True):
        times = step.times
        assert times.window_s == 0 < times.trainer_wait_s
        assert times.step_s == pytest.approx(times.train_s + times.trainer_wait_s + profile.training.optimizer_s)
        assert times.step_s == pytest.approx(other.times.step_s, rel=0.05)


def test_rlboost_without_reserved_engines_is_rlboost_without_seeding() -> None:
    profile = small_profile(reserved_instances=0)
    seeded, unseeded = (run(profile, 3, name) for name in ("rlboost", "rlboost-no-seeding"))
    assert seeded.wall_s == pytest.approx(unseeded.wall_s)


def test_beside_takes_the_longer_of_both_and_turns_their_sum() -> None:
    training = Training(s_per_token=4e-4, micro_batch_samples=8)
    beside = run(small_profile(reserved_beside=True, training=training), 0)
    turns = run(small_profile(training=training), 0)
    for step in beside.steps:
        times = step.times
        assert times.train_s < times.step_s == pytest.approx(times.train_s + times.trainer_wait_s)
        assert times.window_s < times.step_s < times.window_s + times.train_s
        assert not step.causes
    for step in turns.steps:
        times = step.times
        assert times.step_s == pytest.approx(times.window_s + times.train_s + times.trainer_wait_s)
    assert beside.wall_s < turns.wall_s


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_every_strategy_finishes_its_steps_and_none_beats_the_bound(name: str) -> None:
    outcome = run(small_profile(reserved_beside=True), 2, name)
    assert len(outcome.steps) == STEPS
    for step in outcome.steps:
        assert step.times.step_s >= step.bound_s * (1 - 1e-9)
        own = [spans for machine, spans in step.machine_spans.items() if machine.startswith("reserved")]
        assert len(own) == 2
        assert all(own)


def test_they_go_on_where_the_last_remote_instance_is_taken_away() -> None:
    profile = small_profile(reserved_beside=True)
    trace = Trace((Change(0.0, "a", True), Change(6.0, "a", False)), 1e9)
    outcome = simulate(profile, trace, make_strategy("penstock", profile, machines=1), steps=STEPS)
    assert outcome.steps[0].times.preemptions == 1
    assert len(outcome.steps) == STEPS


@pytest.mark.parametrize("gbit_s", [1.0, 10.0])
def test_each_version_has_to_come_before_they_generate(gbit_s: float) -> None:
    own = MACHINE.model_copy(update={"link_gbit_s": gbit_s})
    for step in run(small_profile(reserved_beside=True, reserved=own), 0).steps:
        began_s = min(spans[0][0] for spans in step.machine_spans.values())
        assert began_s - step.began_s == pytest.approx(8.0 / gbit_s)
        assert step.times.step_s >= step.bound_s


def test_both_are_compared_by_a_sweep() -> None:
    profile = small_profile()
    assert with_values(profile, {"reserved_beside": 1.0}).reserved_beside
    assert not with_values(profile, {"reserved_beside": 0.0}).reserved_beside
    with pytest.raises(ConfigError, match="reserved_beside"):
        with_values(profile, {"reserved_beside": 2.0})
