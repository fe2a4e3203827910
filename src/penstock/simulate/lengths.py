"""True lengths of a simulated run's answers, the same for every strategy that is compared on them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from penstock.simulate.machine import SimSample
from penstock.simulate.profiles import Profile

__all__ = ["step_samples"]


def step_samples(profile: Profile, step: int, seed: int) -> list[SimSample]:
    """A step's samples in order, prompt by prompt. Log-normal, or by quantiles; a part is shared by all of a prompt."""
    rng = random.Random(f"{seed}/{step}")
    lengths = profile.lengths
    growth = step * math.log1p(lengths.growth_per_step)
    middle = math.log(lengths.median_tokens)
    of_prompt, of_sample = math.sqrt(lengths.prompt_share), math.sqrt(1 - lengths.prompt_share)
    samples: list[SimSample] = []
    for prompt in range(profile.prompts):
        shared = rng.gauss(0.0, of_prompt)
        for _ in range(profile.samples_per_prompt):
            deviations = shared + rng.gauss(0.0, of_sample)
            if lengths.quantiles:
                drawn = math.log(_at(lengths.quantiles, _below(deviations)))
            else:
                drawn = middle + lengths.spread * deviations
            length = max(1, min(lengths.max_tokens, round(math.exp(drawn + growth))))
            samples.append(SimSample(len(samples), prompt, lengths.prompt_tokens, length))
    return samples


def _below(deviations: float) -> float:
    """Share of a normal distribution below so many standard deviations."""
    return 0.5 * math.erfc(-deviations / math.sqrt(2))


def _at(quantiles: Sequence[float], share: float) -> float:
    at = share * (len(quantiles) - 1)
    low = min(int(at), len(quantiles) - 2) if len(quantiles) > 1 else 0
    high = min(low + 1, len(quantiles) - 1)
    return quantiles[low] + (at - low) * (quantiles[high] - quantiles[low])
