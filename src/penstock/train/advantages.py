"""Advantages: what each sample, or each of its tokens, is worth. Plain functions on tensors, registered by name.

Decides what rewards are worth against their group, their mini-batch or a critic's values. Refuses to know about
losses, models and where rewards come from. Shape suffixes: `_B`, B samples of whole groups; `_BT`, the same with their
output tokens right-padded to T.

A function says by the names of its parameters what it is given (`Outcomes` lists them), and at its registration
whether it must see a whole mini-batch. Without that it is called on whole groups as they complete, and what it returns
for a group must not depend on the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from penstock.config.train import TrainConfig
from penstock.errors import ConfigError, RewardError
from penstock.train.registry import Registry

__all__ = [
    "Advantage",
    "AdvantageEstimator",
    "Outcomes",
    "Valued",
    "dr_grpo",
    "gdpo",
    "get_advantage",
    "gpg",
    "grpo",
    "grpo_passk",
    "has_signal",
    "masked_whiten",
    "opo",
    "register_advantage",
    "rloo",
]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What is known of B samples of whole groups, by the names that an advantage function asks for."""

    rewards_B: Tensor
    """float32: each sample's reward, less the KL penalty of its tokens where that is part of the reward."""
    group_B: Tensor
    """int64 group index of each sample (any numbers)."""
    config: TrainConfig
    lengths_B: Tensor
    """float32: output tokens that are learned from."""
    mask_BT: Tensor
    """bool: True on output tokens that are learned from."""
    parts: Mapping[str, Tensor]
    """float32 [B] of each named part of the scores; NaN where a sample's score has no such part."""
    token_rewards_BT: Tensor
    """float32: `rewards_B` laid out over tokens: the score on the last one, the KL penalty on each; 0 on padding."""
    values_BT: Tensor | None = None
    """float32: the critic's value of the state before each token. A function that asks for it makes the run have a
    critic."""
    baselines_B: Tensor | None = None
    """float32: the reward of the greedy answer to the sample's prompt. A function that asks for it makes the run
    generate and score those answers."""


class Valued(NamedTuple):
    """An advantage function's answer where a critic learns too."""

    advantages_BT: Tensor
    returns_BT: Tensor
    """What the critic's values should have been."""


Advantage: TypeAlias = Callable[..., Tensor | Valued]
"""`f(rewards_B, group_B, ...) -> advantages [B] or [B, T], or Valued`: parameters are names of `Outcomes`' fields.
Those with a default that are no such names keep it."""

F = TypeVar("F", bound=Advantage)

_REGISTRY: Registry[Advantage] = Registry("train.advantage", "an advantage estimator")
_WHOLE: set[Advantage] = set()
_FIELDS = tuple(Outcomes.__dataclass_fields__)


def register_advantage(name: str, *, whole_mini_batch: bool = False) -> Callable[[F], F]:
    """Registers a function; with `whole_mini_batch` it is given a mini-batch at once, and streaming waits for that."""

    def keep(function: F) -> F:
        _REGISTRY.register(name)(function)
        if whole_mini_batch:
            _WHOLE.add(function)
        return function

    return keep


class AdvantageEstimator:
    """A named advantage function with what it needs. Raises ConfigError where it asks for what nobody knows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.function = _REGISTRY.get(name)
        parameters = inspect.signature(self.function).parameters
        self.needs = frozenset(parameters) & frozenset(_FIELDS)
        unknown = [
            parameter.name
            for parameter in parameters.values()
            if parameter.name not in _FIELDS and parameter.default is parameter.empty
        ]
        if unknown:
            raise ConfigError(
                f"train.advantage={name!r} asks for {', '.join(unknown)}; an advantage function's parameters are "
                f"among: {', '.join(_FIELDS)}"
            )

    @property
    def whole_mini_batch(self) -> bool:
        """Whether a group's advantages depend on the others of its mini-batch."""
        return self.function in _WHOLE

    @property
    def has_critic(self) -> bool:
        return "values_BT" in self.needs

    @property
    def has_baselines(self) -> bool:
        return "baselines_B" in self.needs

    @property
    def by_token(self) -> bool:
        """Whether it looks at single tokens."""
        return bool(self.needs & {"token_rewards_BT", "values_BT"})

    def __call__(self, outcomes: Outcomes) -> Valued:
        """Advantages [B, T], 0 where nothing is learned; returns [B, T] where there is a critic, else the same.

        Raises RewardError where the function gives something of another shape.
        """
        given: dict[str, Any] = {name: getattr(outcomes, name) for name in self.needs}
        found = self.function(**given)
        advantages, returns = found if isinstance(found, Valued) else (found, found)
        mask_BT = outcomes.mask_BT
        if advantages.shape not in (mask_BT.shape, mask_BT.shape[:1]):
            raise RewardError(
                f"train.advantage={self.name!r} gave a tensor of shape {tuple(advantages.shape)} for "
                f"{mask_BT.shape[0]} samples of up to {mask_BT.shape[1]} tokens"
            )
        return Valued(_spread(advantages, mask_BT), _spread(returns, mask_BT))


