"""Fixtures: a finished sample, and the reward functions of `reward_functions.py` by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from reward_support import build_sample

from penstock.sample import Sample

FUNCTIONS = Path(__file__).parent / "reward_functions.py"


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return build_sample


@pytest.fixture
def function() -> Callable[[str], str]:
    return lambda name: f"{FUNCTIONS}:{name}"
