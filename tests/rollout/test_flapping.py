"""How long an agent that comes and goes too quickly waits for work, on a virtual clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout import flapping
from penstock.rollout.flapping import FlapConfig, Flapping

CONFIG = FlapConfig(quick_s=60, free=2, first_s=2, most_s=60, forget_s=600)


def lose_quickly(held: Flapping, times: int, now: float = 0.0, name: str = "spot") -> list[float]:
    """Comes, lives a second, is lost; the wait before each next life."""
    waits = []
    for _ in range(times):
        held_off_s = held.hold_off_s(name, now)
        held.lost(name, now, held_off_s, now + 1)
        now += 1
        waits.append(held.hold_off_s(name, now))
    return waits


def test_the_first_quick_ends_are_free_and_each_further_one_doubles_the_wait_up_to_the_longest() -> None:
    assert lose_quickly(Flapping(CONFIG), 9) == [0, 0, 2, 4, 8, 16, 32, 60, 60]


def test_a_long_life_is_no_flapping() -> None:
    held = Flapping(CONFIG)
    for start in range(0, 1000, 100):
        held.lost("spot", start, 0.0, start + 60)
    assert held.hold_off_s("spot", 1000) == 0


def test_the_time_of_waiting_does_not_make_a_life_long() -> None:
    held = Flapping(CONFIG)
    lose_quickly(held, 6)
    wait_s = held.hold_off_s("spot", 10)
    held.lost("spot", 10, wait_s, 10 + wait_s + 59)
    assert held.hold_off_s("spot", 10 + wait_s + 59) == 2 * wait_s


def test_quick_ends_are_forgotten_after_a_good_while() -> None:
    held = Flapping(CONFIG)
    lose_quickly(held, 5)
    assert held.hold_off_s("spot", 5 + 600) > 0
    assert held.hold_off_s("spot", 5 + 600.5) == 0
    assert lose_quickly(held, 3, now=1000) == [0, 0, 2]


def test_agents_of_one_name_that_are_lost_together_are_one_quick_end() -> None:
    held = Flapping(CONFIG)
    for number in range(8):
        held.lost("host", 0.1 * number, 0.0, 10.0 + 0.1 * number)
    assert held.quick_ends("host", 11) == 1


def test_others_do_not_pay_for_it() -> None:
    held = Flapping(CONFIG)
    lose_quickly(held, 9, name="spot")
    assert held.hold_off_s("steady", 10) == 0


def test_a_longest_wait_of_0_lets_everyone_in_at_once() -> None:
    assert set(lose_quickly(Flapping(FlapConfig(most_s=0)), 9)) == {0}


def test_only_so_many_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flapping, "NAMES_REMEMBERED", 3)
    held = Flapping(CONFIG)
    for number in range(10):
        lose_quickly(held, 4, now=float(number), name=f"spot-{number}")
    assert len(held._records) == 3
    assert held.hold_off_s("spot-9", 14) > 0


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 1000)), max_size=200))
def test_no_wait_is_longer_than_the_longest_however_it_flaps(lives: list[tuple[float, float]]) -> None:
    held, now = Flapping(CONFIG), 0.0
    for pause_s, life_s in lives:
        now += pause_s
        held_off_s = held.hold_off_s("spot", now)
        assert 0 <= held_off_s <= CONFIG.most_s
        held.lost("spot", now, held_off_s, now + life_s)
        now += life_s
