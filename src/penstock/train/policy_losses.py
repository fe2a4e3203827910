"""Policy losses: what a token's probability should do, given its sample's advantage. Plain functions on tensors.

Each is registered under the name that the field uses, and gives the numbers of verl 0.9.1's function of that name.
Only clip_cov and kl_cov look beyond their own sample, at all tokens of a pass; for the others a mini-batch may be cut
into passes anywhere. They refuse to know about models, groups and aggregation; KL and entropy terms are added by the
actor. Shape suffixes: `_BT`, B samples with their output tokens right-padded to T; `_B`, one number a sample; `_B1`,
the same, to be spread over tokens.

In all of them r is new over old probability of a token and A its advantage; gradients flow through `logprobs_BT`
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.config.train import TrainConfig
from penstock.train.registry import Registry

__all__ = ["MAX_LOG_RATIO", "PolicyLoss", "TokenLoss", "get_loss", "ppo_clip", "register_loss"]

MAX_LOG_RATIO = 20.0
"""Ratios are exp of a difference; beyond this one they say only "absurd" and would overflow."""
MAX_LOG_SEQUENCE_RATIO = 10.0
"""Of GSPO, as in verl."""


class TokenLoss(NamedTuple):
    loss_BT: Tensor
    ratio_BT: Tensor
    """New over old probability, without gradient; for the metrics."""
    clipped_BT: Tensor
    """bool: the loss took the token's gradient away or bounded its weight; for the metrics."""


PolicyLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, TrainConfig], TokenLoss]
"""`f(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, config) -> TokenLoss`.

Log-probabilities are those of the distribution that tokens were drawn from; `mask_BT` is True on output tokens, and
what stands elsewhere counts for nothing."""

_REGISTRY: Registry[PolicyLoss] = Registry("train.loss", "a policy loss")
register_loss = _REGISTRY.register
get_loss = _REGISTRY.get


@register_loss("ppo_clip")
def _ppo_clip(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, config: TrainConfig
) -> TokenLoss:
    return ppo_clip(
        logprobs_BT, old_logprobs_BT, advantages_BT, config.clip_low, config.clip_high, config.clip_dual or None
    )


