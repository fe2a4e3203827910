"""Policy losses by hand; `tests/integrations/real_verl_losses.py` compares them with verl's own, number for number."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.config.train import TrainConfig
from penstock.train.policy_losses import TokenLoss, get_loss

NEW, OLD = (0.3, 0.1), (0.2, 0.2)
"""Ratios 1.5 and 0.5."""
BOTH = torch.ones(1, 2, dtype=torch.bool)


def logs(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor([[math.log(value) for value in values]])


def lost(name: str, advantage: float, new: torch.Tensor | None = None, **options: float) -> TokenLoss:
    config = TrainConfig(**{"clip_low": 0.2, "clip_high": 0.3, **options})  # type: ignore[arg-type]
    return get_loss(name)(logs(NEW) if new is None else new, logs(OLD), torch.full((1, 2), advantage), BOTH, config)


def close(found: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(found, torch.tensor([expected]), rtol=1e-5, atol=1e-6)


def gradient(name: str, advantage: float, **options: float) -> torch.Tensor:
    new = logs(NEW).requires_grad_()
    lost(name, advantage, new, **options).loss_BT.sum().backward()
    assert new.grad is not None
    return new.grad


def test_a_dual_clip_bounds_what_a_token_with_a_negative_advantage_can_lose() -> None:
    close(lost("ppo_clip", -2.0).loss_BT, 3.0, 1.6)
    dual = lost("ppo_clip", -2.0, clip_dual=1.2)
    close(dual.loss_BT, 2.4, 1.6)
    assert dual.clipped_BT.tolist() == [[True, True]]
    close(lost("ppo_clip", 2.0, clip_dual=1.2).loss_BT, -2.6, -1.0)
    close(gradient("ppo_clip", -2.0, clip_dual=1.2), 0.0, 0.0)


def test_a_dual_clip_within_the_ratios_range_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_dual must be above 1, or 0 for none"):
        TrainConfig(clip_dual=0.5)


def test_gspo_has_one_ratio_a_sequence() -> None:
    sequence = math.sqrt(1.5 * 0.5)
    found = lost("gspo", 2.0)
    close(found.ratio_BT, sequence, sequence)
    close(found.loss_BT, -2.0 * sequence, -2.0 * sequence)
    assert found.clipped_BT.tolist() == [[False, False]]
    close(gradient("gspo", 2.0), -2.0 * sequence, -2.0 * sequence)
    clipped = lost("gspo", -2.0, clip_low=0.1)
    close(clipped.loss_BT, 1.8, 1.8)
    assert clipped.clipped_BT.tolist() == [[True, True]]


def test_gspo_leaves_padding_out_of_the_sequence() -> None:
    mask = torch.tensor([[True, False]])
    found = get_loss("gspo")(logs(NEW), logs(OLD), torch.tensor([[2.0, 0.0]]), mask, TrainConfig(clip_high=9.0))
    torch.testing.assert_close(found.ratio_BT[0, 0], torch.tensor(1.5))


def test_cispo_bounds_a_tokens_weight_and_takes_no_gradient_away() -> None:
    found = lost("cispo", 2.0)
    close(found.loss_BT, -1.3 * 2.0 * math.log(0.3), -0.8 * 2.0 * math.log(0.1))
    assert found.clipped_BT.tolist() == [[True, True]]
    close(gradient("cispo", 2.0), -2.6, -1.6)


def test_geo_mean_is_the_geometric_mean_of_ratios_clipped_where_that_lessens_the_objective() -> None:
    # log 1.5 = 0.405 is clipped to 0.3; log 0.5 = -0.693 stays: clipping it would raise the objective.
    good = math.exp((0.3 + math.log(0.5)) / 2)
    close(lost("geo_mean", 2.0).loss_BT, -2.0 * good, -2.0 * good)
    bad = math.exp((math.log(1.5) - 0.2) / 2)
    close(lost("geo_mean", -2.0).loss_BT, 2.0 * bad, 2.0 * bad)


def test_sapo_is_a_soft_gate_that_is_softer_for_a_positive_advantage() -> None:
    def gate(ratio: float, tau: float) -> float:
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    close(lost("sapo", 2.0).loss_BT, -2.0 * gate(1.5, 1.0), -2.0 * gate(0.5, 1.0))
    close(lost("sapo", -2.0).loss_BT, 2.0 * gate(1.5, 1.05), 2.0 * gate(0.5, 1.05))
    close(lost("sapo", 2.0, sapo_tau_positive=2.0).loss_BT, -2.0 * gate(1.5, 2.0), -2.0 * gate(0.5, 2.0))
    close(lost("sapo", -2.0, sapo_tau_negative=2.0).loss_BT, 2.0 * gate(1.5, 2.0), 2.0 * gate(0.5, 2.0))


def test_gpg_is_the_plain_policy_gradient() -> None:
    close(gradient("gpg", 2.0), -2.0, -2.0)
    assert not lost("gpg", 2.0).clipped_BT.any()


def test_dppo_tv_stops_where_a_probability_has_moved_too_far_in_its_advantages_direction() -> None:
    # Probabilities rise by 0.1 and fall by 0.1.
    near = lost("dppo_tv", 2.0, clip_low=0.15, clip_high=0.15)
    close(near.loss_BT, -2.0 * 1.5 * math.log(0.3), -2.0 * 0.5 * math.log(0.1))
    assert lost("dppo_tv", 2.0, clip_low=0.05, clip_high=0.05).clipped_BT.tolist() == [[True, False]]
    assert lost("dppo_tv", -2.0, clip_low=0.05, clip_high=0.05).clipped_BT.tolist() == [[False, True]]
    close(lost("dppo_tv", 2.0, clip_high=0.15, ratio_cap=1.2).loss_BT, -2.4 * math.log(0.3), -math.log(0.1))


def test_dppo_kl_measures_the_same_by_a_binary_divergence() -> None:
    rise = 0.2 * math.log(0.2 / 0.3) + 0.8 * math.log(0.8 / 0.7)
    assert lost("dppo_kl", 2.0, clip_high=rise * 0.99).clipped_BT.tolist() == [[True, False]]
    assert lost("dppo_kl", 2.0, clip_high=rise * 1.01).clipped_BT.tolist() == [[False, False]]
    fall = 0.2 * math.log(0.2 / 0.1) + 0.8 * math.log(0.8 / 0.9)
    assert lost("dppo_kl", -2.0, clip_low=fall * 0.99).clipped_BT.tolist() == [[False, True]]


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "geo_mean", "sapo", "gpg", "dppo_tv", "dppo_kl"])
def test_at_the_policy_that_drew_every_loss_is_the_plain_policy_gradient(name: str) -> None:
    """Where new and old are the same, all of them agree on the direction, and geo_mean on it over the length."""
    new = logs(OLD).requires_grad_()
    lost(name, 2.0, new).loss_BT.mean().backward()
    close(new.grad, -1.0, -1.0)  # type: ignore[arg-type]


def test_clip_cov_leaves_out_tokens_of_a_covariance_within_its_bounds() -> None:
    # Advantages 1 and -1 and log-probabilities around their mean: both covariances are ln(0.3 / 0.1) / 2.
    covariance = math.log(3) / 2
    advantages = torch.tensor([[1.0, -1.0]])

    def found(low: float, high: float, share: float = 1.0) -> TokenLoss:
        config = TrainConfig(clip_low=0.9, clip_high=9.0, cov_low=low, cov_high=high, cov_share=share)
        return get_loss("clip_cov")(logs(NEW), logs(OLD), advantages, BOTH, config)

    close(found(covariance - 0.1, covariance + 0.1).loss_BT, 0.0, 0.0)
    close(found(covariance + 0.1, covariance + 0.2).loss_BT, -1.5, 0.5)
    close(found(covariance - 0.2, covariance - 0.1).loss_BT, -1.5, 0.5)
    one = found(covariance - 0.1, covariance + 0.1, share=0.001)
    assert int(one.clipped_BT.sum()) == 1
    assert [value == 0 for value in one.loss_BT[0].tolist()] == one.clipped_BT[0].tolist()


def test_kl_cov_holds_the_tokens_of_the_highest_covariance_back() -> None:
    advantages = torch.tensor([[3.0, 1.0]])
    mean = (math.log(0.3) + math.log(0.1)) / 2
    assert (3 - 2) * (math.log(0.3) - mean) == pytest.approx((1 - 2) * (math.log(0.1) - mean))
    config = TrainConfig(cov_share=1.0, cov_kl_coef=0.5)
    found = get_loss("kl_cov")(logs(NEW), logs(OLD), advantages, BOTH, config)
    close(found.loss_BT, -3 * 1.5 + 0.5 * math.log(1.5), -0.5 + 0.5 * math.log(2))
    first = get_loss("kl_cov")(logs(NEW), logs(OLD), torch.tensor([[9.0, 1.0]]), torch.tensor([[True, False]]), config)
    assert first.clipped_BT.tolist() == [[True, False]]


def test_losses_take_an_advantage_for_each_token() -> None:
    advantages = torch.tensor([[1.0, -2.0]])
    config = TrainConfig(clip_low=0.9, clip_high=9.0)
    found = get_loss("ppo_clip")(logs(NEW), logs(OLD), advantages, BOTH, config)
    close(found.loss_BT, -1.5, 1.0)
