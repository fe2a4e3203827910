"""Engines of unequal speed: slower ones have less to do, none where answers would end last, and hurt nobody."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace

import pytest
from balance_helpers import report_of, rows
from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout.arrivals import JOINED, Arrivals
from penstock.rollout.balance import InstanceLoad, Move, PlacedSample, Queue, Report
from penstock.rollout.balanced import COMPARED, Balanced
from penstock.rollout.curves import Speed
from penstock.rollout.facts import Facts
from penstock.rollout.offload import Offload
from penstock.rollout.other_fleets import OtherFleets
from penstock.rollout.plan import best_plan
from penstock.rollout.step_replay import Engine, Limits, Plan, Training, replay
from penstock.rollout.unequal import ALIKE, PACE, Beside, compared

TRUTH = Speed(0.01, 5e-4, 5e-7, 1e-5)
CONTEXT = 1000.0
MEMORY = 1e6
PLACES = 64
TRAINING = Training(token_s=2e-5, micro_batch_samples=8, switch_s=0.5, rest_s=0.2)
GROUPS = [[100 + 37 * (k * 4 + r) % 1900 for r in range(4)] for k in range(32)]


def slower(by: float, speed: Speed = TRUTH) -> Speed:
    return Speed(by * speed.base_s, by * speed.sequence_s, by * speed.context_s, by * speed.prefill_s)


def known(*factors: float) -> list[Beside]:
    return compared([(slower(by), PLACES, MEMORY) for by in factors], CONTEXT)


def engine(by: float = 1.0) -> Engine:
    return Engine(slower(by), PLACES)


# ---- how much less


def test_engines_that_are_alike_but_for_chance_have_the_same_limits() -> None:
    assert [beside.samples(40) for beside in known(1.0, 0.99 * ALIKE, 1.02)] == [40, 40, 40]
    assert known() == []
    assert known(7.0) == [Beside()]


def test_what_a_slower_engine_does_beside_a_fast_one_is_less_than_its_speed_and_nothing_where_few_samples_are() -> None:
    fast, slow = known(1.0, 2.0)
    assert fast.rate(3) == fast.rate(math.inf) == 1.0
    assert replace(slow, fit=math.inf).rate(math.inf) == 0.5, "nothing is known of the samples"
    assert slow.rate(2) == slow.rate(0) == 0.0
    found = [slow.rate(samples) for samples in (10, 20, 50, 200)]
    assert found == sorted(found)
    assert 0 < found[0] < found[-1] < 0.5
    # As many as it is given, at its pace.
    assert slow.rate(50) == pytest.approx(slow.samples(50) / 50 * 2**-PACE, rel=0.02)
    tight = replace(slow, fit=20.0)
    assert tight.rate(200) == tight.rate(20) == slow.rate(20)


def test_a_slower_engine_s_pace_is_slower_by_less_than_it_is() -> None:
    fast, slow = known(1.0, 2.0)
    assert fast.samples(50) == 50
    held = slow.samples(50)
    per_sequence_s = TRUTH.sequence_s + CONTEXT * TRUTH.context_s
    pace_s = 2 * (TRUTH.base_s + held * per_sequence_s)
    assert pace_s == pytest.approx(2**PACE * (TRUTH.base_s + 50 * per_sequence_s), rel=0.02)


@given(st.floats(1.0, 50.0), st.floats(1.0, 50.0), st.integers(1, 1000))
def test_the_slower_the_less_and_never_more_than_the_fastest(one: float, other: float, limit: int) -> None:
    fast, *rest = known(1.0, *sorted((one, other)))
    first, second = (beside.samples(limit) for beside in rest)
    assert 0 <= second <= first <= fast.samples(limit) == limit


def test_an_engine_that_is_slower_alone_than_the_fastest_one_full_has_nothing() -> None:
    _, slow = known(1.0, 8.0)
    assert slow.samples(10) == 0
    assert slow.samples(1000) > 0


def test_what_the_fastest_one_has_no_memory_for_makes_the_others_no_wider() -> None:
    plenty = compared([(TRUTH, PLACES, math.inf), (slower(2), PLACES, math.inf)], CONTEXT)[1]
    little = compared([(TRUTH, PLACES, 20 * CONTEXT), (slower(2), PLACES, 20 * CONTEXT)], CONTEXT)[1]
    assert plenty.samples(60) > little.samples(60) == plenty.samples(20)


# ---- in a plan


def step_s(*factors: float, limits: Limits | None = None, window_s: float = 0.0) -> float:
    both = limits or Limits(), Limits()
    return replay(GROUPS, 32, [engine(by) for by in factors], [engine()] * 2, TRAINING, both, window_s).step_s


@pytest.mark.parametrize("by", [1.5, 3.0, 8.0, 50.0])
def test_slow_engines_beside_fast_ones_make_a_planned_step_hardly_longer(by: float) -> None:
    """Nothing moves while the window is open, and nearly all of this step is."""
    fast = [engine()] * 2
    own = [engine()] * 2
    alone = best_plan(GROUPS, 32, fast, own, TRAINING)
    beside = best_plan(GROUPS, 32, [*fast, *[engine(by)] * 2], own, TRAINING)
    assert beside.step_s < 1.04 * alone.step_s
    if by <= 1.5:
        assert beside.step_s < 0.95 * alone.step_s, "they help"


def test_a_slow_engine_that_comes_first_in_the_list_changes_nothing() -> None:
    assert step_s(3.0, 1.0, 1.0) == pytest.approx(step_s(1.0, 1.0, 3.0), rel=0.02)


def test_running_samples_leave_a_slow_engine_once_nothing_waits() -> None:
    """With two samples for each engine, the slow one's would end last by far."""
    groups = [[1000, 1000] for _ in range(3)]
    alike = replay(groups, 32, [engine()] * 3, [], TRAINING, (Limits(), Limits()), 0.0)
    wide = Limits(1.0, 1.0)
    unequal = replay(groups, 32, [engine(), engine(), engine(3.0)], [], TRAINING, (wide, wide), 0.0)
    assert unequal.step_s < 1.6 * alike.step_s
    assert unequal.step_s < 1000 * slower(3.0).base_s