def ppo_clip(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) for each token (PPO, arXiv 1707.06347, equation 7).

    Separate bounds as in DAPO (arXiv 2503.14476, equation 10). `clip_dual`, above 1, bounds the loss of a token with
    a negative advantage at -A `clip_dual`, whatever its ratio (dual clip, arXiv 1912.09729, equation 5).
    """
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT)
    advantages_BT = advantages_BT.detach()
    free_BT = -advantages_BT * ratio_BT
    bound_BT = -advantages_BT * ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_BT, clipped_BT = torch.maximum(free_BT, bound_BT), bound_BT > free_BT
    if clip_dual is not None:
        most_BT = (-advantages_BT * clip_dual).expand_as(loss_BT)
        over_BT = (advantages_BT < 0) & (loss_BT > most_BT)
        loss_BT, clipped_BT = torch.where(over_BT, most_BT, loss_BT), clipped_BT | over_BT
    return TokenLoss(loss_BT, ratio_BT.detach(), clipped_BT.detach())


@register_loss("gspo")
def gspo(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, config: TrainConfig
) -> TokenLoss:
    """PPO's clipped loss with one ratio a sequence, the geometric mean of its tokens' (GSPO, arXiv 2507.18071, eq. 5).

    In the form with a gradient for each token (equation 17). The paper aggregates by `seq-mean-token-mean`; its
    clip bounds are of the order of 3e-4.
    """
    log_ratio_BT = (logprobs_BT - old_logprobs_BT.detach()) * mask_BT
    length_B1 = mask_BT.sum(dim=1, keepdim=True).clamp_min(1)
    mean_B1 = log_ratio_BT.detach().sum(dim=1, keepdim=True) / length_B1
    log_sequence_BT = (logprobs_BT - logprobs_BT.detach() + mean_B1).clamp(max=MAX_LOG_SEQUENCE_RATIO)
    ratio_BT = log_sequence_BT.exp()
    advantages_BT = advantages_BT.detach()
    free_BT = -advantages_BT * ratio_BT
    bound_BT = -advantages_BT * ratio_BT.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return TokenLoss(torch.maximum(free_BT, bound_BT), ratio_BT.detach(), (bound_BT > free_BT).detach())


@register_loss("cispo")
def cispo(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, config: TrainConfig
) -> TokenLoss:
    """-clip(r) A log p, the clipped ratio being a mere weight (CISPO, MiniMax-M1, arXiv 2506.13585, equation 4).

    No token loses its gradient; a far one has a bounded weight. The paper leaves the lower bound open
    (`clip_low` near 1).
    """
    ratio_BT = _ratio(logprobs_BT.detach(), old_logprobs_BT)
    weight_BT = ratio_BT.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss_BT = -weight_BT * advantages_BT.detach() * logprobs_BT
    return TokenLoss(loss_BT, ratio_BT, weight_BT != ratio_BT)


@register_loss("geo_mean")
def geo_mean(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, config: TrainConfig
) -> TokenLoss:
    """-A times the geometric mean of a sequence's clipped ratios (GMPO, arXiv 2507.20673, equation 4).

    Log-ratios are clipped to [-clip_low, clip_high] (the paper: 0.4 both), only where that lessens the objective.
    Each token carries its sequence's loss, so that `seq-mean-token-mean` is the paper's mean over sequences.
    """
    log_ratio_BT = logprobs_BT - old_logprobs_BT.detach()
    sign_BT = advantages_BT.detach().sign()
    bounded_BT = log_ratio_BT.clamp(-config.clip_low, config.clip_high)
    least_BT = sign_BT * torch.minimum(sign_BT * log_ratio_BT, sign_BT * bounded_BT)
    length_B = mask_BT.sum(dim=1).clamp_min(1)
    mean_B = (least_BT * mask_BT).sum(dim=1) / length_B
    advantages_B = (advantages_BT.detach() * mask_BT).sum(dim=1) / length_B
    loss_B1 = (-advantages_B * mean_B.exp()).unsqueeze(1)
    ratio_BT = log_ratio_BT.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return TokenLoss(loss_B1.expand_as(logprobs_BT), ratio_BT, (bounded_BT != log_ratio_BT).detach())


@register_loss("sapo")
def sapo(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, config: TrainConfig
) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate instead of a clip (SAPO, arXiv 2511.20347, equation 5).

    tau is `sapo_tau_positive` for A > 0, else `sapo_tau_negative`. The paper aggregates by `seq-mean-token-mean`.
    """
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT)
    advantages_BT = advantages_BT.detach()
    tau_BT = torch.where(advantages_BT > 0, config.sapo_tau_positive, config.sapo_tau_negative)
    gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1.0)) * (4.0 / tau_BT)
    return TokenLoss(-gate_BT * advantages_BT, ratio_BT.detach(), torch.zeros_like(mask_BT))


@register_loss("gpg")
def gpg(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, config: TrainConfig
) -> TokenLoss:
    """-A log p, without ratio or clip (GPG, arXiv 2504.02546, equation 7)."""
    ratio_BT = _ratio(logprobs_BT.detach(), old_logprobs_BT)
    return TokenLoss(-logprobs_BT * advantages_BT.detach(), ratio_BT, torch.zeros_like(mask_BT))


@register_loss("dppo_tv")
def dppo_tv(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, config: TrainConfig
) -> TokenLoss:
    """-min(r, ratio_cap) A log p, where the probability has not moved too far (DPPO-Binary-TV, arXiv 2602.04879).

    `clip_high` bounds how much a token's probability may have risen (for A > 0), `clip_low` how much it may have
    fallen: differences of probabilities, not ratios.
    """
    probability_BT, old_BT = logprobs_BT.detach().exp(), old_logprobs_BT.detach().exp()
    moved_BT = probability_BT - old_BT
    near_BT = torch.where(advantages_BT > 0, moved_BT <= config.clip_high, moved_BT >= -config.clip_low)
    return _dppo(logprobs_BT, old_logprobs_BT, advantages_BT, near_BT, config)


