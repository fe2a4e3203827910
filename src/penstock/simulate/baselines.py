"""What a user would otherwise run, as the paper describes it, and what runs here: strategies for one simulator.

- `colocated`: the reserved machines generate everything, then train on everything; prompts are split among the engines
  once, at the start, as verl does.
- `disaggregated`: they only train, fed by a fixed number of machines on demand, with streaming; the number is tuned.
- `rlboost`: the paper's Algorithm 1 (window) and Algorithm 2 (delayed dispatch, then moves), N_prem as the number of
  machines. What its code lacks (instance allocation, moves between healthy instances, the case of no instance) is
  supplied as the paper has it.
- `penstock`: the policies of `rollout`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.errors import ConfigError
from penstock.rollout.balance import InstanceLoad, Move, PlacedSample, Queue, Report, ShortestQueue
from penstock.rollout.balanced import Balanced
from penstock.rollout.fleet_size import FleetSize, FleetSizeConfig
from penstock.rollout.offload import Offload, StepTimes, Window, WindowView
from penstock.simulate.profiles import Profile
from penstock.simulate.strategy import FixedSize, SizePolicy, Strategy

__all__ = ["STRATEGIES", "Algorithm1", "Algorithm2", "PaperSize", "make_strategy"]

UNBOUNDED = 1 << 20


class Forever:
    """The reserved engines generate until everything is there."""

    def review(self, view: WindowView) -> Window:
        return Window(True, "colocated")

    def ended(self, times: StepTimes) -> None:
        pass


class StaticSplit(ShortestQueue):
    """Prompts dealt to engines once, in equal blocks."""

    def __init__(self, prompts: int) -> None:
        super().__init__(UNBOUNDED, affinity=False)
        self.prompts = prompts

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        if not loads:
            return super().assign(queue, loads)
        rows = [queue.prompt_of(position) for position in range(queue.waiting)]
        return [max(0, row) * len(loads) // self.prompts for row in rows]


@dataclass
class Algorithm1:
    """RLBoost's seeding window: `T_seed += (t_train_wait - t_remote_wait) / eta`, remembered per number of instances.

    `eta` 3 and the least change are its code's; `first_s` is where a number of instances that was never seen begins.
    """

    eta: float = 3.0
    first_s: float = 200.0
    windows: dict[int, float] = field(default_factory=dict)
    _fleet: int = 0

    def review(self, view: WindowView) -> Window:
        if view.fleet == 0:
            return Window(True, "no remote instance")
        if view.elapsed_s <= 1e-9:
            self._fleet = view.fleet
        window_s = self._window(self._fleet or view.fleet)
        return Window(view.elapsed_s < window_s, f"T_seed = {window_s:.0f} s for {self._fleet} instances")

    def ended(self, times: StepTimes) -> None:
        fleet = self._fleet or round(times.fleet)
        if fleet:
            change = (times.trainer_wait_s - times.remote_wait_s) / self.eta
            self.windows[fleet] = max(0.0, self._window(fleet) + change)

    def _window(self, fleet: int) -> float:
        if fleet in self.windows or not self.windows:
            return self.windows.get(fleet, self.first_s)
        # A number that was never seen goes on from where the run is, as its code does.
        return self.windows[min(self.windows, key=lambda known: abs(known - fleet))]


@dataclass
class Algorithm2(ShortestQueue):
    """RLBoost's balancer: fewest pending first, at most `max_pending` each; then pending ones, then running ones move.

    Running ones move to an idle instance from the one with most, beyond the batch size at which throughput stops
    growing: where the next sequence added less than `knee` of what the first ones did, learned online.
    """

    affinity: bool = False
    knee: float = 0.2
    _rates: dict[int, float] = field(default_factory=dict)

    def report(self, report: Report) -> None:
        bucket = max(1, round(report.running / 8)) * 8
        rate = report.tokens / report.wall_s
        self._rates[bucket] = 0.7 * self._rates.get(bucket, rate) + 0.3 * rate

    def moves(
        self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        idle = [load for load in loads if load.samples == 0]
        without_pending = [load.instance for load in loads if load.pending == 0 and load.samples < load.max_running]
        found: list[Move] = []
        busiest = max(loads, key=lambda load: load.pending, default=None)
        if busiest is not None and busiest.pending and without_pending:
            rows = [sample for sample in placed(busiest.instance) if not sample.running]
            share = rows[: max(1, len(rows) // (len(without_pending) + 1)) * len(without_pending)]
            return [
                Move(busiest.instance, sample.lease, without_pending[k % len(without_pending)])
                for k, sample in enumerate(share)
            ]
        if waiting or not idle:
            return found
        fullest = max(loads, key=lambda load: load.samples)
        beyond = min(fullest.samples - self._knee_batch(), fullest.samples // 2)
        if beyond > 0:
            found = [Move(fullest.instance, s.lease, idle[0].instance) for s in placed(fullest.instance)[-beyond:]]
        return found

    def _knee_batch(self) -> int:
        known = sorted(self._rates)
        if len(known) < 2:
            return UNBOUNDED
        first = self._rates[known[0]] / known[0]
        for smaller, larger in itertools.pairwise(known):
            if (self._rates[larger] - self._rates[smaller]) / (larger - smaller) < self.knee * first:
                return smaller
        return known[-1]


@dataclass
class PaperSize:
    """`N_prem = (t_remote * n_prem + T_seed * n_resv) / t_train`, the upper bound of the paper's Algorithm 1."""

    reserved: int
    ceiling: int
    wanted: int = 4

    def __post_init__(self) -> None:
        self.wanted = min(self.wanted, self.ceiling)

    def ended(self, times: StepTimes, predict: Callable[[int], float | None] | None = None) -> int:
        if times.train_s > 0:
            bound = math.ceil((times.remote_busy_s + times.window_s * self.reserved) / times.train_s)
            self.wanted = max(1, min(self.ceiling, bound))
        return self.wanted


