"""Robust least squares with every unknown at or above zero, for a handful of unknowns.

Huber's loss by iterated weights (Huber 1964; Holland and Welsch 1977): a row whose residual is beyond what most rows
show counts less the further it is off, so that a few stalls of a run do not bend its fit. A row that alone shows an
unknown has no residual, whatever is wrong with it; what is known of an unknown beforehand (a `Prior`) then counts for
as much as the rows leave open. Decides nothing about what the unknowns mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from penstock.errors import MissingExtra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Prior", "Solution", "robust_fit"]

HUBER = 1.345
"""Residuals in standard deviations up to which a row counts whole: 95 % as good as plain squares on normal noise."""
TO_DEVIATION = 1.4826
"""From the median absolute residual of a normal distribution to its standard deviation."""
ROUNDS = 30
AT_FIRST = 0.1
"""Spread of residuals that is taken until there are some."""
FLOOR = 1e-4
"""Least spread that residuals, as shares, are taken to have: rows that fit exactly must not outweigh all others."""


@dataclass(frozen=True, slots=True)
class Solution:
    """`values`, one for each column. Residuals are |predicted / measured - 1|."""

    values: tuple[float, ...]
    median_residual: float
    worst_residual: float
    rows: int


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of an unknown without the rows: about so much, give or take `spread` (a standard deviation)."""

    value: float
    spread: float


def robust_fit(
    rows: NDArray[np.float64],
    measured: NDArray[np.float64],
    counts: NDArray[np.float64],
    priors: Mapping[int, Prior] | None = None,
) -> Solution:
    """`rows` [N, U] times the unknowns [U] ought to be `measured` [N] (above 0); row n counts as `counts[n]` rows.

    Residuals are relative: rows are divided by what was measured. `priors`: by number of the unknown, with a spread
    above 0. Raises ValueError without rows.
    """
    try:
        import numpy as np
    except ImportError as error:
        raise MissingExtra("numpy", "engine", "fitting a profile") from error
    if not len(rows):
        raise ValueError("nothing to fit")
    priors = priors or {}
    design = rows / measured[:, None]
    said = np.zeros((len(priors), design.shape[1]))
    for row, (unknown, prior) in zip(said, priors.items()):
        row[unknown] = 1 / prior.spread
    every = np.vstack([design, said])
    goal = np.concatenate([np.ones(len(design)), [prior.value / prior.spread for prior in priors.values()]])
    scale = np.sqrt(np.mean(every**2, axis=0))
    known = [k for k in range(design.shape[1]) if scale[k] > 0]
    weights, spread = counts, AT_FIRST
    values = np.zeros(design.shape[1])
    for _ in range(ROUNDS):
        before = values
        values = np.zeros(design.shape[1])
        # A row's own spread belongs to its mean count; a prior's is 1.
        whole = np.concatenate([weights, np.full(len(priors), spread**2 * float(counts.mean()))])
        values[known] = _not_negative(every[:, known] / scale[known], goal, whole / whole.sum()) / scale[known]
        residual = np.abs(design @ values - 1)
        spread = max(FLOOR, TO_DEVIATION * float(np.median(residual)))
        weights = counts / np.maximum(1.0, residual / (HUBER * spread))
        if np.allclose(before, values, rtol=1e-9, atol=0):
            break
    residual = np.abs(design @ values - 1)
    return Solution(tuple(float(v) for v in values), float(np.median(residual)), float(residual.max()), len(rows))


def _not_negative(
    design: NDArray[np.float64], goal: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The best of all choices of positive unknowns; exact, and there are few of them."""
    import numpy as np

    root = np.sqrt(weights)
    target = root * goal
    best, best_loss = np.zeros(design.shape[1]), float(np.sum(target**2))
    for size in range(1, design.shape[1] + 1):
        for chosen in combinations(range(design.shape[1]), size):
            part = root[:, None] * design[:, chosen]
            found, *_ = np.linalg.lstsq(part, target, rcond=1e-9)
            loss = float(np.sum((part @ found - target) ** 2))
            if np.all(found >= 0) and loss < best_loss * (1 - 1e-12):
                best, best_loss = np.zeros(design.shape[1]), loss
                best[list(chosen)] = found
    return best
