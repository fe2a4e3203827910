"""How fast one peer may send, on a virtual clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout.pace import Pace, PaceConfig

CONFIG = PaceConfig(frames_per_s=10, bytes_per_s=1000, burst_s=2, patience_s=5)


def test_a_peer_within_its_limits_is_never_slowed() -> None:
    pace = Pace(CONFIG, 0.0)
    assert all(pace.take(90, number / 10) == 0 for number in range(1000))
    assert pace.fault(100) == ""


def test_a_burst_is_let_through_and_what_is_over_waits() -> None:
    pace = Pace(CONFIG, 0.0)
    assert [pace.take(1, 0.0) for _ in range(22)] == [0.0] * 20 + [pytest.approx(0.1), pytest.approx(0.2)]


def test_bytes_count_as_well_as_frames() -> None:
    pace = Pace(CONFIG, 0.0)
    assert pace.take(5000, 0.0) == pytest.approx(3.0)


def flood(pace: Pace, until: float) -> tuple[float, int]:
    """Sends as fast as it is read; when it was dropped, or `until`, and how many frames were read."""
    now, frames = 0.0, 0
    while now < until:
        frames += 1
        now += max(pace.take(50, now), 1e-6)
        if pace.fault(now):
            break
    return now, frames


def test_one_that_goes_on_is_slowed_to_its_limit_and_dropped_with_the_cause() -> None:
    pace = Pace(CONFIG, 0.0)
    dropped_at, frames = flood(pace, 60)
    assert 5 < dropped_at < 6
    assert frames <= 20 + 10 * dropped_at + 1
    assert "it sent at its limit (10 frames and 1000 bytes a second) for" in pace.fault(dropped_at)


def test_one_that_pauses_is_forgiven() -> None:
    pace = Pace(CONFIG, 0.0)
    now = 0.0
    for _ in range(20):
        for _ in range(25):
            now += pace.take(1, now)
        now += 2.0
        assert pace.fault(now) == ""


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 10_000)), max_size=200))
def test_what_is_read_never_exceeds_burst_and_rate(sent: list[tuple[float, int]]) -> None:
    pace, now, frames, nbytes, wait_s = Pace(CONFIG, 0.0), 0.0, 0, 0, 0.0
    for pause_s, size in sent:
        now += wait_s + pause_s
        assert frames <= CONFIG.frames_per_s * (CONFIG.burst_s + now) + 1
        assert nbytes <= CONFIG.bytes_per_s * (CONFIG.burst_s + now) + 1
        frames, nbytes = frames + 1, nbytes + size
        wait_s = pace.take(size, now)


def test_a_clock_that_stands_still_or_steps_back_gives_nothing_away() -> None:
    pace = Pace(CONFIG, 10.0)
    for _ in range(20):
        pace.take(1, 10.0)
    assert pace.take(1, 9.0) > 0
