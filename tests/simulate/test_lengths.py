"""Drawn lengths: by which distribution, shared within a prompt as far as said, cut and growing."""

from __future__ import annotations

import math
import statistics

import pytest
from simulated import small_profile

from penstock.simulate.lengths import step_samples
from penstock.simulate.profiles import Lengths


def drawn(step: int = 0, **lengths: object) -> list[list[int]]:
    """Lengths of the samples of 500 prompts, by prompt."""
    table = {"prompt_tokens": 32, "median_tokens": 1000.0, "spread": 0.5, "max_tokens": 10**6, **lengths}
    profile = small_profile(prompts=500, lengths=Lengths(**table))  # type: ignore[arg-type]
    found = [sample.length for sample in step_samples(profile, step, 1)]
    return [found[k : k + 4] for k in range(0, len(found), 4)]


def logs(groups: list[list[int]]) -> list[float]:
    return [math.log(length) for group in groups for length in group]


def test_lengths_are_log_normal_about_the_median() -> None:
    found = logs(drawn())
    assert statistics.median(found) == pytest.approx(math.log(1000), abs=0.05)
    assert statistics.stdev(found) == pytest.approx(0.5, rel=0.06)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_a_prompt_s_share_of_the_variance_is_between_prompts(share: float) -> None:
    groups = drawn(prompt_share=share)
    within = statistics.fmean(statistics.variance(logs([group])) for group in groups)
    assert within == pytest.approx((1 - share) * 0.25, rel=0.1, abs=1e-5)


def test_quantiles_stand_in_place_of_the_median_and_are_met() -> None:
    found = sorted(length for group in drawn(quantiles=(100.0, 200.0, 1000.0), prompt_share=0.0) for length in group)
    assert (found[0], found[-1]) == (pytest.approx(100, abs=2), pytest.approx(1000, abs=10))
    for share, length in ((0.25, 150), (0.5, 200), (0.75, 600)):
        assert sum(one <= length for one in found) / len(found) == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("quantiles", [(), (500.0, 1000.0, 2000.0)])
def test_lengths_grow_from_step_to_step_and_never_beyond_the_limit(quantiles: tuple[float, ...]) -> None:
    first, later = (statistics.median(logs(drawn(step, growth_per_step=0.02, quantiles=quantiles))) for step in (0, 40))
    assert later - first == pytest.approx(40 * math.log(1.02), abs=0.1)
    most = [max(max(group) for group in drawn(40, quantiles=quantiles, max_tokens=limit)) for limit in (900, 1200)]
    assert most == [900, 1200]
