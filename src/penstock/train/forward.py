"""One forward pass of a Hugging Face causal LM over output tokens: log-probabilities and entropy.

Decides how little is computed: no padding, and logits for output positions alone, in chunks where the vocabulary is
large. Refuses to know about losses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock.train.batching import PassBatch
from penstock.train.packing import hidden_states

__all__ = ["MAX_LOGITS", "TokenScorer", "TokenScores", "score_tokens"]

MAX_LOGITS = 2**27
"""Most logits held at once: 512 MiB in float32."""


class TokenScorer(torch.nn.Module):
    """A causal LM that is asked for `TokenScores` alone; the unit that ranks cut (`sharding`)."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: PassBatch, temperature: float, entropy_gradient: bool) -> TokenScores:
        return score_tokens(self.lm, batch, temperature=temperature, entropy_gradient=entropy_gradient)


class TokenScores(NamedTuple):
    logprobs_BT: Tensor
    """float32 log-probability of each output token under softmax(logits / temperature); 0 on padding."""
    entropy_BT: Tensor
    """float32 entropy of the same distribution, in nats; 0 on padding."""
    model_logprobs_BT: Tensor
    """float32 log-probability of each output token at temperature 1, as engines report it; no gradient."""


def score_tokens(
    model: Any,
    batch: PassBatch,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    max_logits: int = MAX_LOGITS,
) -> TokenScores:
    """Runs `model` (backbone at `model.base_model`, head at `get_output_embeddings()`) over one pass.

    `temperature` (above 0) is the one that the tokens were drawn at: the policy gradient's log-probabilities are those
    of the distribution that acted. verl and TRL divide the logits in the same way.
    """
    hidden_ND = hidden_states(model.base_model, batch.input_ids_F, batch.layout)[batch.at_N]
    head_VD = model.get_output_embeddings().weight
    target_N = batch.output_ids_N
    rows = max(1, max_logits // head_VD.shape[0])
    if hidden_ND.shape[0] <= rows:
        pieces = [_head(hidden_ND, head_VD, target_N, temperature, entropy_gradient)]
    else:
        # Each chunk's logits are made again in the backward pass rather than kept.
        pieces = [
            checkpoint(_head, part_ND, head_VD, part_N, temperature, entropy_gradient, use_reentrant=False)
            for part_ND, part_N in zip(hidden_ND.split(rows), target_N.split(rows), strict=True)
        ]
    logprob_N, entropy_N, model_logprob_N = (
        columns[0] if len(columns) == 1 else torch.cat(columns) for columns in zip(*pieces, strict=True)
    )
    logprobs_BT = _spread(logprob_N, batch.mask_BT)
    same = model_logprob_N is logprob_N
    return TokenScores(
        logprobs_BT,
        _spread(entropy_N, batch.mask_BT),
        logprobs_BT.detach() if same else _spread(model_logprob_N, batch.mask_BT).detach(),
    )


def _head(
    hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability and entropy at `temperature`, and log-probability at 1 (the first itself where they agree)."""
    logits_NV = F.linear(hidden_ND, head_VD).float()
    target_N1 = target_N.unsqueeze(1)
    model_logprob_N = None
    if temperature != 1.0:
        with torch.no_grad():
            model_logprob_N = logits_NV.gather(1, target_N1).squeeze(1) - logits_NV.logsumexp(dim=-1)
        logits_NV = logits_NV.div_(temperature)
    logprobs_NV = F.log_softmax(logits_NV, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    logprob_N = logprobs_NV.gather(1, target_N1).squeeze(1)
    return logprob_N, entropy_N, logprob_N if model_logprob_N is None else model_logprob_N


def _spread(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(mask_BT, values_N)