@pytest.mark.parametrize("starts_s", [5.0, 20.0, 100.0])
def test_an_engine_that_is_not_there_yet_takes_nothing_from_one_that_is(starts_s: float) -> None:
    groups = [[1000, 1000] for _ in range(3)]
    late = replace(engine(), starts_s=starts_s)
    narrow = Limits(0.5, 0.5), Limits()
    alone = replay(groups, 32, [engine(2.0), engine()], [], TRAINING, narrow, 0.0).step_s
    beside = replay(groups, 32, [engine(2.0), engine(), late], [], TRAINING, narrow, 0.0).step_s
    # What it was dealt waits for it.
    assert beside < max(alone, starts_s + 1000 * TRUTH.step_s(2, 2000)) + 2.0


def test_engines_that_have_nothing_when_the_window_ends_take_from_slow_ones_whatever_their_order() -> None:
    groups = [[400, 400, 1600, 1600] for _ in range(6)]
    both = Limits(0.3, 0.3), Limits(0.02, 0.02)

    def seconds(*factors: float) -> float:
        return replay(groups, 32, [engine(by) for by in factors], [engine()], TRAINING, both, 8.0).step_s

    assert seconds(1.0, 1.0, 3.0) == pytest.approx(seconds(3.0, 1.0, 1.0), rel=0.05)


@given(
    st.lists(st.floats(1.0, 9.0), min_size=1, max_size=5),
    st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    st.floats(0.0, 30.0),
    st.sampled_from([math.inf, 9000.0]),
)
def test_whatever_the_speeds_and_limits_everything_is_generated_once(
    factors: list[float], shares: list[float], window_s: float, memory: float
) -> None:
    remote = [replace(engine(by), memory=memory) for by in factors]
    limits = Limits(*shares[:2]), Limits(*shares[2:])
    # Nearly all of the step is training on groups that are complete.
    slow = replace(TRAINING, token_s=1.0)
    plan = replay(GROUPS[:8], 32, remote, [engine()], slow, limits, window_s)
    tokens = sum(sum(row) + 32 * len(row) for row in GROUPS[:8])
    assert plan.step_s == pytest.approx(tokens, abs=3600)
    assert plan.step_s >= tokens


