"""The learning rate as a pure function of the optimizer step's position in the run."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["LrSchedule", "lr_at"]

LrSchedule = Literal["constant", "linear", "cosine"]


def lr_at(position: int, *, peak: float, total: int, warmup: int, schedule: LrSchedule) -> float:
    """Learning rate of optimizer step `position` (0-based) of `total`.

    Rises linearly over `warmup` steps, the first of them already above 0, then stays, or falls to 0 just behind the
    last step, linearly or along a half cosine. It depends on the position alone, so a resumed run and a step that was
    skipped change nothing.
    """
    if position < warmup:
        return peak * (position + 1) / (warmup + 1)
    if schedule == "constant":
        return peak
    done = min(1.0, (position - warmup) / max(1, total - warmup))
    if schedule == "linear":
        return peak * (1.0 - done)
    return peak * 0.5 * (1.0 + math.cos(math.pi * done))
