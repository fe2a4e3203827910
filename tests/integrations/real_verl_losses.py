"""Penstock's policy losses against verl's own functions of the same names: values and gradients, number for number.

Run by `make test-verl`, in an environment that has verl; `make test` doesn't collect it.
"""

from __future__ import annotations

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.workers.config import ActorConfig, PolicyLossConfig

from penstock.config.train import TrainConfig
from penstock.train.losses import aggregate, approximate_kl
from penstock.train.policy_losses import get_loss

B, T = 6, 9
MASK_BT = torch.arange(T) < torch.tensor([9, 5, 1, 7, 3, 9]).unsqueeze(1)
TOKENS, SEQUENCES = "token-mean", "seq-mean-token-mean"
LOSSES = [
    ("ppo_clip", "vanilla", {"clip_dual": 3.0}, TOKENS),
    ("gspo", "gspo", {}, SEQUENCES),
    ("cispo", "cispo", {}, TOKENS),
    ("geo_mean", "geo_mean", {}, SEQUENCES),
    ("sapo", "sapo", {}, SEQUENCES),
    ("gpg", "gpg", {}, TOKENS),
    ("dppo_tv", "dppo_tv", {"ratio_cap": 3.0}, TOKENS),
    ("dppo_kl", "dppo_kl", {"ratio_cap": 3.0}, TOKENS),
    ("clip_cov", "clip_cov", {"cov_share": 0.2, "cov_low": 0.05, "cov_high": 2.0}, TOKENS),
    ("kl_cov", "kl_cov", {"cov_share": 0.2, "cov_kl_coef": 0.7}, TOKENS),
]
"""Name here, name there, options that stand for verl's defaults, aggregation."""


def drawn(scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    old_BT = -(torch.rand(B, T, generator=generator) * 3 + 0.05)
    new_BT = (old_BT + torch.randn(B, T, generator=generator) * scale).clamp(max=-0.01)
    return new_BT, old_BT, torch.randn(B, generator=generator)


@pytest.mark.parametrize("scale", [0.05, 1.0, 3.0])
@pytest.mark.parametrize(("mine", "theirs", "options", "aggregation"), LOSSES)
def test_a_loss_and_its_gradient_are_those_of_verl(
    mine: str, theirs: str, options: dict[str, float], aggregation: str, scale: float
) -> None:
    new_BT, old_BT, advantages_B = drawn(scale)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        policy_loss=PolicyLossConfig(
            clip_cov_ratio=0.2, clip_cov_lb=0.05, clip_cov_ub=2.0, kl_cov_ratio=0.2, ppo_kl_coef=0.7
        ),
    )
    one_BT, other_BT = new_BT.clone().requires_grad_(), new_BT.clone().requires_grad_()
    advantages_BT = advantages_B.unsqueeze(1).expand(B, T)
    torch.manual_seed(3)
    expected, _ = get_policy_loss_fn(theirs)(old_BT, one_BT, advantages_BT, MASK_BT.float(), aggregation, config)
    expected.backward()
    torch.manual_seed(3)
    ours = TrainConfig(clip_low=0.2, clip_high=0.3, **options)
    found = aggregate(get_loss(mine)(other_BT, old_BT, advantages_BT, MASK_BT, ours).loss_BT, MASK_BT, aggregation, T)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other_BT.grad, one_BT.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
)
def test_an_aggregation_is_verls(aggregation: str) -> None:
    values_BT, _, _ = drawn(1.0)
    expected = agg_loss(values_BT, MASK_BT.float(), aggregation)
    torch.testing.assert_close(aggregate(values_BT, MASK_BT, aggregation, T), expected)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"])
def test_a_kl_estimator_and_its_gradient_are_verls(estimator: str) -> None:
    new_BT, old_BT, _ = drawn(1.0)
    one_BT, other_BT = new_BT.clone().requires_grad_(), new_BT.clone().requires_grad_()
    found, expected = approximate_kl(one_BT, old_BT, estimator), kl_penalty(other_BT, old_BT, estimator)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(one_BT.grad, other_BT.grad)