def make_strategy(
    name: str, profile: Profile, *, machines: int | None = None, ceiling: int = 32, first_s: float = 200.0
) -> Strategy:
    """A fresh strategy; `machines` fixes the number of remote instances. Raises ConfigError for no such name."""
    if name not in STRATEGIES:
        raise ConfigError(f"there is no strategy {name!r}; there are: {', '.join(STRATEGIES)}")
    fixed = FixedSize(machines) if machines is not None else None
    return STRATEGIES[name](profile, fixed, ceiling, first_s)


def _colocated(profile: Profile, fixed: FixedSize | None, ceiling: int, first_s: float) -> Strategy:
    return Strategy("colocated", StaticSplit(profile.prompts), Forever(), FixedSize(0), streaming=False)


def _disaggregated(profile: Profile, fixed: FixedSize | None, ceiling: int, first_s: float) -> Strategy:
    size = fixed or FixedSize(profile.reserved_instances)
    return Strategy("disaggregated", Balanced(8), None, size, spot=False)


def _rlboost(profile: Profile, fixed: FixedSize | None, ceiling: int, first_s: float) -> Strategy:
    size: SizePolicy = fixed or PaperSize(profile.reserved_instances, ceiling)
    return Strategy("rlboost", Algorithm2(16), Algorithm1(first_s=first_s), size)


def _penstock(profile: Profile, fixed: FixedSize | None, ceiling: int, first_s: float) -> Strategy:
    config = FleetSizeConfig(
        floor=0,
        ceiling=ceiling,
        reserved_price=profile.prices.reserved,
        instance_price=profile.prices.spot,
        start_s=profile.spot.boot_s,
    )
    size: SizePolicy = fixed or FleetSize(config, profile.reserved_instances)
    return Strategy("penstock", Balanced(8), Offload(), size)


STRATEGIES: dict[str, Callable[[Profile, FixedSize | None, int, float], Strategy]] = {
    "colocated": _colocated,
    "disaggregated": _disaggregated,
    "rlboost": _rlboost,
    "penstock": _penstock,
}
