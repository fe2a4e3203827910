"""Sweeps: one profile with some of its numbers changed, every combination once.

`--grid prices.spot=3,5.32,8 --grid lengths.median_tokens=3000,6500` makes six profiles. `machines=2,4,8` fixes the
number of remote instances and is not part of the profile. Decides nothing but which combinations there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from penstock.errors import ConfigError
from penstock.simulate.lengths import reshaped
from penstock.simulate.profiles import Profile

__all__ = ["MACHINES", "combinations", "with_values"]

MACHINES = "machines"
MEDIAN, SPREAD, LIMIT = "lengths.median_tokens", "lengths.spread", "lengths.max_tokens"
MOST_MACHINES = 100_000


def combinations(words: Sequence[str]) -> list[dict[str, float]]:
    """Every combination of `key=a,b,c` words. Raises ConfigError for a word that is none."""
    axes: list[list[tuple[str, float]]] = []
    for word in words:
        key, equals, values = word.partition("=")
        if any(key == other for axis in axes for other, _ in axis):
            raise ConfigError(f"--grid {word!r}: {key} is swept already; give all of its numbers at once, {key}=a,b,c")
        try:
            axes.append([(key, float(value)) for value in values.split(",")])
        except ValueError:
            equals = ""
        if not equals or not key:
            raise ConfigError(f"--grid {word!r}: write key=number,number,... e.g. prices.spot=3,5.32")
        for _, value in axes[-1] if key == MACHINES else ():
            if not (0 <= value <= MOST_MACHINES) or value != int(value):
                raise ConfigError(f"--grid {word!r}: {value:g} is no number of machines from 0 to {MOST_MACHINES}")
    return [dict(picked) for picked in itertools.product(*axes)]


def with_values(profile: Profile, values: dict[str, float]) -> Profile:
    """A profile with numbers changed by dotted key. Raises ConfigError for a key or a value that it does not take.

    A median or a spread of lengths changes quantiles with it: they would stand in its place.
    """
    table: dict[str, Any] = profile.model_dump()
    for key, value in values.items():
        if key == MACHINES:
            continue
        *sections, name = key.split(".")
        place = table
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None  # type: ignore[assignment]
        if not isinstance(place, dict) or not isinstance(place.get(name), int | float):
            raise ConfigError(f"--grid {key}: a profile has no such number; e.g. prices.spot or lengths.median_tokens")
        if isinstance(place[name], bool):
            place[name] = bool(value) if value in (0, 1) else value
        else:
            place[name] = int(value) if isinstance(place[name], int) and value == int(value) else value
    try:
        changed = Profile.model_validate(table)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"--grid: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    median, spread, most = values.get(MEDIAN), values.get(SPREAD), changed.lengths.max_tokens
    if median is not None and median > most and LIMIT not in values:
        raise ConfigError(
            f"--grid {MEDIAN}: {median:g} is beyond {LIMIT}, {most}, at which answers are cut; sweep that as well"
        )
    if not changed.lengths.quantiles or (median is None and spread is None):
        return changed
    try:
        return changed.model_copy(update={"lengths": reshaped(changed.lengths, median, spread)})
    except ValueError as error:
        raise ConfigError(f"--grid {SPREAD}: {error}") from None
