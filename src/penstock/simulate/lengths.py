"""True lengths of a simulated run's answers, the same for every strategy that is compared on them."""

from __future__ import annotations

import math
import random

from penstock.simulate.machine import SimSample
from penstock.simulate.profiles import Profile

__all__ = ["step_samples"]


def step_samples(profile: Profile, step: int, seed: int) -> list[SimSample]:
    """A step's samples in order, prompt by prompt. Log-normal, with a part that all samples of a prompt share."""
    rng = random.Random(f"{seed}/{step}")
    lengths = profile.lengths
    middle = math.log(lengths.median_tokens) + step * math.log1p(lengths.growth_per_step)
    of_prompt = lengths.spread * math.sqrt(lengths.prompt_share)
    of_sample = lengths.spread * math.sqrt(1 - lengths.prompt_share)
    samples: list[SimSample] = []
    for prompt in range(profile.prompts):
        shared = rng.gauss(0.0, of_prompt)
        for _ in range(profile.samples_per_prompt):
            drawn = math.exp(middle + shared + rng.gauss(0.0, of_sample))
            length = max(1, min(lengths.max_tokens, round(drawn)))
            samples.append(SimSample(len(samples), prompt, lengths.prompt_tokens, length))
    return samples
