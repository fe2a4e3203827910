"""Samples behind one another, without padding: how a model sees each of them alone.

Decides where padding is put for attention and nowhere else. Projections, norms, feed-forward layers and the head run
over F real tokens; only attention lays samples side by side, in buckets of like length, right-padded, which a causal
mask can't see. Models whose attention can't be replaced so (sliding windows, attention of their own) get the whole pass
right-padded; the states of the F tokens are the same. Refuses to know about losses.

Shape suffixes: `_F`, all F fed tokens of a pass, sample by sample; `_BL`, B samples right-padded to L fed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Layout", "backbone_of", "few_ids", "hidden_states", "use_packing"]

IMPLEMENTATION = "penstock_packed"
WASTE = 1.3
"""Padded over real tokens that a bucket of attention may come to before another one is begun."""
SMALL = 2048
"""Padded tokens below which no bucket is cut: a call costs more than what it would save."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the fed tokens of B samples lie. `lengths[b]` tokens of sample b come behind those of sample b - 1."""

    row_F: Tensor
    """int64: the token's sample."""
    position_F: Tensor
    """int64: its position within the sample."""
    buckets: tuple[tuple[Tensor, Tensor | None], ...]
    """Of attention: index into F of each padded place [b, L], and bool [b, L] where a token is (None: everywhere)."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Layout:
        lengths_B = torch.tensor(lengths)
        row_F = torch.repeat_interleave(torch.arange(len(lengths)), lengths_B)
        start_B = torch.cumsum(lengths_B, 0) - lengths_B
        position_F = torch.arange(int(lengths_B.sum())) - start_B[row_F]
        buckets = []
        for rows in _buckets(lengths):
            length_b = lengths_B[rows]
            column_L = torch.arange(int(length_b.max()))
            there_bL = column_L < length_b.unsqueeze(1)
            index_bL = torch.where(there_bL, start_B[rows].unsqueeze(1) + column_L, 0)
            buckets.append((index_bL, None if bool(there_bL.all()) else there_bL))
        return cls(row_F, position_F, tuple(buckets))

    def to(self, device: torch.device) -> Layout:
        moved = tuple(
            (index.to(device, non_blocking=True), None if there is None else there.to(device, non_blocking=True))
            for index, there in self.buckets
        )
        row_F, position_F = (tensor.to(device, non_blocking=True) for tensor in (self.row_F, self.position_F))
        return Layout(row_F, position_F, moved)


def _buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Samples of like length together: padded tokens of each bucket at most WASTE times the real ones, or few."""
    buckets: list[list[int]] = []
    real = longest = 0
    for row in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        padded = (len(buckets[-1]) + 1) * longest if buckets else 0
        if not buckets or (padded > SMALL and padded > WASTE * (real + lengths[row])):
            buckets.append([])
            real, longest = 0, lengths[row]
        buckets[-1].append(row)
        real += lengths[row]
    return [sorted(rows) for rows in buckets]


def use_packing(model: Any) -> bool:
    """Has `model` attend by `Layout`, where its kind allows it and two samples stay apart; says whether it does."""
    from transformers import AttentionInterface, AttentionMaskInterface

    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    capped = getattr(config, "attn_logit_softcapping", None)
    plain = kinds == {"full_attention"} and not windowed and not capped
    if not getattr(model, "_supports_attention_backend", False) or not plain:
        return False
    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    own = config._attn_implementation
    expected = _two_samples(model)
    model.set_attn_implementation(IMPLEMENTATION)
    # Some backbones keep what they are given from their layers; their samples would see each other.
    if _close(_two_samples(model), expected):
        return True
    model.set_attn_implementation(own)
    return False


@torch.no_grad()
def _two_samples(model: Any) -> Tensor:
    """Hidden states of two short samples in one pass."""
    ids_F = few_ids(model)
    return hidden_states(backbone_of(model), ids_F, Layout.of([2, 3]).to(ids_F.device))


def few_ids(model: Any) -> Tensor:
    """Five token ids for a trial, where the model computes: its head is there, wherever shards lie."""
    weight_VD = model.get_output_embeddings().weight
    return torch.arange(1, 6, device=weight_VD.device) % int(weight_VD.shape[0])


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-3 * other.abs().max())


def backbone_of(model: Any) -> Any:
    """What of a causal LM makes last hidden states; Llama 4's text model doesn't tell by its own account."""
    base = model.base_model
    return model.model if base is model and hasattr(model, "model") else base


def hidden_states(backbone: Any, input_ids_F: Tensor, layout: Layout) -> Tensor:
    """Last hidden states [F, D] of the fed tokens, each sample by itself."""
    if backbone.config._attn_implementation == IMPLEMENTATION:
        output = backbone(
            input_ids=input_ids_F.unsqueeze(0),
            position_ids=layout.position_F.unsqueeze(0),
            use_cache=False,
            packing=layout,
        )
        packed_FD: Tensor = output.last_hidden_state[0]
        return packed_FD
    samples, longest = int(layout.row_F[-1]) + 1, int(layout.position_F.max()) + 1
    input_ids_BL = input_ids_F.new_zeros(samples, longest)
    input_ids_BL[layout.row_F, layout.position_F] = input_ids_F
    # No mask: right padding can't be seen by what stands left of it.
    padded_BLD: Tensor = backbone(input_ids=input_ids_BL, use_cache=False).last_hidden_state
    return padded_BLD[layout.row_F, layout.position_F]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample: query [1, H, F, D], key and value [1, K, F, D] to [1, F, H, D]."""
    grouped = query.shape[1] != key.shape[1]
    if packing is None:
        # Plain batches, as when somebody else calls the model: right-padded, or of one sample.
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous(), None
    # [F, heads, D], from which rows can be taken.
    query_F, key_F, value_F = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out_F = None
    for index_bL, there_bL in packing.buckets:
        query_bHLD, key_bKLD, value_bKLD = (tensor[index_bL].transpose(1, 2) for tensor in (query_F, key_F, value_F))
        out_bHLD = F.scaled_dot_product_attention(
            query_bHLD, key_bKLD, value_bKLD, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        out_bLHD = out_bHLD.transpose(1, 2)
        taken_F = out_bLHD.flatten(0, 1) if there_bL is None else out_bLHD[there_bL]
        places_F = index_bL.flatten() if there_bL is None else index_bL[there_bL]
        if len(packing.buckets) == 1:
            # One bucket holds all samples in their order, so its tokens are in theirs.
            return taken_F.unsqueeze(0), None
        out_F = torch.zeros_like(query_F) if out_F is None else out_F
        out_F = out_F.index_put((places_F,), taken_F)
    assert out_F is not None
    return out_F.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None
