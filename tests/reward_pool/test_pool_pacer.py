"""Declared limits are kept in every window; undeclared ones are found; told ones are followed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.reward.gate import LearnedCap, Sent
from penstock.reward.pacer import LearnedRate, Meter, ToldRate


class MeterKeepsItsLimit(RuleBasedStateMachine):
    """Whatever the order of takes, refunds and waits: never above the limit in any window, long or short."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter(limit=30, burst=5, window_s=60.0, refunds=True)
        self.now = 100.0
        self.taken: list[list[float]] = []

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.1, 1.0, 2.0, 7.3, 30.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(amount=st.sampled_from([1, 1, 1, 2, 5]))
    def take_when_ready(self, amount: int) -> None:
        self.now = self.meter.ready_at(self.now, amount)
        assert self.meter.ready_at(self.now, amount) == self.now, "the time it named wasn't the time"
        self.meter.take(self.now, amount)
        self.taken.append([self.now, amount])

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def refund(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.taken[-5:]))
        back = data.draw(st.integers(0, int(entry[1])))
        entry[1] -= back
        self.meter.settle(self.now, entry[0], back)

    @invariant()
    def never_above_the_limit_in_any_window(self) -> None:
        recent = self.taken[-80:]
        for n, (start, _) in enumerate(recent):
            in_minute = in_second = 0.0
            for at, amount in recent[n:]:
                if at < start + 60.0:
                    in_minute += amount
                if at <= start + 1.0:
                    in_second += amount
            assert in_minute <= 30
            assert in_second <= 5 + 30 / 60 * 1.0 + 1e-3


TestMeterKeepsItsLimit = MeterKeepsItsLimit.TestCase
TestMeterKeepsItsLimit.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("limit", [60, 600, 1200, 6000])
def test_a_meter_uses_all_of_its_limit_minute_after_minute(limit: int) -> None:
    meter, now, taken = Meter(limit, burst=limit / 60), 0.0, 0
    while now < 600.0:
        now = meter.ready_at(now)
        meter.take(now)
        taken += 1
    assert taken >= 0.998 * limit * 10


@pytest.mark.parametrize("burst", [1, 10])
def test_a_provider_without_room_for_more_refuses_few_of_what_the_network_moves_together(burst: int) -> None:
    """Sent exactly at the provider's own pace; each request takes up to 2 ms to get there."""
    rng, meter, admits = random.Random(0), Meter(600, burst), _bucket(10, burst)
    now, refused, accepted = 0.0, 0, 0
    while accepted < 1000:
        now = meter.ready_at(now)
        meter.take(now)
        if admits(now + rng.random() * 0.002):
            accepted += 1
        else:
            refused += 1
            meter.refused(now + 0.002, None)
    assert refused <= 30
    assert now <= 100 * 1.05
    assert meter.rate >= 0.9 * 10


def test_a_declared_burst_leaves_at_once_and_an_undeclared_one_does_not() -> None:
    def at_once(burst: float) -> int:
        meter, taken = Meter(limit=600, burst=burst), 0
        while meter.ready_at(0.0) == 0.0:
            meter.take(0.0)
            taken += 1
        return taken

    assert at_once(1) == 1
    assert at_once(40) == 40


def test_a_request_above_the_burst_passes_when_the_bucket_is_full_and_is_paid_for_after() -> None:
    meter = Meter(limit=600, burst=10)
    meter.take(0.0, 50)
    assert math.isclose(meter.ready_at(0.0, 10), 5.0)  # 50 in debt by 40, and 10 more, at 10 a second
    assert not meter.fits(601)


def test_a_refusal_empties_the_meter_until_the_provider_says_so() -> None:
    meter = Meter(limit=600, burst=10)
    meter.refused(0.0, None)
    assert math.isclose(meter.ready_at(0.0), 0.1)
    meter.refused(0.0, 3.0)
    assert meter.ready_at(0.0) == 3.0


def _bucket(rate: float, burst: float):
    level, at = burst, 0.0

    def admits(now: float) -> bool:
        nonlocal level, at
        level, at = min(burst, level + (now - at) * rate), now
        if level < 1:
            return False
        level -= 1
        return True

    return admits


