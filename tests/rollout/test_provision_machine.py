"""Whatever providers and machines do: bounds hold, nothing flaps, nothing is killed at work, and nothing is left."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from provision_world import CONFIG, TICK_S, World

from penstock.rollout.provision_types import MachineState, ProvisionConfig

SETTLED_S = CONFIG.join_deadline_s + 2 * CONFIG.retry_most_s + 2 * CONFIG.cool_down_s
"""By then, with nothing failing, everything is as it is wanted."""


class Machines(RuleBasedStateMachine):
    config: ProvisionConfig = replace(CONFIG, floor=1)

    agents = 1

    def __init__(self) -> None:
        super().__init__()
        self.world = World(config=self.config, agents=self.agents)
        self.world.machines.want(1, 0.0)
        self.cost = 0.0
        """As the provider bills it."""
        self.blind = False
        """A release or a list failed: machines may cost what nobody can help."""
        self.overdrawn = False

    def least_price(self) -> float:
        """What a machine was taken to cost an hour, at least."""
        return self.config.price_per_h

    def asked_price(self) -> float:
        """At least, where more than one is asked for."""
        return self.least_price()

    def pass_time(self, seconds: float) -> None:
        world = self.world
        for _ in range(int(seconds / TICK_S)):
            self.cost += len(world.alive()) * self.least_price() * TICK_S / 3600
            world.pass_time(TICK_S)
            assert len(world.boxes) <= self.config.ceiling
            assert len(world.boxes) * self.asked_price() <= self.config.budget_per_h
            assert world.killed_at_work == 0
            if not self.blind and not self.overdrawn:
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

    @rule(by_hand=st.integers(0, 3), deaf=st.booleans(), seconds=st.integers(1, 60))
    def change_instances(self, by_hand: int, deaf: bool, seconds: int) -> None:
        self.world.by_hand, self.world.deaf = by_hand, deaf
        self.pass_time(seconds)

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

    @rule(away_s=st.integers(0, 7200), stay=st.booleans(), failing=st.booleans())
    def restart_manager(self, away_s: int, stay: bool, failing: bool) -> None:
        world = self.world
        known = {machine.id for machine in world.machines.machines}
        # What was made by a call that was never answered, no account can have.
        self.blind = self.blind or not known >= world.boxes.keys() or (failing and stay)
        if not stay:
            world.boxes.clear()
        # Nobody is there to keep to the budget.
        self.overdrawn = self.overdrawn or (stay and away_s > 0)
        self.cost += len(world.alive()) * self.least_price() * away_s / 3600
        spent = world.machines.purse.spent
        world.another_manager(away_s=away_s)
        if failing:
            # Its successor, too, goes before any list has shown what there is.
            world.failing.add("list")
            self.pass_time(3)
            world.failing.discard("list")
            world.another_manager()
        # For a list to be answered.
        self.pass_time(12)
        if not stay:
            assert world.machines.purse.spent - spent < 0.7 * self.config.ceiling, "of the seconds since"

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
            bounded = max(0, bounded - self.world.by_hand)
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


class MachinesWithTwoAgents(Machines):
    agents = 2


class MachinesAtPricesThatMove(Machines):
    """Lists tell other prices than the configured one, which may be none."""

    least = 0.0

    config = replace(CONFIG, floor=0, budget_per_h=110.0)

    @initialize(configured=st.sampled_from([0.0, 20.0, 36.0]), listed=st.sampled_from([20.0, 36.0, 40.0, 120.0]))
    def begin(self, configured: float, listed: float) -> None:
        self.config = replace(self.config, price_per_h=configured)
        self.world = World(config=self.config, price=listed)
        self.world.machines.want(1, 0.0)
        self.least = listed

    def least_price(self) -> float:
        """Until a list tells, it is the configured price; the account is no less than the bill at the least of them."""
        return min(self.least, self.config.price_per_h)

    def asked_price(self) -> float:
        """With no price known, one machine is asked for to show it, however dear it is."""
        return self.least_price() or min(self.least, self.config.budget_per_h)

    @rule(price=st.sampled_from([20.0, 36.0, 40.0, 54.0, 120.0]))
    def change_price(self, price: float) -> None:
        self.world.price = price
        self.least = min(self.least, price)

    @rule()
    def constant_load_changes_nothing(self) -> None:
        world = self.world
        self.settle()
        there, asked, ended = world.alive(), world.asked_in_all, len(world.changes("released"))
        assert world.price is not None
        assert len(there) * world.price <= self.config.budget_per_h
        self.pass_time(600)
        # An hour after machines were dearer, or too dear for even one, others may be asked for.
        assert world.asked_in_all == asked or len(world.changes("released")) == ended or not there
        assert world.asked_in_all - asked <= self.config.ceiling


TestMachines = Machines.TestCase
TestMachines.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestMachinesOnABudget = MachinesOnABudget.TestCase
TestMachinesOnABudget.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestMachinesAtPricesThatMove = MachinesAtPricesThatMove.TestCase
TestMachinesAtPricesThatMove.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestMachinesWithTwoAgents = MachinesWithTwoAgents.TestCase
TestMachinesWithTwoAgents.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
