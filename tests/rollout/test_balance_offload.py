"""The window and the number of machines: they follow what happened, within bounds, and do not flap."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from balance_helpers import Replayed
from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout import plan as plan_module
from penstock.rollout.curves import Speed
from penstock.rollout.facts import Facts, as_long_as, thinned
from penstock.rollout.fleet_size import FleetSize, FleetSizeConfig
from penstock.rollout.offload import FixedWindow, Offload, StepTimes, WindowView
from penstock.rollout.other_fleets import Predictor
from penstock.rollout.plan import best_plan, search
from penstock.rollout.step_replay import ONE_BY_ONE, Engine, Limits, Plan, Training, replay
from penstock.rollout.step_times import StepAccount

SPEED = Speed(0.01, 1e-4, 1e-6, 1e-5)
GROUPS = [[100 + 37 * (k * 4 + r) % 500 for r in range(4)] for k in range(32)]
TRAINING = Training(token_s=2e-4, micro_batch_samples=8, switch_s=0.5, rest_s=0.2)
ENGINE = Engine(SPEED, 32)


def facts(remote: int) -> Facts:
    return Facts(GROUPS, 32, [ENGINE] * remote, [ENGINE] * 2, TRAINING)


def times(**changes: float) -> StepTimes:
    base: dict[str, float] = {
        "fleet": 3,
        "step_s": 100.0,
        "window_s": 20.0,
        "train_s": 60.0,
        "trainer_wait_s": 0.0,
        "remote_wait_s": 0.0,
        "remote_busy_s": 300.0,
        "preemptions": 0,
    }
    return StepTimes(**{**base, **changes})  # type: ignore[arg-type]


def test_without_remote_instances_everything_is_generated_here() -> None:
    assert Offload().review(WindowView(1e6, 0, 1.0)).generate


def test_before_anything_is_known_the_window_follows_what_is_finished() -> None:
    assert Offload().review(WindowView(10.0, 2, 0.1)).generate
    assert not Offload().review(WindowView(10.0, 2, 0.9)).generate


def test_a_first_window_does_not_end_before_a_remote_instance_has_the_version() -> None:
    answer = Offload().review(WindowView(10.0, 2, 0.9, reserved=2, loading=2))
    assert answer.generate
    assert "no remote instance has the version" in answer.cause
    assert not Offload().review(WindowView(10.0, 2, 0.9, reserved=2, loading=1)).generate


def test_the_window_shrinks_with_the_fleet_s_size() -> None:
    windows = [Offload().plan(facts(remote)).window_s for remote in (1, 3, 12)]
    assert windows[0] > windows[1] > windows[2]


def test_the_plan_is_no_worse_than_any_window_at_any_width() -> None:
    plan = best_plan(GROUPS, 32, [ENGINE] * 3, [ENGINE] * 2, TRAINING)
    for width in (0.1, 0.3, 1.0):
        for window_s in (0.0, 3.0, 6.0, 12.0, 24.0):
            both = Limits(width, width), Limits(width, width)
            other = replay(GROUPS, 32, [ENGINE] * 3, [ENGINE] * 2, TRAINING, both, window_s)
            assert plan.step_s <= 1.03 * other.step_s


@pytest.mark.parametrize("stuck", [False, True])
def test_where_answers_take_longer_than_training_on_them_fast_engines_of_one_s_own_go_on(stuck: bool) -> None:
    """Windows were looked at up to 1.2 times the training alone: here that is a sixtieth of what fits."""
    slow, fast = Engine(Speed(0.02, 1e-4, 1e-6, 1e-5), 256), Engine(Speed(0.01, 1e-4, 1e-6, 1e-5), 256)
    training = replace(TRAINING, token_s=2e-6)
    near = replay(GROUPS, 32, [slow], [fast] * 2, training, (Limits(), Limits(1.0, 0.03)), 0.05) if stuck else None
    plan = best_plan(GROUPS, 32, [slow], [fast] * 2, training, near)
    best = min(
        replay(GROUPS, 32, [slow], [fast] * 2, training, (Limits(width, width), Limits()), window_s).step_s
        for width in (0.01, 0.1, 1.0)
        for window_s in (0.0, 1.0, 3.0, 6.0, math.inf)
    )
    assert plan.step_s <= 1.05 * best
    assert plan.window_s > 3.0


@pytest.mark.parametrize("seed", [1, 2])
def test_a_long_window_may_end_before_all_is_generated_and_take_a_slow_engine_along(seed: int) -> None:
    """With next to nothing on the remote engine a choice looked good at first, and no step led away from it."""
    source = random.Random(seed)
    groups = [[int(min(12000, source.lognormvariate(7.6, 0.8))) for _ in range(8)] for _ in range(32)]
    fast = Engine(Speed(0.0095, 1.2e-4, 1e-7, 1.4e-4), 64)
    slow = Engine(Speed(0.016, 2.4e-4, 2e-7, 2.9e-4), 64)
    training = Training(150 / sum(map(sum, groups)), 16, 2.0, 2.0)
    plan = best_plan(groups, 512, [slow], [fast] * 2, training)
    whole_s = replay(groups, 512, [slow], [fast] * 2, training, (Limits(), Limits()), math.inf).window_s
    best = min(
        replay(groups, 512, [slow], [fast] * 2, training, (Limits(width, width), Limits()), share * whole_s).step_s
        for width in (0.13, 0.25, 0.5, 1.0)
        for share in (0.5, 0.6, 0.7, 0.8, 0.9)
    )
    assert plan.step_s <= 1.03 * best


def test_what_remote_engines_idle_by_plan_does_not_shorten_a_window_to_the_end() -> None:
    policy = Offload()
    policy.plans[2] = Plan(Limits(0.0, 0.0), Limits(), 200.0, 260.0, 0.0, 10.0, finished=1.0)
    policy.ended(times(fleet=2, window_s=200.0, step_s=260.0, train_s=60.0, remote_wait_s=150.0))
    assert policy.correction(2) == 0.0
    policy.plans[2] = replace(policy.plans[2], finished=0.5)
    policy.ended(times(fleet=2, window_s=200.0, step_s=260.0, train_s=60.0, remote_wait_s=150.0))
    assert policy.correction(2) < 0.0


def test_a_remote_engine_that_is_slower_for_each_sequence_is_given_next_to_nothing() -> None:
    groups = [[2000 + 13 * (k * 4 + r) % 500 for r in range(4)] for k in range(4)]
    slow, fast = Engine(Speed(0.05, 1e-5, 0.0), 256), Engine(Speed(0.01, 1e-5, 0.0), 256)
    plan = best_plan(groups, 32, [slow], [fast] * 2, replace(TRAINING, token_s=2e-6))
    assert plan.remote.samples(256, 0.0, plan.window_s) <= 3
    assert plan.finished > 0.9


def test_engines_that_are_alone_take_all_unless_less_is_clearly_better() -> None:
    """Of widths that are about equal the narrowest was taken, and what had to wait turned out to be the longest."""
    roomy = Engine(SPEED, 256)
    assert best_plan(GROUPS[:4], 32, [], [roomy] * 2, TRAINING).reserved == Limits(1.0, 1.0)
    full = Engine(Speed(0.01, 1e-4, 1e-6, 1e-3), 256, memory=4000.0)
    assert best_plan(GROUPS, 32, [], [full] * 2, TRAINING).reserved.begin < 1.0


def test_a_replay_generates_everything_once() -> None:
    plan = replay(GROUPS, 32, [ENGINE] * 3, [ENGINE] * 2, TRAINING, (Limits(0.5, 0.5), Limits()), 5.0)
    tokens = sum(sum(row) + 32 * len(row) for row in GROUPS)
    busy_s = plan.step_s - plan.trainer_wait_s - plan.window_s - TRAINING.switch_s - TRAINING.rest_s
    assert busy_s == pytest.approx(tokens * TRAINING.token_s)


def test_a_limit_changes_by_equal_factors_until_the_window_ends() -> None:
    limits = Limits(0.8, 0.2)
    assert [limits.samples(100, at, 10.0) for at in (0.0, 5.0, 10.0, 99.0)] == [80, 40, 20, 20]
    assert Limits(0.1, 0.4).samples(100, 5.0, 10.0) == 20
    assert ONE_BY_ONE.remote.samples(256, 1.0, 0.0) == 1
    assert Limits(1.0, 0.5).samples(8, 0.0, 0.0) == 4, "without a window it is the end's from the start"
    assert Limits(1.0, 0.5).samples(8, 1e6, math.inf) == 8


@given(st.lists(st.sampled_from((0.03, 0.2, 1.0)), min_size=4, max_size=4), st.sampled_from((0.0, 2.0, 5.0, 20.0)))
def test_with_any_limits_everything_is_generated_once(shares: list[float], window_s: float) -> None:
    limits = Limits(*shares[:2]), Limits(*shares[2:])
    plan = replay(GROUPS, 32, [ENGINE] * 3, [ENGINE] * 2, TRAINING, limits, window_s)
    tokens = sum(sum(row) + 32 * len(row) for row in GROUPS)
    switch_s = TRAINING.switch_s if plan.window_s else 0.0
    busy_s = plan.step_s - plan.trainer_wait_s - plan.window_s - switch_s - TRAINING.rest_s
    assert busy_s == pytest.approx(tokens * TRAINING.token_s)
    assert (plan.remote, plan.reserved) == limits


def test_limits_that_change_within_a_step_make_it_shorter() -> None:
    """Falling ones finish the first prompts early, for the trainer, and waste no machine before."""
    source = random.Random(1)
    groups = [[int(min(14000, source.lognormvariate(8.6, 0.7))) for _ in range(8)] for _ in range(64)]
    remote, reserved = ([Engine(Speed(0.00835, 2.99e-5, 3.26e-8, 3.33e-5), 128)] * count for count in (3, 2))
    training = Training(8e-5, 16, 3.0, 1.0)
    windows = [0.05 * k * training.token_s * sum(map(sum, groups)) for k in range(9, 17)]

    def step_s(limits: tuple[Limits, Limits]) -> float:
        return min(replay(groups, 500, remote, reserved, training, limits, w).step_s for w in windows)

    constant_s = min(step_s((Limits(share, share), Limits(share, share))) for share in (0.12, 0.25, 0.5, 1.0))
    falling_s = min(step_s((Limits(share, share / 3), Limits(1.0, 0.03))) for share in (0.25, 0.5, 1.0))
    assert falling_s < 0.99 * constant_s


def test_a_plan_of_short_steps_costs_little_of_them() -> None:
    near = best_plan(GROUPS, 32, [ENGINE] * 3, [ENGINE] * 2, TRAINING)

    def replays(step_s: float) -> int:
        last = replace(near, step_s=step_s)
        training = replace(TRAINING, token_s=0.0)
        return sum(1 for _ in search(GROUPS, 32, [ENGINE] * 3, [ENGINE] * 2, training, last))

    assert replays(0.01) == 3
    assert 3 < replays(1.0) <= 16
    assert replays(100.0) > 40


def test_what_is_handed_over_goes_out_by_what_is_expected_and_not_by_what_will_come() -> None:
    """Two prompts as far as each other, of which one will be longer: nobody can know, so their order stays."""
    training = Training(1e-6, 1, 0.1, 0.0)
    slow = Engine(Speed(0.01, 0.0, 0.0), 1, 1e3)
    for groups in ([[50, 50], [80, 80]], [[80, 80], [50, 50]]):
        plan = replay(groups, 1, [slow], [ENGINE], training, (Limits(), Limits()), 0.2)
        first, second = groups
        # One place: the first prompt's two, then the second's; each has 20 tokens or so by then.
        assert plan.finished == 0.0
        assert plan.step_s == pytest.approx(1e3 + 0.01 * (sum(first) + sum(second) - 80), rel=2e-3)


def test_at_a_window_s_end_all_have_their_turn_anew_and_who_comes_later_waits() -> None:
    """A remote engine holds a prompt of which nothing has ended, and is handed the rest of one that has begun to."""
    groups, engine = [[1000, 1000], [20, 100]], Engine(Speed(0.01, 0.0, 0.0), 2)
    training = Training(0.01, 1, 0.0, 0.0)
    plan = replay(groups, 0, [engine], [engine], training, (Limits(1.0, 0.5), Limits()), 0.5)
    assert plan.finished == 0.25
    # One place: 50 tokens of the second prompt's, then 950 of each of the first one's. The trainer waits until 1 s, has
    # the second prompt until 2.2 s, and waits on.
    assert plan.trainer_wait_s == pytest.approx(0.5 + (20.0 - 2.2), rel=1e-3)
    assert plan.step_s == pytest.approx(20.0 + 20.0, rel=1e-3)


def test_a_step_is_replayed_with_what_its_trainer_does_ahead_of_whole_groups() -> None:
    # One place, a token in 0.01 s: samples of 100, 300, 100 and 100 tokens end at 1, 4, 5 and 6 s.
    groups, engine = [[100, 300], [100, 100]], Engine(Speed(0.01, 0.0, 0.0, 0.0), 1)
    both = Limits(), Limits()

    def replayed(training: Training) -> tuple[float, float]:
        plan = replay(groups, 0, [engine], [], training, both, 0.0)
        return plan.step_s, plan.trainer_wait_s

    behind = Training(token_s=0.01, micro_batch_samples=2)
    # Trains on the first two from 4 to 8 s, on the others until 10 s.
    assert replayed(behind) == (pytest.approx(10.0), pytest.approx(4.0))
    # Half of the first is done from 1 to 1.5 s: then it trains from 4 to 7.5 s, and until 9.5 s.
    assert replayed(replace(behind, ahead_token_s=0.005)) == (pytest.approx(9.5), pytest.approx(3.5))
    assert replayed(replace(behind, ahead_token_s=0.005, ahead_samples=2)) == replayed(behind), "there are never two"


@given(
    st.lists(st.lists(st.integers(1, 400), min_size=3, max_size=3), min_size=1, max_size=12),
    st.floats(0.0, 4.0),
    st.integers(1, 8),
    st.integers(1, 5),
)
def test_what_is_done_ahead_is_not_done_again(
    groups: list[list[int]], window_s: float, micro_batch: int, ahead_samples: int
) -> None:
    training = Training(3e-3, micro_batch, 0.2, 0.1, ahead_token_s=1e-3, ahead_samples=ahead_samples)
    plan = replay(groups, 10, [ENGINE] * 2, [ENGINE], training, (Limits(), Limits()), window_s)
    switch_s = training.switch_s if plan.window_s > 0 else 0.0
    busy_s = plan.step_s - plan.trainer_wait_s - plan.window_s - switch_s - training.rest_s
    assert busy_s == pytest.approx(3e-3 * sum(sum(row) + 10 * len(row) for row in groups))
    nothing = replace(training, ahead_token_s=1e-15)
    behind = replace(training, ahead_token_s=0.0)
    one, other = (
        replay(groups, 10, [ENGINE] * 2, [ENGINE], each, (Limits(), Limits()), window_s) for each in (nothing, behind)
    )
    assert one.step_s == pytest.approx(other.step_s)


def test_a_trainer_that_waited_more_than_planned_lengthens_the_window_of_that_size_alone() -> None:
    offload = Offload()
    for remote in (2, 3, 8):
        offload.plan(facts(remote))
    before = offload.window_s(3)
    offload.corrections |= {2: 0.5, 8: 0.0}
    offload.ended(times(fleet=3, trainer_wait_s=offload.plans[3].trainer_wait_s + 10))
    assert offload.window_s(3) > before
    assert (offload.correction(2), offload.correction(8)) == (0.5, 0.0)
    assert offload.correction(4) == offload.correction(3), "one that was never seen begins with the nearest one's"
    offload.ended(times(fleet=3, trainer_wait_s=0.0, remote_wait_s=1e4))
    offload.ended(times(fleet=3, trainer_wait_s=0.0, remote_wait_s=1e4))
    assert offload.window_s(3) < before


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5), st.integers(0, 9)), max_size=30))
def test_corrections_stay_bounded_whatever_is_measured(steps: list[tuple[float, float, int]]) -> None:
    limits = Limits(), Limits()
    offload = Offload(plans={3: replay(GROUPS, 32, [ENGINE] * 3, [ENGINE] * 2, TRAINING, limits, 8.0)})
    for wait_s, remote_s, fleet in steps:
        offload.ended(times(fleet=fleet, trainer_wait_s=wait_s, remote_wait_s=remote_s))
    assert all(abs(value) <= 60.0 for value in offload.corrections.values())
    assert offload.window_s(3) >= 0


def test_the_window_grows_with_the_answers_step_by_step() -> None:
    offload = Offload()
    windows = []
    for growth in (1.0, 1.3, 1.7, 2.2):
        groups = [[round(growth * length) for length in row] for row in GROUPS]
        offload.plan(Facts(groups, 32, [ENGINE] * 3, [ENGINE] * 2, TRAINING))
        windows.append(offload.window_s(3))
    assert windows == sorted(windows)
    assert windows[-1] > 1.6 * windows[0] > 0


def test_until_a_size_has_a_plan_of_its_own_the_nearest_one_s_holds() -> None:
    offload = Offload()
    offload.seconds[2] = 1.0
    assert offload.window_s(4) == 1.0, "without plans, what fitted"
    offload.plan(facts(3))
    offload.plan(facts(8))
    assert offload.nearest(4) == offload.plans[3]
    assert offload.window_s(4) == offload.length_s(4) == offload.plans[3].window_s > 1.0
    assert offload.nearest(0) is None, "without remote instances the step is another one"
    offload.plan(facts(0))
    assert offload.nearest(1) == offload.plans[3]


def test_a_step_goes_on_with_its_limits_unless_it_has_just_begun_or_either_side_is_alone() -> None:
    policy = Offload()
    alone, three = policy.plan(facts(0)), policy.plan(facts(3))
    assert policy.keeps(three, 0.5 * three.step_s, 4)
    assert not policy.keeps(three, 0.0, 4), "nothing was given out yet"
    assert not policy.keeps(three, 0.5 * three.step_s, 0)
    assert not policy.keeps(alone, 0.5 * alone.step_s, 1), "limits for engines that are alone"
    assert not policy.keeps(ONE_BY_ONE, 1.0, 3), "until there is a plan"
    assert not policy.keeps(None, 1.0, 3)


def test_what_changed_a_window_is_said_with_both_waits_and_the_fleet() -> None:
    offload = Offload()
    offload.plan(facts(3))
    before = offload.window_s(3)
    offload.ended(times(trainer_wait_s=offload.plans[3].trainer_wait_s + 10, remote_wait_s=1.5))
    assert offload.learned is not None
    assert (offload.learned.fleet, offload.learned.before_s) == (3, before)
    assert offload.learned.window_s == offload.window_s(3) > before
    for words in ("the trainer waited", "remote instances 1.5 s", "with 3 of them"):
        assert words in offload.learned.cause
    offload.ended(times(fleet=0))
    assert offload.learned is None


def test_without_speeds_the_window_follows_the_two_waits_and_stays_with_its_fleet_size() -> None:
    offload = Offload()
    offload.ended(times(fleet=3, window_s=20.0, trainer_wait_s=8.0, remote_wait_s=2.0))
    assert offload.length_s(3) == pytest.approx(23.0)
    offload.ended(times(fleet=8, window_s=23.0, trainer_wait_s=0.0, remote_wait_s=30.0))
    assert offload.length_s(8) == pytest.approx(8.0)
    assert offload.length_s(3) == pytest.approx(23.0)
    assert offload.review(WindowView(22.0, 3, 0.9)).generate
    assert not offload.review(WindowView(24.0, 3, 0.0)).generate
    offload.ended(times(fleet=8, trainer_wait_s=0.0, remote_wait_s=1e6))
    assert offload.length_s(8) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4), st.integers(0, 9), st.integers(0, 2)), max_size=30))
def test_a_window_is_never_negative_and_always_says_why_it_changed(
    steps: list[tuple[float, float, int, int]],
) -> None:
    offload = Offload()
    for wait_s, remote_s, fleet, lost in steps:
        seen, before = set(offload.seconds), {size: offload.length_s(size) for size in range(10)}
        offload.ended(times(fleet=fleet, trainer_wait_s=wait_s, remote_wait_s=remote_s, preemptions=lost))
        after = {size: offload.length_s(size) for size in range(10)}
        assert all(length is None or length >= 0 for length in after.values())
        known = {size for size in seen if before[size] != after[size]}
        assert not known or (offload.learned is not None and offload.learned.cause)


def test_a_window_that_is_given_stays_and_without_remote_instances_has_no_end() -> None:
    window = FixedWindow(4.0)
    assert window.review(WindowView(3.9, 2, 1.0)).generate
    assert not window.review(WindowView(4.1, 2, 0.0)).generate
    assert window.review(WindowView(1e6, 0, 0.0)).generate
    window.ended(times(trainer_wait_s=100.0))
    assert (window.length_s(2), window.length_s(0), window.learned) == (4.0, None, None)


def test_a_large_step_is_planned_on_a_part_of_it_to_about_the_same_window(monkeypatch: pytest.MonkeyPatch) -> None:
    # For time's sake.
    monkeypatch.setattr(plan_module, "TRIES", 10)
    monkeypatch.setattr(plan_module, "CHANCES", 2)
    groups = [[100 + 37 * (k * 4 + r) % 500 for r in range(4)] for k in range(512)]
    training = Training(token_s=2e-5, micro_batch_samples=64, switch_s=0.5, rest_s=0.2)
    engine = Engine(SPEED, 256)
    whole = Facts(groups, 32, [engine] * 3, [engine] * 2, training, joined=[engine])
    part = thinned(whole, 512)
    assert list(part.joined) == part.remote[:1] != list(whole.joined)
    assert sum(map(len, part.groups)) == 512
    assert thinned(part, 512) is part
    one, other = (best_plan(f.groups, 32, f.remote, f.reserved, f.training) for f in (whole, part))
    assert other.step_s == pytest.approx(one.step_s, rel=0.1)
    assert other.window_s == pytest.approx(one.window_s, abs=0.1 * one.step_s)


def test_a_plan_made_bit_by_bit_is_the_one_made_at_once_and_holds_only_once_it_is_whole() -> None:
    at_once, slowly = Offload(), Offload()
    for _ in range(2):
        plan, before = at_once.plan(facts(3)), slowly.plans.get(3)
        bits = 0
        for _ in slowly.planning(facts(3)):
            bits += 1
            assert slowly.plans.get(3) is before
        assert bits >= 10
        assert slowly.plans[3] == plan


def test_a_plan_is_of_the_last_steps_and_not_of_the_last_one_alone() -> None:
    """A step of one odd prompt changes a plan less where others were seen, and none of another form counts."""
    odd = [*GROUPS[:-1], [20 * length for length in GROUPS[-1]]]
    alone, after_others, after_another_form = Offload(), Offload(), Offload()
    for _ in range(2):
        after_others.plan(facts(3))
    after_another_form.plan(replace(facts(2), groups=GROUPS[:7]))
    plans = [policy.plan(replace(facts(3), groups=odd)) for policy in (alone, after_others, after_another_form)]
    assert plans[1].step_s < 0.9 * plans[0].step_s
    assert plans[2].step_s == pytest.approx(plans[0].step_s, rel=0.05)


def test_answers_that_have_grown_by_more_than_chance_make_earlier_steps_longer() -> None:
    longer = [[3 * length for length in row] for row in GROUPS]
    assert as_long_as(GROUPS, longer) == longer
    assert as_long_as(longer, GROUPS) == GROUPS
    by_chance = [[length + 5 for length in row] for row in GROUPS]
    assert as_long_as(GROUPS, by_chance) is GROUPS
    assert as_long_as([[0, 0]], [[9, 9]]) == [[0, 0]]


def test_the_first_window_is_the_longer_the_fewer_the_others_are() -> None:
    def ends_at(remote: int) -> float:
        shares = (k / 100 for k in range(101))
        return next(s for s in shares if not Offload().review(WindowView(1.0, remote, s, reserved=4)).generate)

    ends = [ends_at(remote) for remote in (1, 2, 4, 8, 32)]
    assert ends == sorted(ends, reverse=True)
    # A window that is short costs more than one that is long by as much: never below the engines' own part.
    assert all(end >= 4 / (4 + remote) for end, remote in zip(ends, (1, 2, 4, 8, 32)))
    assert ends[-1] < 0.5


def test_a_step_with_a_loss_says_nothing_about_the_plan() -> None:
    offload = Offload()
    offload.plan(facts(3))
    offload.ended(times(trainer_wait_s=50.0, preemptions=1))
    assert offload.corrections == {}


@pytest.mark.parametrize(("fleet", "off"), [(1.6, 0.4), (2.4, 0.4), (2.85, 0.15001), (3.0, 1.0)])
def test_a_step_into_which_machines_came_says_nothing_about_the_nearest_number(fleet: float, off: float) -> None:
    offload = Offload()
    for remote in (2, 3):
        offload.plan(facts(remote))
    # They waited for the weights, and had little to do: so would the whole number not have.
    offload.ended(times(fleet=fleet, fleet_off=off, remote_wait_s=50.0))
    assert offload.corrections == {}
    assert offload.learned is None
    offload.ended(times(fleet=2.95, fleet_off=0.05, remote_wait_s=50.0))
    assert offload.correction(3) < 0, "one that came in a step's first moments"


def test_without_plans_such_a_step_counts_only_while_there_is_no_other() -> None:
    offload = Offload()
    offload.ended(times(fleet=1.6, fleet_off=0.4, window_s=20.0, trainer_wait_s=8.0))
    assert offload.length_s(2) == pytest.approx(24.0)
    offload.ended(times(fleet=1.6, fleet_off=0.4, remote_wait_s=50.0))
    assert offload.length_s(2) == pytest.approx(24.0)


def test_how_far_a_fleet_was_off_its_rounded_mean_is_by_time() -> None:
    account = StepAccount(0.0, 0.0)
    for now, fleet in ((4.0, 2), (10.0, 4)):
        account.pass_time(now, window=False, training=True, waiting=False, fleet=fleet, idle=(), busy=fleet)
    found = account.times(5.0)
    assert (found.fleet, found.fleet_off) == (pytest.approx(3.2), pytest.approx(1.0))


def config(**changes: float) -> FleetSizeConfig:
    return FleetSizeConfig(**{"reserved_price": 80.0, "machine_price": 5.0, "patience": 2, **changes})  # type: ignore[arg-type]


def settled(size: FleetSize, steps: int = 10, **changes: float) -> int:
    for _ in range(steps):
        size.ended(times(**changes))
    return size.wanted


def test_more_work_wants_more_machines_and_a_higher_price_fewer() -> None:
    few = settled(FleetSize(config(), 4), remote_busy_s=100.0)
    many = settled(FleetSize(config(), 4), remote_busy_s=900.0)
    dear = settled(FleetSize(config(machine_price=60.0), 4), remote_busy_s=900.0)
    assert few < many
    assert dear < many


def test_floor_ceiling_and_budget_bound_the_number() -> None:
    assert settled(FleetSize(config(floor=6), 4), remote_busy_s=1.0) == 6
    assert settled(FleetSize(config(ceiling=3), 4), remote_busy_s=3000.0) == 3
    assert settled(FleetSize(config(budget_per_h=12.0), 4), remote_busy_s=3000.0) == 2


def test_where_nothing_costs_anything_the_fastest_number_is_wanted() -> None:
    free = FleetSize(config(reserved_price=0.0, machine_price=0.0, ceiling=12), 4)
    assert settled(free, remote_busy_s=3000.0) == 12


def test_a_price_that_rises_lowers_the_number() -> None:
    size = FleetSize(config(), 4)
    before = settled(size, remote_busy_s=900.0)
    size.learn(machine_price=60.0)
    assert settled(size, remote_busy_s=900.0) < before


def test_time_that_is_worth_something_buys_machines() -> None:
    # Dear enough that dollars alone would want none.
    cheap = settled(FleetSize(config(machine_price=25.0), 4), remote_busy_s=900.0)
    hurried = settled(FleetSize(config(machine_price=25.0, hour_worth=500.0), 4), remote_busy_s=900.0)
    assert hurried > cheap


def replayed(seconds: Callable[[int], float | None], asked: list[int] | None = None) -> Predictor:
    return Replayed(seconds, asked=[] if asked is None else asked)


def test_a_replayed_step_counts_machines_that_live_short_for_less_too() -> None:
    size = FleetSize(config(start_s=600.0), 4)
    predictor = replayed(lambda n: 100.0 / (1 + n))
    n = size.ended(times(), predictor)
    assert size.step_s(n) == pytest.approx(100 / (1 + n))
    assert size.ended(times(preemptions=3), predictor) == n
    assert 0 < size.useful_share < 1
    assert 100 / (1 + n) < size.step_s(n) < 100.0


def test_the_number_is_thought_over_bit_by_bit_each_step_is_replayed_once_and_it_holds_only_at_the_end() -> None:
    def seconds(instances: int) -> float:
        return max(70.0, 400 / (4 + instances))

    asked: list[int] = []
    at_once, slowly = FleetSize(config(first=1), 4), FleetSize(config(first=1), 4)
    wanted = at_once.ended(times(), replayed(seconds))
    slowly.learn_step(times())
    bits = 0
    for _ in slowly.deciding(replayed(seconds, asked)):
        bits += 1
        assert slowly.wanted == 1
    assert (slowly.wanted, slowly.cause) == (wanted, at_once.cause)
    assert wanted == 2
    assert bits == 3 * len(asked)
    assert len(asked) == len(set(asked))


def test_where_nobody_can_say_how_long_a_step_would_take_the_work_is_shared_without_loss() -> None:
    plain, asking = FleetSize(config(), 4), FleetSize(config(), 4)
    for step in range(4):
        changed = times(remote_busy_s=300.0 + 100 * step)
        assert asking.ended(changed, replayed(lambda n: None)) == plain.ended(changed)


def test_steps_with_other_numbers_are_replayed_on_what_was_known_when_it_was_asked() -> None:
    offload = Offload()
    assert offload.predictor() is None
    offload.plan(facts(3))
    predictor = offload.predictor()
    assert predictor is not None

    def seconds(instances: int) -> float | None:
        bits = predictor.seconds(instances)
        count = 0
        while True:
            try:
                next(bits)
            except StopIteration as end:
                assert count >= 4, "no replay waits for another"
                return end.value  # type: ignore[no-any-return]
            count += 1

    asked = (0, 2, 3, 5)
    found = [seconds(n) for n in asked]
    for n, step_s in zip(asked, found):
        near = offload.plans[3] if n == 3 else None
        known = facts(n)
        assert step_s == best_plan(known.groups, 32, known.remote, known.reserved, TRAINING, near).step_s
    offload.plan(facts(1))
    assert [seconds(n) for n in asked] == found
    # With nobody at work there is no step to replay.
    offload.plan(Facts(GROUPS, 32, [ENGINE], [], TRAINING))
    predictor = offload.predictor()
    assert predictor is not None
    with pytest.raises(StopIteration) as end:
        next(predictor.seconds(0))
    assert end.value.value is None


def test_of_numbers_that_cost_about_the_same_the_fastest_is_wanted() -> None:
    """A step costs the same at any number here, within a hair, and is the shorter the more there are."""
    bounds = {"reserved_price": 100.0, "machine_price": 10.0, "ceiling": 8, "worth": 0.0}
    seconds = {n: 1000.0 * (1 + 0.002 * n) / (100 + 10 * n) for n in range(9)}
    size = FleetSize(config(**bounds, indifference=0.04), 2)
    strict = FleetSize(config(**bounds, indifference=0.0), 2)
    for _ in range(4):
        wanted, least = (each.ended(times(), replayed(lambda n: seconds[n])) for each in (size, strict))
    assert (wanted, least) == (3, 0), "looked at beside the cheapest one: three more"


def test_machines_that_live_short_and_start_slowly_count_for_less() -> None:
    size = FleetSize(config(start_s=600.0), 4)
    settled(size, preemptions=2)
    assert size.useful_share < 0.5
    steady = FleetSize(config(start_s=600.0), 4)
    settled(steady)
    assert steady.useful_share == 1.0


def test_a_sweep_in_a_step_s_first_seconds_moves_the_number_by_no_more_than_one_and_only_up() -> None:
    """Each machine is lost at once, and none comes back for the rest of the step."""
    size = FleetSize(config(start_s=120.0, ceiling=16), 4)
    train_s, work_s = 150.0, 1200.0

    def step(fleet: float, preemptions: int = 0) -> int:
        step_s = max(train_s, (work_s + 4 * train_s) / (4 + fleet))
        window_s = step_s - train_s
        busy_s = max(0.0, work_s - 4 * window_s)
        found = StepTimes(fleet, step_s, window_s, train_s, 0.0, 0.0, busy_s, preemptions)
        return size.ended(found)

    for _ in range(12):
        before = step(size.wanted)
    after = [step(before * 5 / 300, preemptions=before), *(step(size.wanted) for _ in range(20))]
    assert set(after) <= {before, before + 1}
    assert after == sorted(after)
    assert size.useful_share > 0.9


def test_losses_that_are_booked_once_no_machine_is_left_count_too() -> None:
    at_once, later = FleetSize(config(), 4), FleetSize(config(), 4)
    at_once.learn_step(times(preemptions=3))
    at_once.learn_step(times(fleet=0))
    later.learn_step(times())
    later.learn_step(times(fleet=0, preemptions=3))
    assert at_once.preemptions_per_h > 0
    assert later.preemptions_per_h == pytest.approx(at_once.preemptions_per_h, rel=0.05)


def test_the_rate_is_that_of_the_last_hours_however_short_steps_are() -> None:
    def rate(step_s: float, losses_per_h: int) -> float:
        size = FleetSize(config(), 4)
        every = round(3600 / step_s / losses_per_h)
        for step in range(round(8 * 3600 / step_s)):
            size.learn_step(times(step_s=step_s, preemptions=int(step % every == 0)))
        return size.preemptions_per_h

    assert rate(10.0, 6) == pytest.approx(2.0, rel=0.15)
    assert rate(600.0, 6) == pytest.approx(2.0, rel=0.15)


@given(st.lists(st.floats(50.0, 2000.0), min_size=1, max_size=40), st.integers(1, 4))
def test_the_number_never_turns_within_its_patience(work: list[float], patience: int) -> None:
    size = FleetSize(config(patience=patience, ceiling=20), 4)
    changes: list[tuple[int, int]] = []
    before = size.wanted
    for step, busy_s in enumerate(work):
        wanted = size.ended(times(remote_busy_s=busy_s))
        assert 0 <= wanted <= 20
        if wanted != before:
            changes.append((step, 1 if wanted > before else -1))
        before = wanted
    for (first, one), (second, other) in itertools.pairwise(changes):
        assert one == other or second - first >= patience


@pytest.mark.parametrize("seed", range(3))
def test_where_two_numbers_are_as_good_chance_does_not_move_it_back_and_forth(seed: int) -> None:
    """Nine and ten machines cost the same, and each step's replays err by two per cent."""
    source = random.Random(seed)
    size = FleetSize(config(reserved_price=80.0, machine_price=5.0, ceiling=16, first=9), 4)

    def seconds(best: float, slope: float, instances: int) -> float:
        return source.gauss(1, 0.02) * (1 + slope * abs(instances - best)) * 3e4 / (80 + 5 * instances)

    wanted = [size.ended(times(), replayed(partial(seconds, 9.5, 0.03))) for _ in range(300)]
    changes = [after - before for before, after in itertools.pairwise(wanted) if after != before]
    assert sum(one * other < 0 for one, other in itertools.pairwise(changes)) <= 18
    assert 9 <= statistics.fmean(wanted) <= 11
    # What is clearly better is still had within some steps.
    for _ in range(8):
        after = size.ended(times(), replayed(partial(seconds, 3, 0.3)))
    assert after == 3


