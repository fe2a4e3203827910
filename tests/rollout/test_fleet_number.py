"""How many machines are right for a run whose own engines generate beside the trainer, or in turns with it."""

from __future__ import annotations

import pytest
from balance_helpers import Replayed

from penstock.rollout.fleet_size import FleetSize, FleetSizeConfig
from penstock.rollout.manager import Manager, ManagerConfig
from penstock.rollout.offload import StepTimes
from penstock.rollout.provision_types import Add, InstanceView, ProvisionConfig, Release, Seen
from penstock.rollout.provision_use import Use
from penstock.rollout.windows import Turn
from penstock.wire import StepReport

OWN, WORK_S, TRAIN_S = 2, 200.0, 50.0
"""Engines of the trainer's machine; instance-seconds of generating a step; seconds of training in it."""


def settled(turn: Turn, agents: int = 1, by_hand: int = 0, work_s: float = WORK_S, **prices: float) -> int:
    """What a manager wants after some steps that went as its machines allowed. `agents`: on each of them."""
    manager = Manager(ManagerConfig())
    manager.provide(ProvisionConfig(ceiling=16, first=0, start_s=1, cool_down_s=1, **prices), OWN, None, 0.0)  # type: ignore[arg-type]
    provisioning = manager.provisioning
    assert provisioning is not None
    machines, now = provisioning.machines, 0.0
    there: list[str] = []

    def look(samples: int) -> None:
        own = [InstanceView(f"own{k}", f"own{k}", "h", False, True, True, samples) for k in range(OWN)]
        mine = [InstanceView(f"mine{k}", f"mine{k}", "d", False, True, False, samples) for k in range(by_hand)]
        theirs = [
            InstanceView(f"{name}/{agent}", f"gpu-{agent}", name, False, True, False, samples)
            for name in there
            for agent in range(agents)
        ]
        for call in provisioning.tick([*own, *mine, *theirs], now, True).calls:
            if isinstance(call, Add):
                names = [f"m{call.call}-{k}" for k in range(call.count)]
                there.extend(names)
                machines.added(call.call, names, now)
            elif isinstance(call, Release):
                there.remove(call.machine)
                machines.released(call.call, now)
            else:
                machines.listed(call.call, [Seen(name) for name in there], now)

    for step in range(12):
        manager.windows.turn = turn
        for _ in range(4):
            # Those that were asked for or released come at once, or are gone.
            look(0)
        instances = by_hand + agents * len(there)
        busy_s = work_s / (OWN + instances) if turn is Turn.SHARED else (work_s + OWN * TRAIN_S) / (OWN + instances)
        step_s = max(TRAIN_S, busy_s)
        own_s = busy_s if turn is Turn.SHARED else step_s - TRAIN_S
        look(1)
        for passed_s, samples in ((own_s, 1), (step_s - own_s, 0)):
            now += passed_s
            look(samples)
        waited_s = step_s - TRAIN_S if turn is Turn.SHARED else 0.0
        manager.on_trainer_frame(StepReport(step=step, step_s=step_s, train_s=TRAIN_S, trainer_wait_s=waited_s), now)
        while manager.thinking:
            manager.think(now)
    return machines.wanted


@pytest.mark.parametrize(
    "prices",
    [{}, {"reserved_price_per_h": 20.0, "price_per_h": 3.0}, {"reserved_price_per_h": 83.79, "price_per_h": 20.0}],
)
def test_engines_that_generate_beside_the_trainer_take_none_of_its_time(prices: dict[str, float]) -> None:
    assert settled(Turn.SHARED, **prices) == WORK_S / TRAIN_S - OWN


@pytest.mark.parametrize(("agents", "by_hand", "wanted"), [(1, 0, 12), (2, 0, 6), (3, 0, 4), (2, 4, 8), (4, 2, 5)])
def test_a_machine_with_several_instances_is_worth_as_many(agents: int, by_hand: int, wanted: int) -> None:
    prices = {"reserved_price_per_h": 83.79, "price_per_h": 5.32}
    assert settled(Turn.SHARED, agents, by_hand, TRAIN_S * (OWN + 12), **prices) == wanted