def test_an_engine_of_which_nothing_is_known_yet_is_compared_with_nobody() -> None:
    """What stands in for its speed may be faster than any that is known, or slower."""
    limits = Limits(0.3, 0.3), Limits()

    def seconds(other: Engine) -> float:
        remote = [engine(), engine(), other]
        return replay(GROUPS, 32, remote, [engine()], TRAINING, limits, 2.0).step_s

    assert seconds(replace(engine(0.5), known=False)) < 1.02 * seconds(engine())
    assert seconds(engine(0.5)) > 1.02 * seconds(replace(engine(0.5), known=False)), "two engines beside a fast one"


def test_fewer_machines_are_predicted_to_be_those_that_stay_and_more_like_those_that_joined_last() -> None:
    own = [engine()] * 2

    def predicted(remote: list[Engine], instances: int, joined: list[Engine] | None = None) -> float:
        offload = Offload()
        offload.plan(Facts(GROUPS, 32, remote, own, TRAINING, joined=joined or []))
        predictor = offload.predictor()
        assert predictor is not None

        def told() -> Generator[None, None, None]:
            answers.append((yield from predictor.seconds(instances)))

        answers: list[float | None] = []
        assert not any(told())
        assert answers[0] is not None
        return answers[0]

    mixed = [engine(4.0), engine(4.0), engine(), engine()]
    assert predicted(mixed, 2) == pytest.approx(predicted([engine()] * 2, 2), rel=0.02)
    assert predicted(mixed, 2) < 0.9 * predicted([engine(4.0)] * 4, 2)
    assert predicted(mixed, 8) < 0.95 * predicted(mixed, 4), "where nobody has joined: twice as many of both"
    kept = [engine()] * 2
    slow = predicted(kept, 6, joined=[engine(4.0)] * 4 + kept)
    assert slow == pytest.approx(predicted([*kept, *[engine(4.0)] * 4], 6), rel=0.02)
    assert slow > 1.1 * predicted(kept, 6, joined=[*kept, *[engine(4.0)] * 4])
    assert predicted([], 2, joined=[engine(4.0)]) == pytest.approx(predicted([engine(4.0)] * 2, 2), rel=0.02)


def test_other_numbers_are_of_those_that_stay_by_price_and_speed_and_of_further_ones_at_their_own_price() -> None:
    dear, cheap = replace(engine(), price_per_h=9.0), replace(engine(2.0), price_per_h=2.0)
    by_hand, untold = replace(engine(3.0), price_per_h=0.0), replace(engine(), price_per_h=None)

    def fleet(remote: list[Engine], joined: list[Engine], prompts: int = 32) -> OtherFleets:
        return OtherFleets.of(Facts(GROUPS[:prompts], 32, remote, [engine()], TRAINING, joined=joined), {})

    other = fleet([dear, cheap, dear, by_hand, cheap], joined=[by_hand, cheap, dear])
    assert other.machines(5) == [[by_hand], [cheap], [cheap], [dear], [dear]]
    assert other.prices(8) == [0.0, 2.0, 2.0, 9.0, 9.0, 2.0, 9.0, 2.0], "nobody can ask for one by hand"
    less = replace(dear, price_per_h=3.0)
    assert fleet([cheap, less], []).machines(1) == [[less]]
    assert fleet([cheap, dear], []).machines(1) == [[cheap]]
    assert fleet([cheap, dear], [], prompts=2).machines(1) == [[dear]], "of so few samples a slow one is given none"
    middling = replace(cheap, price_per_h=4.0)
    assert fleet([middling, untold, dear], []).machines(1) == [[untold]], "it may cost the mean, and is fast"
    assert fleet([], [by_hand]).prices(2) == [None, None], "what one costs is not known from it"
    assert fleet([], []).machines(1) == [[engine()]]
    assert fleet([dear], []).prices(0) == []


