"""The trainer's own devices as instances among others, on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rollout_helpers import SimulatedAgent, World, submit

from penstock.rollout import operators
from penstock.rollout.balance import InstanceLoad, Queue, ShortestQueue
from penstock.rollout.fleet import START_MOST_S, FleetConfig
from penstock.rollout.manager import Manager, ManagerConfig
from penstock.wire import AgentHello


def hello(name: str, **changes: object) -> AgentHello:
    fields = {"engine": "simulated", "pid": 1, "host": "here", "max_running": 4, "max_context_tokens": 1024, **changes}
    return AgentHello(name=name, **fields)  # type: ignore[arg-type]


def join(world: World, name: str, **changes: object) -> SimulatedAgent:
    peer = f"peer-of-{name}"
    agent = world.agents[peer] = SimulatedAgent(peer)
    world.carry_out(world.manager.on_agent_connected(peer, world.now))
    world.send(agent, hello(name, **changes))
    if agent.loading is not None:
        world.send(agent, agent.ready())
    return agent


def test_people_see_which_instances_are_reserved() -> None:
    world = World()
    world.publish(0)
    join(world, "own", reserved=True)
    join(world, "spot")
    rows = {row["instance"]: row["reserved"] for row in operators.instances(world.manager, world.now)}
    assert rows == {"own": True, "spot": False}
    assert "penstock_instances_reserved 1\n" in operators.metrics(world.manager, world.now)


class Seeing(ShortestQueue):
    """Gives everything to reserved instances, as long as there are any."""

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        own = [k for k, load in enumerate(loads) if load.reserved]
        return [own[0]] * queue.waiting if own else super().assign(queue, loads)


def test_a_policy_sees_which_instances_are_reserved() -> None:
    world = World()
    world.manager = Manager(ManagerConfig(), policy=Seeing(max_pending=8), wall_offset_s=1000.0)
    world.carry_out(world.manager.on_trainer_connected(world.now))
    world.publish(0)
    spot, own = join(world, "spot"), join(world, "own", reserved=True)
    world.trainer(submit(samples_per_prompt=6))
    assert (len(spot.sequences), len(own.sequences)) == (0, 6)


def test_one_manager_balances_both_and_without_remote_instances_the_step_completes_on_the_reserved_alone() -> None:
    world = World()
    world.publish(0)
    own, spots = join(world, "own", reserved=True), [join(world, "spot-0"), join(world, "spot-1")]
    world.trainer(submit(samples_per_prompt=12, max_new_tokens=40))
    assert all(len(agent.sequences) == 4 for agent in (own, *spots))
    for agent in (own, *spots):
        world.play(agent, 2)
    drawn_by_spots = sum(held.drawn for agent in spots for held in agent.sequences.values())
    assert drawn_by_spots > 0
    for agent in spots:
        world.lose(agent)
    world.play_out()
    assert world.done["train-0"].samples == 12
    assert world.done["train-0"].failed == 0
    # What the others had drawn was kept: the reserved one drew the rest.
    instance = next(iter(world.manager.fleet))
    total = sum(len(sample.token_ids) for sample in world.delivered.values())
    assert instance.reserved
    assert instance.tokens_accepted <= total - drawn_by_spots


@pytest.mark.parametrize(
    ("start_s", "deadline_s"), [(0.0, 30.0), (100.0, 130.0), (10 * START_MOST_S, 30.0 + START_MOST_S)]
)
def test_an_engine_that_starts_with_its_first_weights_has_that_time_on_top_once(
    start_s: float, deadline_s: float
) -> None:
    world = World(ManagerConfig(fleet=FleetConfig(heartbeat_s=2000.0, load_deadline_s=30.0)))
    world.publish(0)
    agent = world.agents["peer"] = SimulatedAgent("peer")
    world.carry_out(world.manager.on_agent_connected("peer", world.now))
    world.send(agent, hello("server", start_s=start_s))
    world.pass_time(deadline_s - 1)
    assert world.closed == []
    world.send(agent, agent.ready())
    world.publish(1)
    world.pass_time(29)
    assert world.closed == []
    world.pass_time(2)
    [(_, cause)] = world.closed
    assert "weight version 1 was not loaded after 31.0 s" in cause


def test_a_start_that_is_not_over_in_time_is_given_up() -> None:
    world = World(ManagerConfig(fleet=FleetConfig(heartbeat_s=2000.0, load_deadline_s=30.0)))
    world.publish(0)
    agent = world.agents["peer"] = SimulatedAgent("peer")
    world.carry_out(world.manager.on_agent_connected("peer", world.now))
    world.send(agent, hello("server", start_s=100.0))
    world.pass_time(131)
    [(_, cause)] = world.closed
    assert "weight version 0 was not loaded after 131.0 s" in cause


@pytest.mark.parametrize("start_s", [-1.0, float("nan")])
def test_a_start_that_makes_no_sense_is_refused(start_s: float) -> None:
    world = World()
    agent = world.agents["peer"] = SimulatedAgent("peer")
    world.carry_out(world.manager.on_agent_connected("peer", world.now))
    world.send(agent, hello("server", start_s=start_s))
    [(_, cause)] = world.closed
    assert "start_s" in cause


def test_a_reserved_instance_that_was_lost_comes_back_as_one() -> None:
    world = World()
    world.publish(0)
    first = join(world, "own", reserved=True)
    world.lose(first)
    again = join(world, "own", reserved=True)
    assert again.instance == "own~2"
    assert [row.reserved for row in world.manager.status(world.now).instances] == [True, True]
