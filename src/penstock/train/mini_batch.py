"""One mini-batch's gradient: added up pass by pass, divided once, clipped, stepped.

Decides when an optimizer step is refused (nothing to learn from; a non-finite loss or gradient). Refuses to know what
the loss is and whose parameters these are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.train.losses import TokenWeights
from penstock.train.ranks import Ranks
from penstock.train.sharding import local

__all__ = ["MiniBatch", "OptimizerStep"]


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    applied: bool
    grad_norm: float
    """Of the normalised gradient, before clipping; NaN where the mini-batch had nothing to learn from."""
    lr: float
    cause: str = ""
    """Why it was not applied."""
    refused: bool = False
    """Whether that was for a non-finite loss or gradient."""


class MiniBatch:
    """The mini-batch that `parameters`, which `optimizer` steps, are learning from; each rank has a part of it.

    Gradients of shards are added up over ranks as they come (`sharding`); denominators, losses and norms here.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self.denominator: Tensor | None = None
        """Of the passes so far; what their gradient is divided by in the end. None before the first."""
        self._loss: Tensor | None = None
        self._constant = False

    def begin(self) -> None:
        """Forgets what was added up."""
        self._optimizer.zero_grad(set_to_none=True)
        self.denominator = self._loss = None

    def add(self, loss_BT: Tensor, weights: TokenWeights) -> None:
        """Back-propagates the un-normalised sum of a pass's weighted losses."""
        loss = (weights.weights_BT * loss_BT).sum()
        self._constant = weights.constant
        loss.backward()
        # A NaN can vanish in a clamp's backward pass, so the gradient alone doesn't tell.
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        if self.denominator is None or weights.constant:
            self.denominator = weights.denominator
        else:
            self.denominator = self.denominator + weights.denominator

    def step(self, lr: float) -> OptimizerStep:
        """Divides the gradient by the mini-batch's denominator, clips it and steps.

        A mini-batch without any pass changes nothing. A non-finite gradient or loss leaves parameters and optimizer
        as they were.
        """
        denominator, loss = self.denominator, self._loss
        self.denominator = self._loss = None
        if denominator is None or loss is None:
            return OptimizerStep(False, math.nan, lr, "no group of the mini-batch had a signal")
        if self._constant:
            loss = self._ranks.add_up(loss)
        else:
            denominator, loss = self._ranks.add_up(torch.stack([denominator, loss])).unbind()
        gradients = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        if gradients:
            # Those of offloaded shards are in host memory.
            denominator, loss = denominator.to(gradients[0].device), loss.to(gradients[0].device)
        torch._foreach_div_(gradients, denominator)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._ranks.size > 1:
            norm = self._ranks.add_up(norm * norm).sqrt()
        grad_norm, mean = torch.stack([norm, loss / denominator]).tolist()
        if not (math.isfinite(grad_norm) and math.isfinite(mean)):
            self._optimizer.zero_grad(set_to_none=True)
            cause = f"the loss is {mean} and the gradient's norm {grad_norm}"
            return OptimizerStep(False, grad_norm, lr, cause, refused=True)
        torch._foreach_mul_(gradients, (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return OptimizerStep(True, grad_norm, lr)