@settings(max_examples=40, deadline=None)
@given(
    rate=st.sampled_from([0.5, 3.0, 25.0, 100.0, 800.0]), burst=st.sampled_from([3, 10, 50]), seed=st.integers(0, 99)
)
def test_a_learned_rate_finds_any_limit_with_few_rejections(rate: float, burst: int, seed: int) -> None:
    learned, admits, rng = LearnedRate(), _bucket(rate, burst), random.Random(seed)
    now, accepted, refused = 0.0, 0, 0
    times: list[float] = []
    while accepted < 600:
        now = max(now + rng.random() * 0.2 / rate, learned.ready_at(now))
        number = learned.take(now)
        if admits(now):
            accepted += 1
            times.append(now)
        else:
            refused += 1
            learned.armed = True
            learned.rejected(now, number, now, None)
    least_s = (600 - burst) / rate
    assert now <= 1.25 * least_s + 10 / rate
    assert refused <= 0.15 * 600


def test_a_learned_rate_learns_again_when_the_limit_changes() -> None:
    def run(factor: float) -> tuple[float, int]:
        learned, now, refused, accepted = LearnedRate(), 0.0, 0, 0
        admits = _bucket(100, 20)
        while accepted < 2000:
            if accepted == 1000:
                admits = _bucket(100 * factor, 20)
                admits(now)
            now = learned.ready_at(now)
            number = learned.take(now)
            if admits(now):
                accepted += 1
            else:
                refused += 1
                learned.armed = True
                learned.rejected(now, number, now, None)
        return now, refused

    for factor in (0.3, 0.5, 2.0, 4.0):
        took_s, refused = run(factor)
        assert took_s <= 1.15 * (10 + 10 / factor)
        assert refused <= 0.1 * 2000


def test_a_coarse_retry_after_makes_the_learned_pace_stay_below_the_estimate() -> None:
    learned = LearnedRate()
    learned.armed = True
    for n in range(1, 40):
        learned.take(n * 0.01)
    learned.rejected(0.5, 39, 0.39, None)
    assert learned.pace > learned.rate
    learned.rejected(0.6, 40, 0.55, 1.0)
    assert learned.pace < learned.rate
    assert learned.ready_at(0.6) >= 1.6


def test_a_told_rate_follows_what_the_headers_say_is_left() -> None:
    told = ToldRate()
    told.take(0.0)
    assert told.ready_at(0.0) == 0.0, "nothing is told yet"
    told.told(0.2, 0.0, 0, limit=20, remaining=0, reset_s=2.0)
    assert told.known
    assert 9.0 <= told.rate <= 10.0
    # 0.2 s have passed since the request left: two units are back.
    assert told.ready_at(0.2) == 0.2
    told.take(0.2)
    assert told.ready_at(0.2) > 0.2


def test_requests_sent_since_are_taken_from_what_the_headers_said() -> None:
    told = ToldRate()
    for _ in range(11):
        told.take(0.0)
    told.told(0.0, 0.0, 10, limit=20, remaining=10, reset_s=100.0)
    assert told.ready_at(0.0) > 0.0, "ten were left when the first was admitted, and ten have gone since"


def test_a_stalled_client_does_not_take_silence_for_consent() -> None:
    learned = LearnedRate()
    learned.armed = True
    for n in range(1, 12):
        learned.take(0.001 * n)
    learned.rejected(0.05, 11, 0.011, None)
    learned.rejected(0.2, learned.take(0.15), 0.15, None)
    rate, now, left = learned.rate, 0.2, 0
    while now < 0.3:  # a tenth of a second in which no answer is read
        now = max(now + 1e-4, learned.ready_at(now))
        learned.take(now)
        left += 1
    assert learned.pace <= 2.5 * rate
    assert left <= 2.5 * rate * 0.1 + 5


def test_a_few_rejections_of_a_declared_rate_are_not_taken_for_a_cap() -> None:
    gate = LearnedCap(1024, trusted_rate=True)
    sent = [Sent(0.02 * n, 10 + n, 0.0) for n in range(2 * LearnedCap.RUN)]
    for request in sent:
        gate.sent(request)
    for request in sent[: LearnedCap.RUN - 1]:
        assert not gate.rejected(request, 1.0)
    assert gate.cap == 1024
    assert gate.rejected(sent[LearnedCap.RUN - 1], 1.0), "a long run of them is one"
    assert gate.cap < 2 * LearnedCap.RUN
