"""Moves by choice on the real manager: whatever a policy asks for, each sample ends once and says the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_helpers import SimulatedAgent, World, output_of, submit

from penstock.errors import PolicyError
from penstock.observe.events import SamplesMoved
from penstock.rollout.balance import InstanceLoad, Move, PlacedSample, Queue, Report, ShortestQueue
from penstock.rollout.manager import ManagerConfig
from penstock.sample import SampleId, sample_seed
from penstock.wire import Heartbeat


class Restless(ShortestQueue):
    """Moves what it is told to, sense or none, and remembers what it was told."""

    def __init__(self, max_pending: int) -> None:
        super().__init__(max_pending)
        self.wishes: list[tuple[int, int, int]] = []
        self.lengths: list[int] = []
        self.reports: list[Report] = []
        self.batches = 0
        self.lost: list[str] = []
        self.seen: list[PlacedSample] = []
        self.queues: list[Queue] = []

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        self.queues.append(queue)
        return super().assign(queue, loads)

    def moves(
        self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        found: dict[int, Move] = {}
        while self.wishes:
            source, sample, target = self.wishes.pop()
            one, other = loads[source % len(loads)], loads[target % len(loads)]
            rows = placed(one.instance)
            self.seen = list(rows)
            if rows:
                lease = rows[sample % len(rows)].lease
                # To where it is already: it is put back among the waiting ones.
                found[lease] = Move(one.instance, lease, "" if one is other else other.instance)
        return list(found.values())

    def finished(self, prompt: int, output_tokens: int) -> None:
        self.lengths.append(output_tokens)

    def report(self, report: Report) -> None:
        self.reports.append(report)

    def batch_ended(self) -> None:
        self.batches += 1

    def gone(self, instance: str) -> None:
        self.lost.append(instance)


def restless_world(agents: int) -> tuple[World, Restless, list[SimulatedAgent]]:
    world = World(ManagerConfig(balance="test_balance_manager:Restless", max_pending_per_instance=2))
    policy = world.manager.policy
    assert type(policy).__name__ == "Restless"
    world.publish(0)
    return world, policy, [world.join_ready(f"engine-{k}") for k in range(agents)]  # type: ignore[return-value]


IDLE = Heartbeat(running=0, waiting=0, kv_tokens=0, tokens_generated=0, tokens_prefilled=0, tokens_per_s=0.0)
Wishes = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 2)), max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(Wishes, min_size=1, max_size=12), st.integers(1, 3))
def test_whatever_is_moved_every_sample_ends_once_with_the_same_tokens(rounds: list[list], count: int) -> None:
    world, policy, agents = restless_world(3)
    world.trainer(submit(prompts=[[1, 2], [3], [4, 5, 6]], samples_per_prompt=6, max_new_tokens=20))
    for wishes in rounds:
        policy.wishes = list(wishes)
        world.pass_time(1.5)
        for agent in agents:
            if agent.peer in world.agents:
                world.send(agent, IDLE)
                world.play(agent, count)
    world.play_out()
    for prompt in range(3):
        for replica in range(6):
            got = world.delivered["train-0", prompt, replica]
            ids, logprobs, finish = output_of(sample_seed(0, SampleId("train-0", prompt, replica)), 20)
            assert (got.token_ids, got.logprobs, got.finish) == (ids, logprobs, finish)
    assert len(policy.lengths) == 18
    assert policy.batches == 1


def test_a_policy_is_told_how_long_a_batch_s_prompts_are() -> None:
    world, policy, _ = restless_world(2)
    world.trainer(submit(prompts=[[1, 2], [3], [4, 5, 6]], samples_per_prompt=2))
    assert {queue.prompt_tokens for queue in policy.queues if queue.waiting} == {2.0}


def test_a_moved_sample_goes_on_from_its_last_token_and_is_told_as_moved() -> None:
    world, policy, (one, other) = restless_world(2)
    world.trainer(submit(samples_per_prompt=2, max_new_tokens=40))
    world.play(one)
    assert one.sequences
    policy.wishes = [(0, 0, 1)]
    world.pass_time(1.5)
    assert not one.sequences
    assert one.stop_causes == [""], "nothing is wrong with it that its own screen should tell"
    assert len(other.sequences) == 2
    (event,) = world.of_kind(SamplesMoved)
    assert isinstance(event, SamplesMoved)
    assert (event.instance, event.samples, event.tokens_kept) == ("engine-0", 1, 3)
    policy.wishes = [(1, 0, 0), (1, 1, 0)]
    world.pass_time(1.5)
    assert sorted(row.moves for row in policy.seen) == [0, 1]


def test_what_was_moved_while_it_waited_is_counted_apart_from_what_ran() -> None:
    world, policy, _ = restless_world(0)
    for k in range(2):
        world.join_ready(f"engine-{k}", max_running=1)
    world.trainer(submit(samples_per_prompt=4, max_new_tokens=40))
    policy.wishes = [(0, 1, 1)]
    world.pass_time(1.5)
    assert [row.running for row in policy.seen] == [True, False]
    policy.wishes = [(1, 0, 1)]
    world.pass_time(1.5)
    assert sorted((row.moves, row.shifts) for row in policy.seen) == [(0, 0), (0, 0), (0, 1)]


def test_moves_are_asked_for_no_more_than_once_a_second() -> None:
    world, policy, _ = restless_world(2)
    world.trainer(submit(samples_per_prompt=4, max_new_tokens=40))
    world.pass_time(1.5)
    policy.wishes = [(0, 0, 1)]
    world.pass_time(0.3)
    assert policy.wishes
    world.pass_time(1.0)
    assert not policy.wishes


def test_moves_are_asked_for_at_once_when_a_window_has_ended() -> None:
    world, policy, _ = restless_world(2)
    world.trainer(submit(samples_per_prompt=4, max_new_tokens=40))
    world.pass_time(1.5)
    batch = next(world.manager.tracker.batches())
    loads = [InstanceLoad(instance, 1, 8) for instance in ("engine-0", "engine-1")]
    now, wish = 1e3, (0, 0, 1)

    def asked(loads: list[InstanceLoad], now: float) -> bool:
        policy.wishes = [wish]
        world.manager.balancing.moves(batch, loads, now)
        return policy.wishes == []

    with_own = [*loads, InstanceLoad("own", 1, 8, reserved=True)]
    assert asked(with_own, now)
    assert not asked(with_own, now + 0.1)
    assert asked(loads, now + 0.2)
    assert not asked(loads, now + 0.3)


def test_reports_cover_the_time_between_heartbeats_in_which_an_instance_worked() -> None:
    world, policy, (one, _) = restless_world(2)
    for tokens, prefilled, running in ((0, 0, 0), (10, 30, 2), (50, 40, 4), (90, 40, 0)):
        world.now += 2.0
        beat = Heartbeat(
            running=running,
            waiting=0,
            kv_tokens=100 * running,
            tokens_generated=tokens,
            tokens_prefilled=prefilled,
            tokens_per_s=0.0,
        )
        world.send(one, beat)
    (report,) = policy.reports
    assert (report.wall_s, report.running, report.context_tokens) == (2.0, 3.0, 300.0)
    assert (report.tokens, report.prefilled) == (40, 10)


def test_a_lost_instance_is_forgotten_by_the_policy() -> None:
    world, policy, (one, _) = restless_world(2)
    world.lose(one)
    assert policy.lost == ["engine-0"]
    assert policy.assign(Queue(1), []) == []


class Asked(ShortestQueue):
    """Counts how often it is asked."""

    times = 0

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        Asked.times += 1
        return super().assign(queue, loads)


def test_turns_that_wait_are_not_each_asked_about_and_all_end() -> None:
    world = World(ManagerConfig(balance="test_balance_manager:Asked", max_pending_per_instance=0))
    world.publish(0)
    world.join_ready("engine-0")
    names = [f"train-0.{k}.0.turn-1" for k in range(200)]
    Asked.times = 0
    for k, name in enumerate(names):
        # The later ones need less context, and then more.
        world.trainer(submit(batch=name, prompts=[[1] * (5 + abs(k - 100) % 7)], samples_per_prompt=1))
    assert Asked.times < 10 * len(names), "one by one it would be some 20,000"
    world.play_out()
    assert {batch for batch, _, _ in world.delivered} == set(names)


class Forgetful(ShortestQueue):
    """Leaves out all but the first of what waits."""

    def order(self, output_tokens: Sequence[int], prompts: Sequence[int]) -> list[int]:
        return [0]


def test_a_policy_that_would_lose_samples_ends_the_manager_in_words() -> None:
    world = World(ManagerConfig(balance="test_balance_manager:Forgetful", max_pending_per_instance=2))
    world.publish(0)
    agent = world.join_ready("engine")
    world.trainer(submit(samples_per_prompt=4, max_new_tokens=40))
    world.play(agent)
    with pytest.raises(PolicyError, match="Forgetful makes no sense: order"):
        world.lose(agent)


def test_who_is_ready_first_leaves_those_that_still_load_their_share() -> None:
    world = World(ManagerConfig(max_pending_per_instance=2))
    world.publish(0)
    first = world.join_ready("first", max_running=8)
    second = world.join("second", max_running=8)
    world.trainer(submit(samples_per_prompt=8))
    assert len(first.sequences) == 4
    world.send(second, second.ready())
    assert len(second.sequences) == 4
