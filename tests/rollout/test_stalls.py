"""An instance that beats and gives no token of its work is given up, on a virtual clock."""

from __future__ import annotations

from rollout_helpers import SimulatedAgent, World, submit

from penstock.observe.events import InstanceChanged
from penstock.rollout.fleet import FleetConfig
from penstock.rollout.manager import ManagerConfig
from penstock.wire import Heartbeat

STALL_S = 20.0


def world_of(stall_s: float = STALL_S) -> World:
    world = World(ManagerConfig(fleet=FleetConfig(heartbeat_s=2.0, load_deadline_s=100.0), stall_s=stall_s))
    world.publish(0)
    return world


def beat(world: World, agent: SimulatedAgent, prefilled: int = 0) -> None:
    held = len(agent.sequences)
    world.send(
        agent,
        Heartbeat(
            running=held, waiting=0, kv_tokens=9, tokens_generated=1, tokens_prefilled=prefilled, tokens_per_s=5.0
        ),
    )


def live(world: World, seconds: float, *agents: SimulatedAgent) -> None:
    """Time passes in which the agents beat and do nothing else."""
    for _ in range(round(seconds)):
        for agent in agents:
            if agent.peer in world.agents:
                beat(world, agent)
        world.pass_time(1.0)


def gone(world: World) -> list[InstanceChanged]:
    return [e for e in world.of_kind(InstanceChanged) if isinstance(e, InstanceChanged) and e.after == "gone"]


def test_an_instance_that_beats_and_gives_no_token_is_given_up_and_its_samples_go_on_elsewhere() -> None:
    world = world_of()
    idle, good = world.join_ready("idle", 4), world.join_ready("good", 4)
    world.trainer(submit(samples_per_prompt=8, deadline_s=1000.0))
    world.play(idle, 2)
    assert len(idle.sequences) > 0
    live(world, STALL_S - 1, idle, good)
    assert gone(world) == []
    world.play(good, 1)
    live(world, 3, idle, good)
    [lost] = gone(world)
    assert lost.instance == "idle"
    assert "no token of them for 2" in lost.cause
    assert "stall_s = 20" in lost.cause
    assert not lost.orderly
    world.play_out()
    assert world.done["train-0"].samples == 8
    assert world.done["train-0"].failed == 0


def test_how_long_it_may_be_is_an_option() -> None:
    for stall_s, expected in ((5.0, 1), (50.0, 0)):
        world = world_of(stall_s)
        agent = world.join_ready()
        world.trainer(submit(deadline_s=1000.0))
        live(world, 10, agent)
        assert len(gone(world)) == expected


def test_tokens_and_prefills_count_as_getting_on() -> None:
    world = world_of()
    slow, long = world.join_ready("slow", 2), world.join_ready("long", 2)
    world.trainer(submit(samples_per_prompt=4, max_new_tokens=64, deadline_s=1000.0))
    for round_ in range(4):
        world.play(slow, 1)
        beat(world, long, prefilled=1000 * round_)
        live(world, 1, slow)
        for _ in range(15):
            beat(world, slow)
            beat(world, long, prefilled=1000 * round_)
            world.pass_time(1.0)
    assert gone(world) == []


def test_an_instance_without_work_or_with_weights_to_load_is_no_stall() -> None:
    world = world_of()
    agent = world.join_ready("idle")
    live(world, 3 * STALL_S, agent)
    world.publish(1)
    live(world, 3 * STALL_S, agent)
    assert agent.loading is not None
    assert gone(world) == []
    world.send(agent, agent.ready())
    world.trainer(submit(version=1, deadline_s=1000.0))
    live(world, STALL_S - 1, agent)
    assert gone(world) == []


def test_a_pause_of_the_managers_own_is_held_against_nobody() -> None:
    world = world_of()
    agent = world.join_ready()
    world.trainer(submit(deadline_s=10_000.0))
    live(world, 3, agent)
    world.now += 10 * STALL_S
    beat(world, agent)
    world.pass_time(0.1)
    assert gone(world) == []
