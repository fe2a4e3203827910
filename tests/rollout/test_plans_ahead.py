"""A step's plan is begun while the trainer still learns from the step before, and is there when it begins."""

from __future__ import annotations

import pytest
from balance_helpers import report_of
from rollout_helpers import submit
from test_windows import TurnWorld, generated, learned

from penstock.rollout.balanced import COMPARED, Balanced
from penstock.rollout.curves import Speed
from penstock.rollout.offload import Offload
from penstock.rollout.step_replay import Plan


def thought_out(world: TurnWorld) -> int:
    """All of what is being thought; in so many bits."""
    bits = 0
    while world.manager.thinking:
        world.carry_out(world.manager.think(world.now))
        bits += 1
    return bits


def until_generated(world: TurnWorld, batch: str, max_new_tokens: int = 60) -> None:
    """A step of which all samples have ended, and the trainer trains."""
    own, spot = world.agents["peer-of-own"], world.agents["peer-of-spot"]
    world.say("begins", batch)
    thought_out(world)
    generated(world, batch, own, spot, plays=12)
    world.play_out()
    world.hand_over()
    world.pass_time(1.0)


def trained(world: TurnWorld, batch: str) -> None:
    world.say("trained", batch)
    world.say("ended", batch, tokens=1000, train_s=1.0, rest_s=0.1)


def followed(world: TurnWorld) -> Plan:
    plan = world.manager.policy.plan  # type: ignore[attr-defined]
    assert isinstance(plan, Plan)
    return plan


def step_generated() -> tuple[TurnWorld, Offload, Plan]:
    """The third step is generated, its successor is being planned; the plan that it went by."""
    world = TurnWorld()
    policy = learned(world, steps=2)
    until_generated(world, "train-2")
    assert world.manager.thinking
    return world, policy, policy.plans[1]


def test_a_plan_that_was_made_while_the_trainer_trained_is_followed_from_the_step_s_beginning() -> None:
    world, policy, before = step_generated()
    assert policy.facts is not None
    assert policy.facts.groups == world.manager.windows.measured_groups
    assert thought_out(world) > 10
    assert policy.plans[1] is before, "the step that is open is judged by its own"
    assert followed(world) is before
    trained(world, "train-2")
    world.say("begins", "train-3")
    assert not world.manager.thinking
    assert policy.plans[1] is not before
    assert followed(world) is policy.plans[1]
    assert world.told("opened")[-1].window_s == policy.length_s(1)
    world.pass_time(0.01)
    assert not world.manager.thinking, "once is enough"


def test_a_plan_knows_which_instances_joined_last() -> None:
    world = TurnWorld()
    policy, balance = learned(world, steps=2), world.manager.policy
    assert isinstance(balance, Balanced)
    (spot,) = (instance.id for instance in world.manager.fleet if not instance.reserved)
    for k in range(COMPARED):
        balance.report(report_of(spot, Speed(0.01, 5e-4, 5e-7), k, steps=10))
    until_generated(world, "train-2")
    assert thought_out(world) > 10
    assert policy.facts is not None
    assert policy.facts.joined == balance.joined() == policy.facts.remote


def test_a_plan_that_is_not_made_yet_when_its_step_begins_becomes_that_step_s_own() -> None:
    world, policy, before = step_generated()
    for _ in range(3):
        world.carry_out(world.manager.think(world.now))
    facts = policy.facts
    trained(world, "train-2")
    world.say("begins", "train-3")
    assert world.manager.thinking
    assert policy.plans[1] is before
    assert followed(world) is before, "until then the last one's limits"
    assert thought_out(world) > 3
    assert policy.facts is facts, "it was not begun anew"
    assert policy.plans[1] is not before
    assert followed(world) is policy.plans[1]
    assert world.told("planned")[-1].batch == "train-3"


@pytest.mark.parametrize("done", [False, True])
def test_a_plan_for_other_machines_than_there_are_when_the_step_begins_is_made_anew(done: bool) -> None:
    world, policy, before = step_generated()
    if done:
        thought_out(world)
    world.join_as("later", reserved=False)
    trained(world, "train-2")
    world.say("begins", "train-3")
    assert world.manager.thinking
    assert policy.plans == {1: before}
    thought_out(world)
    assert policy.facts is not None
    assert len(policy.facts.remote) == 2
    assert followed(world) is policy.plans[2]


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("other", ["an engine of the trainer's own more", "larger micro-batches"])
def test_a_plan_for_other_engines_of_the_trainer_s_own_or_other_micro_batches_is_made_anew(
    done: bool, other: str
) -> None:
    world, policy, before = step_generated()
    if done:
        thought_out(world)
    ahead = policy.facts
    if other == "larger micro-batches":
        micro_batch_samples = 3
    else:
        micro_batch_samples = 1
        world.join_as("own-too", reserved=True)
    trained(world, "train-2")
    world.say("begins", "train-3", micro_batch_samples=micro_batch_samples)
    assert world.manager.thinking
    assert policy.plans == {1: before}
    thought_out(world)
    assert policy.facts is not None
    assert policy.facts is not ahead
    assert policy.facts.training.micro_batch_samples == micro_batch_samples
    assert len(policy.facts.reserved) == (1 if other == "larger micro-batches" else 2)
    assert followed(world) is policy.plans[1]
    assert policy.plans[1] is not before


def test_another_trainer_s_first_step_does_not_go_by_what_was_thought_for_the_last_one() -> None:
    world, policy, before = step_generated()
    world.manager.windows.reset()
    assert not world.manager.thinking
    world.say("begins", "train-9")
    assert policy.plans[1] is before
    assert followed(world) is before


def test_after_a_step_of_conversations_all_their_turns_are_planned_with() -> None:
    world = TurnWorld()
    policy = learned(world, steps=2)
    world.say("begins", "train-2")
    thought_out(world)
    world.trainer(submit("train-2", samples_per_prompt=2, max_new_tokens=20))
    world.play_out()
    first = sum(map(sum, world.manager.windows.measured_groups))
    for _ in range(3):
        world.carry_out(world.manager.think(world.now))
        assert policy.facts is not None
        assert policy.facts.groups == world.manager.windows.measured_groups, "not those of fewer turns"
        world.say("wants", "train-2")
        world.hand_over()
        world.answer(2)
        world.say("waits", "train-2")
        world.play_out()
    assert sum(map(sum, policy.facts.groups)) > first
    trained(world, "train-2")
    world.say("begins", "train-3")
    thought_out(world)
    assert policy.facts.groups == world.manager.windows.measured_groups
    before = [[len(row) for row in policy.facts.groups], policy.facts.earlier]
    assert before == [[2], []], "no step was remembered of which some turns were missing"