def test_a_machine_of_several_instances_stays_or_goes_or_comes_with_all_of_them_at_its_one_price() -> None:
    def on(name: str, price: float, *factors: float) -> list[Engine]:
        of_machine = len(factors) if name else 1
        return [replace(engine(by), price_per_h=price, machine=name, of_machine=of_machine) for by in factors]

    pair, single, by_hand = on("a", 6.0, 1.0, 1.0), on("b", 4.0, 1.0), on("", 0.0, 1.0, 1.0)
    mixed = [pair[0], by_hand[0], single[0], pair[1], by_hand[1]]
    other = OtherFleets.of(Facts(GROUPS, 32, mixed, [engine()], TRAINING, joined=[single[0], pair[1], *by_hand]), {})
    assert other.machines(4) == [[by_hand[0]], [by_hand[1]], pair, single], "two for six are cheaper than one for four"
    assert other.prices(7) == [0.0, 0.0, 6.0, 4.0, 4.0, 6.0, 4.0]
    assert other.machines(6)[4:] == [single, pair]

    def predicted(remote: list[Engine], machines: int) -> float | None:
        bits = OtherFleets.of(Facts(GROUPS, 32, remote, [engine()], TRAINING, joined=remote[:1]), {}).seconds(machines)
        while True:
            try:
                next(bits)
            except StopIteration as end:
                return end.value

    alone = [engine() for _ in range(4)]
    assert predicted([*pair, *on("c", 6.0, 1.0, 1.0)], 2) == predicted(alone, 4)
    assert predicted(pair, 2) == predicted(alone, 4), "a further one has two, too"
    assert predicted([*pair, *on("c", 6.0, 1.0, 1.0)[:1]], 2) == predicted(alone, 4), "the other one is about to join"


def test_of_a_machine_with_an_instance_of_which_too_little_is_known_the_others_say_how_fast_it_is() -> None:
    def on(name: str, *engines: Engine) -> list[Engine]:
        return [replace(one, price_per_h=5.0, machine=name, of_machine=len(engines)) for one in engines]

    slow, unknown = engine(3.0), replace(engine(), known=False)
    mixed, fast = on("a", slow, unknown), on("b", engine())
    other = OtherFleets.of(Facts(GROUPS, 32, [*mixed, *fast], [engine()], TRAINING), {})
    assert other.machines(1) == [fast], "two slow ones do less than one fast one, as whoever releases has it"


def test_which_machine_an_instance_is_on_goes_from_its_load_into_the_steps_that_are_predicted() -> None:
    policy = learned(a1=1.0, a2=1.0, hand=1.0)
    loads = [InstanceLoad(name, 0, PLACES, price_per_h=5.0, machine="a", of_machine=2) for name in ("a1", "a2")]
    loads.append(InstanceLoad("hand", 0, PLACES, price_per_h=0.0))
    remote = [found for load in loads if (found := policy.engine(load, 0.0)) is not None]
    other = OtherFleets.of(Facts(GROUPS, 32, remote, [engine()], TRAINING, joined=policy.joined()), {})
    assert [len(machine) for machine in other.machines(4)] == [1, 2, 2, 2]
    assert other.prices(4) == [0.0, 5.0, 5.0, 5.0]


# ---- instances


