"""How much computing a step asks for, and how much of it a device could do: what MFU is made of.

Model FLOPs as in PaLM (arXiv 2204.02311, appendix B): two for each weight and token of a matrix product forward, two
for each gradient that is needed, and attention's two products over whole sequences. What is computed only because of
how it is done (activations made again, padding) is not counted. Refuses to know how long anything took.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import torch

from penstock.train.batching import PassBatch

__all__ = ["ModelSize", "forward_flops", "known_peak", "learning_flops", "measured_peak"]

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A30": 165e12,
    "A40": 150e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Dense bfloat16 FLOP/s by a part of the device's name, from its maker's data sheets; the more special name first."""
_TRIES = 3
_MEASURE_S = 0.05


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model as its matrix products see it. Weights are counted whole, whatever of them a rank holds."""

    body: int
    """Weights that every token meets: neither embedding nor head."""
    head: int
    """Weights that a token with a prediction meets."""
    learned_body: int
    learned_head: int
    layers: int
    attention_width: int
    """Heads times their width."""

    @classmethod
    def of(cls, model: Any, *, has_head: bool = True) -> ModelSize:
        """`model`: a Hugging Face causal LM, or with `has_head=False` its backbone."""
        config = model.config
        embedding = model.get_input_embeddings().weight
        head = model.get_output_embeddings().weight if has_head else None
        outside = {id(embedding), id(head)}
        weights = [tensor for tensor in model.parameters() if tensor.dim() in (2, 3) and id(tensor) not in outside]
        # Of a mixture's experts, whose weights lie behind one another, a token meets a few.
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
        share = (getattr(config, "num_experts_per_tok", None) or experts) / experts
        heads = getattr(config, "num_attention_heads", 0)
        width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)

        def met(tensor: Any) -> int:
            return int(tensor.numel() * share) if tensor.dim() == 3 else int(tensor.numel())

        return cls(
            body=sum(met(tensor) for tensor in weights),
            head=0 if head is None else head.numel(),
            learned_body=sum(met(tensor) for tensor in weights if tensor.requires_grad),
            learned_head=head.numel() if head is not None and head.requires_grad else 0,
            layers=config.num_hidden_layers,
            attention_width=heads * width,
        )


def learning_flops(size: ModelSize, batch: PassBatch) -> float:
    """Of one forward and backward pass."""
    body = (4.0 * size.body + 2.0 * size.learned_body) * batch.tokens
    head = (4.0 * size.head + 2.0 * size.learned_head) * batch.at_N.numel()
    return _of_company(batch, body + head + 12.0 * size.layers * size.attention_width * _squares(batch))


def forward_flops(size: ModelSize, batch: PassBatch) -> float:
    """Of one pass without a gradient."""
    body, head = 2.0 * size.body * batch.tokens, 2.0 * size.head * batch.at_N.numel()
    return _of_company(batch, body + head + 4.0 * size.layers * size.attention_width * _squares(batch))


def _squares(batch: PassBatch) -> float:
    # 1 + 3 + 5 + ...: the sum of a sequence's odd numbers is its length squared.
    return 2.0 * float(batch.layout.position_F.sum()) + batch.tokens


def _of_company(batch: PassBatch, flops: float) -> float:
    """Nothing where nothing is predicted: such a pass a rank makes for company's sake."""
    return flops if batch.at_N.numel() else 0.0


def known_peak(device_name: str, dtype: str) -> float | None:
    """FLOP/s that a device's maker states for bfloat16; None for other types and devices that are not known."""
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)


@functools.cache
def measured_peak(device: torch.device, dtype: str) -> float:
    """FLOP/s of square matrix products on this device, the best of a few tries; takes about a quarter of a second,
    once in a process."""
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    side = 8192 if device.type == "cuda" else 512
    one = torch.ones(side, side, dtype=kind, device=device)
    one @ one
    best = 0.0
    for _ in range(_TRIES):
        done = 0
        _wait_for(device)
        began = now = time.perf_counter()
        while now - began < _MEASURE_S:
            one @ one
            _wait_for(device)
            done += 1
            now = time.perf_counter()
        best = max(best, 2.0 * side**3 * done / (now - began))
    return best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
