"""Remote machines of a run, added up by hand: who is taken and given back, what is paid, pulled and waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from simulated import MACHINE, small_profile

from penstock.config.toml import write_toml
from penstock.errors import ConfigError
from penstock.rollout.balance import ShortestQueue
from penstock.rollout.balanced import Balanced
from penstock.rollout.offload import StepTimes
from penstock.rollout.other_fleets import Predictor
from penstock.simulate.outcome import Outcome
from penstock.simulate.profiles import Prices, Profile, load_profile
from penstock.simulate.strategy import FixedSize, SizePolicy, Strategy
from penstock.simulate.traces import Change, Trace, static_trace
from penstock.simulate.world import simulate

PULL_S = 0.8
"""One gigabyte over ten gigabits a second."""
COMING = (
    Change(0.0, "a", True),
    Change(0.0, "b", True),
    Change(1.0, "c", True),
    Change(1.0, "d", True),
    Change(1.8, "b", False),
    Change(2.0, "d", False),
)
"""`c` is up after two seconds; `b` is taken away from its work, and `d` before it is up."""


def ran(profile: Profile, changes: tuple[Change, ...], size: SizePolicy, steps: int = 2) -> Outcome:
    strategy = Strategy("own", ShortestQueue(8), None, size)
    return simulate(profile, Trace(changes, 1e9), strategy, steps=steps)


@dataclass
class Sizes:
    """One number after the other."""

    numbers: list[int]
    cause: str = "said"

    @property
    def wanted(self) -> int:
        return self.numbers[0]

    def ended(self, times: StepTimes, predictor: Predictor | None = None, beside: bool = False) -> int:
        self.numbers = self.numbers[1:] or self.numbers
        return self.wanted


def test_what_is_taken_is_paid_and_what_is_connected_counts_as_there() -> None:
    first, second = ran(small_profile(), COMING, FixedSize(4)).steps
    wall_s = first.times.step_s
    assert 3600 * first.paid_h == pytest.approx(wall_s + 1.8 + (wall_s - 1.0) + 1.0)
    assert first.times.fleet * wall_s == pytest.approx(wall_s + 1.8 + (wall_s - 1.0 - MACHINE.boot_s))
    assert first.times.preemptions == 2
    assert 3600 * second.paid_h == pytest.approx(2 * second.times.step_s)
    assert second.times.fleet == pytest.approx(2.0)


def test_who_is_taken_away_before_it_is_up_was_never_connected() -> None:
    outcome = ran(small_profile(), COMING, FixedSize(4))
    stays = {stay.node: stay for stay in outcome.stays[0]}
    assert [(stay.connected_at, stay.ready_at, stay.left_at, stay.preempted) for stay in stays.values()] == [
        (0.0, pytest.approx(PULL_S), 1.8, True),
        (None, None, 2.0, True),
        (0.0, pytest.approx(PULL_S), None, False),
        (3.0, pytest.approx(3.0 + PULL_S), None, False),
    ]
    assert list(stays) == ["b", "d", "a", "c"]


def test_a_machine_is_busy_while_it_works_and_waits_while_it_holds_the_weights_and_does_not() -> None:
    outcome = ran(small_profile(), COMING, FixedSize(4), steps=3)
    for step, stays in zip(outcome.steps, outcome.stays, strict=True):
        ends_s = step.began_s + step.times.step_s
        worked = {stay.node: sum(b - a for a, b in step.machine_spans[stay.node]) for stay in stays}
        assert step.times.remote_busy_s == pytest.approx(sum(worked.values()), abs=1e-3)
        held = {stay.node: (stay.left_at or ends_s) - stay.ready_at for stay in stays if stay.ready_at is not None}
        waits = [held_s - worked[node] for node, held_s in held.items()]
        assert step.times.remote_wait_s == pytest.approx(sum(waits) / len(waits), abs=1e-3)
        assert step.times.remote_wait_s > 0.1
        assert step.remote_waited_s == pytest.approx(sum(waits), abs=1e-3)
        assert step.remote_ready_s == pytest.approx(sum(held.values()), abs=1e-3)


@pytest.mark.parametrize(("link", "machines", "pull_s"), [(40.0, 3, 0.8), (20.0, 4, 1.6), (40.0, 8, 1.6)])
def test_those_that_pull_at_once_share_the_store_s_link(link: float, machines: int, pull_s: float) -> None:
    profile = small_profile(store_gbit_s=link)
    strategy = Strategy("own", ShortestQueue(8), None, FixedSize(machines))
    outcome = simulate(profile, static_trace(machines, 1e9), strategy, steps=2)
    for step, stays in zip(outcome.steps, outcome.stays, strict=True):
        assert [stay.ready_at for stay in stays] == pytest.approx([step.began_s + pull_s] * machines)


def test_who_comes_up_while_others_pull_shares_with_them() -> None:
    """Two pull for 3.2 s; the third is up after 3 s and has a third of the link."""
    changes = (Change(0.0, "a", True), Change(0.0, "b", True), Change(1.0, "c", True))
    (stays,) = ran(small_profile(store_gbit_s=5.0), changes, FixedSize(3), steps=1).stays
    assert [stay.ready_at for stay in stays] == pytest.approx([3.2, 3.2, 3.0 + 4.8])


def test_those_longest_there_are_taken_and_the_last_one_taken_is_given_back() -> None:
    changes = tuple(Change(0.0, node, True) for node in "abcd")
    stays = ran(small_profile(), changes, Sizes([3, 1, 2]), steps=3).stays
    assert [[stay.node for stay in step if stay.left_at is None] for step in stays] == [
        ["a", "b", "c"],
        ["a"],
        ["a", "b"],
    ]
    assert not any(stay.preempted for step in stays for stay in step)


def test_a_slow_machine_is_given_back_before_younger_ones_once_it_is_known_as_slow() -> None:
    profile = small_profile(kinds={"slow": MACHINE.slower_by(2.5)})
    trace = static_trace(["fast:0", "slow:1", "fast:2"], 1e9)
    sizes = Sizes([3, 3, 3, 3, 2])
    strategy = Strategy("own", Balanced(8), None, sizes)
    stays = simulate(profile, trace, strategy, steps=5).stays
    assert [stay.node for stay in stays[-1] if stay.left_at is None] == ["fast:0", "fast:2"]


def test_each_machine_costs_what_its_kind_does_and_the_dearest_for_what_they_do_go_first() -> None:
    prices = Prices(reserved=36.0, spot=9.0, on_demand=20.0, kinds={"slow": 4.0})
    profile = small_profile(kinds={"slow": MACHINE.slower_by(1.5)}, prices=prices)
    trace = static_trace(["slow:0", "fast:1", "slow:2"], 1e9)
    outcome = simulate(profile, trace, Strategy("own", Balanced(8), None, Sizes([3, 3, 3, 3, 2])), steps=5)
    first, *_, last = outcome.steps
    assert first.dollars == pytest.approx((36.0 + 4.0 + 9.0 + 4.0) * first.times.step_s / 3600)
    assert [stay.node for stay in outcome.stays[-1] if stay.left_at is None] == ["slow:0", "slow:2"]
    assert last.dollars == pytest.approx((36.0 + 4.0 + 4.0) * last.times.step_s / 3600)
    assert outcome.dollars == sum(step.dollars for step in outcome.steps)
    kept = Strategy("own", Balanced(8), None, FixedSize(3), spot=False)
    (step,) = simulate(profile, trace, kept, steps=1).steps
    assert step.dollars == pytest.approx((36.0 + 3 * 20.0) * step.times.step_s / 3600)


def test_a_price_of_a_kind_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prices\.kinds has a price of slwo, and kinds no such machine"):
        small_profile(
            kinds={"slow": MACHINE}, prices=Prices(reserved=36.0, spot=9.0, on_demand=20.0, kinds={"slwo": 4.0})
        )


def test_a_file_with_such_a_price_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    table = small_profile().model_dump(mode="json", exclude_none=True)
    path.write_text(write_toml(table | {"prices": table["prices"] | {"kinds": {"slwo": 4.0}}}))
    with pytest.raises(ConfigError) as refused:
        load_profile(path)
    assert str(refused.value).endswith(
        "not a profile:\n  - prices.kinds has a price of slwo, and kinds no such machine"
    )


def test_policies_are_told_who_is_given_back_and_who_is_taken_away() -> None:
    @dataclass
    class Told(ShortestQueue):
        names: list[str] = field(default_factory=list)

        def gone(self, instance: str) -> None:
            self.names.append(instance)

    told = Told(8)
    changes = (*(Change(0.0, node, True) for node in "abc"), Change(2.0, "a", False))
    simulate(small_profile(), Trace(changes, 1e9), Strategy("own", told, None, Sizes([3, 1])), steps=2)
    assert told.names == ["a", "c"]


def test_who_is_taken_away_makes_room_for_the_next_one_that_is_there() -> None:
    changes = (*(Change(0.0, node, True) for node in "abc"), Change(2.0, "a", False))
    (stays,) = ran(small_profile(), changes, FixedSize(2), steps=1).stays
    assert [(stay.node, stay.taken_at, stay.connected_at) for stay in stays] == [
        ("a", 0.0, 0.0),
        ("b", 0.0, 0.0),
        ("c", 2.0, 2.0 + MACHINE.boot_s),
    ]


@pytest.mark.parametrize("back", [False, True])
def test_a_machine_that_goes_and_comes_within_a_step_keeps_all_that_it_worked(back: bool) -> None:
    changes = [(0.0, True), (1.5, False), (2.0, True), (7.0, False), *([(7.1, True)] if back else [])]
    trace = tuple(Change(at_s, "n", there) for at_s, there in changes)
    step = ran(small_profile(), trace, FixedSize(1)).steps[0]
    spans = step.machine_spans["n"]
    assert sum(end_s - at_s for at_s, end_s in spans) == pytest.approx(step.times.remote_busy_s, abs=1e-6)
    assert list(spans) == sorted(spans)
    begun = [at_s for at_s, _ in spans]
    assert any(at_s < 1.5 for at_s in begun)
    assert any(2.0 < at_s < 7.0 for at_s in begun)
    assert any(at_s > 7.1 for at_s in begun) is back