def get_advantage(name: str) -> AdvantageEstimator:
    """The estimator that a configuration names. Raises ConfigError naming what is wrong with it."""
    # Registers those that look at tokens; they stand on this module.
    import penstock.train.token_advantages  # noqa: F401

    return AdvantageEstimator(name)


# ---- within a group


@register_advantage("grpo")
def grpo(rewards_B: Tensor, group_B: Tensor, epsilon: float = 1e-6) -> Tensor:
    """(r - mean) / (std + epsilon) within each group (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    The standard deviation is the unbiased one (n - 1), as in verl and TRL. A group of one has nothing to be compared
    with and gets 0.
    """
    centred_B, index_B, size_G = _centred(rewards_B, group_B)
    return centred_B / (_deviation(centred_B, index_B, size_G)[index_B] + epsilon)


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


@register_advantage("opo")
def opo(rewards_B: Tensor, group_B: Tensor, lengths_B: Tensor) -> Tensor:
    """r minus the group's mean reward weighted by length (OPO, arXiv 2505.23585, equation 8).

    A group of one, or of equal rewards, gets 0.
    """
    centred_B, index_B, size_G = _centred(rewards_B, group_B)
    # The weighted mean of what is centred already: it stays exactly 0 where all rewards are equal.
    weighted_G = torch.zeros_like(size_G).index_add_(0, index_B, centred_B * lengths_B)
    length_G = torch.zeros_like(size_G).index_add_(0, index_B, lengths_B)
    return centred_B - (weighted_G / length_G.clamp_min(1))[index_B]


@register_advantage("grpo_passk")
def grpo_passk(rewards_B: Tensor, group_B: Tensor, epsilon: float = 1e-6) -> Tensor:
    """(best - second best) / (std + epsilon) for a group's best sample, 0 for the others (arXiv 2503.19595).

    In the normalised form of verl. Of several equally good ones none is better than the next, so all get 0. A group
    of one gets 0.
    """
    centred_B, index_B, size_G = _centred(rewards_B, group_B)
    std_G = _deviation(centred_B, index_B, size_G)
    # Sorted by group and, within it, from the best down: a stable sort by reward, then one by group.
    by_reward_B = torch.sort(rewards_B, descending=True, stable=True).indices
    order_B = by_reward_B[torch.sort(index_B[by_reward_B], stable=True).indices]
    first_G = torch.cumsum(size_G, 0).long() - size_G.long()
    several_G = size_G > 1
    best_G = order_B[first_G[several_G]]
    second_G = order_B[first_G[several_G] + 1]
    advantages_B = torch.zeros_like(rewards_B)
    advantages_B[best_G] = (rewards_B[best_G] - rewards_B[second_G]) / (std_G[several_G] + epsilon)
    return advantages_B


# ---- over a mini-batch


