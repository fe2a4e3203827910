"""Memory that fills before places do: it is learned, planned with, and not filled beyond."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.rollout.balance import InstanceLoad, PlacedSample, Queue, Report
from penstock.rollout.balanced import Balanced
from penstock.rollout.curves import Speed
from penstock.rollout.offload import Offload, WindowView
from penstock.rollout.step_replay import Engine, Limits, Plan, Training, replay

WIDE = Limits(), Limits()
SPEED = Speed(0.01, 1e-4, 1e-7, 1e-5)


def report(instance: str, running: float, context: float, pending: int = 0) -> Report:
    return Report(instance, 10.0, running, context, round(running * 500), 0, pending)


def test_the_context_at_which_samples_wait_is_learned_and_bounds_places() -> None:
    policy = Balanced(8)
    load = InstanceLoad("a", 0, 256)
    policy.report(report("a", 20, 40_000))
    assert policy.places(load) == 256
    policy.report(report("a", 50, 100_000, pending=30))
    assert policy.memory("a") == 100_000
    assert policy.places(load) == 50
    for _ in range(100):
        policy.report(report("a", 10, 20_000))
    assert policy.memory("a") == 100_000
    assert policy.memory("unknown") == 100_000
    policy.gone("a")
    assert policy.places(load) == 256


def test_a_new_instance_s_memory_is_like_the_smallest_of_its_own_kind_whenever_that_is_told() -> None:
    policy = Balanced(8)
    loads = [InstanceLoad("a", 0, 256), InstanceLoad("b", 0, 256), InstanceLoad("own", 0, 256, reserved=True)]
    new = [InstanceLoad("c", 0, 256), InstanceLoad("own2", 0, 256, reserved=True)]
    for name, context in (("a", 100_000), ("b", 90_000), ("own", 40_000)):
        policy.report(report(name, 50, context, pending=30))
    policy.assign(Queue(0), loads + new)
    assert [policy.memory(load.instance) for load in new] == [90_000, 40_000]
    policy.report(report("own", 50, 50_000, pending=30))
    policy.gone("b")
    assert [policy.memory(load.instance) for load in new] == [100_000, 50_000]
    # One of which the kind is told after it was asked about.
    policy.report(report("d", 50, 60_000, pending=30))
    assert policy.memory("c") == 100_000
    policy.assign(Queue(0), [InstanceLoad("d", 0, 256)])
    assert policy.memory("c") == 60_000


def test_answers_that_are_known_say_how_many_fit() -> None:
    policy = Balanced(8)
    policy.report(report("a", 50, 100_000, pending=1))
    for k in range(64):
        policy.finished(k, 2000)
    policy.batch_ended()
    # On its way to 2000 tokens an answer has 1000 on average.
    assert policy.places(InstanceLoad("a", 0, 256)) == 100


def test_a_replay_with_little_memory_takes_longer_and_finishes_everything() -> None:
    groups = [[800] * 8 for _ in range(16)]
    training = Training(1e-5, 16)

    def step_s(memory: float) -> float:
        return replay(groups, 50, [Engine(SPEED, 64, 0.0, memory)] * 2, [], training, WIDE, 0.0).step_s

    assert step_s(1e9) == pytest.approx(step_s(60_000), rel=1e-6)
    assert step_s(20_000) > 1.2 * step_s(60_000)
    assert step_s(1000) > step_s(20_000)


def test_nothing_is_prefilled_twice_where_the_width_leaves_room_to_grow() -> None:
    """With memory for 16 whole answers, 16 at a time never overflow it; 64 do, and pay for that in prefill alone."""
    groups = [[500] * 8 for _ in range(16)]
    dear = Speed(0.0, 1e-4, 0.0, 1e-3)
    engine = Engine(dear, 64, 0.0, 16 * 550 + 16 * 256, 256)
    few = Limits(0.25, 0.25), Limits()
    narrow, wide = (replay(groups, 50, [engine], [], Training(0.0, 16), both, 0.0).step_s for both in (few, WIDE))
    assert narrow < wide


def test_before_any_length_is_known_the_tail_of_a_step_is_levelled_too() -> None:
    policy = Balanced(8)
    for k in range(32):
        wall_s = 500 * SPEED.step_s(4 + k, 1000.0 * (4 + k))
        policy.report(Report("a" if k % 2 else "b", wall_s, 4 + k, 1000.0 * (4 + k), 500 * (4 + k), 0))
    rows = {"a": [PlacedSample(k, 5000, 5500, True) for k in range(40)], "b": []}
    moves = policy.moves(0, [InstanceLoad("a", 40, 64), InstanceLoad("b", 0, 64)], rows.__getitem__)
    assert moves
    assert {move.target for move in moves} == {"b"}
    assert policy.assign(Queue(0), []) == []


def test_the_first_window_ends_at_a_power_of_the_reserved_engines_share() -> None:
    # Of 4 and 2 machines that is 0.77 of the samples, of 4 and 8 it is 0.49.
    policy = Offload()
    assert policy.review(WindowView(10.0, 2, 0.75, reserved=4)).generate
    assert not policy.review(WindowView(10.0, 2, 0.78, reserved=4)).generate
    assert policy.review(WindowView(10.0, 8, 0.47, reserved=4)).generate
    assert not policy.review(WindowView(10.0, 8, 0.5, reserved=4)).generate


def test_about_its_planned_end_a_window_follows_what_is_finished() -> None:
    policy = Offload(plans={2: Plan(*WIDE, 100.0, finished=0.5)})
    assert policy.review(WindowView(105.0, 2, 0.4)).generate
    assert not policy.review(WindowView(95.0, 2, 0.6)).generate
    assert policy.review(WindowView(70.0, 2, 1.0)).generate
    assert not policy.review(WindowView(130.0, 2, 0.0)).generate


def test_what_an_engine_keeps_free_for_growth_is_learned_from_when_it_lets_nobody_in() -> None:
    policy = Balanced(8)
    load, other = InstanceLoad("a", 0, 256), InstanceLoad("b", 0, 256)

    def planned() -> float:
        engine = policy.engine(load, 0.0)
        assert engine is not None
        return engine.reserve

    for k in range(20):
        policy.report(report("a", 10 + k, 1000.0 * (10 + k)))
    assert planned() == 0, "nobody has waited yet"
    # It is full at 74,240 tokens with 100 sequences, and holds 100,000 when these have grown.
    for context, running in ((74_240, 100), (90_000, 100), (100_000, 99)):
        policy.report(report("a", running, context, pending=10))
    policy.finished(0, 500)
    policy.batch_ended()
    assert planned() == pytest.approx((100_000 - 74_240) / 101)
    known = policy.engine(load, 0.0)
    assert known is not None
    assert policy.engine(other, 0.0) == replace(known, known=False), "a new one is like those that are known"
    # Batches in which nobody waits say nothing; one that fills its memory to the brim keeps nothing free.
    policy.finished(0, 500)
    policy.batch_ended()
    assert planned() == pytest.approx((100_000 - 74_240) / 101)
    policy.report(report("a", 120, 100_000, pending=10))
    policy.finished(0, 500)
    policy.batch_ended()
    assert planned() == 0


def test_a_replay_keeps_free_what_the_engine_does() -> None:
    """Memory for four whole answers, and tokens kept free for each: two or four at a time."""
    groups = [[300] * 8 for _ in range(4)]

    def step_s(reserve: float) -> float:
        engine = Engine(Speed(0.01, 0.0, 0.0, 0.0), 64, 0.0, 4 * 350.0, reserve)
        return replay(groups, 50, [engine], [], Training(0.0, 8), WIDE, 0.0).step_s

    assert step_s(600.0) > 1.5 * step_s(300.0)