def learned(lengths: bool = True, **factors: float) -> Balanced:
    """A policy that has seen enough of instances of these speeds, and of answers of 100 to 2,000 tokens."""
    policy = Balanced(4)
    for name, by in factors.items():
        for k in range(20):
            policy.report(report_of(name, slower(by), k, 10))
    for k in range(200 if lengths else 0):
        policy.finished(k // 4, 100 + 1900 * (k * 37 % 200) // 200)
    policy.batch_ended()
    return policy


def given_to(policy: Balanced, loads: list[InstanceLoad], count: int) -> list[int]:
    picks = policy.assign(Queue(count, elapsed_s=1.0, prompt_tokens=64.0), loads)
    return [picks.count(k) for k in range(len(loads))]


def test_limits_are_the_fastest_one_s_and_a_much_slower_one_is_given_nothing() -> None:
    policy = learned(fast=1.0, slow=1.5, slowest=6.0)
    policy.follow(Plan(Limits(0.5, 0.5), Limits(), 10.0))
    loads = [InstanceLoad(name, 0, PLACES) for name in ("slowest", "slow", "fast")]
    none, less, most = given_to(policy, loads, 500)
    assert (none, most) == (0, 32)
    assert 0 < less < 32


def test_of_few_samples_a_slow_one_is_given_fewer_than_for_its_speed() -> None:
    """Also where others are coming, and each is given its share of all there is."""
    policy = learned(fast=1.0, slow=2.0, slowest=9.0)
    policy.follow(Plan(Limits(), Limits(), 10.0))
    loads = [InstanceLoad(name, 0, PLACES) for name in ("fast", "slow", "slowest")]
    fast, slow, slowest = given_to(policy, loads, 60)
    assert fast + slow + slowest == 60
    assert 0 < slow < 0.45 * fast
    assert slowest == 0
    picks = policy.assign(Queue(60, coming=1, elapsed_s=1.0, prompt_tokens=64.0), loads)
    assert 0 < picks.count(1) < 0.45 * picks.count(0)
    assert picks.count(2) == 0
    assert 20 <= picks.count(0) <= 30, "half of all, but for what the slow one has"


def test_once_the_fastest_one_is_gone_the_others_take_its_place() -> None:
    policy = learned(fast=1.0, slow=6.0)
    policy.follow(Plan(Limits(0.5, 0.5), Limits(), 10.0))
    assert given_to(policy, [InstanceLoad("slow", 0, PLACES)], 500) == [32]
    assert given_to(policy, [InstanceLoad("slow", 0, PLACES), InstanceLoad("fast", 0, PLACES)], 500) == [0, 32]


def test_an_instance_of_which_nothing_is_known_is_given_as_much_as_the_fastest() -> None:
    policy = Balanced(4)
    policy.follow(Plan(Limits(0.5, 0.5), Limits(), 10.0))
    assert given_to(policy, [InstanceLoad("a", 0, PLACES), InstanceLoad("b", 0, PLACES)], 500) == [32, 32]


def test_a_new_instance_is_not_taken_for_the_mean_of_the_others() -> None:
    policy = learned(fast=1.0, one=4.0, two=4.0, three=4.0)
    policy.follow(Plan(Limits(0.3, 0.3), Limits(), 10.0))
    loads = [InstanceLoad(name, 0, PLACES) for name in ("fast", "one", "two", "three", "new")]
    fast, *slow, new = given_to(policy, loads, 500)
    assert new == fast == 19
    assert slow == [0, 0, 0]


def test_one_that_has_said_little_is_compared_with_nobody() -> None:
    policy = learned(fast=1.0)
    policy.follow(Plan(Limits(0.3, 0.3), Limits(), 10.0))
    loads = [InstanceLoad("fast", 0, PLACES), InstanceLoad("new", 0, PLACES)]
    for k in range(12):
        policy.report(report_of("new", slower(0.2), k, 10))
    assert policy.speed("new") is not None
    assert given_to(policy, loads, 500) == [19, 19]
    for k in range(12):
        policy.report(report_of("new", slower(0.2), k, 10))
    assert given_to(policy, loads, 500) == [0, 19]


def test_until_a_new_instance_has_said_enough_its_kind_stands_in() -> None:
    policy = Balanced(4)
    own = [InstanceLoad("own", 0, PLACES, reserved=True)]
    others = [InstanceLoad(name, 0, PLACES) for name in ("one", "new")]
    policy.assign(Queue(0), [*own, *others])
    for k in range(40):
        for name, by in (("own", 0.5), ("one", 1.0)):
            policy.report(report_of(name, slower(by), k, 10))
    found = policy.engine(others[1], 0.0)
    assert found is not None
    assert not found.known
    assert found.speed.step_s(20, 20000) == pytest.approx(TRUTH.step_s(20, 20000), rel=0.02)


def test_who_joined_last_is_remembered_when_it_is_gone_and_comes_first() -> None:
    policy = learned(first=1.0, slow=3.0, own=1.0)
    loads = [InstanceLoad("first", 0, PLACES), InstanceLoad("slow", 0, PLACES)]

    def told() -> list[float]:
        for load in [*loads, InstanceLoad("own", 0, PLACES, reserved=True)]:
            policy.engine(load, 0.0)
        return [round(engine.speed.base_s / TRUTH.base_s, 1) for engine in policy.joined()]

    assert told() == [3.0, 1.0]
    policy.gone("slow")
    del loads[1]
    assert told() == [3.0, 1.0], "it joined after the other"
    for k in range(COMPARED):
        policy.report(report_of("third", slower(2.0), k, steps=50))
        loads[1:] = [InstanceLoad("third", 0, PLACES)]
        if k < COMPARED - 1:
            assert told() == [3.0, 1.0], "too little is known of it"
    assert told() == [2.0, 3.0, 1.0]
    for k in range(2 * JOINED):
        policy.gone(loads.pop().instance)
        loads.append(InstanceLoad(f"other-{k}", 0, PLACES))
        for n in range(COMPARED):
            policy.report(report_of(f"other-{k}", slower(2.0), n, steps=50))
        found = told()
    assert found == [2.0] * JOINED


def test_of_those_that_are_gone_the_ones_that_joined_last_are_remembered_whoever_left_last() -> None:
    names = [f"m{k}" for k in range(JOINED + 2)]
    policy = learned(**{name: 1.0 + k for k, name in enumerate(names)})
    for name in names:
        policy.engine(InstanceLoad(name, 0, PLACES), 0.0)
    for name in reversed(names):
        policy.gone(name)
    assert [round(engine.speed.base_s / TRUTH.base_s) for engine in policy.joined()] == list(range(JOINED + 2, 2, -1))


def test_a_machine_whose_instance_was_away_has_joined_once_and_last() -> None:
    arrivals, one = Arrivals(), engine()
    for name, machine in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("c1", "")):
        arrivals.see(name, replace(one, machine=machine))
    assert [engine.machine for engine in arrivals.newest()] == ["", "b", "a"]
    for back in range(3):
        arrivals.gone("a1" if not back else f"a1 again {back - 1}")
        arrivals.see(f"a1 again {back}", replace(one, machine="a"))
        assert [engine.machine for engine in arrivals.newest()] == ["a", "", "b"]
    arrivals.see("c1", replace(one, machine="c"))
    assert [engine.machine for engine in arrivals.newest()] == ["a", "c", "b"], "nobody knew where it was"
    for name in ("a2", "a1 again 2", "b1", "c1"):
        arrivals.gone(name)
    assert [engine.machine for engine in arrivals.newest()] == ["a", "c", "b"]
    for k in range(JOINED + 3):
        arrivals.see(f"d{k}", replace(one, machine=f"d{k}"))
        arrivals.gone(f"d{k}")
    assert [engine.machine for engine in arrivals.newest()] == [f"d{k}" for k in range(JOINED + 2, 2, -1)]


