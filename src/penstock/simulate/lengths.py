"""True lengths of a simulated run's answers, the same for every strategy that is compared on them.

Decides how they are drawn, and what another median or spread makes of lengths that a run had.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

from penstock.simulate.machine import SimSample
from penstock.simulate.profiles import Lengths, Profile

__all__ = ["reshaped", "spread_of", "step_samples"]

SHARES = 1000
"""At which a spread is measured."""
MOST_LOG = 700.0
"""Of a length: what is longer is no number, and is cut at the profile's limit long before."""


def step_samples(profile: Profile, step: int, seed: int) -> list[SimSample]:
    """A step's samples in order, prompt by prompt. Log-normal, or by quantiles; a part is shared by all of a prompt."""
    rng = random.Random(f"{seed}/{step}")
    lengths = profile.lengths
    growth = step * math.log1p(lengths.growth_per_step)
    middle = math.log(lengths.median_tokens)
    of_prompt, of_sample = math.sqrt(lengths.prompt_share), math.sqrt(1 - lengths.prompt_share)
    longest = math.log(lengths.max_tokens)
    samples: list[SimSample] = []
    for prompt in range(profile.prompts):
        shared = rng.gauss(0.0, of_prompt)
        for _ in range(profile.samples_per_prompt):
            deviations = shared + rng.gauss(0.0, of_sample)
            if lengths.quantiles:
                drawn = math.log(_at(lengths.quantiles, _below(deviations)))
            else:
                drawn = middle + lengths.spread * deviations
            length = max(1, round(math.exp(min(drawn + growth, longest))))
            samples.append(SimSample(len(samples), prompt, lengths.prompt_tokens, length))
    return samples


def reshaped(lengths: Lengths, median: float | None = None, spread: float | None = None) -> Lengths:
    """Quantiles scaled to another median, and spread about it in the logarithm; None: as they are.

    Raises ValueError where they can't be spread: all of one length.
    """
    quantiles = lengths.quantiles
    middle = _at(quantiles, 0.5)
    median = middle if median is None else median
    power = 1.0
    if spread is not None:
        own = spread_of(quantiles)
        if spread and own < 1e-9:
            raise ValueError(f"the profile's quantiles are all {middle:g}, and what is all the same can't be spread")
        power = spread / own if spread else 0.0
    logs = (math.log(median) + power * math.log(length / middle) for length in quantiles)
    return lengths.model_copy(
        update={
            "median_tokens": median,
            "spread": spread_of(quantiles) if spread is None else spread,
            "quantiles": tuple(math.exp(max(-MOST_LOG, min(MOST_LOG, log))) for log in logs),
        }
    )


def spread_of(quantiles: Sequence[float]) -> float:
    """Standard deviation of the logarithm of what is drawn by quantiles."""
    return statistics.pstdev(math.log(_at(quantiles, (k + 0.5) / SHARES)) for k in range(SHARES))


def _below(deviations: float) -> float:
    """Share of a normal distribution below so many standard deviations."""
    return 0.5 * math.erfc(-deviations / math.sqrt(2))


def _at(quantiles: Sequence[float], share: float) -> float:
    at = share * (len(quantiles) - 1)
    low = min(int(at), len(quantiles) - 2) if len(quantiles) > 1 else 0
    high = min(low + 1, len(quantiles) - 1)
    return quantiles[low] + (at - low) * (quantiles[high] - quantiles[low])
