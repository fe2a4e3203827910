"""Machines are asked for, watched and released, on a virtual clock."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from provision_world import CONFIG, Box, World, grown

from penstock.observe.events import Warned
from penstock.rollout.provision_types import InstanceView, MachineState, Seen

JOINED = MachineState.JOINED


def test_machines_go_from_asked_to_starting_to_joined_each_with_an_event() -> None:
    world = grown(2)
    for state in ("asked", "starting", "joined"):
        assert len(world.changes(state)) == 2
    assert world.changes("asked")[0].machine.startswith("ask-")
    assert {event.machine for event in world.changes("joined")} == {"m-1", "m-2"}


def test_nothing_is_asked_for_before_a_list_has_shown_what_is_there() -> None:
    world = World(failing={"list"})
    world.machines.want(2, 0.0)
    world.pass_time(60)
    assert world.asked_in_all == 0
    assert "list is broken" in world.machines.calls.trouble
    world.failing.clear()
    world.pass_time(60)
    assert len(world.alive()) == 2
    assert world.machines.calls.trouble == ""


def test_a_number_that_shrinks_is_followed_after_the_cool_down_and_not_before() -> None:
    world = grown(3)
    world.machines.want(1, world.now)
    world.pass_time(CONFIG.cool_down_s - 2)
    assert world.states() == [JOINED] * 3
    world.pass_time(2 + CONFIG.drain_s + 5)
    assert world.states() == [JOINED]
    assert world.killed_at_work == 0
    assert len(world.changes("released")) == 2


def test_a_number_that_swings_within_the_cool_down_changes_nothing() -> None:
    world = grown(3)
    for _ in range(20):
        world.machines.want(1, world.now)
        world.pass_time(10)
        world.machines.want(3, world.now)
        world.pass_time(10)
    assert world.asked_in_all == 3
    assert world.changes("draining") == []


def test_the_cool_down_is_as_long_as_machines_take_to_start() -> None:
    world = grown(2, boots_s=20.0, config=replace(CONFIG, cool_down_s=0.0, start_s=20.0))
    world.machines.want(0, world.now)
    world.pass_time(15)
    assert len(world.states()) == 2
    world.pass_time(30)
    assert world.states() == []


def test_much_dearer_machines_go_first_and_idle_ones_before_a_little_dearer_ones() -> None:
    world = World(works=False)
    world.machines.want(3, 0.0)
    world.pass_time(30)
    world.boxes["m-1"].samples = 5
    prices = {"m-1": 37.0, "m-2": 50.0, "m-3": 36.0}
    for machine in world.machines.machines:
        machine.price_per_h = prices[machine.id]
        machine.samples = world.boxes[machine.id].samples
    world.machines._shrink(2, world.now)
    assert [m.id for m in world.machines.machines if m.state is MachineState.DRAINING] == ["m-2"]
    world.machines._shrink(1, world.now)
    assert [m.id for m in world.machines.machines if m.state is JOINED] == ["m-1"]


def test_a_machine_with_samples_drains_first_and_is_wanted_again_at_no_cost() -> None:
    world = grown(1)
    world.machines.want(0, world.now)
    world.pass_time(CONFIG.cool_down_s + 3)
    assert world.states() == [MachineState.DRAINING]
    assert world.machines.cordoned == {"m-1"}
    world.machines.want(1, world.now)
    world.pass_time(2)
    assert world.states() == [JOINED]
    assert world.machines.cordoned == set()
    assert world.asked_in_all == 1


def test_an_idle_machine_is_told_to_leave_at_once() -> None:
    world = grown(1, works=False)
    world.machines.want(0, world.now)
    world.pass_time(CONFIG.cool_down_s + 3)
    assert world.states() == []


def test_a_machine_that_never_joins_is_released_and_counted_and_the_next_one_waits_longer() -> None:
    world = World(never_join=True)
    world.machines.want(1, 0.0)
    world.pass_time(600)
    assert world.machines.counts["never_joined"] == world.machines.counts["failed"] > 2
    assert "no instance of its name" in world.changes("failed")[0].cause
    asked = [event.ts for event in world.changes("asked")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > gaps[0]
    assert len(world.alive()) <= 1


def test_a_provisioner_that_fails_is_named_and_asked_ever_more_seldom() -> None:
    world = World(failing={"add"})
    world.machines.want(2, 0.0)
    world.pass_time(300)
    waits = [event.retry_s for event in world.failures()]
    assert waits[:5] == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert max(waits) == CONFIG.retry_most_s
    assert world.failures()[0].cause == "add is broken"
    assert world.machines.calls.trouble == "add: add is broken"
    world.failing.clear()
    world.pass_time(120)
    assert world.states() == [JOINED] * 2
    assert world.machines.calls.trouble == ""


def test_a_provider_that_gives_fewer_is_asked_again_for_the_rest() -> None:
    world = World(given=1)
    world.machines.want(3, 0.0)
    world.pass_time(150)
    assert world.states() == [JOINED] * 3
    assert "1 machines where 3" in world.failures()[0].cause


def test_machines_of_an_add_that_was_cut_off_are_found_and_not_asked_for_twice() -> None:
    world = World(failing={"lost_add"})
    world.machines.want(2, 0.0)
    world.pass_time(40)
    assert world.asked_in_all == 2
    assert world.states() == [JOINED] * 2


def test_a_release_that_fails_is_tried_until_it_works() -> None:
    world = grown(1, works=False)
    world.failing = {"release"}
    world.machines.want(0, world.now)
    world.pass_time(200)
    assert world.states() == [MachineState.RELEASING]
    assert {event.machine for event in world.failures()} == {"m-1"}
    assert [event.retry_s for event in world.failures()][:5] == [2.0, 4.0, 8.0, 16.0, 32.0]
    assert len(world.failures()) < 10
    world.failing.clear()
    world.pass_time(60)
    assert world.states() == [] == world.alive()


def test_machines_that_are_not_gone_yet_count_for_the_ceiling() -> None:
    world = grown(4, works=False)
    world.failing = {"release"}
    world.machines.want(0, world.now)
    world.pass_time(60)
    world.machines.want(4, world.now)
    world.pass_time(60)
    assert world.asked_in_all == 4
    world.failing.clear()
    world.pass_time(100)
    assert world.states() == [JOINED] * 4


def test_a_list_from_before_a_call_was_cut_off_confirms_no_end() -> None:
    world = World()
    machines = world.machines
    (first,) = machines.tick([], 0.0).calls
    machines.listed(first.call, [], 1.0)
    machines.want(1, 1.0)
    (add,) = machines.tick([], 2.0).calls
    machines.calls.list_at = 3.0
    (listing,) = machines.tick([], 3.0).calls
    machines.failed(add.call, "the connection was cut", 4.0)
    machines.end("the run ended", 4.0)
    machines.listed(listing.call, [], 5.0)
    assert not machines.done
    (again,) = machines.tick([], 6.0).calls
    machines.listed(again.call, [Seen("m-1")], 7.0)
    assert not machines.done
    assert [machine.id for machine in machines.machines] == ["m-1"]


def test_a_preempted_machine_is_replaced_and_counts_as_lost() -> None:
    world = grown(2)
    world.preempt("m-1")
    world.pass_time(100)
    assert len(world.alive()) == 2
    assert world.machines.take_losses() == 1
    assert world.machines.take_losses() == 0
    assert world.machines.counts["lost"] == 1


def test_a_machine_that_says_goodbye_by_itself_is_released_at_once() -> None:
    world = grown(1)
    world.machines.left("m-1", "the cloud takes it away", world.now)
    assert world.states() == [MachineState.RELEASING]
    world.boxes["m-1"].connected = False
    world.boxes["m-1"].told = True
    world.pass_time(3)
    assert "the cloud takes it away" in world.changes("failed")[0].cause


def test_a_connection_that_breaks_and_comes_back_costs_no_machine() -> None:
    world = grown(1)
    box = world.boxes["m-1"]
    box.connected, box.born_at, box.boots_s = False, world.now, 8.0
    world.pass_time(60)
    assert world.states() == [JOINED]
    assert world.asked_in_all == 1


def test_what_a_machine_that_ended_said_is_its_cause() -> None:
    world = World(never_join=True)
    world.machines.want(1, 0.0)
    world.pass_time(5)
    world.boxes["m-1"].alive = False
    world.pass_time(20)
    assert "it ended before it joined: exit code 1" in world.changes("failed")[0].cause


def test_another_manager_finds_the_machines_that_run_and_what_they_cost() -> None:
    world = grown(3)
    spent = world.machines.purse.spent
    world.another_manager()
    world.pass_time(5)
    assert world.states() == [JOINED] * 3
    assert world.machines.purse.spent > spent
    assert world.asked_in_all == 3


def test_another_manager_without_an_account_finds_them_too() -> None:
    world = grown(2)
    world.another_manager(keep_account=False)
    world.pass_time(5)
    assert world.states() == [JOINED] * 2
    assert world.asked_in_all == 2


def test_machines_that_went_with_the_manager_before_are_no_failure() -> None:
    world = grown(2)
    world.boxes.clear()
    world.another_manager()
    world.pass_time(30)
    assert world.states() == [JOINED] * 2
    assert world.machines.counts["never_joined"] == 0


def test_machines_that_were_released_and_are_still_listed_are_released_again() -> None:
    world = grown(1, works=False)
    world.machines.want(0, world.now)
    box = world.boxes["m-1"]
    world.pass_time(CONFIG.cool_down_s + 5)
    assert world.states() == []
    box.connected = False
    world.boxes["m-1"] = box
    world.pass_time(30)
    assert world.alive() == []


def test_at_the_end_everything_is_released_and_a_list_confirms_it() -> None:
    world = grown(3)
    world.machines.end("the run ended", world.now)
    world.pass_time(10)
    assert world.alive() == []
    assert world.machines.done
    world.machines.want(3, world.now)
    world.pass_time(30)
    assert world.alive() == []


def test_machines_asked_for_as_the_run_ends_are_released_too() -> None:
    world = World(answer_s=5.0, failing={"lost_add"})
    world.machines.want(2, 0.0)
    world.pass_time(8)
    assert world.states() == [MachineState.ASKED] * 2
    world.machines.end("the run ended", world.now)
    world.pass_time(60)
    assert world.asked_in_all == 2
    assert world.alive() == []
    assert world.machines.done


def test_the_hourly_budget_bounds_the_number_and_the_run_s_budget_ends_it() -> None:
    config = replace(CONFIG, budget_per_h=80.0, budget=3.0)
    world = World(config=config)
    world.machines.want(4, 0.0)
    world.pass_time(30)
    assert len(world.alive()) == 2
    world.pass_time(600)
    assert world.alive() == []
    assert 1.5 < world.machines.purse.spent <= 3.0


def test_the_budget_comes_before_the_floor() -> None:
    world = World(config=replace(CONFIG, floor=2, budget=1.5))
    world.machines.want(0, 0.0)
    world.pass_time(20)
    assert len(world.alive()) > 0
    world.pass_time(300)
    assert world.alive() == []
    assert world.machines.purse.spent <= 1.5


def test_a_budget_that_holds_the_number_down_is_told_once_and_so_is_one_that_ends_machines() -> None:
    world = World(config=replace(CONFIG, budget=2.0))
    world.machines.want(4, 0.0)
    world.pass_time(60)
    (told,) = [event for event in world.events if isinstance(event, Warned)]
    assert told.message.startswith("4 machines are wanted and 0 there; the budget pays for 2 more")
    assert world.machines.short.startswith("4 machines are wanted and 2 there; the budget pays for 0 more")
    assert "of 2 dollars are spent" in world.machines.short
    world.pass_time(600)
    assert len([event for event in world.events if isinstance(event, Warned)]) == 1
    assert world.alive() == []
    assert {machine.cause.partition(":")[0] for machine in world.machines.ended} == {"machines paid for"}


def test_the_budget_pays_each_machine_that_is_asked_for_until_it_was_of_use_for_as_long_as_it_took_to_start() -> None:
    world = World(config=replace(CONFIG, budget=2.0))
    world.machines.want(4, 0.0)
    world.pass_time(2 * CONFIG.start_s)
    assert world.states() == [JOINED] * 2, "for four there is not enough"
    assert world.asked_in_all == 2


def test_a_budget_too_small_for_any_machine_is_told() -> None:
    world = World(config=replace(CONFIG, floor=1, budget=0.5))
    world.pass_time(30)
    assert world.asked_in_all == 0
    assert "1 machines are wanted and 0 there; the budget pays for 0 more" in world.machines.short


def test_a_place_that_is_about_to_be_free_is_no_lack_of_money() -> None:
    world = World(config=replace(CONFIG, budget_per_h=80.0))
    world.machines.want(2, 0.0)
    world.pass_time(30)
    world.preempt(world.alive()[0])
    world.pass_time(60)
    assert len(world.alive()) == 2
    assert not [event for event in world.events if isinstance(event, Warned)]


def test_a_price_that_the_provider_tells_is_the_one_that_counts() -> None:
    world = grown(1)
    while not (calls := world.machines.tick(world.views(), world.now).calls):
        world.now += 1.0
    world.machines.listed(calls[0].call, [Seen("m-1", price_per_h=360.0)], world.now)
    before = world.machines.purse.spent
    world.machines.tick(world.views(), world.now + 10)
    assert round(world.machines.purse.spent - before, 6) == 1.0


def test_a_run_without_a_trainer_keeps_no_machine() -> None:
    world = grown(2, works=False)
    world.machines.tick(world.views(), world.now, active=False)
    assert world.states() == [MachineState.DRAINING] * 2


def test_an_instance_is_known_by_its_host_too_and_reserved_ones_are_nobody_s_machine() -> None:
    world = World(never_join=True)
    world.machines.want(1, 0.0)
    world.pass_time(5)
    engine = InstanceView("a-1", "m-1", "m-1", False, True, True, 0)
    world.machines.tick([engine], world.now)
    assert world.states() == [MachineState.STARTING]
    spot = InstanceView("a-2", "whatever-77", "m-1.internal", False, True, False, 0)
    world.machines.tick([engine, spot], world.now)
    assert world.states() == [JOINED]


def test_a_machine_s_samples_are_those_of_all_its_instances_and_it_is_there_as_long_as_one_is() -> None:
    world = World(never_join=True)
    world.machines.want(1, 0.0)
    world.pass_time(5)
    busy = InstanceView("a-1", "gpu0", "m-1.internal", False, True, False, 3)
    idle = InstanceView("a-2", "gpu1", "m-1.internal", False, True, False, 0)
    world.machines.tick([busy, idle], world.now)
    assert (world.machine("m-1").samples, world.machine("m-1").peers) == (3, ("a-1", "a-2"))
    world.machines.left("a-1", "its engine is changed", world.now)
    world.machines.tick([idle], world.now)
    assert (world.states(), world.machine("m-1").samples) == ([JOINED], 0)
    world.machines.left("a-2", "the cloud takes it away", world.now)
    assert world.states() == [MachineState.RELEASING]


def test_an_agent_that_dials_in_again_as_it_leaves_is_told_again_and_one_that_stays_is_not_waited_for() -> None:
    world = grown(1, works=False)
    world.machines.end("the run ended", world.now)
    cut, again = (InstanceView(peer, "m-1", "h", False, True, False, 0) for peer in ("m-1", "p-2"))
    told = [world.machines.tick([cut], world.now).leave, world.machines.tick([cut, again], world.now + 1).leave]
    assert [[peer for peer, _ in each] for each in told] == [["m-1"], ["p-2"]]
    assert world.machines.tick([again], world.now + CONFIG.leave_s - 1).leave == []
    assert world.states() == [MachineState.DRAINING]
    world.machines.tick([again], world.now + CONFIG.leave_s)
    assert world.states() == [MachineState.RELEASING]
    assert "the run ended; an instance is there 5 s after it was told to leave" in world.changes("releasing")[0].cause


def test_the_time_that_machines_take_to_start_is_learned() -> None:
    world = grown(4, boots_s=2.0)
    assert world.machines.start_s < CONFIG.start_s


@pytest.mark.parametrize("number", [1, 3])
def test_a_machine_that_is_listed_while_it_is_made_is_not_taken_for_one_too_many(number: int) -> None:
    """Clouds list what they make at once, and their tools come back once it runs."""
    world = World(making_s=45.0, boots_s=50.0, config=replace(CONFIG, call_s=60.0))
    world.machines.want(number, 0.0)
    world.pass_time(200)
    assert world.asked_in_all == number
    assert world.states() == [JOINED] * number
    assert not world.changes("releasing")


def test_a_stray_that_comes_while_machines_are_made_is_released_after_that() -> None:
    world = World(making_s=45.0, boots_s=50.0, config=replace(CONFIG, call_s=60.0))
    world.machines.want(1, 0.0)
    world.pass_time(20)
    world.boxes["stray"] = Box("stray", world.now, 1e9)
    world.pass_time(100)
    assert list(world.boxes) == ["m-1"]


def test_what_is_being_released_is_not_gone_before_the_call_says_so() -> None:
    """It may not be listed any more, and still runs and costs."""
    world = grown(1, grace_s=8.0, works=False, config=replace(CONFIG, ceiling=1, list_s=2.0))
    world.machines.want(0, world.now)
    world.pass_time(CONFIG.cool_down_s + 2)
    world.machines.want(1, world.now)
    most = 0
    for _ in range(60):
        world.pass_time(1)
        most = max(most, len(world.boxes))
    assert most == 1
    assert world.asked_in_all == 2
