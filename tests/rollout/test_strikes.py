"""Who is to blame for a dead engine: found by trial, never at the expense of whoever ran beside, on a virtual clock."""

from __future__ import annotations

import itertools
import math

import pytest
from rollout_helpers import SimulatedAgent, World, submit, tokens

from penstock.observe.events import SampleFailed
from penstock.rollout.tracker import LOSSES_A_STRIKE, Tracker
from penstock.sample import Finish
from penstock.wire import AgentHello, Goodbye, Heartbeat, column_bytes

STRIKES = 3
NAMES = (f"spot-{number}" for number in itertools.count())


def published() -> World:
    world = World()
    world.publish(0)
    return world


def joined(world: World, name: str = "", max_running: int = 8) -> SimulatedAgent:
    """Where no name is given, one that nobody had: such an engine need not wait for work."""
    return world.join_ready(name or next(NAMES), max_running)


def come_back(world: World, process: str) -> SimulatedAgent:
    """An agent of that life, in a session of its own."""
    agent = SimulatedAgent(f"{process}-{next(NAMES)}")
    world.agents[agent.peer] = agent
    world.carry_out(world.manager.on_agent_connected(agent.peer, world.now))
    hello = AgentHello(
        name=next(NAMES), engine="x", pid=1, host="here", max_running=8, max_context_tokens=1024, process=process
    )
    world.send(agent, hello)
    if agent.loading is not None:
        world.send(agent, agent.ready())
    return agent


def strikes_of(world: World) -> list[int]:
    tracker = world.manager.tracker
    return sorted(sample.strikes for batch in tracker.batches() for sample in tracker.unfinished_of(batch))


@pytest.mark.parametrize("samples", [1, 2, 8])
@pytest.mark.parametrize("engines", [1, 3])
def test_what_kills_its_engine_three_times_is_set_aside_and_nobody_who_ran_beside_it(
    samples: int, engines: int
) -> None:
    world = published()
    for _ in range(engines):
        joined(world)
    world.trainer(submit(samples_per_prompt=samples, max_new_tokens=16))
    cursed = next(held.seed for agent in world.agents.values() for held in agent.sequences.values())
    deaths = 0
    for _ in range(200):
        for agent in list(world.agents.values()):
            if cursed in {held.seed for held in agent.sequences.values()}:
                # Before any of those beside it has a token.
                deaths += 1
                world.lose(agent)
                joined(world)
            else:
                world.play(agent, 1)
        world.pass_time(0.1)
    assert deaths == STRIKES
    assert world.done["train-0"].failed == 1
    [failed] = world.of_kind(SampleFailed)
    assert isinstance(failed, SampleFailed)
    assert "taken back 3 times without a new token" in failed.cause
    ended = [sample.finish for sample in world.delivered.values()]
    assert (len(ended), ended.count(Finish.FAILED)) == (samples, 1)


def test_where_machines_die_by_themselves_three_strikes_are_chance_and_an_hour_later_they_are_not() -> None:
    for deaths, later_s, enough in ((0, 0.0, 3), (3, 0.0, 3), (8, 0.0, 5), (100, 0.0, 12), (100, 3600.0, 3)):
        world = published()
        for _ in range(deaths):
            # At work or not: no sample of theirs is to blame.
            world.lose(joined(world))
        world.pass_time(later_s)
        world.trainer(submit())
        losses = 0
        while not world.of_kind(SampleFailed):
            world.lose(joined(world))
            losses += 1
        assert losses == enough, (deaths, later_s)


def test_an_engine_has_one_suspect_at_a_time_and_the_next_one_when_that_has_a_token() -> None:
    world = published()
    first = joined(world)
    world.trainer(submit(samples_per_prompt=6))
    world.lose(first)
    assert strikes_of(world) == [1] * 6
    engines = [joined(world), joined(world)]
    assert [len(engine.sequences) for engine in engines] == [1, 1]
    for tried in (2, 3):
        world.send(engines[0], engines[0].draw(list(engines[0].sequences)[-1:], 1))
        assert len(engines[0].sequences) == tried
    assert len(engines[1].sequences) == 1
    # Samples that nobody suspects need not wait for any trial.
    world.trainer(submit("train-1", samples_per_prompt=4))
    assert sum(len(engine.sequences) for engine in engines) == 3 + 1 + 4


def test_a_deadline_says_which_samples_wait_for_a_trial() -> None:
    world = published()
    world.trainer(submit(samples_per_prompt=3, deadline_s=5.0))
    world.lose(joined(world))
    mute = joined(world)
    for _ in range(6):
        world.pass_time(1.0)
        world.send(mute, Heartbeat(1, 0, 0, 0, 0, 0.0))
    cause = world.failed["train-0"].cause
    assert "1 samples are with" in cause
    assert "2 samples wait for room on an instance, 2 of them for a trial of their own" in cause


