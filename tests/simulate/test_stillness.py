"""A step that can't end is given up in words; one that only waits for a machine, or for time, goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from simulated import MACHINE, small_profile

from penstock.errors import PenstockError
from penstock.rollout.balance import InstanceLoad, Move, PlacedSample, Queue, ShortestQueue
from penstock.simulate.baselines import Forever, make_strategy
from penstock.simulate.profiles import Profile
from penstock.simulate.stillness import StuckError
from penstock.simulate.strategy import FixedSize, Strategy
from penstock.simulate.traces import Change, Trace, from_counts, static_trace
from penstock.simulate.world import simulate

STILL_S = 300.0
"""An hour takes a second to simulate, and so much does as well."""
LONE = small_profile(reserved_instances=0)


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.simulate.stillness.STILL_S", STILL_S)


class Never(ShortestQueue):
    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        return []


class NoRoom(ShortestQueue):
    def room(self, load: InstanceLoad) -> int:
        return -3


class Restless(ShortestQueue):
    """Takes everything back as often as it may, before a token of it is drawn."""

    def moves(
        self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        return [Move(load.instance, sample.lease, "") for load in loads for sample in placed(load.instance)]


class Patient(ShortestQueue):
    """Begins some time after a step has, though all is there."""

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        return super().assign(queue, loads) if (queue.elapsed_s or 0.0) > STILL_S / 2 else []


def own(policy: ShortestQueue, machines: int = 2) -> Strategy:
    return Strategy("own", policy, Forever(), FixedSize(machines), streaming=False)


@pytest.mark.parametrize("name", ["colocated", "disaggregated", "rlboost", "penstock"])
def test_a_step_for_which_there_is_no_machine_and_none_to_come_is_given_up(name: str) -> None:
    words = r"step 0 can't end: .*64 of 64 samples wait .* 0 remote machines and 0 reserved ones, and none is to come"
    with pytest.raises(PenstockError, match=rf"^{name}: {words}"):
        simulate(LONE, static_trace(0, 1e9), make_strategy(name, LONE, machines=0), steps=1)


SLOW_PREFILL = MACHINE.model_copy(update={"prefill_s_per_token": 10.0})


@pytest.mark.parametrize(
    ("policy", "profile", "says"),
    [
        (Never(4), small_profile(), "64 of 64 samples wait and 0 are with machines"),
        (NoRoom(4), small_profile(), "64 of 64 samples wait and 0 are with machines"),
        (
            Restless(4),
            small_profile(prompts=2, samples_per_prompt=2, reserved=SLOW_PREFILL, spot=SLOW_PREFILL),
            "of 4 samples",
        ),
    ],
)
def test_a_policy_with_which_nobody_ever_draws_a_token_is_stopped(
    policy: ShortestQueue, profile: Profile, says: str
) -> None:
    with pytest.raises(PenstockError, match=rf"own: step 0 can't end: .*{says}.* 2 remote machines and 2 reserved"):
        simulate(profile, static_trace(2, 1e9), own(policy), steps=1)


@pytest.mark.parametrize("name", ["rlboost", "penstock"])
def test_a_machine_that_comes_after_hours_is_waited_for_and_does_the_work(name: str) -> None:
    late_s = 5 * STILL_S
    trace = Trace((Change(late_s, "a", True),), 1e9)
    outcome = simulate(LONE, trace, make_strategy(name, LONE, machines=2), steps=3)
    assert outcome.steps[0].times.step_s > late_s
    assert len(outcome.steps) == 3


def test_a_fleet_that_is_gone_for_hours_in_mid_step_is_waited_for() -> None:
    trace = from_counts([(0.0, 2), (8.0, 0), (8.0 + 4 * STILL_S, 1)], 1e6)
    outcome = simulate(LONE, trace, make_strategy("penstock", LONE, machines=2), steps=2)
    assert outcome.steps[0].times.step_s > 4 * STILL_S


@pytest.mark.parametrize(
    "profile",
    [
        small_profile(reserved_instances=0, spot=MACHINE.model_copy(update={"boot_s": 3 * STILL_S})),
        small_profile(
            reserved_instances=0, weights_gb=3 * STILL_S, spot=MACHINE.model_copy(update={"link_gbit_s": 8.0})
        ),
    ],
    ids=["boot", "pull"],
)
def test_long_boots_and_pulls_are_waited_for(profile: Profile) -> None:
    trace = Trace((Change(1.0, "a", True),), 1e9)
    outcome = simulate(profile, trace, make_strategy("rlboost", profile, machines=1), steps=1)
    assert outcome.steps[0].times.step_s > 3 * STILL_S


def test_long_training_and_rewards_are_waited_for() -> None:
    training = small_profile().training.model_copy(update={"optimizer_s": 3 * STILL_S, "reward_s": 3 * STILL_S})
    profile = small_profile(training=training)
    outcome = simulate(profile, static_trace(2, 1e9), make_strategy("penstock", profile, machines=2), steps=2)
    assert all(step.times.step_s > 6 * STILL_S for step in outcome.steps)


def test_a_step_on_machines_that_take_hours_for_it_goes_on() -> None:
    slow = MACHINE.model_copy(update={"step_base_s": 5.0})
    profile = small_profile(reserved=slow, spot=slow)
    outcome = simulate(profile, static_trace(2, 1e9), make_strategy("penstock", profile, machines=2), steps=1)
    assert outcome.steps[0].times.step_s > 4 * STILL_S


def test_a_prefill_of_hours_goes_on() -> None:
    slow = MACHINE.model_copy(update={"prefill_s_per_token": STILL_S / 8})
    profile = small_profile(prompts=1, samples_per_prompt=1, reserved=slow, spot=slow)
    outcome = simulate(profile, static_trace(1, 1e9), own(ShortestQueue(4), 1), steps=1)
    assert outcome.steps[0].times.step_s > 4 * STILL_S


def test_a_policy_that_waits_for_its_time_goes_on() -> None:
    outcome = simulate(small_profile(), static_trace(2, 1e9), own(Patient(4)), steps=2)
    assert all(step.times.step_s > STILL_S / 2 for step in outcome.steps)


def test_within_a_time_a_step_that_can_t_end_is_the_last_one_and_those_before_it_count() -> None:
    trace = from_counts([(0.0, 2), (60.0, 0)], 1e6)
    outcome = simulate(LONE, trace, make_strategy("rlboost", LONE, machines=2), duration_s=5 * STILL_S)
    assert outcome.steps
    assert sum(step.times.step_s for step in outcome.steps) < 60.0
    assert f"step {len(outcome.steps)} can't end" in outcome.stuck
    assert outcome.end_s == 5 * STILL_S
    assert simulate(LONE, trace, make_strategy("rlboost", LONE, machines=2), duration_s=50.0).stuck == ""


@pytest.mark.parametrize("name", ["colocated", "rlboost"])
def test_what_is_told_of_a_still_step_is_so_and_it_is_not_waited_for_longer(name: str) -> None:
    with pytest.raises(StuckError) as caught:
        simulate(LONE, static_trace(0, 1e9), make_strategy(name, LONE, machines=0), steps=1)
    assert caught.value.outcome.end_s == pytest.approx(STILL_S + 2 * LONE.training.switch_s, abs=5.0)


def test_a_machine_that_comes_too_late_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.simulate.stillness.FAR_S", 8 * STILL_S)
    trace = Trace((Change(20 * 86_400.0, "a", True),), 1e9)
    with pytest.raises(StuckError, match=r"0 remote machines and 0 reserved ones, and nothing comes for 20 days$"):
        simulate(LONE, trace, make_strategy("rlboost", LONE, machines=2), steps=1)


def test_a_pull_that_takes_too_long_is_not_waited_for_and_the_steps_before_it_are_kept() -> None:
    slow = MACHINE.model_copy(update={"link_gbit_s": 1e-6})
    profile = small_profile(reserved_instances=0, spot=slow)
    with pytest.raises(StuckError, match=r"2 remote machines .*, and a pull of the weights takes 93 days$") as caught:
        simulate(profile, static_trace(2, 1e9), make_strategy("rlboost", profile, machines=2), steps=1)
    assert caught.value.outcome.steps == []
    trace = from_counts([(0.0, 2), (60.0, 0)], 1e6)
    with pytest.raises(StuckError) as caught:
        simulate(LONE, trace, make_strategy("rlboost", LONE, machines=2), steps=100)
    assert len(caught.value.outcome.steps) > 1