def test_one_that_was_too_slow_is_tried_with_a_few_samples_now_and_then_and_comes_back() -> None:
    policy = learned(fast=1.0, slow=6.0)
    policy.follow(Plan(Limits(0.5, 0.5), Limits(), 10.0))
    loads = [InstanceLoad(name, 0, PLACES) for name in ("fast", "slow")]

    def batch(slow_is: float) -> int:
        _, slow = given_to(policy, loads, 500)
        for k in range(40):
            for name, most, by in (("fast", 32, 1.0), ("slow", slow, slow_is)):
                running = most - k * most // 40
                context = running * (CONTEXT + 20 * k)
                if running:
                    policy.report(
                        Report(name, 10 * slower(by).step_s(running, context), running, context, 10 * running, 0)
                    )
        policy.batch_ended()
        return slow

    tried = [batch(6.0) for _ in range(60)]
    assert set(tried) == {0, 4}
    assert 2 <= sum(tried) // 4 <= 5
    back = [batch(1.0) for _ in range(60)]
    assert back[-1] == 32


def test_without_a_plan_and_with_a_weight_of_one_s_own_nobody_is_handicapped() -> None:
    class Level(Balanced):
        def weight(self, load: InstanceLoad) -> float:
            return 1.0

    loads = [InstanceLoad("fast", 0, PLACES), InstanceLoad("slow", 0, PLACES)]
    usual = learned(fast=1.0, slow=6.0)
    usual.follow(Plan(Limits(), Limits(), 10.0))
    assert given_to(usual, loads, 20)[1] == 0
    assert len(usual.assign(Queue(4, coming=4, prompt_tokens=64.0), loads[1:])) > 0, "a batch that no plan is for"
    level = Level(4)
    level.curves, level.fleet_curve, level.lengths = usual.curves, usual.fleet_curve, usual.lengths
    level.follow(Plan(Limits(), Limits(), 10.0))
    assert given_to(level, loads, 20) == [10, 10]


def test_kinds_are_not_compared_with_each_other() -> None:
    policy = learned(own=1.0, slow=6.0)
    policy.follow(Plan(Limits(0.5, 0.5), Limits(0.5, 0.5), 10.0))
    loads = [InstanceLoad("own", 0, PLACES, reserved=True), InstanceLoad("slow", 0, PLACES)]
    assert given_to(policy, loads, 500) == [32, 32]


