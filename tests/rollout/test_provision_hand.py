"""Instances that joined by hand, beside the machines that are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from provision_world import CONFIG, World, grown

from penstock.rollout.provision_match import ByHand
from penstock.rollout.provision_types import InstanceView, MachineState

JOINED = MachineState.JOINED


@pytest.mark.parametrize(("by_hand", "asked"), [(0, 3), (2, 1), (3, 0), (5, 0)])
def test_instances_that_joined_by_hand_are_part_of_what_is_wanted(by_hand: int, asked: int) -> None:
    world = World(by_hand=by_hand)
    world.machines.want(3, 0.0)
    world.pass_time(60)
    assert (world.asked_in_all, len(world.alive())) == (asked, asked)
    assert world.machines.by_hand == by_hand


def test_floor_and_ceiling_bound_all_instances() -> None:
    world = World(by_hand=1, config=replace(CONFIG, floor=2, ceiling=3))
    world.pass_time(60)
    assert len(world.alive()) == 1
    world.machines.want(9, world.now)
    world.pass_time(60)
    assert len(world.alive()) == 2


def test_an_instance_that_joins_by_hand_lets_a_machine_go_after_the_cool_down_and_is_replaced_once_missed() -> None:
    world = grown(2)
    world.by_hand = 1
    world.pass_time(CONFIG.cool_down_s - 2)
    assert world.states() == [JOINED] * 2
    world.pass_time(CONFIG.drain_s + 10)
    assert len(world.alive()) == 1
    assert "machines wanted: 1, beside 1 by hand" in world.changes("draining")[0].cause
    world.by_hand = 0
    world.pass_time(CONFIG.rejoin_s - 1)
    assert len(world.alive()) == 1, "it may be back"
    world.pass_time(5)
    assert len(world.alive()) == 2


def hand(number: int, loading: bool, ready: bool) -> list[InstanceView]:
    return [InstanceView(f"h{k}", f"h{k}", "desk", loading, ready, False, 0) for k in range(number)]


@pytest.mark.parametrize(("loading", "ready"), [(True, False), (False, False), (False, True)])
def test_by_hand_counts_who_is_connected_whatever_its_state_for_floor_and_ceiling_too(
    loading: bool, ready: bool
) -> None:
    world = World(config=replace(CONFIG, floor=4, ceiling=4))
    world.views = lambda: hand(4, loading, ready)  # type: ignore[method-assign]
    world.pass_time(60)
    assert (world.machines.by_hand, world.asked_in_all) == (4, 0)


def test_an_instance_by_hand_counts_for_as_long_as_its_connection_is_there() -> None:
    world = World()
    world.machines.want(4, 0.0)
    for loading, ready in ((False, True), (False, False), (True, False), (False, True)):
        world.views = lambda loading=loading, ready=ready: hand(4, loading, ready)  # type: ignore[method-assign, misc]
        world.pass_time(3 * CONFIG.rejoin_s)
    assert world.asked_in_all == 0


def test_neither_reserved_instances_nor_those_of_a_machine_that_just_ended_are_by_hand() -> None:
    world = grown(1, works=False)
    world.machines.want(0, world.now)
    world.pass_time(CONFIG.cool_down_s + 5)
    assert world.states() == []
    world.machines.tick([InstanceView("m-1", "m-1", "desk", False, True, False, 0)], world.now)
    assert world.machines.by_hand == 0, "its connection is not missed yet"
    world.machines.tick([InstanceView("engine", "engine", "desk", False, True, True, 0)], world.now)
    assert world.machines.by_hand == 0


def test_an_instance_is_not_by_hand_any_more_once_its_machine_is_known() -> None:
    world = grown(3)
    world.another_manager(keep_account=False)
    world.step()
    assert world.machines.by_hand == 3
    world.pass_time(3)
    assert (world.machines.by_hand, world.states()) == (0, [JOINED] * 3)
    world.pass_time(CONFIG.cool_down_s + CONFIG.rejoin_s)
    assert len(world.alive()) == 3


def never(name: str) -> bool:
    """None of these machines has just ended."""
    return False


def test_an_instance_by_hand_that_comes_back_by_another_connection_is_one() -> None:
    by_hand = ByHand(15.0)
    by_hand.see(hand(2, False, True), (), never, 0.0)
    by_hand.see(hand(1, False, True), (), never, 10.0)
    assert by_hand.number == 2, "it may be back"
    by_hand.see([*hand(1, False, True), InstanceView("again", "h1", "desk", False, True, False, 0)], (), never, 12.0)
    assert by_hand.number == 2
    by_hand.see(hand(1, False, True), (), never, 27.0)
    assert by_hand.number == 2
    by_hand.see(hand(1, False, True), (), never, 28.0)
    assert by_hand.number == 1


def test_another_manager_waits_for_instances_that_had_joined_by_hand() -> None:
    world = grown(3, by_hand=0)
    world.machines.want(5, world.now)
    world.by_hand = 1
    world.pass_time(5)
    world.another_manager()
    world.by_hand = 0
    world.pass_time(CONFIG.rejoin_s - 2)
    assert world.asked_in_all == 3
    world.pass_time(10)
    assert world.asked_in_all == 4


def test_machines_that_join_under_other_names_are_told_of_and_do_not_come_and_go() -> None:
    world = World(under_other_names=True)
    world.machines.want(2, 0.0)
    world.pass_time(CONFIG.join_deadline_s - 1)
    assert world.asked_in_all == 2
    assert not world.changes("releasing"), "they may join yet"
    world.pass_time(10)
    [first, second] = world.changes("releasing")
    for change in (first, second):
        assert "no instance of its name" in change.cause
        assert "but others did since it was asked for: ip-m-1, ip-m-2" in change.cause
    world.pass_time(600)
    assert world.machines.counts["never_joined"] == world.asked_in_all - len(world.machines.machines)
    # Each pair costs its deadline, the time until it is missed and a wait that grows.
    assert world.asked_in_all <= 2 * 8


def test_several_instances_on_one_host_may_be_those_of_a_machine_that_is_waited_for() -> None:
    world = World(under_other_names=True, agents=4)
    world.machines.want(2, 0.0)
    world.pass_time(CONFIG.join_deadline_s - 1)
    assert world.machines.by_hand == 8
    assert world.asked_in_all == 2
    assert not world.changes("releasing"), "they may join yet"
    world.pass_time(10)
    assert "but others did since it was asked for: gpu1 on ip-m-1, " in world.changes("releasing")[0].cause


def test_an_instance_by_hand_lets_a_machine_go_that_joins_after_it() -> None:
    world = World(boots_s=40.0)
    world.machines.want(2, 0.0)
    world.pass_time(20)
    world.by_hand = 1
    world.pass_time(15)
    assert len(world.alive()) == 2, "one of them may be the instance"
    world.pass_time(60)
    assert len(world.alive()) == 1
    assert world.asked_in_all == 2


def test_instances_older_than_the_machines_are_by_hand_for_sure() -> None:
    by_hand = ByHand(15.0)
    others = [replace(view, host=f"desk{k // 2}") for k, view in enumerate(hand(3, False, True))]
    by_hand.see(others, (), never, 10.0)
    assert [by_hand.sure(asked) for asked in ([], [11.0, 12.0], [9.0, 12.0], [10.0, 9.0, 8.0])] == [3, 3, 1, 0]
    names = ["h0 on desk0", "h1 on desk0", "h2 on desk1"]
    assert by_hand.since(10.0) == names
    by_hand.see([], (), never, 12.0)
    assert by_hand.since(10.0) == names, "they may be back"
    by_hand.see([], (), never, 30.0)
    assert by_hand.since(10.0) == []
