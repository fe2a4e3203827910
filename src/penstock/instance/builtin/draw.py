"""From logits to tokens: one uniform number per token, inverse CDF in vocabulary order.

Decides which token a row of logits and a number u in [0, 1) give, and how near that was to another token. Knows
nothing of sequences, seeds or the model.

Why the inverse CDF: batches of different sizes round matrix products differently, so the same sequence's logits
differ by about 1e-6 from one place to another. The CDF is summed in float64 and its edges move no more than the
logits do, so a draw changes only if u lies within about 1e-6 of an edge: a few tokens in a million. The log-probability
is the model's own: temperature 1, nothing truncated.

Truncation follows transformers' and vLLM's order: temperature, then top-k, then top-p on what is left (the smallest set
of most probable tokens whose probability reaches `top_p`: Holtzman et al., 2020, equation 3). Tokens equal to the last
one kept are kept.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.wire import Sampling

_EXCHANGES = 8
"""Tokens looked at on either side of a truncation; those further from it change places less easily."""


@dataclass(frozen=True, slots=True)
class DrawRows:
    """The sampling options of B rows, as columns; made again only when the rows change."""

    greedy_B: torch.Tensor | None
    """None where no row is greedy."""
    inverse_temperature_B1: torch.Tensor | None
    """None where every row has temperature 1 (or is greedy)."""
    top_k_B1: torch.Tensor | None
    """Tokens kept, V where off; None where it is off for all rows."""
    top_p_B1: torch.Tensor | None
    """None where it is off for all rows."""
    all_greedy: bool


def draw_rows(samplings: Sequence[Sampling], vocab_size: int, device: torch.device) -> DrawRows:
    greedy = [sampling.temperature == 0 for sampling in samplings]
    inverse = [1.0 if sampling.temperature == 0 else 1.0 / sampling.temperature for sampling in samplings]
    top_k = [min(sampling.top_k or vocab_size, vocab_size) for sampling in samplings]
    top_p = [sampling.top_p for sampling in samplings]

    def column(values: Sequence[float], needed: bool, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1) if needed else None

    return DrawRows(
        greedy_B=torch.tensor(greedy, device=device) if any(greedy) else None,
        inverse_temperature_B1=column(inverse, any(value != 1.0 for value in inverse), torch.float32),
        top_k_B1=column(top_k, any(value < vocab_size for value in top_k), torch.int64),
        top_p_B1=column(top_p, any(value < 1.0 for value in top_p), torch.float64),
        all_greedy=all(greedy),
    )


def draw(logits_BV: torch.Tensor, rows: DrawRows, u_B: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (int64 [B]) and their log-probabilities (float32 [B]) for float32 logits and float64 u.

    `u_B` may be None where all rows are greedy. A row whose logits are not finite gets a log-probability that is not
    finite and some id within the vocabulary: the caller must look before it uses either. (Single logits of minus
    infinity are fine: such tokens have no probability.)
    """
    top_B1, best_B1 = logits_BV.max(dim=-1, keepdim=True)
    centred_BV = logits_BV - top_B1
    exp_BV = centred_BV.exp()
    total_B1 = exp_BV.sum(dim=-1, keepdim=True)
    if rows.all_greedy or u_B is None:
        chosen_B1 = best_B1
    else:
        chosen_B1 = _inverse_cdf(_kept_mass(centred_BV, exp_BV, rows), u_B.unsqueeze(1))
        if rows.greedy_B is not None:
            chosen_B1 = torch.where(rows.greedy_B.unsqueeze(1), best_B1, chosen_B1)
    logprob_B1 = centred_BV.gather(1, chosen_B1) - total_B1.log()
    return chosen_B1.squeeze(1), logprob_B1.squeeze(1)


def _inverse_cdf(mass_BV: torch.Tensor, u_B1: torch.Tensor) -> torch.Tensor:
    """First token whose cumulative mass exceeds u times the total; it has mass above zero (see `philox.uniforms`)."""
    cdf_BV = mass_BV.cumsum(dim=-1, dtype=torch.float64)
    chosen_B1 = torch.searchsorted(cdf_BV, u_B1 * cdf_BV[:, -1:], right=True)
    return chosen_B1.clamp_(max=mass_BV.shape[1] - 1)