@pytest.mark.parametrize(("agents", "by_hand"), [(1, 0), (3, 0), (3, 5)])
def test_losses_are_of_machines_however_many_instances_each_has(agents: int, by_hand: int) -> None:
    """Six machines, of which one is lost every hundred seconds."""
    use, size = Use(), FleetSize(FleetSizeConfig(start_s=600.0), OWN)
    views = [InstanceView(f"{k}", "", "", False, True, False, 1) for k in range(6 * agents + by_hand)]
    now = 0.0
    for step in range(200):
        for _ in range(10):
            now += 10.0
            use.pass_time(views, now, 6)
        report = StepReport(step=step, step_s=100.0, train_s=50.0, trainer_wait_s=0.0)
        size.learn_step(use.step(report, losses=1))
    assert size.preemptions_per_h == pytest.approx(6.0, rel=0.02), "each machine goes once in ten minutes"


def test_engines_that_give_way_to_the_trainer_leave_more_to_others() -> None:
    assert settled(Turn.TRAINING) > WORK_S / TRAIN_S - OWN


def test_a_step_beside_the_trainer_takes_the_longer_of_the_two() -> None:
    size = FleetSize(FleetSizeConfig(), OWN)
    size.learn_step(StepTimes(0, 105.0, 100.0, TRAIN_S, 50.0, 0.0, 0.0), beside=True)
    assert [size.step_s(machines) for machines in (0, 2, 6)] == [105.0, 55.0, 55.0]


def test_each_machine_costs_its_own_price_and_one_of_which_none_is_known_the_usual_one() -> None:
    price = {0: 0.0, 1: 2.0, 2: None, 3: 30.0}.get
    config = FleetSizeConfig(ceiling=4, first=0, machine_price=5.0, reserved_price=80.0)
    size = FleetSize(config, OWN)
    predictor = Replayed(lambda n: 400 / (4 + n), price=price)
    times = StepTimes(0, 105.0, 100.0, TRAIN_S, 50.0, 0.0, 0.0)
    for _ in range(4):
        wanted = size.ended(times, predictor)
    assert [size.step_cost(n) for n in (2, 3, 4)] == pytest.approx(
        [(80.0 + dollars) / 3600 * 400 / (4 + n) for n, dollars in ((2, 2.0), (3, 7.0), (4, 37.0))]
    )
    assert wanted == 3, "the fourth one costs more than it saves"
    alike = FleetSize(config, OWN)
    assert [alike.ended(times, Replayed(lambda n: 400 / (4 + n))) for _ in range(4)][-1] == 4


@pytest.mark.parametrize(
    ("budget", "unpaid", "most"), [(1.9, 0, 1), (2.0, 0, 2), (7.0, 0, 3), (7.0, 2, 4), (36.9, 0, 3)]
)
def test_a_budget_pays_for_machines_at_their_own_prices(budget: float, unpaid: int, most: int) -> None:
    price = {0: 0.0, 1: 2.0, 2: None, 3: 30.0}.get
    config = FleetSizeConfig(ceiling=4, first=0, machine_price=5.0, reserved_price=9000.0, budget_per_h=budget)
    size = FleetSize(config, OWN)
    size.learn(unpaid=unpaid)
    times = StepTimes(0, 105.0, 100.0, TRAIN_S, 50.0, 0.0, 0.0)
    for _ in range(4):
        wanted = size.ended(times, Replayed(lambda n: 400 / (4 + n), price=price))
    assert wanted == most


def test_where_only_further_machines_cost_anything_those_that_are_free_are_wanted() -> None:
    price = {0: 0.0, 1: 0.0}
    size = FleetSize(FleetSizeConfig(ceiling=4, first=3, machine_price=4.0), OWN)
    times = StepTimes(0, 105.0, 100.0, TRAIN_S, 50.0, 0.0, 0.0)
    predictor = Replayed(lambda n: 400 / (4 + n), price=lambda k: price.get(k, 4.0))
    assert [size.ended(times, predictor) for _ in range(6)][-1] == 2


def test_what_the_budget_does_not_pay_for_is_not_wanted_whatever_the_floor() -> None:
    config = FleetSizeConfig(floor=5, ceiling=8, budget_per_h=10.0, machine_price=4.0, reserved_price=80.0)
    size = FleetSize(config, OWN)
    assert size.wanted == 2
    for _ in range(3):
        assert size.ended(StepTimes(2, 100.0, 20.0, 60.0, 20.0, 0.0, 800.0)) == 2
    size.learn(machine_price=1.0)
    for _ in range(3):
        size.ended(StepTimes(2, 100.0, 20.0, 60.0, 20.0, 0.0, 800.0))
    assert size.wanted >= 5
