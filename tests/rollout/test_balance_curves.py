"""What is learned about machines and answers, against machines and answers that are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout.curves import AnswerLengths, Speed, StepCurve, drain_s

TRUTH = Speed(base_s=0.008, sequence_s=3e-5, context_s=3e-8, prefill_s=2e-5)


def report(curve: StepCurve, speed: Speed, running: int, context: float, steps: int, prefilled: int) -> None:
    wall_s = steps * speed.step_s(running, context) + prefilled * speed.prefill_s
    curve.report(wall_s, running, context, steps * running, prefilled)


def test_a_curve_is_found_from_reports() -> None:
    curve = StepCurve()
    for k in range(60):
        report(curve, TRUTH, 1 + 7 * k % 100, 500.0 * (1 + 13 * k % 900), 50, 1000 * (k % 3))
    found = curve.speed
    assert found is not None
    for running, context in ((1, 2000.0), (64, 200_000.0), (120, 500_000.0)):
        assert found.step_s(running, context) == pytest.approx(TRUTH.step_s(running, context), rel=0.01)
    assert found.prefill_s == pytest.approx(TRUTH.prefill_s, rel=0.05)


def test_nothing_is_said_before_enough_was_reported() -> None:
    curve = StepCurve()
    report(curve, TRUTH, 8, 8000.0, 50, 0)
    assert curve.speed is None


def test_a_card_that_slows_down_is_noticed() -> None:
    curve = StepCurve()
    slow = Speed(0.016, 6e-5, 6e-8, 4e-5)
    for k in range(400):
        report(curve, TRUTH if k < 100 else slow, 1 + 7 * k % 100, 500.0 * (1 + 13 * k % 900), 50, 0)
    found = curve.speed
    assert found is not None
    assert found.step_s(50, 100_000.0) == pytest.approx(slow.step_s(50, 100_000.0), rel=0.05)


def test_no_term_is_negative_whatever_is_reported() -> None:
    curve = StepCurve()
    for k in range(30):
        curve.report(1.0 + (k * 7919 % 13) / 5, 1 + k % 9, 100.0 * (k * 31 % 17), 50 + k * 101 % 97, k % 4)
    found = curve.speed
    assert found is not None
    assert min(found.base_s, found.sequence_s, found.context_s, found.prefill_s) >= 0


@given(st.floats(0.01, 500.0), st.integers(1, 256), st.floats(0.0, 600_000.0))
def test_steps_and_seconds_are_each_other_s_reverse(wall_s: float, running: int, context: float) -> None:
    steps = TRUTH.steps_in(wall_s, running, context)
    assert TRUTH.wall_s(steps, running, context) == pytest.approx(wall_s, rel=1e-6)


def token_by_token(speed: Speed, places: int, held: list[tuple[int, int]]) -> float:
    """The same as `drain_s`, one decode step at a time."""
    waiting, running, clock = list(held), [], 0.0
    first = True
    while waiting or running:
        while waiting and len(running) < places:
            left, has = waiting.pop(0)
            clock += 0.0 if first else has * speed.prefill_s
            running.append([left, has])
        first = False
        clock += speed.step_s(len(running), sum(has for _, has in running))
        running = [[left - 1, has + 1] for left, has in running if left > 1]
    return clock


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 400)), max_size=12), st.integers(1, 6))
def test_draining_is_what_it_would_be_step_by_step(held: list[tuple[int, int]], places: int) -> None:
    speed = Speed(0.01, 1e-4, 1e-6, 1e-5)
    # Between two ends the quadratic counts half a step's growth more than whole steps do.
    expected = token_by_token(speed, places, held)
    assert drain_s(speed, places, [(float(a), float(b)) for a, b in held]) == pytest.approx(expected, rel=0.03)


def test_an_answer_s_remainder_is_that_of_the_answers_that_got_as_far() -> None:
    lengths = AnswerLengths()
    assert lengths.left(0) == 0.0
    for tokens in (10, 20, 30, 100):
        lengths.finished(tokens)
    assert not lengths.known
    lengths.refresh()
    assert lengths.left(0) == pytest.approx(40)
    assert lengths.left(25) == pytest.approx((30 + 100) / 2 - 25)
    assert lengths.left_at(25, 0.99) == 75
    assert lengths.left(100) >= 1
    assert lengths.groups == [[10, 20, 30, 100]]


def test_groups_of_the_last_batch_are_kept_by_prompt() -> None:
    lengths = AnswerLengths()
    for prompt, tokens in ((1, 5), (0, 7), (1, 6), (0, 8)):
        lengths.finished(tokens, prompt)
    lengths.refresh()
    assert lengths.groups == [[7, 8], [5, 6]]
    lengths.refresh()
    assert lengths.groups == [[7, 8], [5, 6]]
