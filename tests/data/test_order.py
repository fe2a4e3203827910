from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import PromptOrder
from penstock.errors import DataError

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40)).map(lambda pair: (max(pair), min(pair)))
SEEDS = st.integers(0, 2**64)


@given(SIZES, SEEDS, st.booleans())
def test_no_step_holds_a_prompt_twice_and_every_epoch_holds_each_once(
    sizes: tuple[int, int], seed: int, shuffle: bool
) -> None:
    count, prompts_per_step = sizes
    order = PromptOrder(count, prompts_per_step, seed, shuffle)
    steps = [order.for_step(step) for step in range(3 * count // prompts_per_step + 2)]
    assert all(len(step) == len(set(step)) == prompts_per_step for step in steps)
    drawn = [index for step in steps for index in step]
    for epoch in range(len(drawn) // count):
        assert Counter(drawn[epoch * count : (epoch + 1) * count]) == Counter(range(count))


@given(SIZES, SEEDS, st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_a_step_is_the_same_whenever_it_is_asked_for(sizes: tuple[int, int], seed: int, steps: list[int]) -> None:
    straight = PromptOrder(*sizes, seed)
    expected = [straight.for_step(step) for step in range(max(steps) + 1)]
    jumping = PromptOrder(*sizes, seed)
    assert [jumping.for_step(step) for step in steps] == [expected[step] for step in steps]
    assert [PromptOrder(*sizes, seed).for_step(step) for step in steps] == [expected[step] for step in steps]


def test_the_order_changes_with_the_seed_and_the_epoch() -> None:
    first = PromptOrder(100, 100, seed=1)
    assert first.for_step(0) != first.for_step(1)
    assert first.for_step(0) != PromptOrder(100, 100, seed=2).for_step(0)
    assert (first.epoch_of(0), first.epoch_of(7)) == (0, 7)


def test_the_order_is_the_same_on_every_machine() -> None:
    order = PromptOrder(8, 3, seed=0)
    assert [order.for_step(step) for step in range(4)] == [[5, 2, 4], [7, 0, 3], [1, 6, 5], [4, 1, 6]]


def test_without_shuffling_prompts_come_in_their_sources_order() -> None:
    order = PromptOrder(5, 2, seed=1, shuffle=False)
    assert [order.for_step(step) for step in range(5)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("count", "prompts_per_step", "message"),
    [(3, 4, "there are 3 training prompts and a step draws 4"), (3, 0, "prompts_per_step is 0")],
)
def test_a_step_that_would_repeat_a_prompt_is_refused(count: int, prompts_per_step: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PromptOrder(count, prompts_per_step, seed=0)


def test_steps_count_from_zero() -> None:
    with pytest.raises(ValueError, match="step is -1"):
        PromptOrder(3, 2, seed=0).for_step(-1)
