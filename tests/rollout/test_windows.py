"""Turns on the trainer's own devices, on a virtual clock: nothing is lost, nobody waits for ever, all is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_helpers import SimulatedAgent, World, submit

from penstock.observe.events import WindowChanged
from penstock.rollout.journal import Record, decode_record, encode_record
from penstock.rollout.journal_replay import Replay
from penstock.rollout.manager import TRAINER, Decisions, Manager, ManagerConfig
from penstock.rollout.offload import Offload
from penstock.rollout.windows import HAND_OVER_S, Turn
from penstock.sample import SampleId, conversation_of, turn_batch
from penstock.wire import (
    AgentHello,
    HandedOver,
    HandOver,
    Heartbeat,
    LoadFailed,
    ReleaseBatch,
    TrainerHello,
    TrainerTurn,
    TurnGranted,
)


class TurnWorld(World):
    """Agents answer a HandOver when the test says so; grants are kept."""

    def __init__(self) -> None:
        self.granted: list[TurnGranted] = []
        self.asked: list[SimulatedAgent] = []
        self._number = 0
        self.answered: set[tuple[str, int, int]] = set()
        # Losses in a row are the tests' doing, and no fault of a sample's.
        super().__init__(ManagerConfig(max_pending_per_instance=2, max_strikes=1000))
        self.publish(0)

    def carry_out(self, decisions: Decisions) -> None:
        super().carry_out(decisions)
        for peer, frame in decisions.frames:
            if isinstance(frame, HandOver) and peer in self.agents:
                self.asked.append(self.agents[peer])
            if isinstance(frame, TurnGranted):
                assert peer == TRAINER
                self.granted.append(frame)

    def join_as(self, name: str, *, reserved: bool) -> SimulatedAgent:
        peer = f"peer-of-{name}"
        agent = self.agents[peer] = SimulatedAgent(peer)
        self.carry_out(self.manager.on_agent_connected(peer, self.now))
        hello = AgentHello(
            name=name, engine="simulated", pid=1, host="h", max_running=4, max_context_tokens=1024, reserved=reserved
        )
        self.send(agent, hello)
        self.send(agent, agent.ready())
        return agent

    def say(self, state: str, batch: str = "train-0", **changes: Any) -> None:
        self._number += 1
        self.trainer(TrainerTurn(number=self._number, batch=batch, version=0, state=state, **changes))

    def hand_over(self) -> None:
        """Every engine that was asked to has handed over."""
        asked, self.asked = self.asked, []
        for agent in asked:
            agent.sequences.clear()
            if agent.peer in self.agents:
                self.send(agent, HandedOver())

    def answer(self, turns: int) -> None:
        """An environment answers what has come: each conversation of the step has so many further turns."""
        for key in set(self.delivered) - self.answered:
            self.answered.add(key)
            batch = key[0]
            talk = conversation_of(batch) or SampleId(*key)
            number = int(batch.rpartition(".turn-")[2]) if batch != talk.batch else 0
            if number < turns:
                name = turn_batch(talk, number + 1)
                self.trainer(submit(name, deadline_s=1e6, max_new_tokens=20))

    def told(self, what: str) -> list[WindowChanged]:
        return [event for event in self.events if isinstance(event, WindowChanged) and event.what == what]

    @property
    def turn(self) -> Turn:
        return self.manager.windows.turn


def test_while_nobody_asks_for_windows_reserved_engines_are_instances_like_any_other() -> None:
    world = TurnWorld()
    own = world.join_as("own", reserved=True)
    world.trainer(submit(samples_per_prompt=4))
    assert len(own.sequences) == 4
    assert world.manager.status(world.now).window == ""


def test_with_no_remote_instance_the_engines_generate_to_the_end_and_then_the_trainer_trains() -> None:
    world = TurnWorld()
    own = world.join_as("own", reserved=True)
    world.say("begins", window_s=0.5)
    world.trainer(submit(samples_per_prompt=4))
    world.say("wants", window_s=0.5)
    world.pass_time(5.0)
    assert (world.granted, world.turn) == ([], Turn.GENERATING)
    while own.sequences:
        world.play(own)
    world.pass_time(0.1)
    world.hand_over()
    assert [frame.number for frame in world.granted] == [2]
    assert world.granted[0].window_s == pytest.approx(5.0)
    assert world.done["train-0"].samples == 4


def test_a_window_that_is_over_hands_unfinished_samples_on_with_their_tokens_and_then_the_trainer_trains() -> None:
    world = TurnWorld()
    own, spot = world.join_as("own", reserved=True), world.join_as("spot", reserved=False)
    world.say("begins", window_s=1.0)
    world.trainer(submit(samples_per_prompt=8, max_new_tokens=60))
    assert (len(own.sequences), len(spot.sequences)) == (4, 4)
    world.play(own, 5)
    world.say("wants", window_s=1.0)
    world.pass_time(1.1)
    assert world.turn is Turn.HANDING_OVER
    assert world.granted == []
    # What it had drawn is prefix elsewhere: `SimulatedAgent` checks every token of it.
    world.hand_over()
    assert len(world.granted) == 1
    assert any(held.prefix for held in spot.sequences.values())
    assert not own.sequences
    world.play_out()
    assert world.done["train-0"].samples == 8
    assert own.sequences == {}
    closed = world.told("closed")
    assert closed[-1].cause == "1 s, as configured"


def test_a_window_of_zero_never_opens_while_a_remote_instance_is_there() -> None:
    world = TurnWorld()
    own, spot = world.join_as("own", reserved=True), world.join_as("spot", reserved=False)
    world.say("begins", window_s=0.0)
    world.trainer(submit(samples_per_prompt=8))
    assert (len(own.sequences), len(spot.sequences)) == (0, 6)
    world.say("wants", window_s=0.0)
    assert len(world.granted) == 1


def test_a_step_of_conversations_is_generated_when_no_turn_is_open_and_its_answers_are_as_long_as_all_turns() -> None:
    world = TurnWorld()
    own = world.join_as("own", reserved=True)
    world.say("begins", window_s=0.5)
    world.trainer(submit(samples_per_prompt=2, max_new_tokens=20))
    world.play_out()
    world.answer(2)
    world.say("wants", window_s=0.5)
    world.play(own, 1)
    assert (world.granted, world.turn) == ([], Turn.GENERATING), "the first turns alone have ended"
    while len(world.done) < 5:
        world.play_out()
        world.hand_over()
        world.answer(2)
        # What is there was trained on; the next turn has the engines again.
        world.say("waits", window_s=0.5)
    world.say("wants", window_s=0.5)
    world.hand_over()
    assert world.granted
    whole = [
        sum(
            len(got.token_ids)
            for (batch, _, k), got in world.delivered.items()
            if (conversation_of(batch) or SampleId(batch, 0, k)).replica == replica
        )
        for replica in range(2)
    ]
    assert world.manager.windows.measured_groups == [whole]


def test_when_the_last_remote_instance_dies_while_the_trainer_trains_the_engines_go_on_once_it_runs_dry() -> None:
    world = TurnWorld()
    own, spot = world.join_as("own", reserved=True), world.join_as("spot", reserved=False)
    world.say("begins", window_s=0.0)
    world.trainer(submit(samples_per_prompt=4, max_new_tokens=60, deadline_s=30.0))
    world.say("wants", window_s=0.0)
    world.play(spot, 3)
    world.lose(spot)
    # Longer than the batch's deadline: nobody could have made progress.
    for _ in range(50):
        world.pass_time(1.0)
        world.send(own, world_heartbeat())
    assert (world.turn, world.failed) == (Turn.TRAINING, {})
    assert not own.sequences
    world.say("waits", window_s=0.0)
    assert world.turn is Turn.GENERATING
    world.pass_time(0.1)
    assert world.failed == {}
    assert world.told("opened")[-1].cause == "no remote instance is left"
    world.say("wants", window_s=0.0)
    world.play_out()
    world.hand_over()
    assert len(world.granted) == 2
    assert world.done["train-0"].samples == 4


def test_an_engine_that_does_not_hand_over_in_time_loses_its_samples_and_is_not_waited_for() -> None:
    world = TurnWorld()
    own, spot = world.join_as("own", reserved=True), world.join_as("spot", reserved=False)
    world.say("begins", window_s=1.0)
    world.trainer(submit(samples_per_prompt=8, max_new_tokens=60))
    world.say("wants", window_s=1.0)
    world.pass_time(1.1)
    for _ in range(int(HAND_OVER_S) + 1):
        world.pass_time(1.0)
        world.send(own, world_heartbeat())
        world.send(spot, world_heartbeat())
    assert len(world.granted) == 1
    assert not own.sequences
    world.hand_over()
    assert len(world.granted) == 1
    world.play_out()
    assert world.done["train-0"].samples == 8


def test_an_engine_that_dies_while_it_hands_over_is_not_waited_for() -> None:
    world = TurnWorld()
    own = world.join_as("own", reserved=True)
    world.join_as("spot", reserved=False)
    world.say("begins", window_s=1.0)
    world.trainer(submit(samples_per_prompt=8))
    world.say("wants", window_s=1.0)
    world.pass_time(1.1)
    world.lose(own)
    world.pass_time(0.1)
    assert len(world.granted) == 1


@pytest.mark.parametrize("window_s", [100.0, -1.0])
def test_a_window_of_which_no_engine_is_left_is_not_waited_for_and_counts_as_the_trainers_waiting(
    window_s: float,
) -> None:
    world = TurnWorld()
    own, _spot = world.join_as("own", reserved=True), world.join_as("spot", reserved=False)
    world.say("begins", window_s=window_s)
    world.trainer(submit(samples_per_prompt=8, max_new_tokens=60, deadline_s=1e6))
    world.pass_time(1.0)
    world.lose(own)
    world.pass_time(3.0)
    assert world.turn is Turn.GENERATING, "an engine that is started again has the rest of the window"
    world.say("wants", window_s=window_s)
    world.pass_time(0.1)
    assert len(world.granted) == 1
    assert world.told("closed")[-1].cause == "no engine of its own is left"
    assert world.granted[0].window_s == pytest.approx(1.0, abs=0.2)
    assert world.manager.windows.state(world.now)["trainer_wait_s"] == pytest.approx(3.0, abs=0.2)


def test_a_machine_that_is_about_to_be_released_is_not_handed_samples_and_is_waited_for_with_what_it_has() -> None:
    world = TurnWorld()
    own, spot = world.join_as("own", reserved=True), world.join_as("spot", reserved=False)
    world.say("begins", window_s=0.0)
    world.trainer(submit(samples_per_prompt=8, max_new_tokens=60, deadline_s=1e6))
    assert (len(own.sequences), len(spot.sequences)) == (0, 6)
    leaving = world.manager.fleet.get(spot.peer)
    assert leaving is not None
    leaving.cordoned = True
    world.say("waits", window_s=0.0)
    assert world.turn is Turn.GENERATING
    assert len(own.sequences) == 2, "nobody else may have those that wait"
    world.play(own, 60)
    world.say("wants", window_s=0.0)
    world.hand_over()
    assert len(world.granted) == 1, "the engines have nothing to do until it has ended its six, or is lost"
    world.say("waits", window_s=0.0)
    world.pass_time(0.1)
    assert world.turn is Turn.FREE
    world.lose(spot)
    world.pass_time(0.1)
    assert world.turn is Turn.GENERATING
    world.play_out()
    assert world.done["train-0"].samples == 8


def test_an_evaluation_that_is_left_over_is_generated_here_once_the_step_is_trained_on() -> None:
    world = TurnWorld()
    own = world.join_as("own", reserved=True)
    world.say("begins")
    world.trainer(submit(samples_per_prompt=2))
    world.play_out()
    world.say("wants")
    world.hand_over()
    world.trainer(submit("eval-0", samples_per_prompt=2))
    assert not own.sequences
    world.say("trained")
    assert len(own.sequences) == 2
    world.play_out()
    assert world.done["eval-0"].samples == 2


@pytest.mark.parametrize("window_s", [0.0, 5.0])
def test_a_step_that_begins_while_an_evaluation_is_generated_has_its_own_window(window_s: float) -> None:
    world = TurnWorld()
    own = world.join_as("own", reserved=True)
    world.say("begins", window_s=window_s)
    world.trainer(submit(samples_per_prompt=2))
    world.play_out()
    world.say("wants", window_s=window_s)
    world.hand_over()
    world.trainer(submit("eval-0", samples_per_prompt=2, max_new_tokens=60))
    world.say("trained", window_s=window_s)
    assert own.sequences
    world.join_as("spot", reserved=False)
    world.say("begins", "train-1", window_s=window_s)
    of_step = [(event.what, event.elapsed_s) for event in world.events if isinstance(event, WindowChanged)]
    assert of_step[-1] == ("opened" if window_s else "closed", 0.0)
    assert world.turn is (Turn.GENERATING if window_s else Turn.HANDING_OVER)
    world.hand_over()
    world.play_out()
    assert world.done["eval-0"].samples == 2


def test_a_manager_that_learns_late_that_the_trainer_has_its_devices_takes_them_from_the_engines() -> None:
    world = TurnWorld()
    own = world.join_as("own", reserved=True)
    world.trainer(submit(samples_per_prompt=4, max_new_tokens=60))
    assert own.sequences
    world.say("wants", granted=True)
    assert world.turn is Turn.HANDING_OVER
    world.hand_over()
    assert world.turn is Turn.TRAINING
    assert not own.sequences


def test_another_trainer_finds_the_engines_shared_until_it_takes_turns_itself() -> None:
    from penstock.wire import TrainerHello

    world = TurnWorld()
    world.trainer(TrainerHello(name="one", pid=1, session="a"))
    world.say("begins", window_s=0.0)
    world.trainer(TrainerHello(name="one", pid=1, session="a"))
    assert world.turn is not Turn.SHARED
    world.manager.windows._plans.ahead_token_s = 1e-4
    world.trainer(TrainerHello(name="two", pid=2, session="b"))
    assert world.turn is Turn.SHARED
    assert world.manager.windows._plans.ahead_token_s == 0.0, "it may do nothing ahead"


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "sleeps"},
        {"train_s": float("nan")},
        {"micro_batch_samples": 0},
        {"ahead_samples": 0},
        {"ahead_token_s": float("inf")},
        {"ahead_token_s": -1.0},
    ],
)
def test_a_turn_that_makes_no_sense_is_refused_and_changes_nothing(changes: dict[str, Any]) -> None:
    world = TurnWorld()
    world.trainer(TrainerTurn(**{"number": 1, "batch": "b", "version": 0, "state": "begins", **changes}))
    assert world.turn is Turn.SHARED
    assert world.manager.counts.frames_refused == 1


def world_heartbeat() -> Any:
    from penstock.wire import Heartbeat

    return Heartbeat(running=0, waiting=0, kv_tokens=0, tokens_generated=0, tokens_prefilled=0, tokens_per_s=0.0)


ACTIONS = st.sampled_from(
    ["draw", "draw", "draw", "time", "join", "lose", "leaves", "hand over", "wants", "waits", "own dies", "own is back"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.sampled_from([-1.0, 0.0, 0.3, 5.0]), st.sampled_from([0, 0, 1, 3]))
def test_whatever_happens_a_step_ends_and_no_engine_runs_while_the_trainer_has_its_devices(
    actions: Sequence[str], window_s: float, turns: int
) -> None:
    world = TurnWorld()
    owns = [world.join_as("own-0", reserved=True)]
    spots: list[SimulatedAgent] = []
    born = 0
    world.say("begins", window_s=window_s)
    world.trainer(submit(samples_per_prompt=12, max_new_tokens=20, deadline_s=1e6))

    def check() -> None:
        if world.turn is Turn.TRAINING:
            assert not any(agent.sequences for agent in owns if agent.peer in world.agents)

    for action in actions:
        alive = [agent for agent in (*owns, *spots) if agent.peer in world.agents]
        if action == "draw":
            for agent in alive:
                world.play(agent, 2)
        elif action == "time":
            world.pass_time(0.2)
        elif action == "join":
            born += 1
            spots.append(world.join_as(f"spot-{born}", reserved=False))
        elif action == "lose" and any(agent in spots for agent in alive):
            world.lose(next(agent for agent in alive if agent in spots))
        elif action == "own dies" and any(agent in owns for agent in alive):
            world.lose(next(agent for agent in alive if agent in owns))
        elif action == "own is back" and not any(agent in owns for agent in alive):
            owns.append(world.join_as(f"own-{len(owns)}", reserved=True))
        elif action == "leaves" and any(agent in spots for agent in alive):
            leaving = world.manager.fleet.get(next(agent for agent in alive if agent in spots).peer)
            assert leaving is not None
            leaving.cordoned = True
        elif action == "hand over":
            world.hand_over()
        elif action in ("wants", "waits"):
            world.say(action, window_s=window_s)
            if action == "wants" and not any(agent in owns for agent in alive):
                world.pass_time(0.1)
                assert world.turn is Turn.TRAINING, "there is nobody to wait for"
        check()
        world.answer(turns)
        check()
    if not any(agent in owns for agent in world.agents.values()):
        owns.append(world.join_as(f"own-{len(owns)}", reserved=True))
    # The trainer has trained on what there was, and waits for the rest: it comes, whoever is left.
    world.say("waits", window_s=window_s)
    for _ in range(200):
        world.hand_over()
        world.pass_time(0.1)
        for agent in list(world.agents.values()):
            if agent.peer in world.agents:
                world.send(agent, world_heartbeat())
                world.play(agent, 2)
        check()
        world.answer(turns)
        check()
        if len(world.done) == 1 + 12 * turns:
            break
    assert len(world.done) == 1 + 12 * turns
    assert not world.failed
    assert not world.manager.tracker.open_turns
    assert world.done["train-0"].samples == 12
    assert world.done["train-0"].failed == 0
    before = len(world.granted)
    world.say("wants", window_s=window_s)
    world.pass_time(0.1)
    world.hand_over()
    world.pass_time(0.1)
    assert len(world.granted) == before + 1
    check()
    assert all(event.cause for event in world.told("opened") + world.told("closed"))


def generated(world: TurnWorld, batch: str, own: SimulatedAgent, spot: SimulatedAgent, plays: int) -> None:
    """A batch is submitted, both generate for a tenth of a second a play, and the trainer wants the devices."""
    world.trainer(submit(batch, samples_per_prompt=8, max_new_tokens=60))
    for _ in range(plays):
        world.pass_time(0.1)
        world.play(own, 1)
        world.play(spot, 1)
        world.hand_over()
    world.say("wants", batch)
    world.hand_over()


def waited_for(world: TurnWorld, batch: str, own: SimulatedAgent, spot: SimulatedAgent, plays: int) -> None:
    """A step whose trainer waits two seconds for the remote instance, which goes on alone."""
    generated(world, batch, own, spot, plays)
    world.say("waits", batch)
    world.pass_time(2.0)
    world.play_out()
    world.say("wants", batch)
    world.hand_over()
    world.pass_time(1.0)
    world.say("trained", batch)
    world.say("ended", batch, tokens=1000, train_s=1.0, rest_s=0.1, ahead_token_s=2e-4, ahead_samples=3)


def test_a_window_is_learned_from_the_waits_and_the_event_says_so() -> None:
    world = TurnWorld()
    manager: Manager = world.manager
    own, spot = world.join_as("own", reserved=True), world.join_as("spot", reserved=False)
    for step in range(3):
        batch = f"train-{step}"
        world.say("begins", batch)
        waited_for(world, batch, own, spot, plays=40)
    first = next(event for event in world.told("learned") if event.trainer_wait_s >= 2.0)
    assert first.fleet == 1
    assert f"the trainer waited {first.trainer_wait_s:.3g} s" in first.cause
    assert first.window_s != first.before_s
    assert manager.windows.policy.length_s(1) is not None
    assert world.told("opened")[-1].window_s >= 0
    assert "window" in manager.status(world.now).window


class JournaledTurnWorld(TurnWorld):
    """It goes on where another one's journal ends."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.records: list[Record] = list(records)
        super().__init__()
        replay = Replay()
        for record in records:
            replay.take(decode_record(encode_record(record)))
        self.carry_out(self.manager.restore(replay.finish(), self.now))
        self.carry_out(self.manager.on_journal(True, "", self.now))
        self.carry_out(self.manager.on_trainer_connected(self.now))
        self.trainer(TrainerHello(name="t", pid=1, session="same", open_batches=()))
        self.publish(0)

    def carry_out(self, decisions: Decisions) -> None:
        self.records += decisions.records
        super().carry_out(decisions)


