"""How many machines the manager wants and what becomes of them: joins the policy with the machines' state machine.

`FleetSize` says how many are worth having, from each step's report and what the instances did in it; `Provision` asks
for them and releases them. The number is thought over bit by bit (`think`), between the frames of the step that has
begun meanwhile. Pure as they are: events and `now` in, orders out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from penstock.observe.events import Event, FleetSized
from penstock.rollout.fleet_size import FleetSize, FleetSizeConfig
from penstock.rollout.other_fleets import Predictor
from penstock.rollout.provision import Provision
from penstock.rollout.provision_types import InstanceView, Machine, MachineState, Orders, ProvisionConfig
from penstock.rollout.provision_use import Use
from penstock.wire import StepReport

__all__ = ["Provisioning"]


class Provisioning:
    """`reserved_engines`: of the trainer's own machine, which generate beside the machines that are asked for."""

    def __init__(
        self,
        config: ProvisionConfig,
        emit: Callable[[Event], None],
        wall_offset_s: float = 0.0,
        reserved_engines: int = 0,
    ) -> None:
        self.config = config
        self.machines = Provision(config, emit, wall_offset_s)
        self.size = FleetSize(
            FleetSizeConfig(
                floor=config.floor,
                ceiling=config.ceiling,
                budget_per_h=config.budget_per_h,
                reserved_price=config.reserved_price_per_h,
                machine_price=config.price_per_h,
                hour_worth=config.hour_worth,
                start_s=config.start_s,
                patience=config.patience,
                first=config.first,
            ),
            reserved_engines,
        )
        self._emit = emit
        self._wall_offset_s = wall_offset_s
        self._use = Use()
        self._busy_at: float | None = None
        """A trainer was there last."""
        self._begun = False
        self._deciding: Generator[None, None, int] | None = None

    @property
    def thinking(self) -> bool:
        """The number is being thought over, and `think` goes on with it."""
        return self._deciding is not None

    @property
    def cause(self) -> str:
        """Of the number that is wanted."""
        return self.size.cause

    def step(self, report: StepReport, predictor: Predictor | None = None, beside: bool = False) -> None:
        """A step is over: it is learned from, and the number is to be thought over. `predictor`: where somebody can say
        how long other steps would take. `beside`: reserved engines generated while the trainer trained."""
        machines = self.machines
        self.size.learn(
            start_s=machines.start_s,
            machine_price=machines.price_per_h,
            unpaid=machines.by_hand,
            per_machine=machines.per_machine,
        )
        self.size.learn_step(self._use.step(report, self.machines.take_losses()), beside)
        if self._deciding is None:
            # Else the thought goes on: with steps shorter than it, a new one each time would never end.
            self._deciding = self.size.deciding(predictor)

    def think(self, now: float) -> None:
        """One bit of it: some milliseconds. Once the number is there, it is followed."""
        if self._deciding is None:
            return
        try:
            next(self._deciding)
        except StopIteration as end:
            self._deciding = None
            self._want(end.value, now)

    def _want(self, wanted: int, now: float) -> None:
        before = self.machines.wanted
        self.machines.want(wanted, now)
        if wanted != before:
            self._sized(before, wanted, self.size.cause, now)

    def tick(self, instances: Sequence[InstanceView], now: float, trainer_connected: bool) -> Orders:
        if not self._begun:
            self._begin(now)
        if trainer_connected or self._busy_at is None:
            self._busy_at = now
        self._use.pass_time(instances, now, self.machines.working)
        return self.machines.tick(instances, now, active=now - self._busy_at < self.config.idle_s)

    # ---- what outlives this manager

    def saved(self, wall_s: float) -> dict[str, Any]:
        """To be kept where the next manager of the run finds it. `wall_s`: now, in seconds since 1970."""
        machines = self.machines
        asked = [machine.asked_at for machine in machines.machines if not machine.id]
        if (failed_at := machines.calls.add_failed_at) is not None:
            # A call that was cut off may bring its machines yet.
            asked.append(failed_at)
        return {
            "spent": machines.purse.spent,
            "wanted": machines.wanted,
            "by_hand": machines.by_hand,
            "per_machine": machines.per_machine,
            "machines": [machine.id for machine in machines.machines if machine.id],
            "at": wall_s,
            # Since when a call may bring machines without an id yet; 0 for none.
            "asking": min((at + self._wall_offset_s for at in asked), default=0.0),
            # Of machines that nothing has shown yet: an account before this one had them last.
            "unbilled": {
                machine.id: machine.unbilled_since + self._wall_offset_s
                for machine in machines.machines
                if machine.unbilled_since is not None
            },
        }

    def restore(self, saved: Mapping[str, Any], now: float) -> None:
        """Raises KeyError, TypeError or ValueError for what is no such account."""
        unbilled = dict(saved.get("unbilled", {}))
        since = {str(name): float(unbilled.get(name, saved["at"])) for name in saved["machines"]}
        billed = {name: min(now, wall_s - self._wall_offset_s) for name, wall_s in since.items()}
        wanted = max(self.config.floor, min(self.config.ceiling, int(saved["wanted"])))
        by_hand, per_machine = int(saved.get("by_hand", 0)), float(saved.get("per_machine", 1.0))
        self.machines.restore(float(saved["spent"]), billed, now, by_hand, per_machine)
        if billed:
            # With no machine the run had ended, or it never wanted any: that is no reason to begin without.
            self.size.wanted = wanted

    def _begin(self, now: float) -> None:
        self._begun = True
        self.machines.want(self.size.wanted, now)
        if self.size.wanted:
            self._sized(0, self.size.wanted, self.size.cause, now)

    def _sized(self, before: int, after: int, cause: str, now: float) -> None:
        self._emit(FleetSized(ts=now + self._wall_offset_s, before=before, after=after, cause=cause))

    # ---- for people

    def report(self, now: float) -> dict[str, Any]:
        """What operators see."""
        machines = self.machines
        return {
            "wanted": machines.wanted,
            "by_hand": machines.by_hand,
            "cause": self.cause,
            "floor": self.config.floor,
            "ceiling": self.config.ceiling,
            "machines": [_row(machine, now) for machine in machines.machines],
            "ended": [_row(machine, now) for machine in machines.ended],
            "counts": dict(machines.counts),
            "spent": round(machines.purse.spent, 4),
            "price_per_h": sum(machine.price_per_h for machine in machines.machines),
            "budget": _finite(self.config.budget),
            "budget_per_h": _finite(self.config.budget_per_h),
            "start_s": round(machines.start_s, 1),
            "preemptions_per_h": round(self.size.preemptions_per_h, 3),
            "trouble": machines.calls.trouble or machines.short,
            "ending": machines.ending,
            "done": machines.done,
        }

    def by_state(self) -> dict[str, int]:
        found = {state.value: 0 for state in MachineState if state not in (MachineState.RELEASED, MachineState.FAILED)}
        for machine in self.machines.machines:
            found[machine.state.value] += 1
        return found


def _row(machine: Machine, now: float) -> dict[str, Any]:
    return {
        "machine": machine.name,
        "state": machine.state.value,
        "cause": machine.cause,
        "since_s": round(now - machine.since, 1),
        "age_s": round(now - machine.asked_at, 1),
        "samples": machine.samples,
        "price_per_h": machine.price_per_h,
        "cost": round(machine.cost, 4),
    }


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
