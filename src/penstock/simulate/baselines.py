"""What a user would otherwise run, as the paper describes it, and what runs here: strategies for one simulator.

- `colocated`: the reserved machines generate everything, then train on everything; prompts are split among the engines
  once, at the start, as verl does.
- `disaggregated`: they only train, fed by a fixed number of machines on demand, with streaming: as many as are asked
  for (`tune` finds the best number), else as many as there are reserved engines.
- `rlboost`: the paper's Algorithm 1 (window) and Algorithm 2 (delayed dispatch, then moves), N_prem as the number of
  machines. What its code lacks (instance allocation, moves between healthy instances, the case of no instance) is
  supplied as the paper has it.
- `rlboost-no-seeding`: the same, but its reserved machines never generate while there is a remote one.
- `rlboost-forgetful`: the same with one window for all numbers of instances, so without its scheduler's memory.
- `penstock`: the policies of `rollout`; `penstock-...`: with one of them switched off or put in the paper's place.
- `package.module:Class`: the same with a balance policy of the user's own, as `rollout.balance` would name it.

A baseline's constants are its own (`Tuning`); `tuned` finds those that are best for it where it is compared, and `tune`
those that depend on the profile most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import ConfigError
from penstock.rollout.balance import InstanceLoad, Move, PlacedSample, Queue, Report, ShortestQueue, load_policy
from penstock.rollout.balanced import Balanced
from penstock.rollout.fleet_size import FleetSize, FleetSizeConfig
from penstock.rollout.offload import Offload, StepTimes, Window, WindowView
from penstock.rollout.other_fleets import Predictor
from penstock.rollout.step_replay import Plan
from penstock.simulate.profiles import Profile
from penstock.simulate.strategy import FixedSize, SizePolicy, Strategy, WindowPolicy

__all__ = [
    "ABLATIONS",
    "STRATEGIES",
    "Algorithm1",
    "Algorithm2",
    "Bounds",
    "PaperSize",
    "Tuning",
    "make_strategy",
    "tuned",
]

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
    remembers: bool = True
    """A window for each number of instances; else one for all."""
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
            known = fleet if self.remembers else 0
            change = (times.trainer_wait_s - times.remote_wait_s) / self.eta
            self.windows[known] = max(0.0, self._window(known) + change)

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
    cause: str = "nothing is known yet"

    def __post_init__(self) -> None:
        self.wanted = min(self.wanted, self.ceiling)

    def ended(self, times: StepTimes, predictor: Predictor | None = None, beside: bool = False) -> int:
        if times.train_s > 0:
            bound = math.ceil((times.remote_busy_s + times.window_s * self.reserved) / times.train_s)
            self.wanted = min(self.ceiling, max(1, bound))
            self.cause = f"N_prem = {bound} of at most {self.ceiling}"
        return self.wanted


@dataclass(frozen=True, slots=True)
class Tuning:
    """RLBoost's constants: those of its code, where it has them."""

    eta: float = 3.0
    first_s: float = 200.0
    max_pending: int = 16
    knee: float = 0.2


TRIED: dict[str, tuple[Any, ...]] = {
    "eta": (1.5, 6.0),
    "first_s": (100.0, 400.0),
    "max_pending": (4, 64),
    "knee": (0.1, 0.4),
}
"""Beside the constants of its code."""


