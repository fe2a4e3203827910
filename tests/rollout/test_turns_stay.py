"""A conversation's next turn goes to the instance that said the one before, while that costs no balance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_helpers import World, submit

from penstock.rollout.balance import NEAR, InstanceLoad, Queue, ShortestQueue
from penstock.rollout.balanced import Balanced
from penstock.rollout.manager import ManagerConfig
from penstock.sample import SampleId, turn_batch, turn_before
from penstock.wire import ReleaseBatch


def loads(*samples: int, pending: int = 0) -> list[InstanceLoad]:
    return [InstanceLoad(f"i{k}", held, 16, pending=pending) for k, held in enumerate(samples)]


def test_the_turn_before_is_known_by_name() -> None:
    sample = SampleId("train-12", 7, 3)
    first, second = turn_batch(sample, 1), turn_batch(sample, 2)
    assert turn_before(first) == sample
    assert turn_before(second) == SampleId(first, 7, 0)
    assert turn_before("train-12") is None
    assert turn_before("anything.turn-x") is None


@pytest.mark.parametrize("policy", [ShortestQueue(16), Balanced(16)])
def test_a_turn_stays_while_its_instance_is_nearly_level(policy: ShortestQueue) -> None:
    turn = Queue(fresh=1, near=1)
    assert policy.assign(turn, loads(3, 4)) == [1]
    assert policy.assign(turn, loads(3, 8)) == [0], "too far above its share"
    assert policy.assign(turn, loads(16, 16)) == [0], "no place is free there"
    assert policy.assign(turn, loads(9, 9, pending=1)) == [0], "its memory is full"
    assert policy.assign(Queue(fresh=1), loads(3, 4)) == [0]
    assert policy.assign(Queue(fresh=2, near=1), loads(4, 4)) == [0, 1], "near is said of one sample"


@given(st.integers(2, 8), st.integers(1, 200), st.integers(0, 2**20))
def test_however_turns_come_no_instance_is_far_above_its_share(instances: int, turns: int, seed: int) -> None:
    chance, policy, held = random.Random(seed), ShortestQueue(16), [0] * instances
    for _ in range(turns):
        near = chance.randrange(instances)
        before = list(held)
        for pick in policy.assign(Queue(fresh=1, near=near), loads(*held)):
            held[pick] += 1
        if held[near] > before[near]:
            assert held[near] <= max(min(before) + 1, sum(held) / instances + max(1.0, NEAR * 16))
        if sum(held) > 8 * instances:
            held[chance.randrange(instances)] = 0


def world_of(*instances: str) -> World:
    world = World(ManagerConfig())
    world.publish(0)
    for name in instances:
        world.join_ready(name)
    return world


def said_by(world: World, batch: str, prompt: int = 0, replica: int = 0) -> str:
    held = world.manager.trainer.batch(batch)
    assert held is not None
    sample = held.ended_sample(prompt, replica)
    assert sample is not None
    return sample.instance


def test_turns_of_a_conversation_run_where_it_began() -> None:
    world = world_of("engine-0", "engine-1", "engine-2")
    world.trainer(submit(batch="train-0", samples_per_prompt=3))
    world.play_out()
    began = {replica: said_by(world, "train-0", 0, replica) for replica in range(3)}
    assert len(set(began.values())) > 1
    for turn in (1, 2):
        for replica in (2, 1, 0):
            name = turn_batch(SampleId("train-0", 0, replica), turn)
            world.trainer(submit(batch=name, samples_per_prompt=1))
            world.play_out()
            assert said_by(world, name) == began[replica]


def test_a_turn_whose_instance_is_gone_or_not_known_goes_anywhere() -> None:
    world = world_of("engine-0", "engine-1")
    world.trainer(submit(batch="train-0", samples_per_prompt=1))
    world.play_out()
    world.trainer(ReleaseBatch(batch="train-0"))
    for prompt, turn in ((0, 1), (99, 1), (0, 3)):
        name = turn_batch(SampleId("train-0", prompt, 0), turn)
        world.trainer(submit(batch=name, samples_per_prompt=1))
        world.play_out()
        assert said_by(world, name)
