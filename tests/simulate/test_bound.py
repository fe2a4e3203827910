"""The clairvoyant bound: nothing that a simulator can be made to do is faster, and each part of it counts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import MACHINE, small_profile

from penstock.rollout.balance import InstanceLoad, Move, PlacedSample, Queue, ShortestQueue
from penstock.rollout.curves import Speed
from penstock.rollout.offload import StepTimes, Window, WindowView
from penstock.rollout.step_replay import Engine, Limits, replay
from penstock.rollout.step_replay import Training as Trained
from penstock.simulate import bound_phases
from penstock.simulate.baselines import make_strategy
from penstock.simulate.bound import least_run_s, lower_bound_s
from penstock.simulate.bound_phases import SIMPSON, TRAPEZOIDS, Cost, Demands, Prices
from penstock.simulate.lengths import step_samples
from penstock.simulate.machine import Machine, SimSample
from penstock.simulate.profiles import Lengths, Profile, Training, shipped
from penstock.simulate.strategy import FixedSize, Strategy
from penstock.simulate.traces import from_counts, static_trace
from penstock.simulate.world import World

CLOSE = 1 - 1e-6


class AnyBalance(ShortestQueue):
    """Does whatever chance says, within what a policy may do."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__(max_pending=4)
        self.rng, self.width = rng, width

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        rooms = [self.width - load.samples for load in loads]
        picks = []
        for _ in range(queue.waiting):
            free = [k for k, room in enumerate(rooms) if room > 0]
            if not free:
                break
            picks.append(self.rng.choice(free))
            rooms[picks[-1]] -= 1
        return picks

    def moves(
        self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        if len(loads) < 2 or self.rng.random() < 0.7:
            return []
        source, target = self.rng.sample([load.instance for load in loads], 2)
        return [Move(source, sample.lease, target) for sample in placed(source) if self.rng.random() < 0.3]


class AnyWindow:
    def __init__(self, rng: random.Random) -> None:
        self.rng, self.ends = rng, rng.random()

    def review(self, view: WindowView) -> Window:
        return Window(view.fleet == 0 or view.finished < self.ends, "chance")

    def ended(self, times: StepTimes) -> None:
        self.ends = self.rng.random()


def clairvoyant(profile: Profile, seed: int, order: str) -> Callable[[int], list[SimSample]]:
    """Samples of a step in an order that only one who knows their lengths can have."""

    def samples(number: int) -> list[SimSample]:
        made, per = step_samples(profile, number, seed), profile.samples_per_prompt
        groups = [made[k : k + per] for k in range(0, len(made), per)]
        if order != "as they are":
            groups.sort(key=lambda group: max(sample.length for sample in group), reverse=order == "longest first")
        flat = [sample for group in groups for sample in group]
        return [SimSample(k, k // per, sample.prompt_tokens, sample.length) for k, sample in enumerate(flat)]

    return samples


profiles = st.builds(
    lambda kv, places, base, sequence, context, faster, train, engines, spread, count, wait, reward, pull, share, own, ahead: (  # noqa: E501
        small_profile(
            reserved_beside=own,
            prompts=count,
            reserved_instances=engines,
            difference_gb=pull[0],
            encode_s=pull[1],
            spot=MACHINE.model_copy(
                update={
                    "apply_s": pull[2],
                    "load_s": pull[3],
                    "shared_prompts": share[0],
                    "prefill_s_per_token": share[2],
                    "kv_tokens": kv,
                    "max_running": places,
                    "step_base_s": base,
                    "sequence_s": sequence,
                    "context_s": context,
                }
            ),
            reserved=MACHINE.model_copy(
                update={"step_base_s": base / faster, "context_s": context / faster, "shared_prompts": share[1]}
            ),
            training=Training(
                s_per_token=train,
                optimizer_s=0.2,
                switch_s=wait,
                micro_batch_samples=8,
                reward_s=reward,
                ahead_share=ahead[0],
                ahead_samples=ahead[1],
            ),
            lengths=Lengths(prompt_tokens=share[3], median_tokens=300, spread=spread, max_tokens=900),
        )
    ),
    st.sampled_from([700, 2_000, 20_000]),
    st.sampled_from([2, 8, 32]),
    st.sampled_from([0.002, 0.01, 0.05]),
    st.sampled_from([0.0, 1e-4, 2e-3]),
    st.sampled_from([0.0, 1e-6, 1e-5]),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([1e-5, 4e-4, 2e-3]),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.6, 1.2]),
    st.integers(1, 16),
    st.sampled_from([0.0, 0.3, 3.0]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from(
        [(None, 0.0, 0.0, 0.0), (None, 0.0, 0.0, 0.5), (0.0, 0.0, 0.0, 0.0), (0.02, 0.2, 0.1, 0.1), (0.5, 2, 0, 0)]
    ),
    st.sampled_from(
        [
            (False, False, 1e-5, 32),
            (True, True, 1e-5, 32),
            (True, True, 1e-3, 400),
            (True, True, 0.0, 400),
            (True, False, 1e-3, 400),
            (False, True, 1e-3, 400),
            (False, False, 1e-3, 400),
        ]
    ),
    st.booleans(),
    st.sampled_from([(0.0, 1), (0.25, 4), (0.6, 1), (0.95, 1)]),
)


@settings(max_examples=40, deadline=None)
@given(
    profile=profiles,
    counts=st.lists(st.tuples(st.floats(0.5, 40.0), st.integers(0, 5)), max_size=6),
    first=st.integers(0, 5),
    name=st.sampled_from(["any", "penstock", "rlboost", "colocated", "disaggregated"]),
    order=st.sampled_from(["as they are", "shortest first", "longest first"]),
    width=st.sampled_from([1, 3, 8, 32]),
    seed=st.integers(0, 1000),
)
def test_no_policy_beats_the_bound_even_one_that_knows_the_lengths(
    profile: Profile,
    counts: list[tuple[float, int]],
    first: int,
    name: str,
    order: str,
    width: int,
    seed: int,
) -> None:
    at, series = 0.0, [(0.0, first)]
    for gap, count in counts:
        at += gap
        series.append((at, count))
    trace = from_counts(series, 1e6, seed)
    if name == "any":
        rng = random.Random(seed)
        policies = AnyBalance(rng, width), AnyWindow(rng), FixedSize(4)
        strategy = Strategy("any", *policies, differences=seed % 2 == 0, looks_ahead=seed % 3 > 0)
    else:
        strategy = make_strategy(name, profile, ceiling=4)
    samples = clairvoyant(profile, seed, order)
    outcome = World(profile, trace, strategy, seed, samples=samples).run(steps=3)
    for step in outcome.steps:
        assert step.times.step_s >= step.bound_s * CLOSE
    if strategy.spot:
        assert outcome.wall_s >= least_run_s(profile, trace, 4, samples, 3) * CLOSE


@pytest.mark.parametrize("machines", [1, 40])
def test_the_bound_counts_training_after_the_first_micro_batch(machines: int) -> None:
    profile = small_profile()
    samples = step_samples(profile, 0, 0)
    train_s = profile.training.s_per_token * sum(s.length + s.prompt_tokens for s in samples)
    bound_s = lower_bound_s(profile, samples, 0.0, [(0.0, 1e9)] * machines)
    longest = sorted(max(s.length for s in samples[k : k + 4]) for k in range(0, len(samples), 4))
    # Two groups of four make a micro-batch of eight.
    assert bound_s >= longest[1] * profile.spot.step_base_s + train_s + profile.training.optimizer_s


def test_what_is_there_later_is_trained_on_later_however_many_machines_there_are() -> None:
    """Two groups of two: 10 and 20 tokens, 30 and 400; a token takes 0.01 s alone, and 0.01 s to train on."""
    machine = MACHINE.model_copy(update={"sequence_s": 0.0, "context_s": 0.0, "prefill_s_per_token": 0.0})
    lengths = (10, 20, 30, 400)
    samples = [SimSample(k, k // 2, 0, length) for k, length in enumerate(lengths)]

    def bound_s(ahead: float, least: int = 1, micro_batch: int = 2) -> float:
        training = Training(s_per_token=0.01, micro_batch_samples=micro_batch, ahead_share=ahead, ahead_samples=least)
        profile = small_profile(
            prompts=2, samples_per_prompt=2, spot=machine, reserved=machine, reserved_instances=0, training=training
        )
        return lower_bound_s(profile, samples, 0.0, [(0.0, 1e9)] * 1000)

    # Whole groups at 0.2 and 4 s: what is trained on the second one comes behind that.
    assert bound_s(0.0) == pytest.approx(4.0 + 4.3)
    assert bound_s(0.0, micro_batch=4) == pytest.approx(4.0 + 4.6)
    # Half of it as samples come, the one of 30 tokens at 0.3 s.
    assert bound_s(0.5) == bound_s(0.5, least=2) == pytest.approx(4.0 + 4.3 - 0.15)
    assert bound_s(0.5, least=4, micro_batch=4) == pytest.approx(4.0 + 4.6)


def test_a_step_without_remote_machines_takes_generating_and_training() -> None:
    profile = small_profile(reserved_instances=1, training=Training(s_per_token=4e-4, micro_batch_samples=8))
    samples = step_samples(profile, 0, 0)
    machine = Machine("m", MACHINE, True)
    for sample in samples:
        machine.give(sample)
    machine.settle(0.0)
    while (due := machine.next_at()) is not None:
        machine.advance(due)
        machine.settle(due)
    train_s = profile.training.s_per_token * sum(s.length + s.prompt_tokens for s in step_samples(profile, 0, 0))
    bound_s = lower_bound_s(profile, step_samples(profile, 0, 0), 0.0, [])
    assert 0.8 * (machine.busy_s + train_s) < bound_s <= machine.busy_s + train_s


def test_batches_that_are_wide_are_slow_and_those_that_are_narrow_waste_machines() -> None:
    """Neither the machines' seconds nor a single answer's forbid this step, but both together do."""
    profile = small_profile(
        prompts=64,
        training=Training(s_per_token=2e-5, micro_batch_samples=8),
        spot=MACHINE.model_copy(update={"max_running": 10**6, "kv_tokens": 10**9}),
        lengths=Lengths(prompt_tokens=1, median_tokens=300, spread=0.0, max_tokens=900),
    )
    samples = step_samples(profile, 0, 0)
    machine = profile.spot
    tokens = sum(sample.length for sample in samples)
    work_s = tokens * (machine.sequence_s + machine.context_s * 151)
    alone_s = 300 * (machine.step_base_s + machine.sequence_s + machine.context_s * 151)
    train_s = profile.training.s_per_token * (tokens + len(samples))
    bound_s = lower_bound_s(profile, samples, 0.0, [(0.0, 1e9)] * 4)
    assert bound_s > 1.02 * max(work_s / (4 + profile.reserved_instances), alone_s + train_s)


def test_a_run_on_a_trace_takes_at_least_as_long_as_with_all_its_machines_all_the_time() -> None:
    profile = small_profile()
    coming = from_counts([(0.0, 1), (30.0, 4)], 1e6)
    samples = clairvoyant(profile, 0, "as they are")
    all_s = least_run_s(profile, static_trace(4, 1e9), 4, samples, 3)
    assert least_run_s(profile, coming, 4, samples, 3) > all_s
    assert least_run_s(profile, static_trace(9, 1e9), 4, samples, 3) == pytest.approx(all_s)


@pytest.mark.parametrize("kv_tokens", [700, 10**6])
def test_a_shared_prompt_is_prefilled_and_held_once_in_the_bound_and_read_by_each(kv_tokens: int) -> None:
    """On machines whose time goes into prefill alone, and on such as are full of prompts."""
    full = kv_tokens == 700
    spot = MACHINE.model_copy(update={"prefill_s_per_token": 0.0 if full else 1e-3, "kv_tokens": kv_tokens})
    profile = small_profile(
        spot=spot,
        reserved=spot,
        training=Training(s_per_token=1e-6, micro_batch_samples=8),
        lengths=Lengths(prompt_tokens=400, median_tokens=100, spread=0.0, max_tokens=900),
    )
    shared = spot.model_copy(update={"shared_prompts": True})
    samples, ready = step_samples(profile, 0, 0), [(0.0, 1e9)]
    each_s = lower_bound_s(profile, samples, 0.0, ready)
    once_s = lower_bound_s(profile.model_copy(update={"spot": shared, "reserved": shared}), samples, 0.0, ready)
    one_kind_s = lower_bound_s(profile.model_copy(update={"spot": shared}), samples, 0.0, ready)
    assert once_s < 0.8 * each_s
    assert once_s <= one_kind_s <= each_s
    # All its prompts read by none of them, on one machine: less than that it can't be.
    unread = profile.model_copy(
        update={kind: shared.model_copy(update={"context_s": 0.0}) for kind in ("spot", "reserved")}
    )
    assert lower_bound_s(unread, samples, 0.0, ready) < once_s


def test_only_the_first_version_of_a_machine_is_pulled_whole_in_the_bound_of_a_run() -> None:
    whole = small_profile(weights_gb=10.0)
    changed = whole.model_copy(update={"difference_gb": 0.1})
    one, three = (
        [least_run_s(p, static_trace(4, 1e9), 4, clairvoyant(p, 0, "as they are"), steps) for p in (whole, changed)]
        for steps in (1, 3)
    )
    assert one[0] == one[1]
    assert three[1] < three[0] - 1
    # Who comes in mid-run has to pull its first version whole, whatever it costs to follow.
    coming = from_counts([(0.0, 0), (30.0, 4)], 1e6)
    free = whole.model_copy(update={"difference_gb": 0.0})
    assert least_run_s(free, coming, 4, clairvoyant(free, 0, "as they are"), 6) > least_run_s(
        small_profile(weights_gb=0.0), coming, 4, clairvoyant(free, 0, "as they are"), 6
    )


def test_prices_that_change_within_a_step_say_more_where_machines_are_plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = shipped("qwen3-8b")
    samples, ready = step_samples(profile, 2, 0), [(5.3, 1e9)] * 8
    changing_s = lower_bound_s(profile, samples, 0.0, ready)
    monkeypatch.setattr(bound_phases, "CLIMBS", 0)
    # Best found by annealing with all lengths known: 313 s.
    assert 1.03 * lower_bound_s(profile, samples, 0.0, ready) < changing_s < 313


costs = st.builds(
    lambda base, sequence, context, prefill, part, shared: Cost(
        base, sequence, context, prefill, part * context, shared
    ),
    st.floats(1e-4, 1e-1),
    st.floats(0, 1e-2),
    st.floats(1e-9, 1e-4),
    st.sampled_from([0.0, 1e-5]),
    st.sampled_from([0.125, 1.0]),
    st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(
    remote=costs,
    reserved=costs,
    at=st.builds(
        Prices, st.floats(1e-6, 10), st.floats(0.1, 4), st.floats(0.05, 2), st.floats(0.01, 1), st.floats(1, 500)
    ),
    group=st.lists(st.tuples(st.integers(1, 2_000), st.integers(1, 2_000)), min_size=1, max_size=3),
    ahead=st.sampled_from([0.0, 0.25, 0.8]),
)
def test_a_token_pays_no_more_than_the_cheapest_place_asks(
    remote: Cost, reserved: Cost, at: Prices, group: list[tuple[int, int]], ahead: float
) -> None:
    """The sum over tokens one by one, and the rule with which prices are looked for, against the one that counts."""
    demands = Demands([group], [3.0], remote, reserved, TRAPEZOIDS, ahead)
    paid = demands.paid(at, at.turn_s)
    weights = [weights for _, weights, _ in demands._samples[0]]
    assert sum(map(sum, weights)) == pytest.approx(3.0)
    assert sum(own for own, _ in weights) == pytest.approx(3.0 * ahead)
    soon = later = 0.0
    for (prompt, tokens), (own_s, group_s) in zip(group, weights):
        w = at.price * (own_s + group_s)
        between = (own_s + at.early * group_s) / (own_s + group_s)
        saved = (1 - at.early) * at.price * at.turn_s
        behind, ends_before = saved * (own_s + group_s), saved * group_s
        for token in range(tokens):
            remote_s, reserved_s = (
                c.sequence + c.prompt * prompt + c.context * (token + 0.5) for c in (remote, reserved)
            )
            asked = [
                (price**0.5 * c**0.5 + (base * w * share) ** 0.5) ** 2
                for price, c, base, share in (
                    (1.0, remote_s, remote.base, 1.0),
                    (at.reserved, reserved_s, reserved.base, 1.0),
                    (1.0, remote_s, remote.base, at.early),
                    (at.reserved, reserved_s, reserved.base, at.early),
                    (at.late, remote_s, remote.base, 1.0),
                    (1.0, remote_s, remote.base, between),
                    (at.reserved, reserved_s, reserved.base, between),
                )
            ]
            soon += min(asked[:2])
            behind += min(asked[2:5])
            ends_before += min(asked[5:])
        later += min(behind, ends_before) if ahead else behind
    prompts = [prompt for prompt, _ in group]
    prefill = (max(prompts) if remote.shared or reserved.shared else sum(prompts)) * min(
        remote.prefill, at.late * remote.prefill, at.reserved * reserved.prefill
    )
    # The middle of a token is no less than its mean: costs are concave.
    assert paid <= (min(soon, later) + prefill) * (1 + 1e-9)
    assert paid >= 0.9 * (min(soon, later) + prefill)
    assert Demands([group], [3.0], remote, reserved, SIMPSON, ahead).paid(at, at.turn_s) == pytest.approx(paid, rel=0.1)


@pytest.mark.parametrize(("machines", "lengths"), [(1, (300, 100, 200, 50)), (2, (90, 400, 210, 330)), (3, (250,) * 4)])
def test_every_order_width_and_window_of_a_few_samples_takes_at_least_the_bound(
    machines: int, lengths: tuple[int, ...]
) -> None:
    profile = small_profile(
        prompts=4,
        samples_per_prompt=1,
        reserved_instances=1,
        training=Training(s_per_token=2e-3, optimizer_s=0.2, switch_s=0.3, micro_batch_samples=1),
        spot=MACHINE.model_copy(update={"context_s": 2e-5}),
        reserved=MACHINE.model_copy(update={"context_s": 2e-5}),
    )
    samples = [SimSample(k, k, 32, length) for k, length in enumerate(lengths)]
    bound_s = lower_bound_s(profile, samples, 0.0, [(0.5, 1e9)] * machines)
    speed = Speed(MACHINE.step_base_s, MACHINE.sequence_s, 2e-5, MACHINE.prefill_s_per_token)
    engine = Engine(speed, 4, 0.5, MACHINE.kv_tokens)
    trained = Trained(2e-3, 1, 0.3, 0.2)
    best_s = min(
        replay(
            [[length] for length in order], 32, [engine] * machines, [engine], trained, (limits, limits), 0.4 * window
        ).step_s
        for order in itertools.permutations(lengths)
        for limits in (Limits(width / 4, width / 4) for width in range(1, 5))
        for window in range(20)
    )
    assert 0.8 * best_s < bound_s <= best_s
