from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.train import TrainConfig
from penstock.errors import ConfigError
from penstock.train.losses import aggregate, approximate_kl, token_weights
from penstock.train.policy_losses import get_loss, ppo_clip, register_loss

AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def logs(*values: float) -> torch.Tensor:
    return torch.tensor([[math.log(value) for value in values]])


def test_ppo_clip_by_hand() -> None:
    # Ratios 1, 1.5, 0.5 with bounds 0.8 and 1.3.
    new, old = logs(0.2, 0.3, 0.1), logs(0.2, 0.2, 0.2)
    good = ppo_clip(new, old, torch.tensor([2.0]), clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(good.ratio_BT, torch.tensor([[1.0, 1.5, 0.5]]))
    torch.testing.assert_close(good.loss_BT, torch.tensor([[-2.0, -2.6, -1.0]]))
    assert good.clipped_BT.tolist() == [[False, True, False]]
    bad = ppo_clip(new, old, torch.tensor([-2.0]), clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(bad.loss_BT, torch.tensor([[2.0, 3.0, 1.6]]))
    assert bad.clipped_BT.tolist() == [[False, False, True]]


def test_a_clipped_token_has_no_gradient() -> None:
    new = logs(0.2, 0.3).requires_grad_()
    clip = ppo_clip(new, logs(0.2, 0.2), torch.tensor([1.0]), clip_low=0.2, clip_high=0.2)
    clip.loss_BT.sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([[-1.0, 0.0]]))


def test_the_registered_loss_takes_its_bounds_from_the_configuration() -> None:
    new, old, advantages = logs(0.2, 0.3, 0.1), logs(0.2, 0.2, 0.2), torch.tensor([2.0])
    config = TrainConfig(clip_low=0.1, clip_high=0.4)
    found = get_loss("ppo_clip")(new, old, advantages, torch.ones(1, 3, dtype=torch.bool), config)
    for one, other in zip(found, ppo_clip(new, old, advantages, 0.1, 0.4), strict=True):
        assert torch.equal(one, other)


def test_an_unknown_loss_is_refused_with_the_known_ones_and_a_taken_name_too() -> None:
    with pytest.raises(
        ConfigError,
        match=r"train.loss='foo' is unknown; registered are: cispo, clip_cov, .*, ppo_clip, sapo; .*import path",
    ):
        get_loss("foo")
    with pytest.raises(ValueError, match="a policy loss named 'ppo_clip' is registered already"):
        register_loss("ppo_clip")(lambda *columns: ppo_clip(*columns[:3], 0.2, 0.2))


def test_an_absurd_ratio_stays_finite() -> None:
    clip = ppo_clip(torch.tensor([[0.0]]), torch.tensor([[-500.0]]), torch.tensor([-1.0]), 0.2, 0.2)
    assert torch.isfinite(clip.loss_BT).all()
    assert torch.isfinite(approximate_kl(torch.tensor([[-500.0]]), torch.tensor([[0.0]]), "k3")).all()


def test_kl_estimators_by_hand() -> None:
    policy, reference = logs(0.5, 0.2), logs(0.25, 0.4)
    log2 = math.log(2)
    expected = {
        "k1": [log2, -log2],
        "abs": [log2, log2],
        "k2": [log2**2 / 2, log2**2 / 2],
        "k3": [0.5 - 1 + log2, 2 - 1 - log2],
    }
    for name, values in expected.items():
        torch.testing.assert_close(approximate_kl(policy, reference, name), torch.tensor([values]))  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator: str) -> None:
    policy = torch.tensor([0.7, 0.2, 0.1])
    reference = torch.tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy / reference).log()).sum()
    estimate = approximate_kl(policy.log(), reference.log(), estimator)  # type: ignore[arg-type]
    torch.testing.assert_close((policy * estimate).sum(), exact)


def test_aggregations_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0, 6.0], [4.0, 8.0, 99.0, 99.0], [99.0, 99.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    expected = {
        "token-mean": 24 / 6,
        "token-sum": 24.0,
        "seq-mean-token-sum": 24 / 2,
        "seq-mean-token-sum-norm": 24 / 2 / 10,
        "seq-mean-token-mean": (3 + 6) / 2,
    }
    for name, value in expected.items():
        assert float(aggregate(values, mask, name, horizon_tokens=10)) == pytest.approx(value)  # type: ignore[arg-type]


@given(
    lengths=st.lists(st.integers(1, 7), min_size=2, max_size=9),
    cuts=st.lists(st.integers(1, 8), max_size=4),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_an_aggregation_is_the_same_however_it_is_cut(lengths: list[int], cuts: list[int], aggregation: str) -> None:
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    values = torch.arange(mask.numel(), dtype=torch.float64).reshape(mask.shape)
    whole = aggregate(values, mask, aggregation, horizon_tokens=16)  # type: ignore[arg-type]
    total, denominator = torch.zeros((), dtype=torch.float64), torch.zeros(())
    edges = sorted({0, len(lengths), *(min(cut, len(lengths)) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        part = token_weights(mask[start:end], aggregation, 16)  # type: ignore[arg-type]
        total += (part.weights_BT * values[start:end]).sum()
        denominator = part.denominator if part.constant else denominator + part.denominator
    torch.testing.assert_close(total / denominator, whole)


def test_unknown_names_are_refused() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        token_weights(mask, "mean", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        approximate_kl(torch.zeros(1, 1), torch.zeros(1, 1), "k4")  # type: ignore[arg-type]