def _kept_mass(centred_BV: torch.Tensor, exp_BV: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Unnormalised probabilities after temperature and truncation; `exp_BV` are those at temperature 1."""
    if rows.inverse_temperature_B1 is not None:
        centred_BV = centred_BV * rows.inverse_temperature_B1
        exp_BV = centred_BV.exp()
    if rows.top_k_B1 is None and rows.top_p_B1 is None:
        return exp_BV
    return torch.where(exp_BV >= _least_kept(exp_BV, rows), exp_BV, 0.0)


def _least_kept(exp_BV: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """[B, 1]: the smallest mass that top-k and then top-p keep."""
    if rows.top_p_B1 is None:
        assert rows.top_k_B1 is not None
        most = int(rows.top_k_B1.max())
        return exp_BV.topk(most, dim=-1).values.gather(1, rows.top_k_B1 - 1)
    sorted_BV = exp_BV.sort(dim=-1, descending=True).values
    if rows.top_k_B1 is not None:
        sorted_BV = torch.where(sorted_BV >= sorted_BV.gather(1, rows.top_k_B1 - 1), sorted_BV, 0.0)
    cdf_BV = sorted_BV.cumsum(dim=-1, dtype=torch.float64)
    before_BV = cdf_BV - sorted_BV
    # A token without mass is never needed to reach top_p; counting it would keep all of them.
    kept_BV = (before_BV < rows.top_p_B1 * cdf_BV[:, -1:]) & (sorted_BV > 0)
    last_B1 = kept_BV.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    return sorted_BV.gather(1, last_B1)


def decision_gap(logits_V: torch.Tensor, sampling: Sampling, u: float) -> float:
    """How near a draw was to giving another token: 0 is a tie.

    Greedy: the two largest logits' difference. Sampled: the distance of u to the nearer edge of the chosen token's
    interval in the CDF. Truncated: also the distance in probability of the truncation itself to keeping one token
    fewer, one more, or another one in place of one that it keeps, as far as that would change the chosen token. Two
    places whose logits differ by float noise may differ in their draw only where this is small.
    """
    logits_V = logits_V.double()
    if sampling.temperature == 0:
        top = logits_V.topk(min(2, logits_V.numel())).values
        return float(top[0] - top[1]) if top.numel() > 1 else math.inf
    probs_V = torch.softmax((logits_V - logits_V.max()) / sampling.temperature, dim=-1)
    order_V = probs_V.argsort(descending=True, stable=True)
    kept, boundary_gap = _kept_count(probs_V[order_V], sampling)
    chosen, gap = _edge_distance(probs_V, order_V[:kept], u)
    for other in (kept - 1, kept + 1):
        if 1 <= other <= probs_V.numel() and _edge_distance(probs_V, order_V[:other], u)[0] != chosen:
            gap = min(gap, boundary_gap[0] if other < kept else boundary_gap[1])
    return min(gap, _exchange_gap(probs_V, order_V, kept, u, chosen))


def _exchange_gap(probs_V: torch.Tensor, order_V: torch.Tensor, kept: int, u: float, chosen: int) -> float:
    """Smallest difference of a kept token to a left-out one whose exchange would change the chosen token."""
    if kept == probs_V.numel():
        return math.inf
    gap = math.inf
    for inside in range(kept - 1, max(-1, kept - 1 - _EXCHANGES), -1):
        for outside in range(kept, min(probs_V.numel(), kept + _EXCHANGES)):
            difference = float(probs_V[order_V[inside]] - probs_V[order_V[outside]])
            if difference >= gap:
                break
            ids = torch.cat((order_V[:inside], order_V[inside + 1 : kept], order_V[outside : outside + 1]))
            if _edge_distance(probs_V, ids, u)[0] != chosen:
                gap = difference
    return gap


def _kept_count(sorted_V: torch.Tensor, sampling: Sampling) -> tuple[int, tuple[float, float]]:
    """Tokens kept of descending probabilities, and how near it was to keeping one fewer and one more."""
    vocab = sorted_V.numel()
    kept = min(sampling.top_k or vocab, vocab)
    fewer = more = math.inf
    if kept < vocab:
        more = float(sorted_V[kept - 1] - sorted_V[kept])
        fewer = float(sorted_V[kept - 2] - sorted_V[kept - 1]) if kept > 1 else math.inf
        while kept < vocab and sorted_V[kept] == sorted_V[kept - 1]:
            kept += 1
    if sampling.top_p < 1.0:
        renormed = sorted_V[:kept] / sorted_V[:kept].sum()
        before = renormed.cumsum(0) - renormed
        within = int((before < sampling.top_p).sum())
        if within < kept:
            more = float(before[within] - sampling.top_p)
        fewer = min(fewer, float(sampling.top_p - before[within - 1]))
        kept = within
    return kept, (abs(fewer), abs(more))


def _edge_distance(probs_V: torch.Tensor, kept_ids: torch.Tensor, u: float) -> tuple[int, float]:
    """The token that u gives among `kept_ids`, and its distance to the nearer edge that has a token beyond it."""
    mass_V = torch.zeros_like(probs_V)
    mass_V[kept_ids] = probs_V[kept_ids]
    cdf_V = mass_V.cumsum(0) / mass_V.sum()
    chosen = min(int(torch.searchsorted(cdf_V, torch.tensor(u, dtype=cdf_V.dtype), right=True)), cdf_V.numel() - 1)
    upper = float(cdf_V[chosen])
    lower = upper - float(mass_V[chosen] / mass_V.sum())
    above = upper - u if bool((mass_V[chosen + 1 :] > 0).any()) else math.inf
    below = u - lower if bool((mass_V[:chosen] > 0).any()) else math.inf
    return chosen, abs(min(above, below))
