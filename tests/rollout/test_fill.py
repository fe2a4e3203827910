"""Places that samples leave are filled by a look at one instance, as if all had been looked at."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_helpers import World, submit

from penstock.errors import PolicyError
from penstock.rollout.answers import ask_fill, fills
from penstock.rollout.balance import InstanceLoad, Queue, ShortestQueue
from penstock.rollout.balanced import Balanced
from penstock.rollout.manager import ManagerConfig
from penstock.sample import SampleId, turn_batch
from penstock.wire import Goodbye

PLACES = 3


class Counting(Balanced):
    """Knows how often it was asked for all instances, and how often for one."""

    asked = 0
    filled = 0

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        self.asked += 1
        return super().assign(queue, loads)

    def fill(self, queue: Queue, load: InstanceLoad) -> int:
        self.filled += 1
        return super().fill(queue, load)


class Backwards(ShortestQueue):
    """Gives a sample to the last instance alone; has no word on how places there are filled."""

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        return [len(loads) - 1] * min(queue.waiting, max(0, 2 - loads[-1].samples)) if loads else []


class Company(ShortestQueue):
    """Lets an instance hold the more, the fewer it was shown together with last."""

    def __init__(self, max_pending: int) -> None:
        super().__init__(max_pending)
        self.company: dict[str, int] = {}

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        self.company.update((load.instance, len(loads)) for load in loads)
        return super().assign(queue, loads)

    def fill(self, queue: Queue, load: InstanceLoad) -> int:
        return super().fill(queue, load)

    def room(self, load: InstanceLoad) -> int:
        return max(1, PLACES + 2 - self.company.get(load.instance, 0))


class Narrowing(ShortestQueue):
    """Lets an instance hold as many as it is told."""

    limit = 6

    def fill(self, queue: Queue, load: InstanceLoad) -> int:
        return super().fill(queue, load)

    def room(self, load: InstanceLoad) -> int:
        return self.limit


class Greedy(ShortestQueue):
    def fill(self, queue: Queue, load: InstanceLoad) -> int:
        return self.max_pending


def world_of(policy: type[ShortestQueue], agents: int = 3, pending: int = 1) -> World:
    world = World(ManagerConfig(balance=f"{policy.__module__}:{policy.__name__}", max_pending_per_instance=pending))
    world.publish(0)
    for k in range(agents):
        world.join_ready(f"engine-{k}", max_running=PLACES, context_tokens=1024 if k else 9)
    return world


def held(world: World) -> dict[str, list[tuple[int, int]]]:
    """What each agent runs: seeds, and tokens so far."""
    return {peer: [(row.seed, row.drawn) for row in a.sequences.values()] for peer, a in world.agents.items()}


Happening = st.one_of(
    st.tuples(st.just("play"), st.integers(0, 5), st.integers(1, 8)),
    st.tuples(
        st.sampled_from(["join", "crash", "turn", "turn", "lose", "tick", "submit", "short", "version"]),
        st.integers(0, 5),
        st.integers(1, 40),
    ),
)


@settings(max_examples=1500, deadline=None)
@given(st.lists(Happening, max_size=60), st.sampled_from([Balanced, ShortestQueue, Company]))
def test_samples_go_where_they_would_if_all_instances_were_looked_at(
    happenings: list[tuple[str, int, int]], policy: type[ShortestQueue]
) -> None:
    worlds = [world_of(policy) for _ in range(2)]
    assert worlds[0].manager.balancing.fills
    worlds[1].manager.balancing.fills = False
    for world in worlds:
        world.trainer(submit(prompts=[(1, 2)] * 12, samples_per_prompt=4))
    for number, (what, which, count) in enumerate(happenings):
        for world in worlds:
            agents = list(world.agents.values())
            version = world.manager.versions.latest
            if what == "join":
                world.join_ready(f"late-{number}", max_running=count % 5 + 1)
            elif what == "version":
                world.publish(version + 1)
            elif what == "turn":
                for k in range(count % 8):
                    name = turn_batch(SampleId(f"talk-{number}", k, 0), 2)
                    longest = 8 if which % 2 else 3
                    world.trainer(submit(name, prompts=[(1, 2)], max_new_tokens=longest, version=version))
            elif what in ("submit", "short"):
                longest = 8 if what == "submit" else 4
                prompts = [(1, 2)] * count
                world.trainer(submit(f"b-{number}", prompts=prompts, max_new_tokens=longest, version=version))
            elif what == "tick":
                world.pass_time(0.01)
            elif what == "crash" and len(agents) > 1:
                world.send(agents[which % len(agents)], Goodbye(cause="a fault", engine_failed=True))
            elif what == "lose" and len(agents) > 1:
                world.lose(agents[which % len(agents)])
            elif agents:
                world.play(agents[which % len(agents)], count)
        assert held(worlds[0]) == held(worlds[1])
    for world in worlds:
        world.play_out()
    assert worlds[0].delivered == worlds[1].delivered


@pytest.mark.parametrize("policy", [Balanced, ShortestQueue])
@pytest.mark.parametrize(("first", "samples"), [(True, 12), (True, 20), (False, 24)])
def test_what_is_kept_for_who_is_coming_is_not_given_out_place_by_place(
    policy: type[ShortestQueue], first: bool, samples: int
) -> None:
    kept = []
    for filled in (True, False):
        world = world_of(policy, agents=3, pending=4)
        world.manager.balancing.fills &= filled
        agents = list(world.agents.values())
        if first:
            world.join("late", max_running=PLACES)
        world.trainer(submit(prompts=[(1, 2)] * samples, max_new_tokens=6))
        if not first:
            assert world.manager.tracker.queued == samples - 3 * (PLACES + 4)
            world.join("late", max_running=PLACES)
        waiting = []
        for _ in range(3):
            for agent in agents:
                world.play(agent, 1)
                waiting.append(world.manager.tracker.queued)
        kept.append(waiting)
    assert kept[0] == kept[1]
    assert kept[0][0] > 0 or kept[0][1] > 0


def test_what_is_kept_for_who_is_coming_holds_nobody_back_for_whom_nothing_is_kept() -> None:
    found = []
    for filled in (True, False):
        world = world_of(ShortestQueue, agents=2)
        world.manager.balancing.fills &= filled
        world.trainer(submit(prompts=[(1, 2)] * 8, max_new_tokens=6))
        for k in range(5):
            world.join(f"late-{k}", max_running=PLACES)
        world.trainer(submit("train-1", prompts=[(1, 2)] * 6, max_new_tokens=6))
        name = turn_batch(SampleId("talk", 0, 0), 2)
        world.trainer(submit(name, prompts=[(1, 2)], max_new_tokens=6))
        assert [batch.name for batch in world.manager.tracker.waiting()] == ["train-1", name]
        first = next(iter(world.agents.values()))
        while not world.delivered:
            world.play(first, 1)
        found.append([batch.name for batch in world.manager.tracker.waiting()])
    assert found == [["train-1"], ["train-1"]], "the turn has the place"


def test_a_sample_that_ends_costs_a_look_at_its_own_instance_while_others_wait() -> None:
    world = world_of(Counting, agents=8)
    policy = world.manager.policy
    assert isinstance(policy, Counting)
    world.trainer(submit(prompts=[(1, 2)] * 20, samples_per_prompt=4, max_new_tokens=6))
    asked, waiting = policy.asked, world.manager.tracker.queued
    assert waiting == 80 - 8 * (PLACES + 1)
    ended = 0
    while waiting - ended > 8:
        for agent in list(world.agents.values()):
            world.play(agent, 1)
            ended = len(world.delivered)
            if waiting - ended <= 8:
                break
    assert policy.asked == asked
    assert 0 < policy.filled <= ended
    assert world.manager.tracker.queued == waiting - ended
    world.pass_time(0.1)
    assert policy.asked == asked + 1, "all of them at each tick"
    world.play_out()
    assert world.done["train-0"].samples == 80


def test_a_policy_with_picks_of_its_own_is_asked_for_them_each_time() -> None:
    world = world_of(Backwards)
    assert not world.manager.balancing.fills
    world.trainer(submit(prompts=[(1, 2)] * 6))
    world.play_out()
    assert world.done["train-0"].samples == 6
    instances = list(world.agents.values())
    assert [len(agent.sequences) for agent in instances] == [0, 0, 0]


def test_who_has_both_or_the_later_word_is_asked() -> None:
    class Later(Backwards):
        def fill(self, queue: Queue, load: InstanceLoad) -> int:
            return 0

    class Bare:
        def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
            return []

    assert [fills(one) for one in (ShortestQueue(4), Balanced(4), Counting(4), Later(4))] == [True] * 4
    assert not fills(Backwards(4))
    assert not fills(Bare())  # type: ignore[arg-type]

    class Named(ShortestQueue):
        fill = 0.9  # type: ignore[assignment]

    assert not fills(Named(4))


@pytest.mark.parametrize("method", ["weight", "room", "handicap"])
def test_what_is_no_number_is_named_where_one_instance_alone_is_looked_at(method: str) -> None:
    class Odd(ShortestQueue):
        pass

    setattr(Odd, method, lambda self, load: float("nan"))
    with pytest.raises(PolicyError, match=rf"Odd\.{method} gave \[nan\]; each must be"):
        ask_fill(Odd(4), Queue(fresh=2, moved=1, coming=1), InstanceLoad("one", 0, 4))


def test_suspects_and_moved_turns_cost_no_look_at_all_instances_for_each_sample_that_ends() -> None:
    world = world_of(Counting, agents=8)
    policy = world.manager.policy
    assert isinstance(policy, Counting)
    for k in range(60):
        world.trainer(submit(turn_batch(SampleId("talk", k, 0), 2), prompts=[(1, 2)], max_new_tokens=6))
    first, *others = list(world.agents.values())
    world.play(first, 1)
    for agent in others[:3]:
        # With no token yet: those that ran there are suspects, and those that waited are moved.
        world.send(agent, Goodbye(cause="a fault", engine_failed=True))
    assert any(batch.suspects for batch in world.manager.tracker.waiting())
    assert sum(bool(batch.moved) for batch in world.manager.tracker.waiting()) > 1
    before, ended = policy.asked, len(world.delivered)
    world.pass_time(0.01)
    assert policy.asked - before < 10, "what waits is alike"
    before = policy.asked
    for agent in (first, *others[3:]):
        world.play(agent, 8)
    assert len(world.delivered) - ended > 10
    assert policy.asked - before < 10
    world.play_out()
    assert len(world.delivered) == 60


def test_an_instance_that_is_full_for_older_samples_tries_suspects_of_younger_batches() -> None:
    world = world_of(Narrowing, agents=0)
    policy = world.manager.policy
    leaves, fails, stays = (world.join_ready(name, max_running=PLACES) for name in ("leaves", "fails", "stays"))
    assert isinstance(policy, Narrowing)
    for k in range(20):
        world.trainer(submit(turn_batch(SampleId("talk", k, 0), 2), prompts=[(1, 2)], max_new_tokens=6 + k))
    policy.limit = 1
    world.send(leaves, Goodbye(cause="its machine goes"))
    world.send(fails, Goodbye(cause="a fault", engine_failed=True))
    instance, tracker = world.manager.fleet.get(stays.peer), world.manager.tracker
    assert instance is not None
    tried = 0
    while stays.sequences:
        ended = len(world.delivered)
        waiting = list(tracker.waiting(instance.version))
        suspects = [k for k, batch in enumerate(waiting) if batch.suspects]
        world.play(stays, 1)
        load = world.manager.balancing.load(instance)
        if len(world.delivered) > ended and suspects:
            tries = not tracker.may_try(instance.id)
            assert tries or load.samples > PLACES, "it has room for one, and tries none"
            tried += tries and any(batch.assignable for batch in waiting[: suspects[0]])
    assert tried
    assert len(world.delivered) == 20


@pytest.mark.parametrize(
    ("says", "words"), [(7, "fill gave 7 of 3"), (-1, "fill gave -1 of 3"), ("x", "fill gave 'x'; a number")]
)
def test_no_more_are_given_than_wait(says: int, words: str) -> None:
    load = InstanceLoad("one", 0, 4)
    policy = Greedy(4)
    policy.max_pending = says
    with pytest.raises(PolicyError, match=rf"test_fill:Greedy makes no sense: {words}"):
        ask_fill(policy, Queue(fresh=2, moved=1), load)
    assert ask_fill(Greedy(2), Queue(fresh=2, moved=1), load) == 2
