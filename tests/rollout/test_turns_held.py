"""Turns of conversations that have ended, and are kept until the batch that they belong to is released."""

from __future__ import annotations

import pytest
from rollout_helpers import World, submit

from penstock.observe.events import BatchEnded
from penstock.observe.summary_tally import SummaryTally
from penstock.rollout import trainer_side
from penstock.rollout.manager import ManagerConfig
from penstock.sample import SampleId, turn_batch
from penstock.wire import CancelBatch, ReleaseBatch


def ready_world() -> World:
    world = World(ManagerConfig())
    world.publish(0)
    world.join_ready("engine-0")
    return world


def end(world: World, batch: str, samples: int) -> None:
    world.trainer(submit(batch=batch, samples_per_prompt=samples))
    world.play_out()


def test_turns_do_not_push_out_the_batch_that_they_belong_to() -> None:
    world = ready_world()
    end(world, "train-0", 2)
    turns = [turn_batch(SampleId("train-0", prompt, 0), 1) for prompt in range(100)]
    for name in turns:
        end(world, name, 1)
    held = world.manager.trainer.held
    assert list(held) == ["train-0", *turns]
    for name in list(held):
        world.trainer(ReleaseBatch(batch=name))
    assert not held


def test_turns_that_nobody_releases_are_forgotten_from_the_oldest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_side, "TURNS_HELD", 5)
    world = ready_world()
    end(world, "train-0", 2)
    for turn in range(1, 9):
        end(world, turn_batch(SampleId("train-0", 0, 0), turn), 1)
    assert list(world.manager.trainer.held) == ["train-0", *(f"train-0.0.0.turn-{turn}" for turn in range(4, 9))]


def test_a_trainer_that_never_releases_anything_is_forgotten_from_its_oldest_on() -> None:
    world = ready_world()
    for step in range(trainer_side.BATCHES_HELD + 3):
        end(world, f"train-{step}", 2)
    assert list(world.manager.trainer.held) == [f"train-{step}" for step in range(3, trainer_side.BATCHES_HELD + 3)]


def test_turns_that_end_as_they_should_are_not_told_of_and_others_are() -> None:
    world = ready_world()
    end(world, "train-0", 2)
    told = len(world.events)
    end(world, turn_batch(SampleId("train-0", 0, 0), 1), 1)
    assert len(world.events) == told
    given_up = turn_batch(SampleId("train-0", 0, 1), 1)
    world.trainer(submit(batch=given_up))
    world.trainer(CancelBatch(batch=given_up, cause="the run ended"))
    (ended,) = world.events[told:]
    assert isinstance(ended, BatchEnded)
    assert (ended.batch, ended.samples) == (given_up, 0)
    tally = SummaryTally()
    for event in world.events:
        tally.take(event)
    assert (tally.samples_finished, tally.samples_lost, tally.samples_open) == (2, 0, 1)
