"""What one step's groups came to, as metrics. Refuses to know how they were made or trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.sample import Group, Sample, Score

__all__ = ["Tally", "value_of"]

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
        self.lr = 0.0
        self.grad_norms: list[float] = []

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
        return found


def value_of(sample: Sample) -> float:
    """A packed sample's reward; the packer lets only scored ones through."""
    assert isinstance(sample.score, Score), sample.id
    return sample.score.value
