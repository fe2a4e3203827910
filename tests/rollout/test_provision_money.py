"""What can be paid for is followed, at the prices that machines have and not at those that were configured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from provision_world import CONFIG, World

from penstock.observe.events import FleetSized
from penstock.rollout.fleet_size import FleetSize, FleetSizeConfig
from penstock.rollout.lately import Lately
from penstock.rollout.offload import StepTimes
from penstock.rollout.provision_money import LATELY_S
from penstock.rollout.provision_types import Add, InstanceView, ListAll, ProvisionConfig, Release, Seen
from penstock.rollout.provisioning import Provisioning
from penstock.wire import StepReport


def released(world: World) -> int:
    return len(world.changes("released")) + len(world.changes("failed"))


@pytest.mark.parametrize(
    ("configured", "listed", "asked", "kept"), [(36.0, 40.0, 3, 2), (36.0, 120.0, 3, 0), (0.0, 40.0, 2, 2)]
)
def test_a_price_above_the_configured_one_costs_one_correction_and_no_machine_is_asked_for_again_and_again(
    configured: float, listed: float, asked: int, kept: int
) -> None:
    world = World(config=replace(CONFIG, price_per_h=configured, budget_per_h=110.0), price=listed)
    world.machines.want(4, 0.0)
    world.pass_time(LATELY_S / 2)
    assert (world.asked_in_all, len(world.alive()), released(world)) == (asked, kept, asked - kept)
    assert f"the budget pays for 0 more at {listed:g} dollars an hour" in world.machines.short


def test_where_a_budget_is_all_that_is_known_one_machine_shows_its_price_first() -> None:
    world = World(config=replace(CONFIG, price_per_h=0.0, budget_per_h=200.0))
    world.machines.want(4, 0.0)
    world.pass_time(100)
    assert len(world.alive()) == 1, "nobody tells a price"
    assert "no price is known: fleet.price_per_h gives none" in world.machines.short
    world.price = 50.0
    world.pass_time(30)
    assert len(world.alive()) == 4
    assert world.machines.short == ""


def test_the_first_machine_s_price_is_asked_for_at_once_and_what_it_has_cost_until_then_is_charged() -> None:
    world = World(config=replace(CONFIG, price_per_h=0.0, budget=100.0, list_s=1000.0), price=36.0, answer_s=5.0)
    world.machines.want(2, 0.0)
    world.pass_time(30)
    assert world.asked_in_all == 2
    lived = sum(world.now - machine.asked_at for machine in world.machines.machines)
    assert world.machines.purse.spent == pytest.approx(lived * 0.01)


def test_without_a_budget_no_price_is_waited_for() -> None:
    world = World(config=replace(CONFIG, price_per_h=0.0))
    world.machines.want(4, 0.0)
    world.pass_time(5)
    assert world.asked_in_all == 4


def test_a_price_too_high_for_any_machine_is_looked_at_again_by_one_machine_an_hour_later() -> None:
    world = World(config=replace(CONFIG, budget_per_h=110.0), price=120.0)
    world.machines.want(2, 0.0)
    world.pass_time(LATELY_S - 60)
    assert (world.asked_in_all, world.alive()) == (2, [])
    world.price = 50.0
    world.pass_time(240)
    assert len(world.alive()) == 2


def test_dearer_machines_go_and_the_others_are_not_joined_by_more_before_an_hour_has_passed() -> None:
    world = World(config=replace(CONFIG, budget_per_h=110.0), price=36.0)
    world.machines.want(3, 0.0)
    world.pass_time(30)
    assert len(world.alive()) == 3
    world.price = 40.0
    world.pass_time(40)
    assert len(world.alive()) == 2
    world.price = 36.0
    world.pass_time(LATELY_S - 120)
    assert world.asked_in_all == 3
    world.pass_time(180)
    assert (world.asked_in_all, len(world.alive())) == (4, 3)


@pytest.mark.parametrize(("budget_per_h", "price", "number"), [(0.6, 0.2, 3), (3.3, 1.1, 3), (79.8, 5.32, 15)])
def test_a_budget_for_so_many_machines_pays_for_so_many(budget_per_h: float, price: float, number: int) -> None:
    config = FleetSizeConfig(budget_per_h=budget_per_h, machine_price=price, first=64)
    assert FleetSize(config, 1).wanted == number


def test_what_can_no_longer_be_paid_for_is_no_longer_wanted_however_little_fewer_would_save() -> None:
    size = FleetSize(FleetSizeConfig(budget_per_h=40.0, reserved_price=80.0, machine_price=5.0, first=8), 4)
    for _ in range(3):
        size.ended(StepTimes(8, 100.0, 20.0, 60.0, 20.0, 0.0, 800.0))
    assert size.wanted == 8
    size.learn(machine_price=7.0)
    assert size.ended(StepTimes(8, 100.0, 20.0, 60.0, 20.0, 0.0, 800.0)) == 5
    assert size.cause == "8 to 5: 40 dollars an hour pay for no more at 7.00 each, on the mean"


def test_a_price_that_was_only_ever_seen_at_a_machine_that_had_to_go_bounds_what_is_wanted_too() -> None:
    config = ProvisionConfig(first=8, budget_per_h=6.0, reserved_price_per_h=80.0)
    events: list[object] = []
    provisioning = Provisioning(config, events.append)
    (first,) = provisioning.tick([], 0.0, True).calls
    provisioning.machines.listed(first.call, [], 1.0)
    (add,) = provisioning.tick([], 2.0, True).calls
    provisioning.machines.added(add.call, ["m"], 3.0)
    (listing,) = provisioning.tick([], 4.0, True).calls
    assert isinstance(listing, ListAll)
    provisioning.machines.listed(listing.call, [Seen("m", price_per_h=7.0)], 5.0)
    (release,) = provisioning.tick([], 6.0, True).calls
    provisioning.machines.released(release.call, 7.0)
    provisioning.step(StepReport(step=0, step_s=100.0, train_s=50.0, trainer_wait_s=50.0))
    while provisioning.thinking:
        provisioning.think(8.0)
    assert provisioning.machines.wanted == 0
    assert provisioning.tick([], 9.0, True).calls == []
    assert [event.after for event in events if isinstance(event, FleetSized)] == [8, 0]


def test_instances_that_joined_by_hand_cost_the_budget_nothing() -> None:
    config = ProvisionConfig(first=1, ceiling=9, price_per_h=10.0, budget_per_h=25.0, reserved_price_per_h=800.0)
    provisioning = Provisioning(config, lambda event: None)
    views = [InstanceView(f"p{k}", f"desk-{k}", "h", False, True, False, 5) for k in range(3)]
    now = 0.0
    for _ in range(3):
        for _ in range(100):
            now += 1.0
            provisioning.tick(views, now, True)
        provisioning.step(StepReport(step=0, step_s=100.0, train_s=1.0, trainer_wait_s=99.0))
        while provisioning.thinking:
            provisioning.think(now)
    assert provisioning.machines.wanted == 3 + 2
    assert (provisioning.report(now)["by_hand"], provisioning.saved(now)["by_hand"]) == (3, 3)


def successor(saved: dict[str, object], hours: float) -> Provisioning:
    """Of a manager whose account was written so long before its clock's beginning."""
    config = ProvisionConfig(ceiling=8, price_per_h=5.0, reserved_price_per_h=80.0, budget=500.0)
    provisioning = Provisioning(config, lambda event: None, wall_offset_s=1e6 + 3600 * hours)
    provisioning.restore(saved, 0.0)
    return provisioning


