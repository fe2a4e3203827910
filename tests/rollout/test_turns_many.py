"""Thousands of open conversations: what is kept so that nobody has to walk through all of them, held against a walk."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rollout_helpers import SimulatedAgent, World, length_of, submit

from penstock.rollout import open_batches
from penstock.rollout.balance import InstanceLoad, Queue
from penstock.rollout.balanced import Balanced
from penstock.rollout.batch import Batch
from penstock.rollout.manager import ManagerConfig
from penstock.rollout.tracker import Tracker
from penstock.sample import SampleId, sample_seed, turn_batch
from penstock.wire import column_bytes


class ManyBatches(RuleBasedStateMachine):
    """A tracker whose batches come, wait, progress and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.before = open_batches.LISTED, open_batches.HANDED
        open_batches.LISTED = open_batches.HANDED = 2
        self.tracker = Tracker()
        self.now = 0.0
        self.number = 0
        self.progress: dict[str, float] = {}
        """As handed down batch by batch."""
        self.removed: list[Batch] = []

    def teardown(self) -> None:
        open_batches.LISTED, open_batches.HANDED = self.before

    @rule(samples=st.integers(1, 3), later=st.booleans())
    def add(self, samples: int, later: bool) -> None:
        self.now += later
        self.number += 1
        batch = self.tracker.add_batch(submit(f"b-{self.number}", samples_per_prompt=samples), self.now)
        self.progress[batch.name] = self.now

    @rule(instance=st.sampled_from("abc"), count=st.integers(1, 4))
    def place_the_oldest(self, instance: str, count: int) -> None:
        for _ in range(count):
            batch = next(self.tracker.waiting(), None)
            if batch is not None:
                self.tracker.place(batch, instance)

    @rule(instance=st.sampled_from("abc"), which=st.integers(0, 20))
    def place_any(self, instance: str, which: int) -> None:
        batches = list(self.tracker.batches())
        if batches:
            self.tracker.place(batches[which % len(batches)], instance)

    @rule(instance=st.sampled_from("abc"), suspects=st.integers(0, 2))
    def evict(self, instance: str, suspects: int) -> None:
        self.tracker.evict(instance, "gone", suspects)

    @rule(instance=st.sampled_from("abc"))
    def put_back(self, instance: str) -> None:
        for sample in list(self.tracker.samples_of(instance))[:1]:
            self.tracker.put_back(instance, sample.lease)

    @rule(which=st.integers(0, 20))
    def progress_is_made(self, which: int) -> None:
        self.now += 1
        batches = list(self.tracker.batches())
        if batches:
            batch = batches[which % len(batches)]
            batch.progress_at = self.progress[batch.name] = self.now

    @rule(which=st.integers(0, 20))
    def remove(self, which: int) -> None:
        batches = list(self.tracker.batches())
        if not batches:
            return
        removed = batches[which % len(batches)]
        self.tracker.remove_batch(removed.name)
        self.removed.append(removed)
        progress_at = self.progress.pop(removed.name)
        for batch in self.tracker.batches():
            if batch.submitted_at >= removed.submitted_at:
                self.progress[batch.name] = max(self.progress[batch.name], progress_at)

    @precondition(lambda self: self.removed)
    @rule()
    def take_up_again(self) -> None:
        batch = self.removed.pop()
        if self.tracker.batch(batch.name) is None:
            batch.placed = 0
            batch.progress_at = self.progress[batch.name] = self.now
            batch.submitted_at = self.now
            self.tracker.take_up(batch)

    @invariant()
    def those_that_wait_are_known(self) -> None:
        waiting = [batch.name for batch in self.tracker.batches() if batch.waiting]
        assert [batch.name for batch in self.tracker.waiting()] == waiting

    @invariant()
    def progress_is_handed_down(self) -> None:
        found = {batch.name: self.tracker.progress_at(batch) for batch in self.tracker.batches()}
        assert found == self.progress

    @invariant()
    def who_came_since_is_known(self) -> None:
        batches = list(self.tracker.batches())
        for batch in batches:
            newer = [other.name for other in batches if other.age > batch.age]
            assert [other.name for other in self.tracker.since(batch.age)] == newer[::-1]


ManyBatches.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestManyBatches = ManyBatches.TestCase


