"""Who is given up first: the dearest for what they do, then those that have nothing to do."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from balance_helpers import report_of
from provision_world import CONFIG, grown
from test_provision_manager import Provided

from penstock.rollout.balanced import Balanced
from penstock.rollout.curves import Speed
from penstock.rollout.provision import Provision
from penstock.rollout.provision_money import Purse
from penstock.rollout.provision_types import Add, InstanceView, ListAll, Machine, MachineState, Seen
from penstock.rollout.provisioning import Provisioning
from penstock.rollout.releases import first_to_go, work_costs
from penstock.wire import StepReport


@dataclass(frozen=True)
class Rated:
    number: int
    known_price: float | None = 5.0
    slower: float = 1.0
    samples: int = 0
    instances: int = 1

    @property
    def rate(self) -> float:
        return self.instances / self.slower


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Rated(0, slower=2.0), Rated(1)),
        (Rated(0, slower=2.0, samples=9), Rated(1)),
        (Rated(0, known_price=8.0, samples=9), Rated(1)),
        (Rated(0, known_price=4.0, slower=2.0), Rated(1, known_price=6.0)),
        (Rated(0, known_price=9.0), Rated(1, known_price=4.0, slower=2.0)),
        (Rated(0), Rated(1, known_price=5.4, samples=1)),
        (Rated(0, known_price=5.4, samples=1), Rated(1, samples=1)),
        (Rated(0, samples=1), Rated(1, samples=2)),
        (Rated(1), Rated(0)),
        (Rated(0, known_price=None, slower=1.5, samples=3), Rated(1, known_price=None)),
        (Rated(0, slower=2.06, samples=4), Rated(1, slower=2.0, samples=5)),
        (Rated(0, slower=2.0), Rated(1, slower=2.06, samples=5)),
        (Rated(0), Rated(1, known_price=8.0, instances=2)),
        (Rated(0, known_price=6.0), Rated(1, known_price=0.0, slower=9.0)),
    ],
    ids=[
        "slower",
        "slower, though it works",
        "dearer, though it works",
        "cheaper and slower by more than that",
        "slower and cheaper by more than that",
        "a little dearer is no reason to interrupt it",
        "a little dearer among those that work",
        "fewer samples",
        "younger",
        "slower, where nothing has a price",
        "a little slower among slow ones that work",
        "idle, among slow ones that differ by chance",
        "one that does less for its money than a dearer one with two instances",
        "one that costs something",
    ],
)
def test_of_two_this_one_goes_first(first: Rated, then: Rated) -> None:
    assert first_to_go([first, then]) == first_to_go([then, first]) == [first, then]


def test_the_order_is_one_whoever_comes_first_and_nobody_is_left_out() -> None:
    draws = random.Random(3)
    machines = [
        Rated(k, draws.choice((None, 0.0, 4.0, 4.2, 9.0)), draws.choice((1.0, 1.2, 3.0)), draws.randrange(3))
        for k in range(40)
    ]
    order = first_to_go(machines)
    assert sorted(order, key=lambda rated: rated.number) == machines
    for _ in range(5):
        draws.shuffle(machines)
        assert first_to_go(machines) == order
    assert first_to_go([]) == []


def test_a_budget_keeps_as_many_as_are_left_when_the_worst_have_gone() -> None:
    def machine(number: int, price_per_h: float, slower: float) -> Machine:
        return Machine(number, price_per_h, 0.0, 0.0, MachineState.JOINED, instance_rate=1 / slower)

    purse = Purse(replace(CONFIG, budget_per_h=10.0))
    fast, slow = machine(0, 6.0, 1.0), [machine(k, 3.0, 4.0) for k in (1, 2)]
    assert purse.keeps([fast, *slow]) == 2, "the fast one and a slow one, though both slow ones cost no more"
    assert purse.keeps([fast, *slow, machine(3, 6.0, 1.0)]) == 1
    asked = replace(machine(4, 9.0, 1.0), state=MachineState.ASKED)
    idle = [machine(k, 3.0, 2.0) for k in (5, 6)]
    assert purse.keeps([*idle, asked]) == 1, "what has no name yet can't go, dear as it is"


def test_who_is_wanted_again_is_the_best_of_those_that_were_to_go() -> None:
    world = grown(3)
    world.boxes["m-1"].rate, world.boxes["m-2"].rate = 1 / 3, 1 / 2
    world.machines.want(1, world.now)
    while not world.changes("draining"):
        world.pass_time(1)
    world.machines.want(2, world.now)
    world.pass_time(CONFIG.drain_s + 10)
    assert world.alive() == ["m-2", "m-3"]


@pytest.mark.parametrize(("agents", "known", "rate"), [(1, None, 0.3), (2, 0.6, 1.2)])
def test_what_a_machine_does_is_what_all_its_instances_do_as_was_last_known(
    agents: int, known: float | None, rate: float
) -> None:
    world = grown(1, agents=agents)
    world.boxes["m-1"].rate = 0.3
    world.pass_time(CONFIG.settle_s + 1)
    assert world.machine("m-1").rate == pytest.approx(agents * 0.3)
    # Another instance on it: of that nothing is known yet.
    world.boxes["m-1"].rate = known
    world.pass_time(1)
    assert world.machine("m-1").rate == pytest.approx(rate)


def test_one_that_has_not_joined_or_is_away_counts_for_as_many_instances_as_others_or_it_had() -> None:
    world = grown(2, agents=2)
    world.pass_time(CONFIG.settle_s + 1)
    world.machines.want(3, world.now)
    world.pass_time(5)
    assert world.machines.per_machine == 2.0
    assert [machine.rate for machine in world.machines.machines] == [2.0, 2.0, 2.0]
    world.boxes["m-1"].connected, world.boxes["m-1"].boots_s = False, 1e9
    world.pass_time(5)
    assert world.machine("m-1").state is MachineState.STARTING
    assert world.machine("m-1").rate == 2.0


def test_how_many_instances_a_machine_has_is_what_it_has_had_for_a_while() -> None:
    provision = Provision(CONFIG, lambda event: None)
    now = 0.0

    def look(instances: int, seconds: float) -> tuple[int, float]:
        nonlocal now
        views = [InstanceView(f"p{k}", "m", "m", False, True, False, 1, 1.0) for k in range(instances)]
        for _ in range(int(seconds)):
            now += 1.0
            for call in provision.tick(views, now).calls:
                if isinstance(call, Add):
                    provision.added(call.call, ["m"], now)
                elif isinstance(call, ListAll):
                    provision.listed(call.call, [Seen("m")], now)
        return provision.machines[0].instances, provision.per_machine

    provision.want(1, now)
    assert look(0, 3) == (1, 1.0)
    assert look(4, CONFIG.settle_s - 2) == (1, 1.0), "some may be there twice"
    assert look(4, 4) == (4, 4.0)
    assert look(1, 5) == (4, 4.0), "the others are back soon"
    assert look(5, 3) == look(4, 5) == (4, 4.0)
    assert look(3, CONFIG.rejoin_s + 2) == (3, 3.0)

    before = Provisioning(CONFIG, lambda event: None)
    before.machines = provision
    again = Provisioning(CONFIG, lambda event: None)
    again.restore(before.saved(now), now)
    assert [machine.rate for machine in again.machines.machines] == [3.0]


def test_a_price_that_nobody_has_told_is_taken_to_be_the_others_mean() -> None:
    machines = [Rated(0, None, 1.0), Rated(1, 4.0, 1.0), Rated(2, 8.0, 2.0)]
    assert work_costs(machines) == pytest.approx([1.5, 1.0, 4.0])
    assert work_costs([Rated(0, None, 3.0), Rated(1, None)]) == pytest.approx([3.0, 1.0])
    assert work_costs([Rated(0, 0.0, 3.0), Rated(1, 2.0)]) == pytest.approx([0.0, 1.0])
    # What is free says nothing of what the others may cost.
    assert work_costs([Rated(0, 0.0), Rated(1, None, 3.0), Rated(2, None)]) == pytest.approx([0.0, 3.0, 1.0])
    assert work_costs([Rated(0, 0.0), Rated(1, None), Rated(2, 4.0)]) == pytest.approx([0.0, 1.0, 1.0])
    assert work_costs([]) == []
    free = Machine(0, 0.0, 0.0, 0.0, priced=True)
    assert (free.known_price, replace(free, priced=False).known_price) == (0.0, None)
    assert replace(free, price_per_h=3.0, priced=False).known_price == 3.0


@pytest.mark.parametrize(("rate", "words"), [(0.4, "2.5 x"), (0.0, "over 20 x")])
def test_a_machine_is_as_slow_as_its_instances_and_says_so_when_it_goes(rate: float, words: str) -> None:
    world = grown(2, works=False)

    world.boxes["m-1"].rate = rate
    world.machines.want(1, world.now)
    world.pass_time(CONFIG.cool_down_s + 3)
    assert world.alive() == ["m-2"]
    assert f"the same work costs {words} as much on it" in world.changes("draining")[0].cause


def test_the_manager_s_policy_tells_at_each_step_s_end_who_is_slow() -> None:
    world = Provided(first=2, ceiling=2)
    world.pass_time(1)
    world.pass_time(1)
    world.publish(0)
    slow, fast = (world.join_ready(name, max_running=8) for name in ("spot-0", "spot-1"))
    policy = world.manager.policy
    assert isinstance(policy, Balanced)
    for agent, factor in ((slow, 2.5), (fast, 1.0)):
        ident = world.manager.fleet.get(agent.peer).id  # type: ignore[union-attr]
        speed = Speed(factor * 0.01, factor * 5e-4, factor * 5e-7)
        for k in range(20):
            policy.report(report_of(ident, speed, k, steps=10))
    world.beat(2, slow)
    machines = world.manager.provisioning.machines  # type: ignore[union-attr]
    assert [machine.rate for machine in machines.machines] == [1.0, 1.0]
    world.trainer(StepReport(step=0, step_s=20.0, train_s=1.0, trainer_wait_s=19.0))
    world.beat(2, slow)
    assert [machine.rate for machine in machines.machines] == [pytest.approx(0.4, rel=0.01), 1.0]