SAVED = {"spent": 20.0, "wanted": 8, "machines": [f"m-{k}" for k in range(8)], "at": 1e6}


def test_machines_that_are_gone_when_another_manager_comes_cost_nothing_for_the_time_between() -> None:
    provisioning = successor(SAVED, 60.0)
    (listing,) = provisioning.tick([], 1.0, True).calls
    provisioning.machines.listed(listing.call, [Seen("m-1")], 2.0)
    assert provisioning.machines.purse.spent == pytest.approx(20.0 + 300.0, abs=0.1), "of the one that is there"
    (add,) = provisioning.tick([], 3.0, True).calls
    assert isinstance(add, Add)
    assert provisioning.machines.short == ""


def test_an_instance_shows_as_well_as_a_list_that_its_machine_was_there_and_the_told_price_is_that_of_the_gap() -> None:
    provisioning = successor(SAVED, 2.0)
    (listing,) = provisioning.tick([InstanceView("p", "m-1", "h", False, True, False, 0)], 0.0, True).calls
    assert provisioning.machines.purse.spent == pytest.approx(20.0 + 10.0)
    provisioning.machines.listed(listing.call, [Seen("m-1"), Seen("m-2", price_per_h=7.0)], 0.0)
    assert provisioning.machines.purse.spent == pytest.approx(20.0 + 10.0 + 14.0)


