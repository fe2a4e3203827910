"""Samples into forward and backward passes: decides who goes with whom, and lays the tokens out.

Refuses to know about models and losses. Shape suffixes: `_BL`, B samples, prompt and output right-padded to L input
tokens; `_BT`, output tokens right-padded to T; `_N`, all N output tokens of the pass in row-major order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.sample import Sample

__all__ = ["PassBatch", "collate", "collate_samples", "split_passes"]


@dataclass(frozen=True, slots=True)
class PassBatch:
    """One forward and backward pass.

    The last output token is never fed: nothing is predicted from it. Hidden state (`row_N`, `column_N`) predicts the
    n-th output token.
    """

    input_ids_BL: Tensor
    output_ids_BT: Tensor
    mask_BT: Tensor
    """bool: True on output tokens."""
    row_N: Tensor
    column_N: Tensor
    advantages_BT: Tensor
    """float32; 0 on padding."""
    rollout_logprobs_BT: Tensor
    old_logprobs_BT: Tensor | None = None
    """Of the weights that the mini-batch is learned from; None: they are computed where they are needed."""
    values_BT: Tensor | None = None
    """The critic's, before it learned from the mini-batch."""
    returns_BT: Tensor | None = None
    """What the critic is to learn."""

    @property
    def padded_tokens(self) -> int:
        return self.input_ids_BL.numel()

    @property
    def output_ids_N(self) -> Tensor:
        return self.output_ids_BT[self.mask_BT]

    def to(self, device: torch.device) -> PassBatch:
        if device.type == "cpu":
            return self
        tensors = {name: tensor for name in self.__slots__ if (tensor := getattr(self, name)) is not None}
        return PassBatch(**{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


def split_passes(lengths: Sequence[int], tokens_per_micro_batch: int) -> list[list[int]]:
    """Indices of the samples of each pass: rows x longest row is at most `tokens_per_micro_batch`.

    Samples are sorted by length (ties keep their order), so that little is padded. One that is longer than the budget
    goes alone.
    """
    order = sorted(range(len(lengths)), key=lambda k: -lengths[k])
    passes: list[list[int]] = []
    at = 0
    while at < len(order):
        rows = max(1, tokens_per_micro_batch // max(1, lengths[order[at]]))
        passes.append(order[at : at + rows])
        at += rows
    return passes


def collate_samples(samples: Sequence[Sample], advantages: Sequence[float] | None = None) -> PassBatch:
    """Lays out finished samples; their columns are copied once, flat."""
    return collate(
        [sample.prompt.token_ids for sample in samples],
        [sample.token_ids for sample in samples],
        [sample.logprobs for sample in samples],
        advantages,
    )


def collate(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]] | None = None,
    advantages: Sequence[float] | None = None,
) -> PassBatch:
    """Right-padded tensors of B prompts and outputs. Every prompt and every output has at least one token.

    `logprobs` (of the engines) and `advantages`, one for each sample and for all its tokens, are zero where they are
    left out.
    """
    if not prompts or not all(prompts) or not all(outputs):
        raise ValueError("a pass needs samples, each with at least one prompt token and one output token")
    prompt_B = torch.tensor([len(ids) for ids in prompts])
    output_B = torch.tensor([len(ids) for ids in outputs])
    fed = array("i")
    for prompt, output in zip(prompts, outputs, strict=True):
        fed.extend(prompt)
        fed.extend(output[:-1])
    fed_B = prompt_B + output_B - 1
    mask_BL = torch.arange(int(fed_B.max())) < fed_B.unsqueeze(1)
    input_ids_BL = torch.zeros(mask_BL.shape, dtype=torch.int64)
    input_ids_BL[mask_BL] = torch.frombuffer(fed, dtype=torch.int32).to(torch.int64)
    mask_BT = torch.arange(int(output_B.max())) < output_B.unsqueeze(1)
    row_N, step_N = mask_BT.nonzero(as_tuple=True)
    advantages_B = torch.tensor(advantages or [0.0] * len(prompts), dtype=torch.float32)
    return PassBatch(
        input_ids_BL=input_ids_BL,
        output_ids_BT=_padded(outputs, mask_BT, "i"),
        mask_BT=mask_BT,
        row_N=row_N,
        column_N=prompt_B[row_N] - 1 + step_N,
        advantages_BT=torch.where(mask_BT, advantages_B.unsqueeze(1), 0.0),
        rollout_logprobs_BT=_padded(logprobs, mask_BT, "f") if logprobs is not None else torch.zeros(mask_BT.shape),
    )


def _padded(columns: Sequence[Sequence[float]], mask_BT: Tensor, code: Literal["i", "f"]) -> Tensor:
    flat: array[Any] = array(code)
    for column in columns:
        flat.extend(array(code, column))
    read, dtype = (torch.int32, torch.int64) if code == "i" else (torch.float32, torch.float32)
    padded_BT = torch.zeros(mask_BT.shape, dtype=dtype)
    padded_BT[mask_BT] = torch.frombuffer(flat, dtype=read).to(dtype)
    return padded_BT
