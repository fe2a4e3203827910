"""Whoever may work has work: whatever became of samples, suspects and instances, none waits beside an idle machine."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_helpers import SimulatedAgent, World, output_of, submit, tokens

from penstock.rollout.fleet import FleetConfig, Instance, State
from penstock.rollout.manager import ManagerConfig
from penstock.sample import Finish, SampleId, sample_seed
from penstock.wire import AgentHello, CancelBatch, Goodbye, Heartbeat, TrainerTurn

BEAT = Heartbeat(running=0, waiting=0, kv_tokens=0, tokens_generated=0, tokens_prefilled=0, tokens_per_s=0.0)
LIMIT = 6
PENDING = 1
CURSED = 3
"""One sample in so many kills whatever runs it."""


def cursed(seed: int) -> bool:
    return seed % CURSED == 0


class ProgressMachine(RuleBasedStateMachine):
    """Machines come, die of their samples or by themselves, come back, are cordoned, and take turns with a trainer."""

    @initialize(version_too=st.booleans())
    def start(self, version_too: bool) -> None:
        self.world = World(ManagerConfig(fleet=FleetConfig(heartbeat_s=2.0), max_pending_per_instance=PENDING))
        self.world.publish(0)
        if version_too:
            self.world.publish(1)
        self.version = int(version_too)
        self.max_running: dict[str, int] = {}
        self.batches = itertools.count()
        self.open: set[str] = set()
        self.turns = itertools.count(1)
        self.fresh_names = (f"fresh-{number}" for number in itertools.count())

    # ---- what happens

    def come(self, name: str, process: str, max_running: int, reserved: bool) -> SimulatedAgent:
        world = self.world
        world._peers += 1
        agent = SimulatedAgent(f"peer-{world._peers}")
        world.agents[agent.peer] = agent
        self.max_running[agent.peer] = max_running
        world.carry_out(world.manager.on_agent_connected(agent.peer, world.now))
        hello = AgentHello(
            name=name,
            engine="simulated",
            pid=1,
            host="here",
            max_running=max_running,
            max_context_tokens=1024,
            reserved=reserved,
            process=process,
        )
        world.send(agent, hello)
        return agent

    def chosen(self, data: st.DataObject) -> SimulatedAgent | None:
        agents = list(self.world.agents.values())
        return data.draw(st.sampled_from(agents)) if agents else None

    def running(self, agent: SimulatedAgent) -> list[int]:
        return list(agent.sequences)[: self.max_running[agent.peer]]

    @precondition(lambda self: len(self.world.agents) < 3)
    @rule(name=st.sampled_from(["a", "b", ""]), max_running=st.integers(1, 3), reserved=st.booleans())
    def join(self, name: str, max_running: int, reserved: bool) -> None:
        self.come(name or next(self.fresh_names), f"life of {name}" if name else "", max_running, reserved)

    @precondition(lambda self: len(self.open) < 3)
    @rule(prompts=st.integers(1, 3), samples=st.integers(1, 3), older=st.booleans())
    def submit(self, prompts: int, samples: int, older: bool) -> None:
        name = f"train-{next(self.batches)}"
        self.open.add(name)
        version = max(0, self.version - older)
        self.world.trainer(submit(name, [[1, 2]] * prompts, samples, version, max_new_tokens=LIMIT, deadline_s=1e9))

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.world.publish(self.version)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open and data.draw(st.integers(0, 3)) == 0:
            self.world.trainer(CancelBatch(batch=data.draw(st.sampled_from(sorted(self.open))), cause="not needed"))

    @rule(data=st.data(), count=st.integers(1, 4))
    def work(self, data: st.DataObject, count: int) -> None:
        agent = self.chosen(data)
        if agent is not None:
            self.live(agent, count)

    def live(self, agent: SimulatedAgent, count: int) -> None:
        """Loads, dies of what it runs, or draws."""
        if agent.loading is not None:
            self.world.send(agent, agent.ready())
        elif any(cursed(agent.sequences[lease].seed) for lease in self.running(agent)):
            self.world.send(agent, Goodbye(cause="out of memory", engine_failed=True))
        elif agent.sequences:
            self.world.send(agent, agent.draw(self.running(agent), count))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        agent = self.chosen(data)
        if agent is not None and agent.sequences:
            lease = data.draw(st.sampled_from(sorted(agent.sequences)))
            held = agent.sequences.pop(lease)
            self.world.send(agent, tokens((lease, held.drawn, [], Finish.ABORTED), version=agent.version))

    @rule(data=st.data())
    def draw_nonsense(self, data: st.DataObject) -> None:
        """One row with a token that no vocabulary has."""
        agent = self.chosen(data)
        if agent is not None and agent.sequences:
            lease = data.draw(st.sampled_from(sorted(agent.sequences)))
            row = (lease, agent.sequences[lease].drawn, [10**6], Finish.RUNNING)
            self.world.send(agent, tokens(row, version=agent.version))

    @rule(data=st.data(), how=st.sampled_from(["cut", "goodbye", "nonsense"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        agent = self.chosen(data)
        if agent is None:
            return
        if how == "goodbye":
            self.world.send(agent, Goodbye(cause="preempted"))
        elif how == "nonsense":
            self.world.send(agent, tokens((1, 0, [1], Finish.RUNNING), logprobs=b""))
        self.world.lose(agent)

    @rule(data=st.data(), cordoned=st.booleans())
    def cordon(self, data: st.DataObject, cordoned: bool) -> None:
        agent = self.chosen(data)
        if agent is not None:
            self.instance(agent).cordoned = cordoned
            self.pass_time(0.1, False)

    @rule(state=st.sampled_from(["begins", "wants", "waits", "trained"]), window_s=st.sampled_from([0.0, 0.5, -1.0]))
    def turn(self, state: str, window_s: float) -> None:
        batch = min(self.open, default="train-0")
        number = next(self.turns)
        self.world.trainer(
            TrainerTurn(number=number, batch=batch, version=self.version, state=state, window_s=window_s)
        )

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]), quiet=st.booleans())
    def pass_time(self, seconds: float, quiet: bool) -> None:
        self.world.pass_time(seconds)
        for agent in list(self.world.agents.values()):
            if not quiet:
                self.world.send(agent, BEAT)

    # ---- what holds

    def instance(self, agent: SimulatedAgent) -> Instance:
        found = self.world.manager.fleet.get(agent.peer)
        assert found is not None
        return found

    @invariant()
    def whoever_may_work_has_work(self) -> None:
        if not hasattr(self, "world"):
            return
        manager = self.world.manager
        tracker = manager.tracker
        self.open = {batch.name for batch in tracker.batches()}
        for batch in tracker.batches():
            for instance in manager.fleet.ready_for(batch.version, batch.context_tokens):
                if not batch.waiting or not manager.windows.may_generate(instance):
                    continue
                if instance.turning:
                    oldest = next(batch for batch in tracker.batches() if batch.waiting)
                    assert not instance.holds(oldest.version), "it runs dry for others than these"
                    assert tracker.leases_of(instance.id), "it is dry"
                    continue
                leases = tracker.leases_of(instance.id)
                assert leases, f"{instance.id} is idle, and {batch.waiting} samples of {batch.name} wait"
                if batch.suspects and leases < instance.max_running + PENDING:
                    assert not tracker.may_try(instance.id), f"{instance.id} has room for one of {batch.suspects}"

    @invariant()
    def nobody_has_two_suspects(self) -> None:
        if not hasattr(self, "world"):
            return
        tracker = self.world.manager.tracker
        for instance in self.world.manager.fleet:
            held = tracker.samples_of(instance.id)
            untried = [sample for sample in held if sample.strikes and sample.length == sample.placed_length]
            assert len(untried) <= 1, instance.id

    def teardown(self) -> None:
        """With one instance at a time, which is replaced when it dies, every batch comes to its end."""
        if not hasattr(self, "world"):
            return
        world, manager = self.world, self.world.manager
        for agent in list(world.agents.values()):
            world.send(agent, Goodbye(cause="the end"))
        for _ in range(1000):
            if not list(manager.tracker.batches()):
                break
            if not world.agents:
                self.come(next(self.fresh_names), "", 2, reserved=False)
            world.pass_time(0.5)
            for agent in list(world.agents.values()):
                world.send(agent, BEAT)
                self.live(agent, 1)
            self.whoever_may_work_has_work()
        assert not list(manager.tracker.batches())
        for key, sample in world.delivered.items():
            seed = sample_seed(0, SampleId(*key))
            if sample.finish is not Finish.FAILED:
                assert (sample.token_ids, sample.logprobs, sample.finish) == output_of(seed, LIMIT)
                assert not cursed(seed)
        assert manager.fleet.count(State.DRAINING) == 0


ProgressMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_whatever_happens_whoever_may_work_has_work_and_every_batch_ends = ProgressMachine.TestCase


def test_samples_of_an_older_version_are_not_starved_by_a_newer_batch_that_keeps_everybody_busy() -> None:
    world = World()
    world.publish(0)
    first, second = world.join_ready("first"), world.join_ready("second")
    world.trainer(submit("older", samples_per_prompt=4, max_new_tokens=40, deadline_s=20.0))
    world.publish(1)
    for lease in list(second.sequences):
        world.send(second, second.draw([lease], 40))
    world.trainer(submit("newer", samples_per_prompt=100, version=1, max_new_tokens=40, deadline_s=20.0))
    world.play(second)
    world.lose(first)
    for _ in range(400):
        if "older" in world.done or "older" in world.failed:
            break
        world.pass_time(0.5)
        world.send(second, BEAT)
        world.play(second, 4)
    assert "older" in world.done, world.failed.get("older")
    assert world.manager.tracker.batch("newer") is not None, "it goes on where it was left"
    world.play_out()
    assert world.done["newer"].samples == 100