def moves(policy: Balanced, held: dict[str, list[PlacedSample]]) -> list[Move]:
    loads = [
        InstanceLoad(name, len(samples), PLACES, pending=sum(not sample.running for sample in samples))
        for name, samples in held.items()
    ]
    policy.assign(Queue(0, elapsed_s=1.0, prompt_tokens=64.0), loads)
    return policy.moves(0, loads, held.__getitem__)


def test_an_idle_fast_instance_takes_what_a_slow_one_has_however_often_that_was_moved() -> None:
    policy = learned(fast=1.0, slow=6.0)
    found = moves(policy, {"slow": rows(1, 3, tokens=500, moves=9), "fast": []})
    assert {(move.source, move.target) for move in found} == {("slow", "fast")}
    assert len(found) == 3


def test_a_move_that_halves_nothing_is_not_made_again_and_again() -> None:
    policy = learned(one=1.0, other=1.0)
    assert moves(policy, {"one": rows(1, 20, tokens=500, moves=0), "other": []})
    assert not moves(policy, {"one": rows(1, 20, tokens=500, moves=9), "other": []})
    never = learned(fast=1.0, slow=6.0)
    never.max_moves = 0
    assert not moves(never, {"slow": rows(1, 3, tokens=500), "fast": []})


def test_a_slow_one_is_not_left_to_end_last_before_lengths_are_known() -> None:
    policy = learned(lengths=False, slow=6.0, fast=1.0)
    found = moves(policy, {"slow": rows(1, 2, tokens=500), "fast": rows(10, 3, tokens=500)})
    assert {(move.source, move.target) for move in found} == {("slow", "fast")}


def test_of_idle_instances_the_fastest_takes_it() -> None:
    policy = learned(slow=2.0, fast=1.0, slowest=6.0)
    found = moves(policy, {"slow": [], "slowest": rows(1, 2, tokens=500), "fast": []})
    assert {move.target for move in found} == {"fast"}


def test_one_sample_s_chances_do_not_decide_when_an_instance_ends() -> None:
    """Whatever its lease is, a single one is taken to be as long as half of those that came so far."""
    for lease in range(1, 200):
        policy = learned(fast=1.0, slow=6.0)
        assert moves(policy, {"slow": rows(lease, 1, tokens=1000), "fast": []}), lease


def test_what_ran_and_waits_by_choice_is_not_sent_back_to_a_slower_one() -> None:
    policy = learned(fast=1.0, slow=2.0)
    policy.follow(Plan(Limits(), Limits(), 10.0))
    waiting = {"fast": rows(1, 64) + rows(100, 4, running=False, moves=1), "slow": rows(200, 1)}
    assert not moves(policy, waiting)
    fresh = {"fast": rows(1, 64) + rows(100, 4, running=False), "slow": rows(200, 1)}
    assert {move.lease for move in moves(policy, fresh)} == {100, 101, 102, 103}
    back = {"slow": rows(1, 64) + rows(100, 4, running=False, moves=1), "fast": rows(200, 1)}
    assert {move.lease for move in moves(policy, back)} == {100, 101, 102, 103}


def test_such_a_sample_goes_to_another_that_is_as_fast() -> None:
    policy = learned(fast=1.0, other=1.0, slow=2.0)
    policy.follow(Plan(Limits(), Limits(), 10.0))
    held = {"fast": rows(1, 64) + rows(100, 4, running=False, moves=1), "other": rows(200, 50), "slow": rows(300, 1)}
    assert {(move.lease, move.target) for move in moves(policy, held)} == {(100 + k, "other") for k in range(4)}


def test_where_contexts_fill_its_memory_a_target_is_not_taken_to_run_all_at_once() -> None:
    """What it has room for goes by the contexts that would be there, and they are long."""

    def taken(memory: float) -> int:
        policy = learned(one=1.0, other=1.0)
        policy.report(Report("one", 1.0, 10.0, 1e6, 100, 0, pending=1))
        policy.report(Report("other", 1.0, 10.0, memory, 100, 0, pending=1))
        return len(moves(policy, {"one": rows(1, 30, tokens=1500), "other": rows(100, 4, tokens=1500)}))

    assert taken(1e6) == 6
    assert taken(3 * 1700.0) == 0, "four run there that have room for three"
