"""Advantages beyond the group's mean, by hand; `tests/integrations/real_verl_advantages.py` has verl's own numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.train import TrainConfig
from penstock.errors import ConfigError, RewardError
from penstock.train.advantages import (
    Outcomes,
    gdpo,
    get_advantage,
    gpg,
    grpo,
    grpo_passk,
    masked_whiten,
    opo,
    register_advantage,
)
from penstock.train.token_advantages import gae, reinforce_plus_plus, reinforce_plus_plus_baseline, remax

GROUPS = torch.tensor([4, 4, 4, 9, 9])
REWARDS = torch.tensor([1.0, 0.0, 3.0, 2.0, 2.0])
LENGTHS = torch.tensor([1.0, 2.0, 1.0, 5.0, 2.0])


def mask(lengths: Sequence[int]) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def test_opo_weighs_the_baseline_by_length() -> None:
    # (1 x 1 + 2 x 0 + 1 x 3) / 4 = 1; equal rewards have no advantage.
    torch.testing.assert_close(opo(REWARDS, GROUPS, LENGTHS), torch.tensor([0.0, -1.0, 2.0, 0.0, 0.0]))


def test_grpo_passk_rewards_the_best_alone() -> None:
    deviation = torch.tensor([1.0, 0.0, 3.0]).std().item()
    found = grpo_passk(REWARDS, GROUPS)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 2.0 / deviation, 0.0, 0.0]), rtol=1e-5, atol=1e-5)
    assert grpo_passk(torch.tensor([5.0]), torch.tensor([0])).tolist() == [0.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3)), min_size=1, max_size=12))
def test_grpo_passk_is_best_less_second_best_in_each_group(rows: list[tuple[int, int]]) -> None:
    group_B = torch.tensor([group for group, _ in rows])
    found = grpo_passk(torch.tensor([float(reward) for _, reward in rows]), group_B).tolist()
    for group in {group for group, _ in rows}:
        rewards = sorted((float(reward) for other, reward in rows if other == group), reverse=True)
        expected = 0.0
        if len(rewards) > 1:
            expected = (rewards[0] - rewards[1]) / (torch.tensor(rewards).std().item() + 1e-6)
        own = [value for (other, _), value in zip(rows, found, strict=True) if other == group]
        assert sum(own) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert sum(value != 0 for value in own) <= 1


def test_gpg_makes_up_for_samples_that_say_nothing() -> None:
    # Five samples, four with a reward other than 0.
    expected = 5 / 4 * torch.tensor([1 - 4 / 3, -4 / 3, 3 - 4 / 3, 0.0, 0.0])
    torch.testing.assert_close(gpg(REWARDS, GROUPS), expected)
    assert gpg(torch.tensor([0.0, 2.0]), torch.tensor([0, 1])).tolist() == [0.0, 4.0]


def test_gdpo_normalises_each_part_for_itself() -> None:
    parts = {"form": torch.tensor([0.0, 1.0, 1.0, 0.0]), "answer": torch.tensor([100.0, 0.0, 0.0, 100.0])}
    group_B, mask_BT = torch.tensor([0, 0, 1, 1]), mask([1, 1, 1, 1])
    config = TrainConfig(gdpo_parts={"form": 1.0, "answer": 0.5})
    found = gdpo(group_B, mask_BT, parts, config)
    plain = grpo(parts["form"], group_B) + 0.5 * grpo(parts["answer"], group_B)
    torch.testing.assert_close(found[:, 0], plain / plain.std(), rtol=1e-4, atol=1e-4)
    with pytest.raises(RewardError, match="part named 'style'; there are: answer, form"):
        gdpo(group_B, mask_BT, parts, TrainConfig(gdpo_parts={"style": 1.0}))
    with pytest.raises(RewardError, match=r"needs train\.gdpo_parts"):
        gdpo(group_B, mask_BT, parts, TrainConfig())


def test_gae_by_hand() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.25, 0.75]])
    config = TrainConfig(gamma=0.5, gae_lambda=0.5)
    deltas = [0.5 * 0.25 - 0.5, 0.5 * 0.75 - 0.25, 1.0 - 0.75]
    last = deltas[2]
    middle = deltas[1] + 0.25 * last
    first = deltas[0] + 0.25 * middle
    plain = torch.tensor([[first, middle, last]])
    found = gae(rewards, values, mask([3]), config)
    torch.testing.assert_close(found.returns_BT, plain + values)
    torch.testing.assert_close(found.advantages_BT, (plain - plain.mean()) / plain.std(), rtol=1e-4, atol=1e-4)


def test_gae_passes_over_what_is_not_learned_from() -> None:
    """A tool's words between two of the model's: the same as if they were not there."""
    config = TrainConfig(gamma=0.9, gae_lambda=0.8)
    holes = torch.tensor([[True, False, False, True, True]])
    rewards = torch.tensor([[0.1, 0.0, 0.0, 0.2, 1.0]])
    values = torch.tensor([[0.3, 7.0, -9.0, 0.5, 0.1]])
    found = gae(rewards, values, holes, config)
    without = gae(rewards[:, [0, 3, 4]], values[:, [0, 3, 4]], mask([3]), config)
    torch.testing.assert_close(found.advantages_BT[:, [0, 3, 4]], without.advantages_BT)
    torch.testing.assert_close(found.returns_BT[:, [0, 3, 4]], without.returns_BT)
    assert found.advantages_BT[0, 1:3].tolist() == [0.0, 0.0]


def test_reinforce_plus_plus_is_the_whitened_reward_to_go() -> None:
    rewards = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    mask_BT = mask([2, 1])
    found = reinforce_plus_plus(rewards, mask_BT, TrainConfig(gamma=0.5))
    to_go = torch.tensor([1.0, 2.0, 1.0])
    whitened = (to_go - to_go.mean()) / to_go.std()
    torch.testing.assert_close(found[mask_BT], whitened, rtol=1e-4, atol=1e-4)


def test_reinforce_plus_plus_baseline_takes_the_groups_mean_away_first() -> None:
    mask_BT = mask([1, 3, 1, 1, 1])
    found = reinforce_plus_plus_baseline(REWARDS, GROUPS, mask_BT)
    centred = REWARDS - torch.tensor([4 / 3] * 3 + [2.0] * 2)
    tokens = centred.unsqueeze(1).expand(mask_BT.shape)[mask_BT]
    torch.testing.assert_close(found[mask_BT], (tokens - tokens.mean()) / tokens.std(), rtol=1e-4, atol=1e-4)


def test_remax_compares_with_the_greedy_answer() -> None:
    rewards = torch.tensor([[-0.25, 1.0], [0.5, 0.0]])
    found = remax(rewards, torch.tensor([0.5, 1.0]), mask([2, 1]))
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.5], [-0.5, -1.0]]))


def test_whitening_ignores_padding_and_survives_a_single_token() -> None:
    values = torch.tensor([[1.0, 3.0], [5.0, math.inf]])
    mask_BT = mask([2, 1])
    found = masked_whiten(torch.where(mask_BT, values, 99.0), mask_BT)
    torch.testing.assert_close(found[mask_BT], torch.tensor([-1.0, 0.0, 1.0]))
    assert masked_whiten(torch.tensor([[7.0]]), mask([1])).tolist() == [[0.0]]


def outcomes(**known: torch.Tensor) -> Outcomes:
    mask_BT = mask([2, 1, 1, 2, 2])
    plain: dict[str, torch.Tensor] = {"rewards_B": REWARDS, "group_B": GROUPS, "lengths_B": LENGTHS}
    return Outcomes(**{**plain, **known}, config=TrainConfig(), mask_BT=mask_BT, parts={}, token_rewards_BT=mask_BT * 1)  # type: ignore[arg-type]


def test_a_function_is_given_what_its_parameters_name() -> None:
    @register_advantage("test_lengths_first")
    def lengths_first(lengths_B: torch.Tensor, rewards_B: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return factor * lengths_B * rewards_B

    estimator = get_advantage("test_lengths_first")
    assert estimator.needs == {"lengths_B", "rewards_B"}
    assert (estimator.has_critic, estimator.has_baselines, estimator.whole_mini_batch) == (False, False, False)
    found = estimator(outcomes())
    assert found.advantages_BT.tolist() == [[2.0, 2.0], [0.0, 0.0], [6.0, 0.0], [20.0, 20.0], [8.0, 8.0]]


def test_a_parameter_that_nobody_knows_is_refused() -> None:
    @register_advantage("test_wants_the_moon")
    def wants_the_moon(rewards_B: torch.Tensor, moon_B: torch.Tensor) -> torch.Tensor:
        return rewards_B

    with pytest.raises(ConfigError, match="asks for moon_B; an advantage function's parameters are among: rewards_B"):
        get_advantage("test_wants_the_moon")


def test_an_answer_of_another_shape_is_refused() -> None:
    @register_advantage("test_one_for_all")
    def one_for_all(rewards_B: torch.Tensor) -> torch.Tensor:
        return rewards_B.mean().reshape(1, 1, 1)

    with pytest.raises(RewardError, match=r"shape \(1, 1, 1\) for 5 samples of up to 2 tokens"):
        get_advantage("test_one_for_all")(outcomes())


def test_estimators_say_what_they_need() -> None:
    assert get_advantage("gae").has_critic
    assert get_advantage("remax").has_baselines
    waits = {"gae", "gdpo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    streams = {"grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "remax"}
    assert {name for name in waits | streams if get_advantage(name).whole_mini_batch} == waits