def test_a_suspect_is_not_moved_about_until_it_has_a_token() -> None:
    world = published()
    world.trainer(submit())
    world.lose(joined(world))
    agent, other = joined(world), joined(world)
    [lease] = agent.sequences
    tracker = world.manager.tracker
    assert tracker.hand_on(agent.instance, lease, other.instance) is None
    world.send(agent, agent.draw([lease], 1))
    assert tracker.hand_on(agent.instance, lease, other.instance) is not None


def test_an_engine_that_comes_back_alive_was_killed_by_nobody() -> None:
    world = published()
    world.trainer(submit(samples_per_prompt=4))
    for _ in range(STRIKES + 2):
        agent = come_back(world, "the same life")
        assert strikes_of(world) == [0] * 4
        assert len(agent.sequences) == 4
        world.lose(agent)
    assert not world.of_kind(SampleFailed)


def test_one_that_came_back_with_another_process_may_have_been_killed() -> None:
    world = published()
    world.trainer(submit())
    for life in range(STRIKES):
        world.lose(come_back(world, f"life {life}"))
    assert len(world.of_kind(SampleFailed)) == 1


@pytest.mark.parametrize("ends", ["its engine failed", "it beat and drew nothing", "it sent nonsense"])
def test_an_agent_that_lives_forgives_nothing_where_its_engine_did_not(ends: str) -> None:
    world = published()
    world.trainer(submit(deadline_s=1e6))
    agent = come_back(world, "the same life")
    if ends == "its engine failed":
        world.send(agent, Goodbye(cause="the server died", engine_failed=True))
    elif ends == "it sent nonsense":
        world.send(agent, tokens(version=7))
    else:
        while agent.peer in world.agents:
            world.send(agent, Heartbeat(1, 0, 0, 0, 0, 0.0))
            world.pass_time(1.0)
    assert strikes_of(world) == [1]
    come_back(world, "the same life")
    assert strikes_of(world) == [1]


def test_forgiven_or_not_a_sample_is_not_passed_on_for_ever() -> None:
    """Such as one that takes its engine's agent out of every session, and lets it live."""
    world = published()
    world.trainer(submit())
    losses = 0
    while not world.of_kind(SampleFailed):
        world.lose(come_back(world, "the same life"))
        losses += 1
    assert losses == LOSSES_A_STRIKE * STRIKES
    [failed] = world.of_kind(SampleFailed)
    assert isinstance(failed, SampleFailed)
    assert "taken back 12 times" in failed.cause


def test_strikes_for_rows_without_sense_are_taken_back_when_the_engine_is_refused_for_them() -> None:
    world = published()
    bad = joined(world)
    world.trainer(submit(samples_per_prompt=8, max_new_tokens=64))
    for _ in range(2):
        # One row in a frame of others: for now it may be that sample's own fault.
        [lease, *others] = list(bad.sequences)
        frame = bad.draw([lease, *others[:1]], 1)
        frame.logprobs = column_bytes([math.nan, -0.5], "f")
        world.send(bad, frame)
        bad.sequences.pop(lease, None)
    assert max(strikes_of(world)) >= 1
    frame = bad.draw(list(bad.sequences), 1)
    frame.logprobs = column_bytes([math.nan] * (len(frame.token_ids) // 4), "f")
    world.send(bad, frame)
    assert [peer for peer, _ in world.closed] == [bad.peer]
    assert max(strikes_of(world)) == 0
    joined(world)
    world.play_out()
    assert world.done["train-0"].failed == 0


def test_an_engine_that_says_it_failed_leaves_suspects_and_one_that_leaves_in_order_does_not() -> None:
    for engine_failed in (True, False):
        world = published()
        agent = joined(world)
        world.trainer(submit(samples_per_prompt=3))
        world.send(agent, Goodbye(cause="it leaves", engine_failed=engine_failed))
        assert strikes_of(world) == [int(engine_failed)] * 3


def test_a_struck_sample_that_its_trainer_had_and_lost_again_is_a_suspect_still() -> None:
    tracker = Tracker()
    batch = tracker.add_batch(submit(samples_per_prompt=2), 0.0)
    while tracker.place(batch, "a"):
        pass
    tracker.evict("a", "it died", suspects=2)
    tracker.claim(batch, {0})
    tracker.claim(batch, set())
    assert sorted(sample.index for sample in batch.suspects) == [0, 1]
    assert not batch.moved


def test_an_ended_batch_leaves_nobody_to_forgive() -> None:
    tracker = Tracker()
    batch = tracker.add_batch(submit(samples_per_prompt=2), 0.0)
    while tracker.place(batch, "a"):
        pass
    tracker.evict("a", "it died", suspects=2)
    tracker.remove_batch(batch.name)
    assert tracker.forgive("a") == []
    assert tracker.apply("a", tokens(), {0}, 10, 0.0).tokens == 0
