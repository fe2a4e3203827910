"""What one step's groups came to, as metrics. Refuses to know how they were made or trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from penstock.sample import Group, Sample, Score

__all__ = ["LEARNING", "STAGES", "Tally", "length_metrics", "speed_metrics", "stage_metrics", "value_of"]

LEARNING = ("look_ahead", "advantages", "forward_backward", "optimizer")
"""Stages in which the trainer's own devices compute."""
STAGES = ("rollout_wait", "scoring_wait", *LEARNING, "publish", "checkpoint", "evaluation")

MAX_PARTS = 64
"""Names of reward parts told of a step; a function that makes up names without end must not fill the records."""


class Tally:
    """Adds up the groups of a step that generates with weight version `version`."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._rewards: list[float] = []
        self._parts: dict[str, list[float]] = {}
        self._parts_left_out = 0
        self._lags = 0
        self._lag_tokens = 0
        self._groups = 0
        self._groups_without_signal = 0
        self.passes = 0
        self.optimizer_steps = 0
        self.train_s = 0.0
        self.ahead_s = 0.0
        """Of that, for samples whose groups were not whole."""
        self.ahead_tokens = 0
        """Of these samples, prompts included."""
        self.lr = 0.0
        self.grad_norms: list[float] = []
        self.critic_grad_norms: list[float] = []

    def take_in(self, groups: Sequence[Group], signal: Sequence[bool]) -> None:
        at = 0
        for group in groups:
            self._groups += 1
            self._groups_without_signal += not signal[at]
            at += len(group.samples)
            for sample in group.samples:
                self._rewards.append(value_of(sample))
                self._take_parts(sample)
                for span in sample.version_spans:
                    self._lags += (self._version - span.version) * (span.end - span.start)
                    self._lag_tokens += span.end - span.start

    def looked(self, samples: Sequence[Sample], wall_s: float) -> None:
        """Passes were made ahead of these samples' groups."""
        self.train_s += wall_s
        self.ahead_s += wall_s
        self.ahead_tokens += sum(len(sample.prompt.token_ids) + len(sample.token_ids) for sample in samples)

    @property
    def ahead_token_s(self) -> float:
        return self.ahead_s / max(1, self.ahead_tokens)

    def _take_parts(self, sample: Sample) -> None:
        assert isinstance(sample.score, Score), sample.id
        for name, value in sample.score.parts.items():
            if name in self._parts or len(self._parts) < MAX_PARTS:
                self._parts.setdefault(name, []).append(value)
            else:
                self._parts_left_out += 1

    def metrics(self) -> dict[str, float]:
        found = {
            "groups": float(self._groups),
            "groups_without_signal": float(self._groups_without_signal),
            "passes": float(self.passes),
            "optimizer_steps": float(self.optimizer_steps),
            "train_s": self.train_s,
            "ahead_s": self.ahead_s,
            "ahead_tokens": float(self.ahead_tokens),
            "lr": self.lr,
            "staleness": self._lags / max(1, self._lag_tokens),
        }
        if self._rewards:
            rewards_B = torch.tensor(self._rewards, dtype=torch.float64)
            found["reward_mean"] = float(rewards_B.mean())
            found["reward_std"] = float(rewards_B.std(correction=0))
            found["train_accuracy"] = float((rewards_B >= 1.0).double().mean())
        for name, values in sorted(self._parts.items()):
            found[f"reward/{name}"] = sum(values) / len(values)
        if self._parts_left_out:
            found["reward_parts_left_out"] = float(self._parts_left_out)
        if self.grad_norms:
            found["grad_norm"] = sum(self.grad_norms) / len(self.grad_norms)
        if self.critic_grad_norms:
            found["critic/grad_norm"] = sum(self.critic_grad_norms) / len(self.critic_grad_norms)
        return found


def value_of(sample: Sample) -> float:
    """A packed sample's reward; the packer lets only scored ones through."""
    assert isinstance(sample.score, Score), sample.id
    return sample.score.value


def stage_metrics(spent_s: Mapping[str, float], step_s: float) -> dict[str, float]:
    """Seconds of each stage, and of what is in none: together they are the step's."""
    found = {f"time/{stage}_s": spent_s.get(stage, 0.0) for stage in STAGES}
    return {**found, "time/other_s": max(0.0, step_s - sum(found.values()))}


def speed_metrics(learned: Mapping[str, float], learning_s: float, peak_flops_per_s: float | None) -> dict[str, float]:
    """Tokens learned from a second, and the share of the devices' peak; nothing where nothing was learned from."""
    flops, tokens = learned["learned/flops"] + learned["looked/flops"], learned["learned/tokens"]
    if not tokens or learning_s <= 0:
        return {}
    found = {"train_tokens_per_s": tokens / learning_s}
    if peak_flops_per_s:
        found["mfu"] = flops / learning_s / peak_flops_per_s
    return found


def length_metrics(lengths: Sequence[int]) -> dict[str, float]:
    """Of a step's answers, in tokens; percentiles are lengths that there were (nearest rank)."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    ranks = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {
        f"response_tokens_{name}": float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])
        for name, share in ranks.items()
    }