def learned(world: TurnWorld, steps: int = 3) -> Offload:
    """Steps in which the trainer waits for the remote instance; speeds are known, so that plans are made."""
    own, spot = world.join_as("own", reserved=True), world.join_as("spot", reserved=False)
    beat = Heartbeat(running=2, waiting=0, kv_tokens=50, tokens_generated=0, tokens_prefilled=0, tokens_per_s=20.0)
    for count in range(12):
        for agent in (own, spot):
            world.now += 0.05
            world.send(agent, msgspec.structs.replace(beat, tokens_generated=20 * count))
    for step in range(steps):
        batch = f"train-{step}"
        world.say("begins", batch)
        while world.manager.thinking:
            world.carry_out(world.manager.think(world.now))
        waited_for(world, batch, own, spot, plays=12)
        world.trainer(ReleaseBatch(batch=batch))
    policy = world.manager.windows.policy
    assert isinstance(policy, Offload)
    return policy


@pytest.mark.parametrize("by_snapshot", [False, True])
def test_a_restarted_manager_knows_what_windows_fitted(by_snapshot: bool) -> None:
    first = JournaledTurnWorld()
    before = learned(first)
    assert before.plans
    assert before.corrections
    assert before.seconds
    again = JournaledTurnWorld(list(first.manager.snapshot().records()) if by_snapshot else first.records)
    policy = again.manager.windows.policy
    assert isinstance(policy, Offload)
    assert (policy.plans, policy.corrections, policy.seconds) == (before.plans, before.corrections, before.seconds)
    # It is followed at once, long before speeds are learned again.
    again.join_as("own", reserved=True)
    again.join_as("spot", reserved=False)
    again.say("begins", "train-9")
    assert again.told("opened")[-1].window_s == before.length_s(1)
    assert again.manager.policy.plan == before.plans[1]  # type: ignore[attr-defined]
    # And a third manager knows it from the second one's journal, in which nothing was learned.
    third = JournaledTurnWorld(list(again.manager.snapshot().records()))
    assert isinstance(third.manager.windows.policy, Offload)
    assert third.manager.windows.policy.corrections == before.corrections