@pytest.mark.parametrize(("alone", "after"), [(0.9, 2), (0.97, 8)])
def test_the_fewest_are_looked_at_wherever_the_search_stands(alone: float, after: int) -> None:
    """Eight machines are the best number but for fewer than three, beyond dearer ones: by less than what nobody minds,
    or by more."""
    size = FleetSize(config(reserved_price=80.0, machine_price=5.0, ceiling=16, floor=2, first=8), 4)

    def seconds(instances: int) -> float:
        dollars = 1.2 * alone if instances < 3 else 1.2 + 0.1 * abs(instances - 8)
        return 3600 * dollars / (80 + 5 * instances)

    assert [size.ended(times(), replayed(seconds)) for _ in range(6)][-1] == after


def test_a_price_that_was_high_for_some_steps_is_not_the_last_word() -> None:
    """From the fewest, the number of before is beyond dearer ones."""
    size = FleetSize(config(reserved_price=80.0, machine_price=5.0, ceiling=16, floor=2, first=8), 4)

    def seconds(alone: float, instances: int) -> float:
        dollars = 1.2 * alone if instances < 3 else 1.2 + 0.1 * abs(instances - 8)
        return 3600 * dollars / (80 + 5 * instances)

    assert [size.ended(times(), replayed(partial(seconds, 0.9))) for _ in range(6)][-1] == 2
    assert [size.ended(times(), replayed(partial(seconds, 1.12))) for _ in range(6)][-1] == 8


