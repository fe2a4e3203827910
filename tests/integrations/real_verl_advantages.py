"""Penstock's advantages and value loss against verl's own functions of the same names, number for number.

Run by `make test-verl`, in an environment that has verl; `make test` doesn't collect it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

from penstock.config.train import TrainConfig
from penstock.train.advantages import Outcomes, get_advantage
from penstock.train.critic import value_loss
from penstock.train.losses import steered_kl_coef

B, T = 8, 7
LENGTHS_B = torch.tensor([7, 5, 1, 7, 3, 6, 2, 4])
MASK_BT = torch.arange(T) < LENGTHS_B.unsqueeze(1)
GROUP_B = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
"""The last one stands alone."""


def made(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards_B = torch.randint(0, 4, (B,), generator=generator).float()
    values_BT = torch.randn(B, T, generator=generator) * MASK_BT
    token_rewards_BT = torch.zeros(B, T)
    token_rewards_BT[torch.arange(B), LENGTHS_B - 1] = rewards_B
    return rewards_B, values_BT, token_rewards_BT


def ours(name: str, seed: int, **train: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rewards_B, values_BT, token_rewards_BT = made(seed)
    found = get_advantage(name)(
        Outcomes(
            rewards_B=rewards_B,
            group_B=GROUP_B,
            config=TrainConfig(**train),
            lengths_B=LENGTHS_B.float(),
            mask_BT=MASK_BT,
            parts={},
            token_rewards_BT=token_rewards_BT,
            values_BT=values_BT,
            baselines_B=rewards_B.flip(0),
        )
    )
    return found.advantages_BT, found.returns_BT


SEEDS = [1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "name",
    ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"],
)
def test_an_advantage_is_verls(name: str, seed: int) -> None:
    _, _, token_rewards_BT = made(seed)
    there = core_algos.get_adv_estimator_fn(name)
    config = AlgoConfig(gamma=0.9)
    expected, _ = there(
        token_level_rewards=token_rewards_BT.clone(),
        response_mask=MASK_BT.float(),
        index=GROUP_B.numpy(),
        config=config,
    )
    found, _ = ours(name, seed, gamma=0.9)
    if name in ("grpo", "rloo", "opo"):
        # A group of one: verl keeps its reward, Penstock gives it nothing to learn from.
        assert not found[-1].any()
        found, expected = found[:-1], expected[:-1]
    torch.testing.assert_close(found, expected * MASK_BT[: len(found)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_dr_grpo_is_verls_grpo_without_the_deviation(seed: int) -> None:
    _, _, token_rewards_BT = made(seed)
    expected, _ = core_algos.compute_grpo_outcome_advantage(
        token_rewards_BT, MASK_BT.float(), GROUP_B.numpy(), norm_adv_by_std_in_grpo=False
    )
    found, _ = ours("dr_grpo", seed)
    torch.testing.assert_close(found[:-1], expected[:-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_passk_is_verls(seed: int) -> None:
    _, _, token_rewards_BT = made(seed)
    expected, _ = core_algos.compute_grpo_passk_outcome_advantage(
        token_rewards_BT[:-1], MASK_BT[:-1].float(), GROUP_B[:-1].numpy(), config=AlgoConfig()
    )
    found, _ = ours("grpo_passk", seed)
    torch.testing.assert_close(found[:-1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_and_its_returns_are_verls(seed: int) -> None:
    _, values_BT, token_rewards_BT = made(seed)
    expected, returns = core_algos.compute_gae_advantage_return(token_rewards_BT, values_BT, MASK_BT.float(), 0.9, 0.95)
    found, found_returns = ours("gae", seed, gamma=0.9, gae_lambda=0.95)
    torch.testing.assert_close(found, expected * MASK_BT, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found_returns, returns * MASK_BT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_remax_is_verls(seed: int) -> None:
    rewards_B, _, token_rewards_BT = made(seed)
    expected, _ = core_algos.compute_remax_outcome_advantage(token_rewards_BT, rewards_B.flip(0), MASK_BT.float())
    torch.testing.assert_close(ours("remax", seed)[0], expected * MASK_BT, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_is_verls(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = {name: torch.randint(0, 3, (B,), generator=generator).float() for name in ("form", "answer")}
    config = AlgoConfig(gdpo_reward_keys=["form", "answer"], gdpo_reward_weights=[1.0, 0.5])
    expected, _ = core_algos.compute_gdpo_outcome_advantage(
        torch.zeros(B - 1, T),
        MASK_BT[:-1].float(),
        GROUP_B[:-1].numpy(),
        config=config,
        non_tensor_batch={name: np.asarray(values)[:-1] for name, values in parts.items()},
        batch={
            "prompts": torch.zeros(B - 1, 2),
            "attention_mask": torch.cat([torch.ones(B - 1, 2), MASK_BT[:-1]], dim=1).long(),
        },
    )
    from penstock.train.advantages import gdpo

    own = TrainConfig(gdpo_parts={"form": 1.0, "answer": 0.5})
    found = gdpo(GROUP_B[:-1], MASK_BT[:-1], {name: values[:-1] for name, values in parts.items()}, own)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("clip", [0.1, 0.5])
def test_the_value_loss_is_verls(clip: float) -> None:
    _, old_BT, returns_BT = made(5)
    values_BT = old_BT + torch.randn(B, T, generator=torch.Generator().manual_seed(6))
    expected, share = core_algos.compute_value_loss(values_BT, returns_BT, old_BT, MASK_BT.float(), clip)
    loss_BT, clipped_BT = value_loss(values_BT, old_BT, returns_BT, clip)
    mask = MASK_BT.float()
    torch.testing.assert_close((loss_BT * mask).sum() / mask.sum(), expected)
    torch.testing.assert_close((clipped_BT * mask).sum() / mask.sum(), share)


def test_the_adaptive_kl_controller_is_verls() -> None:
    theirs = core_algos.AdaptiveKLController(0.2, 0.05, 500)
    config, coef = TrainConfig(kl_coef=0.2, kl_target=0.05, kl_horizon_samples=500), 0.2
    for kl in (0.01, 0.2, 0.051, 0.3):
        theirs.update(kl, 64)
        coef = steered_kl_coef(coef, kl, 64, config)
        assert coef == pytest.approx(theirs.value)