def test_plans_are_made_of_the_last_step_s_answers_loads_and_hand_over() -> None:
    world = TurnWorld()
    policy = learned(world, steps=2)
    assert policy.facts is not None
    assert [engine.starts_s for engine in (*policy.facts.remote, *policy.facts.reserved)] == [0.1, 0.1]
    before = world.manager.windows.measured_groups
    own, spot = world.agents["peer-of-own"], world.agents["peer-of-spot"]
    world.say("begins", "train-2")
    while world.manager.thinking:
        world.carry_out(world.manager.think(world.now))
    world.trainer(submit("train-2", samples_per_prompt=8, max_new_tokens=200))
    world.say("wants", "train-2")
    while not world.asked:
        world.pass_time(0.1)
    world.pass_time(0.4)
    world.hand_over()
    world.play_out()
    world.pass_time(1.0)
    assert world.turn is Turn.TRAINING
    world.say("trained", "train-2")
    # Nobody waited in it, so nothing was done ahead: what is known of that stays.
    world.say("ended", "train-2", tokens=1000, train_s=1.0, rest_s=0.1, ahead_samples=3)
    assert own.sequences == spot.sequences == {}
    longer = world.manager.windows.measured_groups
    assert sum(map(sum, longer)) > 2 * sum(map(sum, before)), "answers grew, and the next plan goes by them"
    world.say("begins", "train-3")
    while world.manager.thinking:
        world.carry_out(world.manager.think(world.now))
    assert policy.facts.groups == longer
    training = policy.facts.training
    assert training.switch_s == pytest.approx(0.4), "as handing over took"
    assert (training.token_s, training.ahead_token_s, training.ahead_samples) == (1e-3, 2e-4, 3)


