"""Random numbers by position, and tokens from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from builtin_models import DEVICES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.instance.builtin.draw import decision_gap, draw, draw_rows
from penstock.instance.builtin.philox import philox4x32, uniforms
from penstock.wire import Sampling


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def drawn(
    logits_BV: torch.Tensor, samplings: Sequence[Sampling], u_B: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities, drawn on `device`."""
    rows = draw_rows(samplings, logits_BV.shape[1], device)
    ids_B, logprobs_B = draw(logits_BV.to(device), rows, u_B.to(device))
    return ids_B.cpu(), logprobs_B.cpu()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    def column(values: tuple[int, ...]) -> np.ndarray:
        return np.array(values, dtype=np.uint64).reshape(-1, 1)

    assert philox4x32(column(counter), column(key))[:, 0].tolist() == list(words)


@given(seed=st.integers(0, 2**64 - 1), begin=st.integers(0, 2**40), count=st.integers(1, 40), at=st.integers(0, 39))
def test_a_number_depends_on_seed_and_position_alone(seed: int, begin: int, count: int, at: int) -> None:
    block = uniforms(seed, begin, count)
    assert all(0.0 <= number < 1.0 for number in block)
    assert uniforms(seed, begin + at % count, 1) == [block[at % count]]


def test_numbers_are_even_and_differ_between_seeds() -> None:
    numbers = np.array(uniforms(1, 0, 20000))
    assert abs(numbers.mean() - 0.5) < 0.01
    assert np.abs(np.histogram(numbers, bins=10, range=(0, 1))[0] - 2000).max() < 200
    assert len(set(numbers.tolist()) & set(uniforms(2, 0, 20000))) == 0