@pytest.mark.parametrize("instance_first", [True, False])
def test_the_time_between_managers_costs_the_told_price_whether_an_instance_or_the_list_came_first(
    instance_first: bool,
) -> None:
    config = ProvisionConfig(ceiling=8, reserved_price_per_h=80.0)
    provisioning = Provisioning(config, lambda event: None, wall_offset_s=1e6 + 2 * 3600)
    provisioning.restore({"spent": 20.0, "wanted": 1, "machines": ["m-1"], "at": 1e6}, 0.0)
    views = [InstanceView("p", "m-1", "h", False, True, False, 0)]
    (listing,) = provisioning.tick(views * instance_first, 0.0, True).calls
    provisioning.machines.listed(listing.call, [Seen("m-1", price_per_h=36.0)], 0.0)
    assert provisioning.machines.purse.spent == pytest.approx(20.0 + 72.0)


def going(provisioning: Provisioning, now: float) -> list[str]:
    """The machines that are to be released in this tick."""
    calls = provisioning.tick([], now, True).calls
    return sorted(call.machine for call in calls if isinstance(call, Release))


def surplus() -> Provisioning:
    """A successor whose machines are to go at its first tick: the budget pays for none."""
    config = ProvisionConfig(ceiling=8, price_per_h=5.0, reserved_price_per_h=80.0, budget=1.0)
    provisioning = Provisioning(config, lambda event: None, wall_offset_s=1e6 + 2 * 3600)
    provisioning.restore(SAVED, 0.0)
    return provisioning


def test_machines_that_are_to_go_at_once_wait_for_the_first_list_so_that_those_that_were_there_are_charged() -> None:
    provisioning = surplus()
    (listing,) = provisioning.tick([], 1.0, True).calls
    provisioning.machines.listed(listing.call, [Seen("m-1")], 2.0)
    assert provisioning.machines.purse.spent == pytest.approx(30.0, abs=0.01)
    assert going(provisioning, 3.0) == ["m-1"]


def test_machines_that_are_to_go_are_released_though_they_can_t_be_listed() -> None:
    provisioning = surplus()
    (listing,) = provisioning.tick([], 1.0, True).calls
    provisioning.machines.failed(listing.call, "list is broken", 2.0)
    assert len(going(provisioning, 3.0)) == 8


def test_a_list_that_hangs_holds_releases_back_for_a_moment_only() -> None:
    provisioning = surplus()
    assert going(provisioning, 1.0) == going(provisioning, 4.0) == []
    assert len(going(provisioning, 6.0)) == 8


def test_at_the_end_releases_do_not_wait_for_a_list() -> None:
    provisioning = successor(SAVED, 2.0)
    provisioning.machines.end("the run ended", 0.0)
    assert len(going(provisioning, 0.0)) == 8


def test_what_no_list_has_shown_yet_stays_to_be_charged_from_one_account_to_the_next() -> None:
    first = successor(SAVED, 2.0)
    first.tick([], 1.0, True)
    saved = first.saved(1e6 + 2 * 3600)
    assert saved["spent"] == 20.0
    second = successor(saved, 3.0)
    (listing,) = second.tick([], 0.0, True).calls
    second.machines.listed(listing.call, [Seen("m-3")], 0.0)
    assert second.machines.purse.spent == pytest.approx(20.0 + 15.0)
    assert second.saved(0.0)["unbilled"] == {}


def test_the_greatest_of_a_while_goes_up_at_once_and_comes_down_once_the_while_is_over() -> None:
    lately = Lately()
    assert lately.most(0.0) is None
    for at, value in enumerate([3, 5, 1, 2, 2]):
        lately.note(value, float(at))
    assert [lately.most(since) for since in (0.0, 1.0, 2.0, 4.0, 5.0)] == [5, 5, 2, 2, None]