def test_a_plan_that_is_made_when_its_step_is_over_is_followed_by_one_of_what_was_learned_meanwhile() -> None:
    world = TurnWorld()
    policy = learned(world, steps=1)
    manager, own, spot = world.manager, world.agents["peer-of-own"], world.agents["peer-of-spot"]
    world.say("begins", "train-1")
    assert policy.plans == {}
    waited_for(world, "train-1", own, spot, plays=12)
    assert manager.thinking, "the step was shorter than the thought"
    of_it, ended = policy.facts, manager.windows.measured_groups
    assert of_it is not None
    assert of_it.groups != ended
    world.say("begins", "train-2")
    assert policy.facts is of_it, "what was begun is made to its end"
    while not policy.plans:
        assert manager.thinking
        world.carry_out(manager.think(world.now))
    world.carry_out(manager.think(world.now))
    assert policy.facts.groups == ended, "and the next one goes by the last step's answers"
    while manager.thinking:
        world.carry_out(manager.think(world.now))
    world.carry_out(manager.tick(world.now))
    assert not manager.thinking, "once is enough"


def test_until_there_is_a_first_plan_samples_go_out_one_by_one_and_the_engines_go_on() -> None:
    """What was given to a machine can't be taken back when the plan, a moment later, says that it is too wide."""
    world = TurnWorld()
    learned(world, steps=1)
    manager, own, spot = world.manager, world.agents["peer-of-own"], world.agents["peer-of-spot"]
    world.say("begins", "train-1")
    assert manager.thinking
    world.trainer(submit("train-1", samples_per_prompt=8, max_new_tokens=60))
    world.say("wants", "train-1")
    assert (len(own.sequences), len(spot.sequences)) == (1, 1), "of four places each"
    for _ in range(40):
        # What fitted before anything was planned is half a second; it does not decide.
        world.carry_out(manager.tick(world.now))
        world.now += 0.1
    assert world.turn is Turn.GENERATING
    while manager.thinking:
        world.carry_out(manager.think(world.now))
    assert manager.policy.plan.remote.begin > 0.25  # type: ignore[attr-defined]
    assert len(own.sequences) + len(spot.sequences) > 2
    assert world.turn is Turn.HANDING_OVER, "the plan's window is over by now"