@register_loss("dppo_kl")
def dppo_kl(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, config: TrainConfig
) -> TokenLoss:
    """As `dppo_tv`, with the distance KL(old || new) between "this token" and "any other" (DPPO-Binary-KL).

    `clip_high` and `clip_low` bound it, in nats, for tokens that have moved in their advantage's direction.
    """
    new_BT, old_BT = logprobs_BT.detach(), old_logprobs_BT.detach()
    probability_BT, old_probability_BT = new_BT.exp(), old_BT.exp()
    others_BT = ((1.0 - old_probability_BT + 1e-8) / (1.0 - probability_BT + 1e-8)).log()
    kl_BT = old_probability_BT * (old_BT - new_BT) + (1.0 - old_probability_BT) * others_BT
    near_BT = torch.where(
        advantages_BT > 0,
        (kl_BT <= config.clip_high) | (probability_BT <= old_probability_BT),
        (kl_BT <= config.clip_low) | (probability_BT >= old_probability_BT),
    )
    return _dppo(logprobs_BT, old_logprobs_BT, advantages_BT, near_BT, config)


@register_loss("clip_cov")
def clip_cov(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, config: TrainConfig
) -> TokenLoss:
    """PPO's clipped loss, a few random tokens of high covariance left out (Clip-Cov, arXiv 2505.22617, equation 11).

    The covariance of a token is (A - mean A) (log p - mean log p), means over the pass; it is what entropy is lost by.
    Of the tokens within (`cov_low`, `cov_high`), `cov_share` of the pass's tokens, at least one, are drawn from
    PyTorch's generator. As in verl, whose default of `cov_share` here is 0.0002.
    """
    ppo = ppo_clip(logprobs_BT, old_logprobs_BT, advantages_BT, config.clip_low, config.clip_high)
    covariance_BT = _covariance(logprobs_BT, advantages_BT, mask_BT)
    within_BT = (covariance_BT > config.cov_low) & (covariance_BT < config.cov_high) & mask_BT & ~ppo.clipped_BT
    candidates = within_BT.nonzero()
    most = max(int(config.cov_share * int(mask_BT.sum())), 1)
    chosen = candidates[torch.randperm(len(candidates))[:most].to(candidates.device)]
    left_out_BT = torch.zeros_like(mask_BT)
    left_out_BT[chosen[:, 0], chosen[:, 1]] = True
    return TokenLoss(ppo.loss_BT * ~left_out_BT, ppo.ratio_BT, ppo.clipped_BT | left_out_BT)


@register_loss("kl_cov")
def kl_cov(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, config: TrainConfig
) -> TokenLoss:
    """-A r, with a penalty on the tokens of the highest covariance (KL-Cov, arXiv 2505.22617, equation 13).

    `cov_share` of the pass's tokens, at least one, get `cov_kl_coef` |log r| on top; nothing is clipped. As in verl.
    """
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT)
    covariance_N = _covariance(logprobs_BT, advantages_BT, mask_BT)[mask_BT]
    most = min(max(int(config.cov_share * covariance_N.numel()), 1), covariance_N.numel())
    highest = torch.topk(covariance_N, most).indices
    held_N = torch.zeros_like(covariance_N, dtype=torch.bool)
    held_N[highest] = True
    held_BT = torch.zeros_like(mask_BT).masked_scatter(mask_BT, held_N)
    penalty_BT = config.cov_kl_coef * (logprobs_BT - old_logprobs_BT.detach()).abs()
    return TokenLoss(-advantages_BT.detach() * ratio_BT + penalty_BT * held_BT, ratio_BT.detach(), held_BT)


def _covariance(logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    mask = mask_BT.to(torch.float32)
    tokens = mask.sum().clamp_min(1)
    logprobs_BT, advantages_BT = logprobs_BT.detach(), advantages_BT.detach()
    mean_advantage, mean_logprob = (advantages_BT * mask).sum() / tokens, (logprobs_BT * mask).sum() / tokens
    return (advantages_BT - mean_advantage) * (logprobs_BT - mean_logprob)


def _dppo(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, near_BT: Tensor, config: TrainConfig
) -> TokenLoss:
    ratio_BT = _ratio(logprobs_BT.detach(), old_logprobs_BT)
    weight_BT = ratio_BT.clamp(max=config.ratio_cap) * near_BT
    return TokenLoss(-advantages_BT.detach() * weight_BT * logprobs_BT, ratio_BT, ~near_BT)


def _ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    return (logprobs_BT - old_logprobs_BT.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
