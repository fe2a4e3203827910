"""Advantages: rewards of whole groups to one number a sample. Plain functions on tensors, registered by name.

Decides what a sample's reward is worth against its group. Refuses to know about tokens, losses and where rewards
come from. Shape suffix: `_B`, B samples of one or more whole groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.train.registry import Registry

__all__ = ["Advantage", "dr_grpo", "get_advantage", "grpo", "has_signal", "register_advantage", "rloo"]

Advantage: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""`f(rewards_B, group_B) -> advantages_B`: float rewards, int64 group index of each sample (any numbers)."""

_REGISTRY: Registry[Advantage] = Registry("train.advantage", "an advantage estimator")
register_advantage = _REGISTRY.register
get_advantage = _REGISTRY.get


@register_advantage("grpo")
def grpo(rewards_B: Tensor, group_B: Tensor, epsilon: float = 1e-6) -> Tensor:
    """(r - mean) / (std + epsilon) within each group (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The standard deviation is the unbiased one (n - 1), as in verl and TRL. A group of one has nothing to be compared
    with and gets 0.
    """
    centred_B, index_B, size_G = _centred(rewards_B, group_B)
    square_G = torch.zeros_like(size_G).index_add_(0, index_B, centred_B * centred_B)
    std_G = (square_G / (size_G - 1).clamp_min(1)).sqrt()
    return centred_B / (std_G[index_B] + epsilon)


@register_advantage("dr_grpo")
def dr_grpo(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """r - mean within each group, undivided (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return _centred(rewards_B, group_B)[0]


@register_advantage("rloo")
def rloo(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """r minus the mean of the *other* samples of its group (RLOO, arXiv 2402.14740, equation 4).

    Equal to n / (n - 1) x (r - group mean). A group of one gets 0.
    """
    centred_B, index_B, size_G = _centred(rewards_B, group_B)
    return centred_B * (size_G / (size_G - 1).clamp_min(1))[index_B]


def has_signal(advantages_B: Tensor, group_B: Tensor) -> Tensor:
    """bool [B]: whether any sample of the sample's group has an advantage other than 0."""
    index_B, size_G = _groups(group_B)
    return torch.zeros_like(size_G).index_add_(0, index_B, (advantages_B != 0).to(torch.float32))[index_B] > 0


def _centred(rewards_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean [B], dense group index [B] and float group sizes [G].

    Exactly 0 where all rewards of a group are equal: their mean is rounded, and grpo would divide what is left by its
    epsilon.
    """
    index_B, size_G = _groups(group_B)
    mean_G = torch.zeros_like(size_G).index_add_(0, index_B, rewards_B) / size_G
    low_G = torch.full_like(size_G, float("inf")).scatter_reduce_(0, index_B, rewards_B, "amin")
    high_G = torch.full_like(size_G, float("-inf")).scatter_reduce_(0, index_B, rewards_B, "amax")
    return torch.where((high_G > low_G)[index_B], rewards_B - mean_G[index_B], 0.0), index_B, size_G


def _groups(group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Dense group index [B] and float group sizes [G]."""
    _, index_B, size_G = torch.unique(group_B, return_inverse=True, return_counts=True)
    return index_B, size_G.to(torch.float32)