def test_a_machine_that_joins_in_mid_step_changes_the_window_and_not_the_limits() -> None:
    world = TurnWorld()
    policy = learned(world, steps=2)
    followed = world.manager.policy.plan  # type: ignore[attr-defined]
    assert followed is policy.plans[1]
    world.say("begins", "train-2")
    while world.manager.thinking:
        world.carry_out(world.manager.think(world.now))
    followed = world.manager.policy.plan  # type: ignore[attr-defined]
    world.trainer(submit("train-2", samples_per_prompt=8, max_new_tokens=60))
    world.now += 0.1 * followed.step_s
    world.join_as("later", reserved=False)
    world.pass_time(0.01)
    assert world.manager.thinking
    while world.manager.thinking:
        world.carry_out(world.manager.think(world.now))
    assert 2 in policy.plans
    assert world.manager.policy.plan is followed  # type: ignore[attr-defined]


def test_a_step_in_which_a_machine_was_lost_is_not_learned_from() -> None:
    world = TurnWorld()
    policy = learned(world)
    policy.corrections[1] = 0.05
    world.join_as("other", reserved=False)
    own, spot = world.agents["peer-of-own"], world.agents["peer-of-spot"]
    world.say("begins", "train-9")
    world.lose(world.agents["peer-of-other"])
    waited_for(world, "train-9", own, spot, plays=12)
    assert policy.corrections[1] == 0.05
    world.say("begins", "train-10")
    waited_for(world, "train-10", own, spot, plays=12)
    assert policy.corrections[1] > 0.05, "the same without a loss is"


