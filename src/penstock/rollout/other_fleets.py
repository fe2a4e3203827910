"""Steps with other numbers of remote machines: which ones those would be, what they cost, and how long a step takes.

Fewer are those that would stay by the order in which machines are released (`releases`), but for what runs on them,
which nobody knows of a step to come; further ones are like those that joined last: those there are may be what was kept
of many. A machine is all the instances on it, and one that joined by hand is one by itself. Decides no number; that is
`fleet_size`'s.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

from penstock.rollout.facts import Facts
from penstock.rollout.plan import search
from penstock.rollout.releases import first_to_go
from penstock.rollout.step_replay import Engine, Plan, rates

__all__ = ["OtherFleets", "Predictor"]


class Predictor(Protocol):
    """Steps with so many remote machines."""

    def seconds(self, machines: int) -> Generator[None, None, float | None]:
        """Of a step, worked out bit by bit, some milliseconds each; None where nobody can say."""
        ...

    def prices(self, machines: int) -> Sequence[float | None]:
        """Dollars an hour of each of them; None where its price is not known. With more machines further ones follow,
        and nobody else's changes."""
        ...


@dataclass(frozen=True, slots=True)
class _Kept:
    """A machine that may be given up."""

    engines: Sequence[Engine]
    number: int
    rate: float
    samples: int = 0

    @property
    def known_price(self) -> float | None:
        return self.engines[0].price_per_h


@dataclass(frozen=True, slots=True)
class OtherFleets:
    """By replays of a step. `there`: who is there now, in the order in which they stay."""

    facts: Facts
    plans: Mapping[int, Plan]
    """By number of instances: where a search begins."""
    there: Sequence[Sequence[Engine]]
    """Of each machine, its instances."""
    further: Sequence[Sequence[Engine]]
    """One after the other, and from the first one again."""

    @classmethod
    def of(cls, facts: Facts, plans: Mapping[int, Plan]) -> OtherFleets:
        remote = facts.remote
        known = rates(remote, len(facts.reserved), facts.prompt_tokens, facts.groups)
        rated = []
        for number, machine in enumerate(_by_machine(zip(remote, known))):
            engines = _whole([engine for engine, _ in machine])
            told = [rate for engine, rate in machine if engine.known] or [rate for _, rate in machine]
            rated.append(_Kept(engines, number, len(engines) * fmean(told)))
        there = [kept.engines for kept in reversed(first_to_go(rated))]
        # One that costs nothing is nobody's to ask for.
        asked_for = [engine for engine in facts.joined if engine.price_per_h != 0] or facts.joined
        further = [_whole([engine]) for engine in asked_for] or there or [facts.reserved[:1]]
        further = [[replace(one, price_per_h=one.price_per_h or None) for one in machine] for machine in further]
        return cls(facts, plans, there, further)

    def machines(self, number: int) -> list[Sequence[Engine]]:
        """Of each of so many, its instances."""
        more = [self.further[k % len(self.further)] for k in range(number - len(self.there))]
        return [*self.there[:number], *more]

    def prices(self, machines: int) -> list[float | None]:
        return [machine[0].price_per_h for machine in self.machines(machines)]

    def seconds(self, machines: int) -> Generator[None, None, float | None]:
        facts, remote = self.facts, [engine for machine in self.machines(machines) for engine in machine]
        if not (remote or facts.reserved):
            return None
        step_s: float | None = None
        groups, tokens, training, near = facts.groups, facts.prompt_tokens, facts.training, self.plans.get(len(remote))
        for best in search(groups, tokens, remote, facts.reserved, training, near, facts.earlier):
            step_s = best.step_s if best is not None else None
            yield
        return step_s


def _whole(engines: Sequence[Engine]) -> list[Engine]:
    """With those of its machine that are away, or about to join, as the ones that are there."""
    known = [engine for engine in engines if engine.known] or engines
    away = engines[0].of_machine - len(engines)
    return [*engines, *(known[k % len(known)] for k in range(away))]


def _by_machine(rated: Iterable[tuple[Engine, float]]) -> list[list[tuple[Engine, float]]]:
    """Each machine's instances and their rates, in order of the first ones."""
    found: dict[str | int, list[tuple[Engine, float]]] = {}
    for k, (engine, rate) in enumerate(rated):
        found.setdefault(engine.machine or k, []).append((engine, rate))
    return list(found.values())