def test_before_a_step_can_be_replayed_the_number_no_more_than_doubles() -> None:
    """A step of which three quarters were spent on long answers looks like one with a lot of work."""
    guessed = FleetSize(config(ceiling=64, first=4), 4)
    assert guessed.ended(times(remote_busy_s=4000.0)) == 8
    replays = FleetSize(config(ceiling=64, first=4), 4)
    assert replays.ended(times(), replayed(lambda n: 1000 / (1 + n))) > 8
    nobody = FleetSize(config(ceiling=64, first=0), 4)
    assert nobody.ended(times(fleet=0, remote_busy_s=0.0, window_s=4000.0)) == 2


def test_what_the_budget_cuts_and_allows_again_is_a_turn_too() -> None:
    """A price that goes up and down every four steps, beside a budget that pays for seven machines or for ten."""
    size = FleetSize(config(budget_per_h=20.0, machine_price=2.0, reserved_price=80.0, ceiling=10, first=7), 4)
    wanted = []
    for step in range(80):
        size.learn(machine_price=2.0 if step // 4 % 2 == 0 else 2.6)
        wanted.append(size.ended(times(), replayed(lambda n: 4000 / (30 + n))))
        assert wanted[-1] * (2.0 if step // 4 % 2 == 0 else 2.6) <= 20.0
    assert wanted[0] == 10
    assert sum(one != other for one, other in itertools.pairwise(wanted)) <= 10


def test_a_floor_that_can_be_paid_for_again_is_asked_for() -> None:
    size = FleetSize(config(floor=3, ceiling=3, budget_per_h=10.0, machine_price=5.0), 4)
    assert size.ended(times()) == 2
    size.learn(machine_price=1.0)
    assert size.ended(times()) == 3
    assert "2 to 3" in size.cause


def test_the_same_step_again_and_again_settles() -> None:
    size = FleetSize(config(), 4)
    settled(size, 10)
    assert len({settled(size, 1) for _ in range(10)}) == 1
