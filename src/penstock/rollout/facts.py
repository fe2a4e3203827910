"""What a plan of a step is made from, and how a step is cut down to what may be replayed.

Decides nothing about plans: what stands here was measured, or learned.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.rollout.curves import Speed
from penstock.rollout.step_replay import Engine, Training

__all__ = ["Facts", "as_long_as", "thinned"]

CHANCE = 3.0
"""Standard errors by which answers of two steps differ by chance; what differs by more has grown, or shrunk."""
MOST_REPLAYED = 1024
"""Samples in one replay: a plan takes some hundreds, each some microseconds a sample, and while one of them runs
the manager does nothing else."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a plan is made from; all of it measured or learned."""

    groups: Sequence[Sequence[int]]
    """Lengths of the last step's answers, by prompt."""
    prompt_tokens: float
    """Mean."""
    remote: Sequence[Engine]
    reserved: Sequence[Engine]
    training: Training
    earlier: Sequence[Sequence[int]] = ()
    """Prompts of the steps before, like those of `groups`; the policy's own."""
    joined: Sequence[Engine] = ()
    """Of each of the remote machines that joined last an instance, the newest first, be it there still or not."""


def as_long_as(step: Sequence[Sequence[int]], last: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """An earlier step's lengths, by prompt. Where the last one's mean differs by more than chance they are multiplied
    to have it: what such answers are like is still known, how long they are is not."""
    before, now = ([statistics.fmean(row) for row in rows] for rows in (step, last))
    mean, wanted = statistics.fmean(before), statistics.fmean(now)
    error = math.hypot(*(statistics.stdev(means) / math.sqrt(len(means)) for means in (before, now) if len(means) > 1))
    if not mean or abs(wanted - mean) <= CHANCE * error:
        return step
    return [[round(length * wanted / mean) for length in row] for row in step]


def thinned(facts: Facts, most: int = MOST_REPLAYED) -> Facts:
    """A step of at most so many samples that takes as long as the given one, up to chance.

    Of every `f` prompts one is kept, on machines with 1/f of the places whose every token costs f times as much.
    """
    groups = facts.groups
    samples = sum(len(row) for row in groups)
    f = -(-samples // most)
    if f <= 1:
        return facts

    def scaled(engine: Engine) -> Engine:
        speed = engine.speed
        slower = Speed(speed.base_s, f * speed.sequence_s, f * speed.context_s, f * speed.prefill_s)
        places = max(1, round(engine.places / f))
        return replace(engine, speed=slower, places=places, memory=engine.memory / f)

    training = facts.training
    fewer = max(1, round(training.micro_batch_samples / f))
    return Facts(
        groups[::f],
        facts.prompt_tokens,
        [scaled(engine) for engine in facts.remote],
        [scaled(engine) for engine in facts.reserved],
        training=replace(
            training,
            token_s=f * training.token_s,
            micro_batch_samples=fewer,
            ahead_token_s=f * training.ahead_token_s,
            ahead_samples=max(1, round(training.ahead_samples / f)),
        ),
        joined=[scaled(engine) for engine in facts.joined],
    )
