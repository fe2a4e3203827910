from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.train.advantages import dr_grpo, get_advantage, grpo, has_signal, register_advantage, rloo

FUNCTIONS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
TWO_GROUPS = torch.tensor([7, 7, 7, 7, 3, 3])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 4.0])


def test_grpo_by_hand() -> None:
    # First group: mean 0.5, unbiased standard deviation sqrt(4 * 0.25 / 3); second: mean 3, sqrt(2).
    first, second = 0.5 / (1 / 3) ** 0.5, 1 / 2**0.5
    expected = torch.tensor([first, -first, -first, first, -second, second])
    torch.testing.assert_close(grpo(REWARDS, TWO_GROUPS), expected, atol=1e-5, rtol=1e-5)


def test_dr_grpo_by_hand() -> None:
    torch.testing.assert_close(dr_grpo(REWARDS, TWO_GROUPS), torch.tensor([0.5, -0.5, -0.5, 0.5, -1.0, 1.0]))


def test_rloo_by_hand() -> None:
    # Each reward less the mean of the others: 1 - 1/3, 0 - 2/3, ...; 2 - 4 and 4 - 2.
    expected = torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3, -2.0, 2.0])
    torch.testing.assert_close(rloo(REWARDS, TWO_GROUPS), expected)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_and_a_group_of_equals_have_no_advantage(name: str) -> None:
    advantages = FUNCTIONS[name](torch.tensor([5.0, 1.0, 1.0]), torch.tensor([0, 1, 1]))
    assert advantages.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12),
    other=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=5),
)
def test_groups_dont_touch_each_other_and_sum_to_zero(name: str, rewards: list[float], other: list[float]) -> None:
    estimator = FUNCTIONS[name]
    alone = estimator(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64))
    group = torch.tensor([0] * len(rewards) + [1] * len(other))
    beside = estimator(torch.tensor(rewards + other), group)[: len(rewards)]
    torch.testing.assert_close(alone, beside, atol=1e-3, rtol=1e-3)
    assert abs(float(alone.double().sum())) < 1e-2


def test_signal_is_a_group_with_any_advantage() -> None:
    advantages = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0])
    assert has_signal(advantages, torch.tensor([0, 0, 1, 1, 2])).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(reward=st.floats(-10, 10, width=32), size=st.integers(1, 16))
@example(reward=0.1, size=7)
def test_equal_rewards_give_no_advantage_at_all_however_they_round(name: str, reward: float, size: int) -> None:
    advantages = FUNCTIONS[name](torch.full((size,), reward), torch.zeros(size, dtype=torch.int64))
    assert not advantages.any()


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'gea'.*dr_grpo, gae, gdpo"):
        get_advantage("gea")


def test_a_name_can_be_taken_once() -> None:
    register_advantage("grpo")(grpo)
    with pytest.raises(ValueError, match="registered already"):
        register_advantage("grpo")(rloo)
