"""A manager that asks for machines: what its instances notice of it, and what operators see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from balance_helpers import Replayed
from provision_world import CONFIG
from rollout_helpers import SimulatedAgent, World, submit

from penstock.observe.events import FleetSized
from penstock.rollout import operators
from penstock.rollout.outbox import Decisions
from penstock.rollout.provision_types import Add, Call, ListAll, Release, Seen
from penstock.wire import StepReport


class Provided(World):
    """Its provisioner answers at once; machines' agents are the test's."""

    def __init__(self, **changes: object) -> None:
        self.there: list[str] = []
        super().__init__()
        config = replace(CONFIG, **changes)  # type: ignore[arg-type]
        self.carry_out(self.manager.provide(config, 0, None, self.now))

    def carry_out(self, decisions: Decisions) -> None:
        super().carry_out(decisions)
        for call in decisions.calls:
            self.carry_out(self.manager.on_provisioner(call, self.answer(call), "", self.now))

    def answer(self, call: Call) -> list[str] | list[Seen] | None:
        if isinstance(call, Add):
            names = [f"spot-{len(self.there) + k}" for k in range(call.count)]
            self.there += names
            return names
        if isinstance(call, Release):
            self.there.remove(call.machine)
            return None
        assert isinstance(call, ListAll)
        return [Seen(name) for name in self.there]

    def beat(self, seconds: float, agent: SimulatedAgent) -> None:
        """Time passes for a manager that hears of its agent."""
        for _ in range(int(seconds)):
            if agent.peer in self.agents:
                self.manager.fleet.get(agent.peer).heard_at = self.now  # type: ignore[union-attr]
            self.pass_time(1.0)


def test_an_instance_whose_machine_is_to_go_ends_its_samples_gets_no_more_and_leaves() -> None:
    world = Provided(first=1, drain_s=60.0)
    world.pass_time(1)
    world.pass_time(1)
    assert world.there == ["spot-0"]
    world.publish(0)
    agent = world.join_ready("spot-0", max_running=2)
    world.trainer(submit(prompts=[(1, 2)] * 6))
    world.beat(1, agent)
    assert len(agent.sequences) == 4
    assert world.manager.provisioning is not None
    world.manager.provisioning.machines.want(0, world.now)
    world.beat(CONFIG.cool_down_s + 1, agent)
    assert world.manager.provisioning.machines.cordoned == {agent.peer}
    assert not agent.draining
    while agent.sequences:
        world.play(agent)
    world.beat(1, agent)
    assert agent.draining
    assert world.manager.tracker.queued == 2
    assert world.there == ["spot-0"], "it is ended once its instance is gone, and not before"
    world.lose(agent)
    world.pass_time(1)
    assert world.there == []


def test_a_machine_that_is_wanted_again_takes_work_again() -> None:
    world = Provided(first=1)
    world.pass_time(1)
    world.pass_time(1)
    world.publish(0)
    agent = world.join_ready("spot-0", max_running=2)
    world.trainer(submit(prompts=[(1, 2)] * 6))
    world.beat(1, agent)
    machines = world.manager.provisioning.machines  # type: ignore[union-attr]
    machines.want(0, world.now)
    world.beat(CONFIG.cool_down_s + 1, agent)
    machines.want(1, world.now)
    world.beat(2, agent)
    world.play_out()
    world.beat(1, agent)
    world.play_out()
    assert world.done["train-0"].samples == 6


def test_every_agent_of_a_machine_that_goes_is_told_to_leave_and_one_that_stays_holds_it_no_longer_than_that() -> None:
    world = Provided(first=1)
    world.pass_time(1)
    world.pass_time(1)
    first, second = (world.join(f"gpu{k}", host="spot-0.ec2.internal") for k in range(2))
    machines = world.manager.provisioning.machines  # type: ignore[union-attr]
    world.beat(1, first)
    world.manager.fleet.get(second.peer).heard_at = world.now  # type: ignore[union-attr]
    assert set(machines.machines[0].peers) == {first.peer, second.peer}
    world.carry_out(world.manager.end_provision("the run is over", world.now))
    assert first.draining
    assert second.draining
    world.lose(second)
    world.beat(CONFIG.leave_s - 1, first)
    assert world.there == ["spot-0"]
    world.beat(3, first)
    assert world.there == []
    assert machines.done


def test_operators_see_machines_their_spend_and_what_is_wanted() -> None:
    world = Provided(first=2, budget=50.0)
    world.pass_time(1)
    world.pass_time(1)
    world.pass_time(10)
    found = operators.fleet(world.manager, world.now)
    assert found is not None
    assert [row["state"] for row in found["machines"]] == ["starting", "starting"]
    assert (found["wanted"], found["spent"], found["budget"], found["budget_per_h"]) == (2, 0.2, 50.0, None)
    text = operators.metrics(world.manager, world.now)
    assert 'penstock_machines{state="starting"} 2' in text
    assert "penstock_machines_wanted 2" in text
    assert operators.fleet(World().manager, 0.0) is None


def test_what_the_trainer_reports_is_what_the_number_follows() -> None:
    world = Provided(first=1, ceiling=3, reserved_price_per_h=400.0)
    world.pass_time(1)
    world.pass_time(1)
    world.publish(0)
    agent = world.join_ready("spot-0", max_running=8)
    world.trainer(submit(prompts=[(1, 2)] * 6))
    world.beat(20, agent)
    world.trainer(StepReport(step=0, step_s=20.0, train_s=1.0, trainer_wait_s=19.0))
    world.beat(2, agent)
    assert len(world.there) == 2
    assert [(event.before, event.after) for event in world.of_kind(FleetSized)] == [(0, 1), (1, 2)]  # type: ignore[attr-defined]


def test_an_account_that_makes_no_sense_is_a_warning_and_no_end() -> None:
    world = World()
    world.carry_out(world.manager.provide(CONFIG, 0, {"spent": "much"}, world.now))
    assert "is not known" in str(world.events[-1])


def test_a_report_that_comes_while_the_number_is_thought_over_is_learned_from_and_begins_no_other_thought() -> None:
    predictor = Replayed(lambda instances: 100.0 / (1 + instances), bits=2)
    world = Provided(first=1, ceiling=3, reserved_price_per_h=400.0)
    world.pass_time(1)
    world.pass_time(1)
    provisioning = world.manager.provisioning
    assert provisioning is not None
    report = StepReport(step=0, step_s=20.0, train_s=1.0, trainer_wait_s=19.0)
    for _ in range(100):
        # Steps are shorter than a thought.
        provisioning.step(report, predictor)
        provisioning.think(world.now)
        if not world.manager.thinking:
            break
        assert provisioning.machines.wanted == 1
    assert sorted(predictor.asked) == [0, 1, 2, 3]
    assert not world.manager.thinking
    assert provisioning.machines.wanted == 3


def test_prices_start_up_times_and_losses_as_they_were_seen_enter_the_number() -> None:
    class Dear(Provided):
        def answer(self, call: Call) -> list[str] | list[Seen] | None:
            if isinstance(call, ListAll):
                return [Seen(name, price_per_h=99.0) for name in self.there]
            gone = isinstance(call, Release) and call.machine not in self.there
            return None if gone else super().answer(call)

    world = Dear(first=2, start_s=500.0)
    world.pass_time(1)
    world.pass_time(1)
    world.publish(0)
    lost, stays = world.join_ready("spot-0"), world.join_ready("spot-1")
    world.trainer(submit(prompts=[(1, 2)] * 6))
    world.beat(CONFIG.list_s + 2, stays)
    provisioning = world.manager.provisioning
    assert provisioning is not None
    world.lose(lost)
    world.there.remove("spot-0")
    world.beat(CONFIG.rejoin_s + CONFIG.list_s, stays)
    world.trainer(StepReport(step=0, step_s=40.0, train_s=1.0, trainer_wait_s=19.0))
    size = provisioning.size
    assert size.config.machine_price == 99.0
    assert size.config.start_s == provisioning.machines.start_s < 500.0
    assert size.preemptions_per_h > 0
    assert size.useful_share < 1


def test_the_policy_is_shown_what_each_instance_costs() -> None:
    class Priced(Provided):
        def answer(self, call: Call) -> list[str] | list[Seen] | None:
            if isinstance(call, ListAll):
                return [Seen(name, price_per_h=99.0 if name == "spot-0" else None) for name in self.there]
            return super().answer(call)

    world = Priced(first=2, price_per_h=0.0)
    world.publish(0)
    for _ in range(int(CONFIG.list_s) + 2):
        world.pass_time(1.0)
    agents = [world.join_ready(name) for name in ("spot-0", "spot-1", "mine")]
    agents.append(world.join("gpu-1", host="spot-0"))
    world.pass_time(0.1)
    instances = [world.manager.fleet.get(agent.peer) for agent in agents]
    loads = [world.manager.balancing.load(instance) for instance in instances if instance is not None]
    assert [load.price_per_h for load in loads] == [99.0, None, 0.0, 99.0]
    assert [load.machine for load in loads] == ["spot-0", "spot-1", "", "spot-0"]


def test_the_account_tells_of_an_order_that_is_under_way() -> None:
    class Slow(Provided):
        def carry_out(self, decisions: Decisions) -> None:
            held = [call for call in decisions.calls if isinstance(call, Add)]
            self.held = [*getattr(self, "held", []), *held]
            super().carry_out(replace(decisions, calls=[call for call in decisions.calls if call not in held]))

    world = Slow(first=1)
    provisioning = world.manager.provisioning
    assert provisioning is not None
    assert provisioning.saved(world.now)["asking"] == 0.0
    world.pass_time(1)
    world.pass_time(1)
    (add,) = world.held
    began = provisioning.saved(world.now)["asking"]
    assert began > 0
    world.pass_time(1)
    assert provisioning.saved(world.now)["asking"] == began
    World.carry_out(world, world.manager.on_provisioner(add, ["spot-0"], "", world.now))
    assert provisioning.saved(world.now)["asking"] == 0.0


def test_the_account_tells_of_an_order_that_failed_until_a_list_shows_what_it_brought() -> None:
    class Unlisted(Provided):
        def carry_out(self, decisions: Decisions) -> None:
            self.held = [*getattr(self, "held", []), *decisions.calls]
            super().carry_out(replace(decisions, calls=[]))

        def answer(self, kind: type, answer: list[Any], cause: str = "") -> None:
            call = next(call for call in self.held if isinstance(call, kind))
            self.held.remove(call)
            self.carry_out(self.manager.on_provisioner(call, answer, cause, self.now))

    world = Unlisted(first=1)
    provisioning = world.manager.provisioning
    assert provisioning is not None
    world.pass_time(1)
    world.answer(ListAll, [])
    world.pass_time(1)
    began = provisioning.saved(world.now)["asking"]
    world.pass_time(1)
    world.answer(Add, [], "cut off at its deadline")
    # The machines may come for as long after that as a call takes.
    failed = provisioning.saved(world.now)["asking"]
    assert began < failed
    assert provisioning.machines.machines == []
    world.pass_time(30)
    assert provisioning.saved(world.now)["asking"] == failed
    world.answer(ListAll, [])
    assert provisioning.saved(world.now)["asking"] != failed