@pytest.mark.parametrize("fault", ["late", "failed"])
def test_a_machine_that_loads_for_too_long_or_failed_to_is_not_waited_for(fault: str) -> None:
    world = TurnWorld()
    learned(world, steps=1)
    slow = world.join("slow")
    world.say("begins", "train-9")
    assert world.manager.windows.state(world.now)["remote"] == 2
    if fault == "late":
        world.pass_time(3.5 * 0.1)
    else:
        world.send(slow, LoadFailed(version=0, cause="no room"))
    assert world.manager.windows.state(world.now)["remote"] == 1


def test_a_plan_is_made_bit_by_bit_and_frames_are_answered_in_between() -> None:
    world = TurnWorld()
    manager: Manager = world.manager
    own, spot = world.join_as("own", reserved=True), world.join_as("spot", reserved=False)

    def step(number: int) -> None:
        batch = f"train-{number}"
        world.say("begins", batch)
        generated(world, batch, own, spot, plays=12)
        world.play_out()
        world.hand_over()
        world.pass_time(1.0)
        world.say("trained", batch)
        world.say("ended", batch, tokens=1000, train_s=1.0, rest_s=0.1)

    beat = Heartbeat(running=2, waiting=0, kv_tokens=50, tokens_generated=0, tokens_prefilled=0, tokens_per_s=20.0)
    for count in range(12):
        for agent in (own, spot):
            world.now += 0.05
            world.send(agent, msgspec.structs.replace(beat, tokens_generated=20 * count))
    step(0)
    assert not manager.thinking
    world.say("begins", "train-1")
    assert manager.thinking
    assert isinstance(manager.windows.policy, Offload)
    assert manager.windows.policy.plans == {}
    # The step goes on meanwhile, and its words are answered.
    world.trainer(submit("train-1", samples_per_prompt=8, max_new_tokens=60))
    assert own.sequences
    assert spot.sequences
    bits = 0
    while manager.thinking:
        world.carry_out(manager.think(world.now))
        bits += 1
    assert bits > 10
    assert set(manager.windows.policy.plans) == {1}
    of_step = [event for event in world.events if isinstance(event, WindowChanged) and event.batch == "train-1"]
    assert of_step[-1].window_s == manager.windows.policy.length_s(1)
    # A machine more is planned for anew; another trainer needs no plan.
    world.join_as("spot-2", reserved=False)
    world.pass_time(0.01)
    assert manager.thinking
    manager.windows.reset()
    assert not manager.thinking