def batch_of(name: str, now: float) -> Batch:
    return Batch.parse(submit(name), now, 1 << 20)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_progress_of_several_that_went_counts_for_those_behind_each(order: tuple[int, ...]) -> None:
    held = open_batches.OpenBatches()
    every = [batch_of(f"b-{k}", float(k)) for k in range(6)]
    for batch in every:
        held.add(batch)
    for at, progress_at in ((1, 30.0), (3, 20.0), (5, 40.0)):
        every[at].progress_at = progress_at
    for k in order:
        held.remove(f"b-{(1, 3, 5)[k]}")
    assert [held.progress_at(batch) for batch in held] == [0.0, 30.0, 30.0]


def test_what_is_cleared_out_while_a_batch_comes_to_wait_stays_in_order() -> None:
    held = open_batches.OpenBatches()
    batches = [batch_of(f"b-{k}", float(k)) for k in range(200)]
    for part in (batches[:100], batches[100:]):
        for batch in part:
            held.add(batch)
        for batch in part[:90]:
            batch.next_fresh = batch.samples
        if part[0] is batches[0]:
            assert len(list(held.waiting())) == 10
    looking = held.waiting()
    next(looking)
    batches[3].next_fresh = 0
    held.may_wait(batches[3])
    list(looking)
    for _ in range(2):
        assert [batch.age for batch in held.waiting()] == [4, *range(91, 101), *range(191, 201)]


def test_what_is_kept_of_batches_that_went_does_not_grow_while_others_overlap() -> None:
    held = open_batches.OpenBatches()
    held.add(batch_of("talk", 0.0))
    for k in range(3000):
        held.add(batch_of(f"b-{k}", 1.0 + k))
        if k >= 100:
            went = held.get(f"b-{k - 100}")
            assert went is not None
            went.progress_at = 2.0 + k
            held.remove(went.name)
        assert len(held._handed) <= open_batches.HANDED + len(held)
    for batch in held:
        batch.next_fresh = batch.samples
    assert list(held.waiting()) == []
    assert list(held.waiting()) == []
    assert sum(len(line.ages) for line in held._lines.values()) <= open_batches.LISTED, (
        "nobody waits, and few are looked at"
    )


# ---- conversations on the manager


class Asked(Balanced):
    """Counts what it is asked and told."""

    asked = 0
    batches = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rows: list[int] = []

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        self.asked += 1
        return super().assign(queue, loads)

    def fill(self, queue: Queue, load: InstanceLoad) -> int:
        return super().fill(queue, load)

    def finished(self, prompt: int, output_tokens: int) -> None:
        self.rows.append(prompt)
        super().finished(prompt, output_tokens)

    def batch_ended(self) -> None:
        self.batches += 1
        super().batch_ended()


def talking(conversations: int, places: int, agents: int = 3) -> tuple[World, Asked, list[SimulatedAgent]]:
    world = World(ManagerConfig(balance="test_turns_many:Asked", max_pending_per_instance=0))
    world.publish(0)
    engines = [world.join_ready(f"engine-{k}", max_running=places) for k in range(agents)]
    world.trainer(submit("talk", prompts=[(1, 2)] * conversations))
    policy = world.manager.policy
    assert isinstance(policy, Asked)
    return world, policy, engines


def ended(world: World) -> list[tuple[str, int, int]]:
    """Which samples have come since this was asked last."""
    found = list(world.delivered)
    world.delivered.clear()
    return found


def next_turn(world: World, sample: tuple[str, int, int], turn: int) -> None:
    _, prompt, replica = sample
    name = turn_batch(SampleId("talk", prompt, replica), turn)
    world.trainer(submit(name, prompts=[(1, 2, 3)], prompt_indices=column_bytes([prompt], "I")))


def test_a_turn_goes_on_where_the_one_before_was_said_without_a_look_at_all_instances() -> None:
    world, policy, engines = talking(conversations=12, places=8)
    asked, turns = policy.asked, [0] * 12
    stayed = came = 0
    for _ in range(30):
        for engine in engines:
            world.play(engine, 2)
            for sample in ended(world):
                turns[sample[1]] += 1
                before = {agent.peer: set(agent.sequences) for agent in engines}
                next_turn(world, sample, turns[sample[1]])
                [there] = [agent.peer for agent in engines if set(agent.sequences) - before[agent.peer]]
                stayed += there == engine.peer
                came += 1
    assert came > 60
    assert stayed == came
    assert policy.asked - asked <= came / 4, (
        "each is asked for alone while the last look at all is no older than a tick"
    )
    world.play_out()


