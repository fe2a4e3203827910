"""Whatever providers and machines do: bounds hold, nothing flaps, nothing is killed at work, and nothing is left."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from provision_world import CONFIG, TICK_S, World

from penstock.rollout.provision_types import MachineState, ProvisionConfig

SETTLED_S = CONFIG.join_deadline_s + 2 * CONFIG.retry_most_s + 2 * CONFIG.cool_down_s
"""By then, with nothing failing, everything is as it is wanted."""


class Machines(RuleBasedStateMachine):
    config: ProvisionConfig = replace(CONFIG, floor=1)

    def __init__(self) -> None:
        super().__init__()
        self.world = World(config=self.config)
        self.world.machines.want(1, 0.0)
        self.cost = 0.0
        """As the provider bills it."""
        self.blind = False
        """A release or a list failed: machines may cost what nobody can help."""

    def pass_time(self, seconds: float) -> None:
        world = self.world
        for _ in range(int(seconds / TICK_S)):
            self.cost += len(world.alive()) * self.config.price_per_h * TICK_S / 3600
            world.pass_time(TICK_S)
            assert len(world.boxes) <= self.config.ceiling
            assert len(world.boxes) * self.config.price_per_h <= self.config.budget_per_h
            assert world.killed_at_work == 0
            if not self.blind:
                assert self.cost <= self.config.budget

    @rule(number=st.integers(0, 6), seconds=st.integers(1, 60))
    def want(self, number: int, seconds: int) -> None:
        self.world.machines.want(number, self.world.now)
        self.pass_time(seconds)

    @rule(seconds=st.integers(1, 90))
    def wait(self, seconds: int) -> None:
        self.pass_time(seconds)

    @rule(kind=st.sampled_from(["add", "lost_add", "release", "list"]), seconds=st.integers(1, 40))
    def fail(self, kind: str, seconds: int) -> None:
        self.blind = self.blind or kind in ("release", "list")
        self.world.failing.add(kind)
        self.pass_time(seconds)
        self.world.failing.discard(kind)

    @rule(works=st.booleans(), never_join=st.booleans(), given=st.integers(0, 4), answer_s=st.integers(1, 8))
    def change_provider(self, works: bool, never_join: bool, given: int, answer_s: int) -> None:
        world = self.world
        world.works, world.never_join, world.given, world.answer_s = works, never_join, given, answer_s

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data(), seconds=st.integers(1, 30))
    def preempt(self, data: st.DataObject, seconds: int) -> None:
        self.world.preempt(data.draw(st.sampled_from(sorted(self.world.alive()))))
        self.pass_time(seconds)

    @precondition(lambda self: any(box.connected for box in self.world.boxes.values()))
    @rule(data=st.data(), away_s=st.integers(1, 40))
    def disconnect(self, data: st.DataObject, away_s: int) -> None:
        world = self.world
        name = data.draw(st.sampled_from(sorted(box.id for box in world.boxes.values() if box.connected)))
        box = world.boxes[name]
        box.connected, box.samples, box.born_at, box.boots_s = False, 0, world.now, float(away_s)
        self.pass_time(5)

    @rule()
    def restart_manager(self) -> None:
        known = {machine.id for machine in self.world.machines.machines}
        # What was made by a call that was never answered, no account can have.
        self.blind = self.blind or not known >= self.world.boxes.keys()
        self.world.another_manager()
        self.pass_time(3)

    def settle(self) -> None:
        world = self.world
        world.failing.clear()
        world.never_join, world.given, world.answer_s = False, 99, 1.0
        self.pass_time(SETTLED_S)

    @rule()
    def constant_load_changes_nothing(self) -> None:
        self.settle()
        asked, there = self.world.asked_in_all, sorted(self.world.alive())
        if self.config.budget == float("inf"):
            bounded = max(self.config.floor, min(self.config.ceiling, self.world.machines.wanted))
            assert len(there) == min(bounded, self.config.budget_per_h // self.config.price_per_h)
            self.pass_time(100)
            assert (self.world.asked_in_all, sorted(self.world.alive())) == (asked, there)

    @invariant()
    def the_account_is_no_less_than_the_bill(self) -> None:
        assert self.cost <= self.world.machines.purse.spent + 1e-6 or self.blind

    @invariant()
    def every_machine_that_is_there_is_known_once_it_was_listed(self) -> None:
        ids = [machine.id for machine in self.world.machines.machines if machine.id]
        assert len(ids) == len(set(ids))
        for machine in self.world.machines.machines:
            assert (machine.state is MachineState.ASKED) == (not machine.id)

    def teardown(self) -> None:
        self.world.machines.end("the run ended", self.world.now)
        self.settle()
        assert self.world.boxes == {}
        assert self.world.machines.done


class MachinesOnABudget(Machines):
    config = replace(CONFIG, floor=1, budget_per_h=110.0, budget=6.0)


TestMachines = Machines.TestCase
TestMachines.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestMachinesOnABudget = MachinesOnABudget.TestCase
TestMachinesOnABudget.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
