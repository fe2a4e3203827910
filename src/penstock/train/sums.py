"""Metrics as running sums of tensors: gathered while the step streams, turned into numbers once."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Sums"]


class Sums:
    """Weighted sums by name. Adding never waits for the device; `means` does, once."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Adds sum(values x weights) over sum(weights); weights are 1 where they are left out."""
        values = values.detach()
        weights = torch.ones_like(values) if weights is None else weights
        total = (values * weights).sum(dtype=torch.float64)
        weight = weights.sum(dtype=torch.float64)
        if name in self._totals:
            self._totals[name] += total
            self._weights[name] += weight
        else:
            self._totals[name], self._weights[name] = total, weight

    def means(self) -> dict[str, float]:
        """The mean of each name that has any weight, and forgets all."""
        return {name: total / weight for name, (total, weight) in self.totals().items() if weight > 0}

    def totals(self) -> dict[str, tuple[float, float]]:
        """Weighted sum and sum of weights of each name, and forgets all."""
        names = list(self._totals)
        if not names:
            return {}
        both = torch.stack([torch.stack([self._totals[name], self._weights[name]]) for name in names]).tolist()
        self._totals.clear()
        self._weights.clear()
        return {name: (total, weight) for name, (total, weight) in zip(names, both, strict=True)}
