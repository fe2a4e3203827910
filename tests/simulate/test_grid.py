"""Numbers of a profile that are swept change what is simulated, lengths that a run had among them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest
from simulated import small_profile

from penstock.config.toml import write_toml
from penstock.errors import ConfigError
from penstock.simulate.grid import with_values
from penstock.simulate.lengths import step_samples
from penstock.simulate.profiles import Lengths, Profile, load_profile

FITTED = small_profile(
    prompts=500,
    lengths=Lengths(
        prompt_tokens=10,
        median_tokens=100.0,
        prompt_share=0.0,
        max_tokens=10**6,
        quantiles=(10.0, 40.0, 80.0, 95.0, 100.0, 110.0, 150.0, 300.0, 900.0),
    ),
)
"""As from a run: quantiles, askew."""


def drawn(profile: Profile, **values: float) -> list[int]:
    changed = with_values(profile, {f"lengths.{name}": value for name, value in values.items()})
    return [sample.length for sample in step_samples(changed, 0, 0)]


def test_another_median_scales_the_lengths_that_a_run_had() -> None:
    before, after = drawn(FITTED), drawn(FITTED, median_tokens=5000.0)
    assert after == pytest.approx([50 * length for length in before], rel=0.1)
    assert statistics.median(after) == pytest.approx(5000, rel=0.1)


@pytest.mark.parametrize("spread", [0.2, 1.5])
def test_another_spread_is_about_the_median_that_a_run_had(spread: float) -> None:
    logs = [math.log(length) for length in drawn(FITTED, spread=spread)]
    assert statistics.pstdev(logs) == pytest.approx(spread, rel=0.1)
    assert math.exp(statistics.median(logs)) == pytest.approx(100.0, rel=0.05)


def test_without_spread_all_lengths_are_their_median_whichever_is_said_first() -> None:
    assert set(drawn(FITTED, spread=0.0)) == {100}
    both = {"median_tokens": 70.0, "spread": 0.0}
    assert set(drawn(FITTED, **both)) == set(drawn(FITTED, **dict(reversed(both.items())))) == {70}


def test_lengths_of_one_kind_can_t_be_spread() -> None:
    same = small_profile(lengths=Lengths(median_tokens=9.0, quantiles=(9.0, 9.0, 9.0)))
    with pytest.raises(ConfigError, match=r"^--grid lengths.spread: the profile's quantiles are all 9, and"):
        drawn(same, spread=0.5)
    assert set(drawn(same, spread=0.0)) == {9}


@pytest.mark.parametrize("spread", [0.6, 1e4])
def test_what_is_longer_than_the_limit_is_cut_however_long(spread: float) -> None:
    for profile in (FITTED, small_profile()):
        assert max(drawn(profile, median_tokens=200.0, max_tokens=600, spread=spread)) == 600


def test_a_median_beyond_the_limit_is_refused_unless_the_limit_is_swept_with_it() -> None:
    with pytest.raises(ConfigError, match=r"1e.09 is beyond lengths.max_tokens, 1000000, at which answers are cut"):
        drawn(FITTED, median_tokens=1e9)
    assert max(drawn(FITTED, median_tokens=2000.0, max_tokens=1000)) == 1000


def test_a_median_written_beside_quantiles_that_have_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    table = FITTED.model_dump(mode="json")
    path.write_text(write_toml(table))
    assert load_profile(path) == FITTED
    table["lengths"]["median_tokens"] = 3000.0
    path.write_text(write_toml(table))
    with pytest.raises(ConfigError, match=r"median_tokens is 3000, .* have 100 in the middle.*--grid lengths.median"):
        load_profile(path)
    del table["lengths"]["median_tokens"]
    path.write_text(write_toml(table))
    lengths = [sample.length for sample in step_samples(load_profile(path), 0, 0)]
    assert statistics.median(lengths) == pytest.approx(100, abs=3)
