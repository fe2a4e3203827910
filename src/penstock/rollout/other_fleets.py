"""Steps with other numbers of remote instances: which ones those would be, what they cost, and how long a step takes.

Fewer are those that would stay by the order in which machines are released (`releases`), but for what runs on them,
which nobody knows of a step to come; further ones are like those that joined last: those there are may be what was kept
of many. Decides no number; that is `fleet_size`'s.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.rollout.facts import Facts
from penstock.rollout.plan import search
from penstock.rollout.releases import first_to_go
from penstock.rollout.step_replay import Engine, Plan, rates

__all__ = ["OtherFleets", "Predictor"]


class Predictor(Protocol):
    """Steps with so many remote instances."""

    def seconds(self, instances: int) -> Generator[None, None, float | None]:
        """Of a step, worked out bit by bit, some milliseconds each; None where nobody can say."""
        ...

    def prices(self, instances: int) -> Sequence[float | None]:
        """Dollars an hour of each of the instances; None where its price is not known. With more instances further
        ones follow, and nobody else's changes."""
        ...


@dataclass(frozen=True, slots=True)
class _Kept:
    """An instance that may be given up."""

    engine: Engine
    number: int
    rate: float
    samples: int = 0

    @property
    def known_price(self) -> float | None:
        return self.engine.price_per_h


@dataclass(frozen=True, slots=True)
class OtherFleets:
    """By replays of a step. `there`: who is there now, in the order in which they stay."""

    facts: Facts
    plans: Mapping[int, Plan]
    """By number: where a search begins."""
    there: Sequence[Engine]
    further: Sequence[Engine]
    """One after the other, and from the first one again."""

    @classmethod
    def of(cls, facts: Facts, plans: Mapping[int, Plan]) -> OtherFleets:
        remote = facts.remote
        known = rates(remote, len(facts.reserved), facts.prompt_tokens, facts.groups)
        rated = [_Kept(engine, k, rate) for k, (engine, rate) in enumerate(zip(remote, known))]
        there = [kept.engine for kept in reversed(first_to_go(rated))]
        # An instance that costs nothing is nobody's to ask for.
        joined = [engine for engine in facts.joined if engine.price_per_h != 0] or facts.joined
        further = joined or there or facts.reserved[:1]
        return cls(facts, plans, there, [replace(engine, price_per_h=engine.price_per_h or None) for engine in further])

    def engines(self, instances: int) -> list[Engine]:
        more = [self.further[k % len(self.further)] for k in range(instances - len(self.there))]
        return [*self.there[:instances], *more]

    def prices(self, instances: int) -> list[float | None]:
        return [engine.price_per_h for engine in self.engines(instances)]

    def seconds(self, instances: int) -> Generator[None, None, float | None]:
        facts, remote = self.facts, self.engines(instances)
        if not (remote or facts.reserved):
            return None
        step_s: float | None = None
        groups, tokens, training, near = facts.groups, facts.prompt_tokens, facts.training, self.plans.get(instances)
        for best in search(groups, tokens, remote, facts.reserved, training, near, facts.earlier):
            step_s = best.step_s if best is not None else None
            yield
        return step_s
