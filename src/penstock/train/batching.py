"""Samples into forward and backward passes: decides who goes with whom, and lays the tokens out.

Refuses to know about models and losses. Shape suffixes: `_F`, all F fed tokens of the pass, sample behind sample;
`_BT`, B samples with their output tokens right-padded to T; `_N`, all N learned output tokens in row-major order.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.sample import Sample
from penstock.train.packing import Layout

__all__ = ["PassBatch", "collate", "collate_samples", "idle_pass", "own_tokens", "split_passes"]


@dataclass(frozen=True, slots=True)
class PassBatch:
    """One forward and backward pass.

    The last output token is never fed: nothing is predicted from it. The hidden state at `at_N` predicts the n-th
    learned token.
    """

    input_ids_F: Tensor
    layout: Layout
    output_ids_BT: Tensor
    mask_BT: Tensor
    """bool: True on output tokens that are learned from."""
    at_N: Tensor
    """int64: index into F."""
    advantages_BT: Tensor
    """float32; 0 on padding."""
    rollout_logprobs_BT: Tensor
    old_logprobs_BT: Tensor | None = None
    """Of the weights that the mini-batch is learned from; None: they are computed where they are needed."""
    reference_logprobs_BT: Tensor | None = None
    """Of the reference, where workers of its own have said them."""
    values_BT: Tensor | None = None
    """The critic's, before it learned from the mini-batch."""
    returns_BT: Tensor | None = None
    """What the critic is to learn."""

    @property
    def tokens(self) -> int:
        """Tokens fed."""
        return self.input_ids_F.numel()

    @property
    def output_ids_N(self) -> Tensor:
        return self.output_ids_BT[self.mask_BT]

    def to(self, device: torch.device) -> PassBatch:
        if device.type == "cpu":
            return self
        held = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in held.items() if name != "layout"}
        return PassBatch(layout=self.layout.to(device), **moved)


def split_passes(lengths: Sequence[int], tokens_per_micro_batch: int, ranks: int = 1) -> list[list[int]]:
    """Indices of the samples of each pass: their lengths add up to at most `tokens_per_micro_batch`.

    Samples are sorted by length (ties keep their order), so that those of a pass are alike. One that is longer than
    the budget goes alone. With several `ranks`, each of which takes every `ranks`-th pass, passes are as many for each
    and nearly equal in tokens (longest first to the emptiest, Graham 1969); some may be empty.
    """
    if ranks > 1:
        return _even_passes(lengths, tokens_per_micro_batch, ranks)
    passes: list[list[int]] = []
    room = 0
    for k in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        if not passes or lengths[k] > room:
            passes.append([])
            room = tokens_per_micro_batch
        passes[-1].append(k)
        room -= lengths[k]
    return passes


def _even_passes(lengths: Sequence[int], tokens_per_micro_batch: int, ranks: int) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda k: -lengths[k])
    count = -(-len(split_passes(lengths, tokens_per_micro_batch)) // ranks) * ranks
    while count:
        passes: list[list[int]] = [[] for _ in range(count)]
        emptiest = [(0, k) for k in range(count)]
        for k in order:
            tokens, at = heapq.heappop(emptiest)
            passes[at].append(k)
            heapq.heappush(emptiest, (tokens + lengths[k], at))
        sums = [sum(lengths[k] for k in rows) for rows in passes]
        if all(total <= tokens_per_micro_batch or len(rows) == 1 for total, rows in zip(sums, passes, strict=True)):
            return passes
        count += ranks
    return []


def collate_samples(samples: Sequence[Sample], advantages: Sequence[float] | None = None) -> PassBatch:
    """Lays out finished samples; their columns are copied once, flat. Only the model's own tokens are learned from."""
    return collate(
        [sample.prompt.token_ids for sample in samples],
        [sample.token_ids for sample in samples],
        [sample.logprobs for sample in samples],
        advantages,
        None if all(sample.learned is None for sample in samples) else [own_tokens(sample) for sample in samples],
        _reference(samples),
    )


def own_tokens(sample: Sample) -> Sequence[int]:
    """1 for each output token that is the model's own, else 0."""
    return array("b", b"\1" * len(sample.token_ids)) if sample.learned is None else sample.learned


def idle_pass(sample: Sample) -> PassBatch:
    """One sample of which nothing is learned: for a rank that has no other while the others have one."""
    nothing = [[False] * len(sample.token_ids)]
    return collate(
        [sample.prompt.token_ids], [sample.token_ids], [sample.logprobs], None, nothing, _reference([sample])
    )


def _reference(samples: Sequence[Sample]) -> list[array[float]] | None:
    known = [sample.reference_logprobs for sample in samples if sample.reference_logprobs is not None]
    assert len(known) in (0, len(samples)), "the reference has seen some samples of a pass, and others not"
    return known or None


def collate(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]] | None = None,
    advantages: Sequence[float] | None = None,
    learned: Sequence[Sequence[int]] | None = None,
    reference_logprobs: Sequence[Sequence[float]] | None = None,
) -> PassBatch:
    """Tensors of B prompts and outputs. Every prompt and every output has at least one token.

    `logprobs` (of the engines) and `advantages`, one for each sample and for all its tokens, are zero where they are
    left out. `learned` says which output tokens are the model's own; by default all are. `reference_logprobs` are of
    the reference, where it is asked elsewhere.
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
    there_BT = torch.arange(int(output_B.max())) < output_B.unsqueeze(1)
    mask_BT = there_BT.clone()
    if learned is not None:
        mask_BT[there_BT] = torch.tensor([one for column in learned for one in column], dtype=torch.bool)
    row_N, step_N = mask_BT.nonzero(as_tuple=True)
    advantages_B = torch.tensor(advantages or [0.0] * len(prompts), dtype=torch.float32)
    first_B = torch.cumsum(fed_B, 0) - fed_B + prompt_B - 1
    return PassBatch(
        input_ids_F=torch.frombuffer(fed, dtype=torch.int32).to(torch.int64),
        layout=Layout.of(fed_B.tolist()),
        output_ids_BT=_padded(outputs, there_BT, "i"),
        mask_BT=mask_BT,
        at_N=first_B[row_N] + step_N,
        advantages_BT=torch.where(mask_BT, advantages_B.unsqueeze(1), 0.0),
        rollout_logprobs_BT=_padded(logprobs, there_BT, "f") if logprobs is not None else torch.zeros(mask_BT.shape),
        reference_logprobs_BT=None if reference_logprobs is None else _padded(reference_logprobs, there_BT, "f"),
    )


def _padded(columns: Sequence[Sequence[float]], mask_BT: Tensor, code: Literal["i", "f"]) -> Tensor:
    flat: array[Any] = array(code)
    for column in columns:
        flat.extend(array(code, column))
    read, dtype = (torch.int32, torch.int64) if code == "i" else (torch.float32, torch.float32)
    padded_BT = torch.zeros(mask_BT.shape, dtype=dtype)
    padded_BT[mask_BT] = torch.frombuffer(flat, dtype=read).to(dtype)
    return padded_BT
