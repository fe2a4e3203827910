"""What a simulated run tells its policies, and how it does what they say: as a manager would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from simulated import MACHINE, small_profile

from penstock.rollout.balance import InstanceLoad, Move, PlacedSample, Queue, ShortestQueue
from penstock.rollout.offload import Offload
from penstock.simulate.baselines import Algorithm1, Forever, make_strategy
from penstock.simulate.machine import Machine, SimSample
from penstock.simulate.profiles import Prices, Profile, Training
from penstock.simulate.strategy import FixedSize, Strategy
from penstock.simulate.traces import Change, Trace, static_trace
from penstock.simulate.world import World, simulate


class Noted(ShortestQueue):
    """Sends moved samples out backwards, moves one whenever it is asked, and notes what it is told."""

    def __init__(self, max_pending: int = 8, mover: bool = False) -> None:
        super().__init__(max_pending, affinity=False)
        self.mover = mover
        self.queues: list[Queue] = []
        self.loads: list[InstanceLoad] = []
        self.ordered: list[list[int]] = []
        self.lost: list[str] = []
        self.waiting: list[int] = []
        self.moved: list[tuple[bool, int, int]] = []
        """How often the one to be moved had been before, as shown."""

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        self.queues.append(queue)
        self.loads += loads
        return super().assign(queue, loads)

    def order(self, output_tokens: Sequence[int], prompts: Sequence[int]) -> list[int]:
        self.ordered.append(list(prompts))
        return list(range(len(prompts)))[::-1]

    def gone(self, instance: str) -> None:
        self.lost.append(instance)

    def moves(
        self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        self.waiting.append(waiting)
        if not self.mover or len(loads) < 2:
            return []
        rows = [(row, at) for at in (0, 1) for row in placed(loads[at].instance)]
        if not rows:
            return []
        row, at = max(rows, key=lambda found: found[0].moves + found[0].shifts)
        self.moved.append((row.running, row.moves, row.shifts))
        return [Move(loads[at].instance, row.lease, loads[1 - at].instance)]


def world_of(policy: Noted, machines: int = 2, window: bool = False, **changes: object) -> World:
    profile = small_profile(**changes)
    strategy = Strategy("own", policy, Forever() if window else None, FixedSize(machines))
    return World(profile, static_trace(machines, 1e9), strategy)


def test_samples_of_a_lost_machine_go_out_in_the_policy_s_order_and_it_hears_who_is_gone() -> None:
    policy = Noted()
    trace = Trace((Change(0.0, "a", True), Change(0.0, "b", True), Change(1.8, "b", False)), 1e9)
    world = World(small_profile(), trace, Strategy("own", policy, None, FixedSize(2)))
    placed: list[tuple[float, int]] = []
    place = world._place

    def noted(sample: SimSample, machine: Machine) -> None:
        placed.append((world.clock.now, sample.prompt))
        place(sample, machine)

    world._place = noted  # type: ignore[method-assign]
    world.run(steps=1)
    assert policy.lost == ["b"]
    (prompts,) = [found for found in policy.ordered if found]
    assert len(prompts) > 8
    again = [prompt for at_s, prompt in placed if at_s >= 1.8]
    assert again[: len(prompts)] == prompts[::-1] != prompts


def test_engines_that_are_about_to_generate_and_machines_that_pull_count_as_coming() -> None:
    """Weights are there after 0.04 s, and after 4 s on the slow one; the switch takes 0.3 s."""
    policy = Noted()
    profile = small_profile(weights_gb=0.05, kinds={"slow": MACHINE.model_copy(update={"link_gbit_s": 0.1})})
    trace = Trace((Change(0.0, "a", True), Change(0.0, "slow:b", True)), 1e9)
    World(profile, trace, Strategy("own", policy, Forever(), FixedSize(2))).run(steps=1)
    coming = {round(queue.elapsed_s or 0.0, 2): queue.coming for queue in policy.queues}
    assert coming[0.04] == 3
    assert coming[0.3] == 1


def test_a_load_says_who_waits_at_a_machine_and_a_queue_who_waits_for_one() -> None:
    policy = Noted(max_pending=3)
    world_of(policy, spot=MACHINE.model_copy(update={"max_running": 4})).run(steps=1)
    assert {load.pending for load in policy.loads} >= {0, 3}
    assert policy.waiting[0] == 64 - 2 * (4 + 3)
    assert 0 < sorted(policy.waiting)[len(policy.waiting) // 2] < 64


def test_a_sample_that_was_moved_is_shown_with_how_often_and_the_step_counts_all() -> None:
    policy = Noted(mover=True)
    outcome = world_of(policy).run(steps=1)
    assert [moves + shifts for _, moves, shifts in policy.moved[:3]] == [0, 1, 2]
    for (ran, *before), (_, *after) in itertools.pairwise(policy.moved[:3]):
        assert after == [before[0] + ran, before[1] + (not ran)]
    assert {ran for ran, *_ in policy.moved} == {True, False}
    assert outcome.steps[0].moves == len(policy.moved)


@pytest.mark.parametrize(("micro_batch_samples", "batches"), [(4, 16), (6, 8), (8, 8), (9, 6), (64, 1)])
def test_a_micro_batch_is_as_many_groups_as_it_takes(micro_batch_samples: int, batches: int) -> None:
    training = Training(s_per_token=4e-4, micro_batch_samples=micro_batch_samples)
    profile = small_profile(training=training)
    outcome = simulate(profile, static_trace(0, 1e9), make_strategy("colocated", profile), steps=1)
    assert len(outcome.steps[0].trainer_spans) == batches


def planned() -> tuple[Profile, World]:
    profile = small_profile(store_gbit_s=10.0)
    world = World(profile, static_trace(2, 1e9), make_strategy("penstock", profile, machines=2))
    world.run(steps=3)
    return profile, world


def test_plans_are_made_from_what_the_last_step_took() -> None:
    profile, world = planned()
    assert isinstance(world.strategy.window, Offload)
    facts = world.strategy.window.facts
    assert facts is not None
    assert [engine.starts_s for engine in facts.remote] == pytest.approx([1.6, 1.6])
    assert [engine.starts_s for engine in facts.reserved] == [0.3, 0.3]
    training = facts.training
    assert (training.switch_s, training.rest_s, training.micro_batch_samples) == (0.3, 0.2, 8)
    assert training.token_s == world.token_s == pytest.approx(profile.training.s_per_token)
    assert facts.prompt_tokens == 32
    assert [engine.price_per_h for engine in facts.remote] == [3.0, 3.0]
    assert [engine.price_per_h for engine in facts.reserved] == [None, None]


def test_other_numbers_of_machines_are_like_those_that_joined_last() -> None:
    prices = Prices(reserved=40.0, spot=3.0, on_demand=10.0, kinds={"slow": 1.0})
    profile = small_profile(kinds={"slow": MACHINE.slower_by(2.0)}, prices=prices)
    changes = (*(Change(0.0, node, True) for node in ("slow:0", "fast:1")), Change(60.0, "slow:0", False))
    world = World(profile, Trace(changes, 1e9), make_strategy("penstock", profile, machines=2))
    world.run(steps=8)
    assert world.clock.now > 60.0
    assert isinstance(world.strategy.window, Offload)
    facts = world.strategy.window.facts
    assert facts is not None
    assert [engine.price_per_h for engine in facts.remote] == [3.0]
    assert sorted(engine.price_per_h or 0 for engine in facts.joined) == [1.0, 3.0], "the one that is gone as well"


def test_a_window_learns_from_how_each_step_went() -> None:
    profile = small_profile()
    strategy = make_strategy("rlboost", profile, machines=2)
    times = simulate(profile, static_trace(2, 1e9), strategy, steps=1).steps[0].times
    assert isinstance(strategy.window, Algorithm1)
    assert strategy.window.windows == {2: pytest.approx(200.0 + (times.trainer_wait_s - times.remote_wait_s) / 3.0)}
    assert times.remote_wait_s > 0