def expected_probs(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution after temperature, top-k, top-p, token by token in float64: the plain definition."""
    probs = torch.softmax(logits_V.double() / sampling.temperature, dim=-1)
    order = sorted(range(len(probs)), key=lambda token: -probs[token].item())
    kept = order[: sampling.top_k] if sampling.top_k else order
    total = sum(probs[token].item() for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if mass >= sampling.top_p * total:
            break
        nucleus.append(token)
        mass += probs[token].item()
    out = torch.zeros_like(probs)
    out[nucleus] = probs[nucleus]
    return out / out.sum()


SAMPLINGS = [
    Sampling(max_new_tokens=1),
    Sampling(max_new_tokens=1, temperature=0.6),
    Sampling(max_new_tokens=1, temperature=1.7, top_k=5),
    Sampling(max_new_tokens=1, top_p=0.7),
    Sampling(max_new_tokens=1, temperature=0.8, top_k=7, top_p=0.8),
    Sampling(max_new_tokens=1, top_k=1),
    Sampling(max_new_tokens=1, top_k=1000),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_even_numbers_give_each_token_its_probability(device: torch.device, sampling: Sampling) -> None:
    torch.manual_seed(0)
    logits_V = torch.randn(12) * 1.5
    count = 20000
    u_B = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    ids_B, logprobs_B = drawn(logits_V.expand(count, -1), [sampling] * count, u_B, device)
    shares = torch.bincount(ids_B, minlength=12).double() / count
    assert (shares - expected_probs(logits_V, sampling)).abs().max() < 2 / count
    torch.testing.assert_close(logprobs_B, torch.log_softmax(logits_V, -1)[ids_B])


def test_rows_of_a_mixed_batch_draw_as_each_does_alone(device: torch.device) -> None:
    torch.manual_seed(1)
    samplings = [*SAMPLINGS, Sampling(max_new_tokens=1, temperature=0), Sampling(max_new_tokens=1, temperature=0.01)]
    logits_BV = torch.randn(len(samplings), 50) * 2
    u_B = torch.rand(len(samplings), dtype=torch.float64)
    mixed, logprobs = drawn(logits_BV, samplings, u_B, device)
    for row, sampling in enumerate(samplings):
        alone, logprob = drawn(logits_BV[row : row + 1], [sampling], u_B[row : row + 1], device)
        assert alone.item() == mixed[row].item()
        torch.testing.assert_close(logprob[0], logprobs[row])


def test_temperature_zero_takes_the_best_token_and_top_k_one_agrees(device: torch.device) -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 2.9], [5.0, -1.0, 4.0]])
    u_B = torch.tensor([0.999, 0.0], dtype=torch.float64)
    for sampling in (Sampling(max_new_tokens=1, temperature=0), Sampling(max_new_tokens=1, top_k=1)):
        ids, _ = drawn(logits_BV, [sampling] * 2, u_B, device)
        assert ids.tolist() == [1, 0]


def test_the_extreme_numbers_draw_the_first_and_last_tokens_that_have_mass(device: torch.device) -> None:
    logits_BV = torch.tensor([[-math.inf, 0.0, 1.0, -math.inf]] * 2)
    u_B = torch.tensor([0.0, 1.0 - 2.0**-52], dtype=torch.float64)
    ids, logprobs = drawn(logits_BV, [Sampling(max_new_tokens=1)] * 2, u_B, device)
    assert ids.tolist() == [1, 2]
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_show_in_the_logprob_of_their_row_alone(device: torch.device, bad: float) -> None:
    logits_BV = torch.zeros(2, 9)
    logits_BV[0, 4] = bad
    for sampling in (*SAMPLINGS, Sampling(max_new_tokens=1, temperature=0)):
        u_B = torch.tensor([0.5, 0.5], dtype=torch.float64)
        ids, logprobs = drawn(logits_BV, [sampling] * 2, u_B, device)
        assert not math.isfinite(logprobs[0].item())
        assert math.isfinite(logprobs[1].item())
        assert set(ids.tolist()) <= set(range(9))


@settings(max_examples=60, deadline=None)
@example(seed=561, u=0.0, sampling=Sampling(max_new_tokens=1, temperature=0.7, top_p=0.3, top_k=1))
@given(
    seed=st.integers(0, 10**6),
    u=st.floats(0, 1, exclude_max=True),
    sampling=st.builds(
        Sampling,
        max_new_tokens=st.just(1),
        temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
        top_k=st.sampled_from([0, 1, 3, 8]),
        top_p=st.sampled_from([0.3, 0.9, 1.0]),
    ),
)
def test_noise_below_the_gap_never_changes_a_draw(
    device: torch.device, seed: int, u: float, sampling: Sampling
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_V = torch.randn(16, generator=generator)
    gap = decision_gap(logits_V, sampling, u)
    noise = 0.02 * min(gap, 1.0)
    noisy_V = logits_V + noise * (2 * torch.rand(16, generator=generator) - 1)
    u_B = torch.tensor([u, u], dtype=torch.float64)
    ids, _ = drawn(torch.stack((logits_V, noisy_V)), [sampling] * 2, u_B, device)
    if gap > 1e-5:
        assert ids[0] == ids[1]


def test_a_tie_between_the_last_kept_token_and_the_first_left_out_is_a_gap_of_its_own() -> None:
    logits_V = torch.log(torch.tensor([0.4, 0.4 - 1e-6, 0.2]))
    assert decision_gap(logits_V, Sampling(max_new_tokens=1, top_k=1), 0.0) == pytest.approx(1e-6, rel=0.1)
    assert decision_gap(logits_V, Sampling(max_new_tokens=1, top_p=0.1), 0.5) == pytest.approx(1e-6, rel=0.1)


def test_the_gap_is_the_distance_to_the_next_decision() -> None:
    logits_V = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    sampled = Sampling(max_new_tokens=1)
    assert decision_gap(logits_V, Sampling(max_new_tokens=1, temperature=0), 0.1) == pytest.approx(math.log(5 / 3))
    assert decision_gap(logits_V, sampled, 0.49) == pytest.approx(0.01)
    assert decision_gap(logits_V, sampled, 0.51) == pytest.approx(0.01)
    assert decision_gap(logits_V, sampled, 0.999) == pytest.approx(0.199)
    # Keeping one more token would move this draw, and 0.8001 is just above what two tokens have.
    assert decision_gap(logits_V, Sampling(max_new_tokens=1, top_p=0.7999), 0.6) == pytest.approx(1e-4, rel=1e-2)
