"""The sequences that an engine generates, what can't be one, and the device columns of those that run.

Legend: B sequences.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import torch

from penstock.instance.builtin.draw import DrawRows, draw_rows
from penstock.instance.builtin.philox import uniforms
from penstock.instance.builtin.spec import ModelSpec
from penstock.instance.engine import SequenceStart
from penstock.sample import Finish
from penstock.wire import Sampling

__all__ = ["Rows", "RunningSequence", "begun"]

_UNIFORMS_AHEAD = 128
"""Random numbers computed at once for a sequence: one call costs about as much for 1 as for 128."""


@dataclass(slots=True)
class RunningSequence:
    lease: int
    seed: int
    sampling: Sampling
    prompt_ids: list[int]
    output_ids: list[int]
    """The prefix and all tokens drawn."""
    stop_ids: frozenset[int]
    length_limit: int
    """Output tokens at which it ends as Finish.LENGTH."""
    taken: int
    """Output tokens that a delta has carried, or that came as the prefix."""
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """Of the output tokens from `taken` on."""
    uniforms: list[float] = field(default_factory=list)
    uniforms_start: int = 0
    finish: Finish = Finish.RUNNING
    cause: str = ""
    renews: bool = False
    """It was running when the weights changed, and waits for its turn to be prefilled again."""

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def next_uniform(self) -> float:
        """The random number of the next output token."""
        position = len(self.output_ids)
        offset = position - self.uniforms_start
        if not 0 <= offset < len(self.uniforms):
            self.uniforms = uniforms(self.seed, position, _UNIFORMS_AHEAD)
            self.uniforms_start, offset = position, 0
        return self.uniforms[offset]


def begun(start: SequenceStart, spec: ModelSpec | None, max_context_tokens: int) -> RunningSequence:
    """The sequence as it begins; one that can't be generated, or is at its end, has ended already."""
    sampling, prompt, prefix = start.sampling, list(start.prompt_ids), list(start.prefix_ids)
    sequence = RunningSequence(
        lease=start.lease,
        seed=start.seed,
        sampling=sampling,
        prompt_ids=prompt,
        output_ids=prefix,
        stop_ids=frozenset(sampling.stop_ids),
        length_limit=min(sampling.max_new_tokens, max_context_tokens - len(prompt)),
        taken=len(prefix),
    )
    cause = _refusal(prompt, prefix, spec, max_context_tokens)
    if cause:
        sequence.finish, sequence.cause = Finish.FAILED, cause
    elif prefix and prefix[-1] in sequence.stop_ids:
        sequence.finish = Finish.STOP
    elif len(prefix) >= sequence.length_limit:
        sequence.finish = Finish.LENGTH
    return sequence


def _refusal(prompt: list[int], prefix: list[int], spec: ModelSpec | None, max_context_tokens: int) -> str:
    """Why a sequence can't be generated; empty if it can."""
    if spec is None:
        return "the engine has no weights yet"
    if not prompt:
        return "the prompt is empty"
    vocab = spec.vocab_size
    for what, ids in (("prompt", prompt), ("prefix", prefix)):
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            worst = min(ids) if min(ids) < 0 else max(ids)
            return f"the {what} holds token id {worst}; the model's vocabulary has ids 0 to {vocab - 1}"
    room = max_context_tokens - len(prompt)
    if room < 1:
        return f"the prompt of {len(prompt)} tokens leaves no room in the context of {max_context_tokens} tokens"
    if len(prefix) > room:
        return (
            f"the prompt of {len(prompt)} tokens and its prefix of {len(prefix)} are over the context of "
            f"{max_context_tokens} tokens"
        )
    return ""


@dataclass(slots=True)
class Rows:
    """Device columns of the running sequences, advanced in place until the set of them changes."""

    ids_B: torch.Tensor
    """Each sequence's last token: drawn, and not yet in the cache."""
    positions_B: torch.Tensor
    """Where that token goes in the cache."""
    longest: int
    """Positions that the longest sequence attends to."""
    drawing: DrawRows

    @staticmethod
    def of(sequences: list[RunningSequence], vocab_size: int, device: torch.device) -> Rows:
        tokens = [sequence.tokens for sequence in sequences]
        last = [sequence.output_ids[-1] for sequence in sequences]
        return Rows(
            ids_B=torch.tensor(last, device=device),
            positions_B=torch.tensor(tokens, device=device) - 1,
            longest=max(tokens),
            drawing=draw_rows([sequence.sampling for sequence in sequences], vocab_size, device),
        )

    def advance(self, ids_B: torch.Tensor) -> None:
        self.ids_B = ids_B
        self.positions_B += 1
        self.longest += 1
