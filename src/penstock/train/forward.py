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
from penstock.train.packing import Layout, backbone_of, few_ids, hidden_states

__all__ = ["MAX_LOGITS", "Head", "TokenScorer", "TokenScores", "refuse_other_heads", "score_tokens"]

MAX_LOGITS = 2**27
"""Most logits held at once: 512 MiB in float32."""


class Head(NamedTuple):
    """How a model's logits come of its last hidden states."""

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    """Cohere, Granite and Falcon-H1 multiply their logits."""
    softcap: float
    """Gemma 2 bounds them: softcap tanh(logits / softcap); 0 sets no bound."""

    @classmethod
    def of(cls, model: Any) -> Head:
        """Of a Hugging Face causal LM, as its configuration tells of it."""
        linear, config = model.get_output_embeddings(), model.config
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        divisor = getattr(config, "logits_scaling", None) or 1.0
        softcap = getattr(config, "final_logit_softcapping", None) or 0.0
        return cls(linear.weight, getattr(linear, "bias", None), scale / divisor, softcap)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 [N, V]."""
        logits_NV = F.linear(hidden_ND, self.weight_VD, self.bias_V).float()
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        return self.softcap * torch.tanh(logits_NV / self.softcap) if self.softcap else logits_NV


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
    """Runs `model` (its backbone, and its `Head` on the tokens that are learned) over one pass.

    `temperature` (above 0) is the one that the tokens were drawn at: the policy gradient's log-probabilities are those
    of the distribution that acted. verl and TRL divide the logits in the same way.
    """
    hidden_ND = hidden_states(backbone_of(model), batch.input_ids_F, batch.layout)[batch.at_N]
    head = Head.of(model)
    target_N = batch.output_ids_N
    rows = max(1, max_logits // head.weight_VD.shape[0])
    if hidden_ND.shape[0] <= rows:
        pieces = [_score(hidden_ND, head, target_N, temperature, entropy_gradient)]
    else:
        # Each chunk's logits are made again in the backward pass rather than kept.
        pieces = [
            checkpoint(_score, part_ND, head, part_N, temperature, entropy_gradient, use_reentrant=False)
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


@torch.no_grad()
def refuse_other_heads(model: Any) -> None:
    """Raises ValueError for a model whose own logits are not its `Head`'s: it would be trained as another one."""
    ids_T = few_ids(model)
    ids_1T = ids_T.unsqueeze(0)
    own_TV = model(input_ids=ids_1T, use_cache=False).logits[0].float()
    layout = Layout.of([ids_T.numel()]).to(ids_T.device)
    found_TV = Head.of(model).logits(hidden_states(backbone_of(model), ids_T, layout))
    gap = float((own_TV - found_TV).abs().max())
    if not gap <= 1e-3 * max(1.0, float(own_TV.abs().max())):
        raise ValueError(
            f"{type(model).__name__} makes its logits in a way that is not known here (they differ by {gap:.2g} from "
            "its head's product with its last hidden states)"
        )


def _score(
    hidden_ND: Tensor, head: Head, target_N: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability and entropy at `temperature`, and log-probability at 1 (the first itself where they agree)."""
    logits_NV = head.logits(hidden_ND)
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
