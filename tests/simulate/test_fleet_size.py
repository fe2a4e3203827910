"""What is simulated is what runs: a manager told what the simulator's machines did wants as many of them."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import pytest
from simulated import MACHINE, small_profile

from penstock.rollout import plan
from penstock.rollout.facts import Facts
from penstock.rollout.fleet_size import FleetSize, FleetSizeConfig
from penstock.rollout.manager import Manager, ManagerConfig
from penstock.rollout.offload import Offload, StepTimes
from penstock.rollout.other_fleets import Predictor
from penstock.rollout.provision_types import InstanceView, ProvisionConfig
from penstock.rollout.step_replay import Plan
from penstock.rollout.windows import Turn
from penstock.simulate.baselines import make_strategy
from penstock.simulate.profiles import Lengths, Prices
from penstock.simulate.traces import static_trace
from penstock.simulate.world import simulate
from penstock.wire import StepReport


@dataclass
class Told:
    """At the end of one of the simulator's steps."""

    times: StepTimes
    facts: Facts | None
    plans: dict[int, Plan]
    wanted: int = 0
    asked: list[int] = field(default_factory=list)
    """Numbers whose steps were replayed."""


@dataclass
class Noted:
    predictor: Predictor
    asked: list[int]

    def seconds(self, instances: int) -> Generator[None, None, float | None]:
        self.asked.append(instances)
        return (yield from self.predictor.seconds(instances))

    def prices(self, instances: int) -> Sequence[float | None]:
        return self.predictor.prices(instances)


class Recorded(FleetSize):
    """The policy, and what it was told."""

    def __init__(self, config: FleetSizeConfig, reserved_engines: int, window: Offload) -> None:
        super().__init__(config, reserved_engines)
        self.window = window
        self.told: list[Told] = []

    def ended(self, times: StepTimes, predictor: Predictor | None = None, beside: bool = False) -> int:
        told = Told(times, self.window.facts, dict(self.window.plans))
        self.told.append(told)

        told.wanted = super().ended(times, None if predictor is None else Noted(predictor, told.asked), beside)
        return told.wanted


def views(remote: int, working: bool, reserved: int, generating: bool) -> list[InstanceView]:
    def view(name: str, own: bool, samples: int) -> InstanceView:
        return InstanceView(peer=name, name=name, host="h", loading=False, ready=True, reserved=own, samples=samples)

    return [view(f"spot{k}", False, int(working)) for k in range(remote)] + [
        view(f"own{k}", True, int(generating)) for k in range(reserved)
    ]


@pytest.mark.parametrize(
    ("machines", "spot_price", "turn"),
    [(1, 3.0, Turn.TRAINING), (3, 3.0, Turn.TRAINING), (6, 30.0, Turn.TRAINING), (1, 3.0, Turn.SHARED)],
)
def test_manager_and_simulator_come_to_the_same_number_from_the_same_facts(
    machines: int, spot_price: float, turn: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = turn is Turn.SHARED
    # The same for both, and quicker.
    monkeypatch.setattr(plan, "TRIES", 3)
    prices = Prices(reserved=40.0, spot=spot_price, on_demand=40.0)
    profile = small_profile(prices=prices, reserved_beside=beside)
    strategy = make_strategy("penstock", profile)
    assert isinstance(strategy.window, Offload)
    config = FleetSizeConfig(ceiling=8, first=4, reserved_price=40.0, machine_price=spot_price, start_s=2.0)
    size = strategy.size = Recorded(config, profile.reserved_instances, strategy.window)
    simulate(profile, static_trace(machines, 1e6), strategy, steps=7)

    manager = Manager(ManagerConfig())
    manager.provide(
        ProvisionConfig(ceiling=8, first=4, reserved_price_per_h=40.0, price_per_h=spot_price, start_s=2.0),
        2,
        None,
        0.0,
    )
    provisioning = manager.provisioning
    assert provisioning is not None
    now, wanted = 0.0, []
    for step, told in enumerate(size.told):
        # The manager's clock passes as the simulated machines spent it.
        times = told.times
        fleet = round(times.fleet)
        assert fleet == pytest.approx(times.fleet, abs=0.01)
        busy_s = times.remote_busy_s / max(1, fleet)
        provisioning.tick(views(fleet, False, 2, False), now, True)
        for until in sorted({times.window_s, busy_s, times.step_s}):
            there = views(fleet, until <= busy_s, 2, until <= times.window_s)
            provisioning.tick(there, now + until, True)
        now += times.step_s
        manager.windows.turn = turn
        manager.windows.policy = Offload(facts=told.facts, plans=told.plans)
        before = provisioning.machines.wanted
        report = StepReport(step=step, step_s=times.step_s, train_s=times.train_s, trainer_wait_s=times.trainer_wait_s)
        manager.on_trainer_frame(report, now)
        bits = 0
        while manager.thinking:
            assert provisioning.machines.wanted == before
            manager.think(now)
            bits += 1
        wanted.append(provisioning.machines.wanted)
        assert bits > 10 * len(told.asked) or beside
    assert wanted == [told.wanted for told in size.told]
    assert size.beside is beside
    # Steps of other fleets are replayed from plans, and without windows there are none.
    assert any(told.plans for told in size.told) is not beside
    assert len(set(wanted)) > 1, "else a manager that never moves would do as well"


@pytest.mark.parametrize(("fast", "slow"), [(9.0, 4.0), (3.0, 3.0)])
def test_the_number_stands_still_where_machines_have_two_speeds_and_prices(
    fast: float, slow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predicted to be kept by speed and released by price, they were given up and asked for again: 19 in these steps,
    and up to seven changes of the number."""
    monkeypatch.setattr(plan, "TRIES", 3)
    profile = small_profile(
        prompts=32,
        kinds={"slow": MACHINE.slower_by(2.0)},
        prices=Prices(reserved=80.0, spot=fast, on_demand=20.0, kinds={"slow": slow}),
        lengths=Lengths(prompt_tokens=32, median_tokens=1500, spread=0.6, max_tokens=4000),
    )
    nodes = [f"{kind}:{k}" for k in range(6) for kind in ("slow", "fast")]
    outcome = simulate(profile, static_trace(nodes, 1e9), make_strategy("penstock", profile, ceiling=12), steps=14)
    asked = [asked.wanted for asked in outcome.asked]
    taken = {(stay.node, stay.taken_at) for step in outcome.stays for stay in step}
    assert len(taken) <= 12
    assert sum(one != other for one, other in itertools.pairwise(asked)) <= 4