def test_turns_that_wait_are_given_out_oldest_first_as_places_come_free() -> None:
    world, policy, engines = talking(conversations=30, places=2)
    assert world.manager.tracker.queued == 24
    first = [sample for engine in engines for sample in _played_until_some_end(world, engine)]
    for sample in first:
        next_turn(world, sample, 1)
    waiting = [batch.name for batch in world.manager.tracker.waiting()]
    assert waiting == ["talk", *(turn_batch(SampleId("talk", prompt, 0), 1) for _, prompt, _ in first)]
    asked, begun = policy.asked, []
    while world.manager.tracker.queued:
        queued = {batch.name: batch.waiting for batch in world.manager.tracker.waiting()}
        for engine in engines:
            world.play(engine, 1)
        left = {batch.name: batch.waiting for batch in world.manager.tracker.waiting()}
        begun += [name for name, count in queued.items() for _ in range(count - left.get(name, 0))]
    assert begun == sorted(begun, key=waiting.index)
    assert policy.asked == asked
    world.play_out()
    assert len(world.done) == 1 + len(first)


def _played_until_some_end(world: World, engine: SimulatedAgent) -> list[tuple[str, int, int]]:
    while not world.delivered:
        world.play(engine, 1)
    return ended(world)


def test_a_policy_is_told_of_turns_as_answers_to_no_prompt_and_of_no_batch_that_ends() -> None:
    world, policy, _ = talking(conversations=6, places=4)
    world.play_out()
    assert policy.batches == 1
    assert sorted(policy.rows) == list(range(6))
    groups = policy.lengths.groups
    for turn in (1, 2):
        for sample in sorted(ended(world)):
            next_turn(world, sample, turn)
        world.play_out()
    assert policy.batches == 1
    assert policy.rows[6:] == [-1] * 12
    world.trainer(submit("after", prompts=[(1, 2)] * 2))
    world.play_out()
    assert policy.batches == 2
    assert [len(row) for row in policy.lengths.groups] == [1, 1]
    assert len(policy.lengths) == 6 + 12 + 2
    assert policy.lengths.groups is not groups


def test_a_turn_waits_for_no_instance_that_is_coming() -> None:
    """Who said the one before is not known; all have places, and as many samples as they would with the one to come."""
    world, _, engines = talking(conversations=9, places=4)
    world.join("late", max_running=4)
    world.trainer(submit(turn_batch(SampleId("other", 0, 0), 1), prompts=[(1, 2)]))
    assert world.manager.tracker.queued == 0
    assert sorted(len(engine.sequences) for engine in engines) == [3, 3, 4]


@pytest.mark.parametrize("ahead", [False, True])
def test_deadlines_hold_although_they_are_not_looked_at_each_tick(ahead: bool) -> None:
    """One of a later batch is shorter; progress of the one before puts it off as long as that is open."""
    world = World(ManagerConfig(max_pending_per_instance=0))
    world.publish(0)
    agent = world.join_ready(max_running=1)
    names = (f"first-{k}" for k in range(99))
    first = next(name for name in names if length_of(sample_seed(0, SampleId(name, 0, 0)), 60) > 30)
    world.trainer(submit(first, prompts=[(1, 2)], deadline_s=1000.0, max_new_tokens=60))
    world.pass_time(1.0)
    world.trainer(submit("second", prompts=[(1, 2)], deadline_s=5.0))
    for _ in range(20 if ahead else 0):
        world.play(agent, 1)
        world.manager.fleet.get(agent.peer).heard_at = world.now  # type: ignore[union-attr]
        world.pass_time(1.0)
        assert not world.failed
    passed = 0.0
    while not world.failed:
        world.manager.fleet.get(agent.peer).heard_at = world.now  # type: ignore[union-attr]
        world.pass_time(0.5)
        passed += 0.5
        assert passed < 10
    assert list(world.failed) == ["second"]
    assert 4.0 <= passed <= 6.5


def test_a_turn_that_nobody_has_the_context_for_does_not_end_the_run_at_the_next_one() -> None:
    world, _, engines = talking(conversations=6, places=4)
    world.trainer(submit(turn_batch(SampleId("other", 0, 0), 1), prompts=[(1, 2)], max_new_tokens=5000))
    world.pass_time(0.1)
    for sample in _played_until_some_end(world, engines[0]):
        next_turn(world, sample, 1)
    assert world.manager.tracker.queued == 1