def tuned(throughput: Callable[[Tuning], float]) -> Tuning:
    """The constants with the highest throughput, one after the other, each next to the best of those before it."""
    best = Tuning()
    reached = throughput(best)
    for name, values in TRIED.items():
        for value in values:
            other = replace(best, **{name: value})
            found = throughput(other)
            if found > reached:
                best, reached = other, found
    return best


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a user bounds the number of instances by, beside a ceiling; of `penstock` and its ablations."""

    floor: int = 0
    budget_per_h: float = math.inf
    hour_worth: float = 0.0


def make_strategy(
    name: str,
    profile: Profile,
    *,
    machines: int | None = None,
    ceiling: int = 32,
    bounds: Bounds | None = None,
    tuning: Tuning | None = None,
) -> Strategy:
    """A fresh strategy; `machines` fixes the number of remote ones, and `ceiling` bounds it where that is chosen.

    `package.module:Class` is Penstock with a balance policy of the user's own. Raises ConfigError for no such name.
    """
    own = ":" in name
    if not own and name not in STRATEGIES:
        raise ConfigError(
            f"there is no strategy {name!r}; there are: {', '.join(STRATEGIES)}, and balance policies of your own, as "
            "package.module:Class"
        )
    fixed = FixedSize(machines) if machines is not None else None
    wish = _Wish(name, fixed, ceiling, bounds or Bounds(), tuning or Tuning())
    made = STRATEGIES["penstock" if own else name](profile, wish)
    if own:
        made.balance = load_policy(name, max_pending=profile.max_pending_per_instance)
    return made


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a strategy is made for."""

    name: str
    fixed: FixedSize | None
    ceiling: int
    bounds: Bounds
    tuning: Tuning


class _AlwaysWide(Balanced):
    """Fills instances as far as they go, whatever a plan says."""

    def follow(self, plan: Plan) -> None:
        pass


def _colocated(profile: Profile, wish: _Wish) -> Strategy:
    return Strategy("colocated", StaticSplit(profile.prompts), Forever(), FixedSize(0), streaming=False)


def _disaggregated(profile: Profile, wish: _Wish) -> Strategy:
    size = wish.fixed or FixedSize(min(profile.reserved_instances, wish.ceiling))
    return Strategy("disaggregated", Balanced(profile.max_pending_per_instance), None, size, spot=False)


def _rlboost(profile: Profile, wish: _Wish) -> Strategy:
    tuning = wish.tuning
    size: SizePolicy = wish.fixed or PaperSize(profile.reserved_instances, wish.ceiling)
    window = Algorithm1(tuning.eta, tuning.first_s, remembers=wish.name != "rlboost-forgetful")
    balance = Algorithm2(tuning.max_pending, knee=tuning.knee)
    return Strategy(wish.name, balance, None if wish.name == "rlboost-no-seeding" else window, size)


def _penstock(profile: Profile, wish: _Wish) -> Strategy:
    config = FleetSizeConfig(
        floor=wish.bounds.floor,
        ceiling=wish.ceiling,
        budget_per_h=wish.bounds.budget_per_h,
        hour_worth=wish.bounds.hour_worth,
        reserved_price=profile.prices.reserved,
        machine_price=profile.prices.spot,
        start_s=profile.spot.boot_s,
    )
    size: SizePolicy = wish.fixed or FleetSize(config, profile.reserved_instances)
    window: WindowPolicy | None = Offload()
    balance = Balanced(profile.max_pending_per_instance)
    match wish.name:
        case "penstock-no-window":
            window = None
        case "penstock-paper-window":
            window = Algorithm1()
        case "penstock-no-width":
            balance = _AlwaysWide(profile.max_pending_per_instance)
        case "penstock-no-moves":
            balance = Balanced(profile.max_pending_per_instance, max_moves=0)
        case "penstock-paper-size":
            size = wish.fixed or PaperSize(profile.reserved_instances, wish.ceiling)
    ahead = wish.name != "penstock-no-look-ahead"
    return Strategy(wish.name, balance, window, size, differences=True, looks_ahead=ahead)


ABLATIONS = (
    "penstock-no-window",
    "penstock-paper-window",
    "penstock-no-width",
    "penstock-no-moves",
    "penstock-no-look-ahead",
    "penstock-paper-size",
)
STRATEGIES: dict[str, Callable[[Profile, _Wish], Strategy]] = {
    "colocated": _colocated,
    "disaggregated": _disaggregated,
    "rlboost": _rlboost,
    "rlboost-no-seeding": _rlboost,
    "rlboost-forgetful": _rlboost,
    "penstock": _penstock,
    **dict.fromkeys(ABLATIONS, _penstock),
}
