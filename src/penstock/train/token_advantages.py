"""Advantages that look at single tokens: with a critic, whitened over tokens, or against a greedy answer.

Plain functions on tensors, registered beside those of `advantages`. Shape suffix: `_BT`, B samples with their output
tokens right-padded to T. Tokens outside the mask (padding, and what a tool said in between) are stepped over: rewards
and values pass across them as if they were not there, as in verl.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.config.train import TrainConfig
from penstock.train.advantages import Valued, centred_or_own, masked_whiten, register_advantage

__all__ = ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"]


@register_advantage("gae", whole_mini_batch=True)
def gae(token_rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, config: TrainConfig) -> Valued:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16), whitened over the mini-batch's tokens.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1}, with `config.gamma` and
    `config.gae_lambda`; the critic's target is A + V before whitening.
    """
    mask = mask_BT.to(torch.float32)
    following_B = torch.zeros_like(values_BT[:, 0])
    advantage_B = torch.zeros_like(following_B)
    columns = []
    for t in reversed(range(values_BT.shape[1])):
        delta_B = token_rewards_BT[:, t] + config.gamma * following_B - values_BT[:, t]
        here_B = mask[:, t]
        advantage_B = torch.lerp(advantage_B, delta_B + config.gamma * config.gae_lambda * advantage_B, here_B)
        following_B = torch.lerp(following_B, values_BT[:, t], here_B)
        columns.append(advantage_B)
    advantages_BT = torch.stack(columns[::-1], dim=1)
    return Valued(masked_whiten(advantages_BT, mask_BT), (advantages_BT + values_BT) * mask)


@register_advantage("reinforce_plus_plus", whole_mini_batch=True)
def reinforce_plus_plus(token_rewards_BT: Tensor, mask_BT: Tensor, config: TrainConfig) -> Tensor:
    """Reward to go, discounted by `config.gamma`, whitened over the mini-batch (REINFORCE++, arXiv 2501.03262)."""
    mask = mask_BT.to(torch.float32)
    to_go_B = torch.zeros_like(token_rewards_BT[:, 0])
    columns = []
    for t in reversed(range(token_rewards_BT.shape[1])):
        to_go_B = torch.lerp(to_go_B, token_rewards_BT[:, t] + config.gamma * to_go_B, mask[:, t])
        columns.append(to_go_B)
    return masked_whiten(torch.stack(columns[::-1], dim=1), mask_BT)


@register_advantage("reinforce_plus_plus_baseline", whole_mini_batch=True)
def reinforce_plus_plus_baseline(rewards_B: Tensor, group_B: Tensor, mask_BT: Tensor) -> Tensor:
    """r - group mean, whitened over the mini-batch's tokens (REINFORCE++-baseline, arXiv 2501.03262).

    A group of one keeps its reward, as in verl.
    """
    centred_B = centred_or_own(rewards_B, group_B)
    return masked_whiten(centred_B.unsqueeze(1).expand(mask_BT.shape), mask_BT)


@register_advantage("remax")
def remax(token_rewards_BT: Tensor, baselines_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Reward to go minus the reward of the greedy answer to the same prompt (ReMax, arXiv 2310.10505, equation 5)."""
    rewards_BT = token_rewards_BT * mask_BT
    return rewards_BT.flip(1).cumsum(1).flip(1) - baselines_B.unsqueeze(1)