@register_advantage("gpg", whole_mini_batch=True)
def gpg(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """alpha x (r - group mean), alpha = samples / samples with a reward other than 0 (GPG, arXiv 2504.02546, eq. 6).

    alpha corrects the gradient for samples that say nothing. A group of one keeps its reward, as in verl.
    """
    alpha = rewards_B.numel() / torch.count_nonzero(rewards_B).clamp_min(1)
    return alpha * centred_or_own(rewards_B, group_B)


@register_advantage("gdpo", whole_mini_batch=True)
def gdpo(group_B: Tensor, mask_BT: Tensor, parts: Mapping[str, Tensor], config: TrainConfig) -> Tensor:
    """Each reward part normalised in its group as by grpo, added up with weights, whitened (GDPO, arXiv 2601.05242).

    `config.gdpo_parts` names the parts of the scores and their weights. Raises RewardError where a sample's score
    lacks one.
    """
    if not config.gdpo_parts:
        raise RewardError("train.advantage='gdpo' needs train.gdpo_parts: the names of reward parts and their weights")
    total_B = torch.zeros(len(group_B))
    for name, weight in config.gdpo_parts.items():
        part_B = parts.get(name)
        if part_B is None or bool(part_B.isnan().any()):
            known = ", ".join(sorted(parts)) or "none"
            raise RewardError(f"train.gdpo_parts: not every score has a part named {name!r}; there are: {known}")
        total_B = total_B + weight * grpo(part_B, group_B)
    return masked_whiten(total_B.unsqueeze(1).expand(mask_BT.shape), mask_BT)


def has_signal(advantages: Tensor, group_B: Tensor) -> Tensor:
    """bool [B]: whether any sample of the sample's group has an advantage ([B] or [B, T]) other than 0."""
    index_B, size_G = groups_of(group_B)
    any_B = (advantages != 0).reshape(len(group_B), -1).any(dim=1)
    return torch.zeros_like(size_G).index_add_(0, index_B, any_B.to(torch.float32))[index_B] > 0


def masked_whiten(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Values less their mean over their unbiased standard deviation, both over the mask's tokens; 0 elsewhere.

    The numbers are verl's. A single token has no deviation and gets 0.
    """
    mask = mask_BT.to(torch.float32)
    count = mask.sum()
    mean = (values_BT * mask).sum() / (count + 1e-8)
    centred_BT = (values_BT - mean) * mask
    variance = (centred_BT * centred_BT).sum() / (count + 1e-8) * count / (count - 1).clamp_min(1)
    return centred_BT * torch.rsqrt(variance + 1e-8)


def centred_or_own(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """Rewards less their group's mean; of a group of one the reward itself."""
    centred_B, index_B, size_G = _centred(rewards_B, group_B)
    return torch.where((size_G == 1)[index_B], rewards_B, centred_B)


def _centred(rewards_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean [B], dense group index [B] and float group sizes [G].

    Exactly 0 where all rewards of a group are equal: their mean is rounded, and grpo would divide what is left by its
    epsilon.
    """
    index_B, size_G = groups_of(group_B)
    mean_G = torch.zeros_like(size_G).index_add_(0, index_B, rewards_B) / size_G
    low_G = torch.full_like(size_G, float("inf")).scatter_reduce_(0, index_B, rewards_B, "amin")
    high_G = torch.full_like(size_G, float("-inf")).scatter_reduce_(0, index_B, rewards_B, "amax")
    return torch.where((high_G > low_G)[index_B], rewards_B - mean_G[index_B], 0.0), index_B, size_G


def _deviation(centred_B: Tensor, index_B: Tensor, size_G: Tensor) -> Tensor:
    """Unbiased standard deviation of each group [G]; 0 of a group of one."""
    square_G = torch.zeros_like(size_G).index_add_(0, index_B, centred_B * centred_B)
    return (square_G / (size_G - 1).clamp_min(1)).sqrt()


def groups_of(group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Dense group index [B] and float group sizes [G]."""
    _, index_B, size_G = torch.unique(group_B, return_inverse=True, return_counts=True)
    return index_B, size_G.to(torch.float32)


def _spread(values: Tensor, mask_BT: Tensor) -> Tensor:
    """Values [B] or [B, T] on the mask's tokens, 0 elsewhere."""
    # Not a product: what stands on padding may be anything.
    return torch.where(mask_BT, values.unsqueeze(1) if values.dim() == 1 else values, 0.0)
