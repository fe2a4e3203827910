"""How token losses add up, and the distance to a reference. Plain functions on tensors.

Decides each output token's weight in the whole. Refuses to know about models, groups and passes, and what a token's
loss is (`policy_losses`).
Shape suffixes: `_BT`, B samples with their output tokens right-padded to T; `_B`, one number a sample.

Aggregation is split in two so that it is exact however a mini-batch is cut into passes: each pass back-propagates
the un-normalised sum of `weights_BT * loss_BT`, and the gradient is divided once, at the mini-batch's end, by the sum
of all passes' denominators.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from penstock.config.train import TrainConfig
from penstock.train.policy_losses import MAX_LOG_RATIO

__all__ = [
    "Aggregation",
    "KlEstimator",
    "TokenWeights",
    "aggregate",
    "approximate_kl",
    "steered_kl_coef",
    "token_weights",
    "truncated_importance",
]

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]


def approximate_kl(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens that the policy drew.

    Schulman 2020, "Approximating KL Divergence". With d = log policy - log reference:
    k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. With a "+" the value is the estimator's and the gradient
    that of k2, whose expectation is the gradient of the KL divergence (the others' is not); as in verl.
    """
    d_BT = logprobs_BT - reference_logprobs_BT.detach()
    if estimator.endswith("+"):
        value_BT = approximate_kl(logprobs_BT, reference_logprobs_BT, cast(KlEstimator, estimator[:-1])).detach()
        k2_BT = 0.5 * d_BT * d_BT
        return k2_BT - k2_BT.detach() + value_BT
    if estimator == "k1":
        return d_BT
    if estimator == "abs":
        return d_BT.abs()
    if estimator == "k2":
        return 0.5 * d_BT * d_BT
    if estimator == "k3":
        bounded_BT = d_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(-bounded_BT) + bounded_BT
    raise ValueError(f"unknown KL estimator {estimator!r}")


def steered_kl_coef(coef: float, kl: float, samples: int, config: TrainConfig) -> float:
    """The KL penalty's weight after `samples` samples whose mean divergence was `kl` (arXiv 1909.08593, section 2.2).

    coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon), with `config.kl_target` and
    `config.kl_horizon_samples`; never below 0.
    """
    error = min(0.2, max(-0.2, kl / config.kl_target - 1.0))
    return max(0.0, coef * (1.0 + error * samples / config.kl_horizon_samples))


def truncated_importance(
    old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor, cap: float, *, sequence: bool = False
) -> Tensor:
    """min(p_trainer / p_engine, cap) for each token, without gradient: corrects for what engines compute differently.

    Truncated importance sampling (TIS; verl's `rollout_is`), with `sequence` of the whole answer's probabilities and
    one weight for all its tokens. 1 on padding.
    """
    gap_BT = ((old_logprobs_BT - rollout_logprobs_BT).detach() * mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if sequence:
        gap_BT = gap_BT.sum(dim=1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expand_as(gap_BT)
    return torch.where(mask_BT, gap_BT.exp().clamp(max=cap), 1.0)


class TokenWeights(NamedTuple):
    weights_BT: Tensor
    """float32; 0 for padding."""
    denominator: Tensor
    """Scalar: what these samples add to the mini-batch's denominator."""
    constant: bool
    """Whether the denominator is one constant for the whole mini-batch and is not to be added up."""


def token_weights(mask_BT: Tensor, aggregation: Aggregation, horizon_tokens: int) -> TokenWeights:
    """Weights and denominator of each aggregation (the names are verl's).

    | aggregation             | weight of a token | denominator                     |
    |-------------------------|-------------------|---------------------------------|
    | token-mean              | 1                 | tokens                          |
    | token-sum               | 1                 | 1                               |
    | seq-mean-token-sum      | 1                 | samples                         |
    | seq-mean-token-sum-norm | 1                 | samples x `horizon_tokens`      |
    | seq-mean-token-mean     | 1 / own length    | samples                         |

    `mask_BT` is True on output tokens. Samples without any output token don't count. `horizon_tokens` is the
    constant length of Dr. GRPO (arXiv 2503.20783): the run's `max_new_tokens`, never the batch's width, which would
    depend on how samples were split.
    """
    ones_BT = mask_BT.to(torch.float32)
    length_B = ones_BT.sum(dim=1)
    samples = (length_B > 0).to(torch.float32).sum()
    if aggregation == "token-mean":
        return TokenWeights(ones_BT, length_B.sum(), False)
    if aggregation == "token-sum":
        return TokenWeights(ones_BT, torch.ones_like(samples), True)
    if aggregation == "seq-mean-token-sum":
        return TokenWeights(ones_BT, samples, False)
    if aggregation == "seq-mean-token-sum-norm":
        return TokenWeights(ones_BT, samples * float(horizon_tokens), False)
    if aggregation == "seq-mean-token-mean":
        return TokenWeights(ones_BT / length_B.clamp_min(1.0).unsqueeze(1), samples, False)
    raise ValueError(f"unknown aggregation {aggregation!r}")


def aggregate(values_BT: Tensor, mask_BT: Tensor, aggregation: Aggregation, horizon_tokens: int) -> Tensor:
    """The aggregated scalar of one undivided mini-batch: what the passes' sums come to."""
    weights = token_weights(mask_BT, aggregation, horizon_tokens)
    return (weights.weights_BT * values_BT).sum() / weights.denominator.clamp_min(1e-30)
