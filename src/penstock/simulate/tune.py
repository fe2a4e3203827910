"""Baselines at their best: what a user would have tried out before comparing.

Decides which few values are tried and what is best: for `disaggregated` the number of machines on demand, by tokens per
dollar; for RLBoost the window that it begins with, by throughput on the very trace. Its code's 200 s fit one model and
length, so they are tried beside shares of the time for which this profile's colocated step generates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.simulate import world
from penstock.simulate.baselines import Tuning, make_strategy
from penstock.simulate.outcome import Outcome
from penstock.simulate.profiles import Profile
from penstock.simulate.stillness import StuckError
from penstock.simulate.strategy import Strategy
from penstock.simulate.traces import Trace, static_trace

__all__ = ["Tuned", "best_number", "tune"]

SEARCH_STEPS = 2
"""Simulated for each number of machines on demand: their steps are alike."""
WINDOW_STEPS = 10
"""Simulated at most for each first window: later ones have learned theirs."""
WINDOW_SHARES = (0.0, 0.1, 0.25, 0.5)
"""First windows that are tried, as shares of a colocated step's generation."""
NEAR = 0.04
"""Where nothing has a price, the fewest machines count that are so close to the fastest, as a share."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a strategy is to be made with."""

    machines: int | None
    """A fixed number; None: it chooses."""
    tuning: Tuning
    words: str = ""
    """What was taken, for people; empty where nothing was tried."""


def tune(
    name: str,
    profile: Profile,
    trace: Trace,
    *,
    machines: int | None = None,
    ceiling: int = 32,
    seed: int = 0,
    steps: int | None = None,
    duration_s: float | None = None,
) -> Tuned:
    """The best constants of a baseline for a run, others as they are. `machines` fixes the number of remote ones."""
    if name == "disaggregated" and machines is None:
        number = best_number(lambda count: _worth(profile, count, seed), ceiling)
        return Tuned(number, Tuning(), f"{number} on demand")
    if name in ("rlboost", "rlboost-forgetful") and profile.reserved_instances:
        # Else nobody generates in a window, whichever it is.
        most = min(steps or WINDOW_STEPS, WINDOW_STEPS)

        def reached(tuning: Tuning) -> float:
            strategy = make_strategy(name, profile, machines=machines, ceiling=ceiling, tuning=tuning)
            return _tried(profile, trace, strategy, steps=most, duration_s=duration_s, seed=seed).tokens_per_s

        tuning = _best_window(profile, reached, seed)
        return Tuned(machines, tuning, f"first window {tuning.first_s:.3g} s")
    return Tuned(machines, Tuning())


def best_number(worth: Callable[[int], tuple[float, float]], most: int) -> int:
    """Machines with the most tokens per dollar: doubled while that grows, then one half-way to either side of the best.

    `worth(count)`: tokens a second, and per dollar (0 where nothing costs anything).
    """
    tried: dict[int, tuple[float, float]] = {}

    def best() -> int:
        dollars = {count: value for count, (_, value) in tried.items()}
        if any(dollars.values()):
            return max(dollars, key=lambda count: (dollars[count], -count))
        fastest = max(speed for speed, _ in tried.values())
        return min(count for count, (speed, _) in tried.items() if speed >= fastest * (1 - NEAR))

    count = min(1, most)
    tried[count] = worth(count)
    while count < most and best() == count:
        count = min(2 * count, most)
        tried[count] = worth(count)
    known, at = sorted(tried), best()
    place = known.index(at)
    for other in {(at + known[max(0, place - 1)]) // 2, (at + known[min(len(known) - 1, place + 1)]) // 2} - set(known):
        tried[other] = worth(other)
    return best()


def _worth(profile: Profile, count: int, seed: int) -> tuple[float, float]:
    strategy = make_strategy("disaggregated", profile, machines=count)
    outcome = _tried(profile, static_trace(0, float("inf")), strategy, steps=SEARCH_STEPS, seed=seed)
    return outcome.tokens_per_s, outcome.tokens_per_dollar


def _best_window(profile: Profile, reached: Callable[[Tuning], float], seed: int) -> Tuning:
    colocated = _tried(profile, static_trace(0, float("inf")), make_strategy("colocated", profile), steps=1, seed=seed)
    generating_s = colocated.steps[0].times.window_s if colocated.steps else 0.0
    # Of equal ones the first: its code's own.
    tried = [Tuning(), *(replace(Tuning(), first_s=share * generating_s) for share in WINDOW_SHARES)]
    return max(tried, key=reached)


def _tried(profile: Profile, trace: Trace, strategy: Strategy, **limits: Any) -> Outcome:
    """As far as it comes."""
    try:
        return world.simulate(profile, trace, strategy, **limits)
    except StuckError as error:
        return error.outcome
