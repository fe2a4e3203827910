"""A provider of machines on a virtual clock, with a mind of its own, and the provisioning that asks it."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.observe.events import Event, MachineChanged, ProvisionerFailed
from penstock.rollout.provision import Provision
from penstock.rollout.provision_types import (
    Add,
    Call,
    InstanceView,
    Machine,
    MachineState,
    ProvisionConfig,
    Release,
    Seen,
)

TICK_S = 1.0
CONFIG = ProvisionConfig(
    ceiling=4,
    price_per_h=36.0,
    start_s=20.0,
    cool_down_s=30.0,
    join_deadline_s=60.0,
    drain_s=10.0,
    leave_s=5.0,
    rejoin_s=15.0,
    call_s=10.0,
    list_s=10.0,
    retry_most_s=40.0,
)
"""A machine costs a cent a second."""


@dataclass
class Box:
    """A machine as its provider has it."""

    id: str
    born_at: float
    boots_s: float
    alive: bool = True
    connected: bool = False
    samples: int = 0
    rate: float | None = 1.0
    told: bool = False
    left: set[str] = field(default_factory=set)
    """Peers of its agents that were told to leave."""


@dataclass
class World:
    """Answers calls after `answer_s`. What fails, and what machines do, is up to the test."""

    config: ProvisionConfig = CONFIG
    boots_s: float = 20.0
    answer_s: float = 1.0
    making_s: float = 0.0
    """Machines are there, and listed, so long before the call that makes them comes back."""
    grace_s: float = 0.0
    """What is released runs on for so long, is not listed meanwhile, and only then the call comes back."""
    works: bool = True
    """Instances have samples."""
    failing: set[str] = field(default_factory=set)
    """Kinds of calls that fail: add, release, list; `lost_add` starts machines and says nothing of them."""
    given: int = 99
    """Most machines that it gives at once."""
    never_join: bool = False
    price: float | None = None
    """Of every machine, as lists tell it."""
    under_other_names: bool = False
    """What runs on machines joins by names that nobody can know."""
    agents: int = 1
    """On each machine, known by its host but for the first."""
    deaf: bool = False
    """Agents that are told to leave stay, or come again."""
    by_hand: int = 0
    """Instances on no machine."""
    now: float = 0.0

    def __post_init__(self) -> None:
        self.events: list[Event] = []
        self.boxes: dict[str, Box] = {}
        self.asked_in_all = 0
        self.killed_at_work = 0
        self._pending: list[tuple[float, Call]] = []
        self._made: dict[int, list[str]] = {}
        """By the calls under way that make them."""
        self._ending: set[str] = set()
        self.machines = Provision(self.config, self.events.append, 1000.0)

    # ---- what tests do

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += TICK_S
            self.step()

    def step(self) -> None:
        for at, call in [entry for entry in self._pending if entry[0] <= self.now]:
            self._pending.remove((at, call))
            self._answer(call)
        for box in self.boxes.values():
            if box.alive and not self.never_join and not box.told and self.now >= box.born_at + box.boots_s:
                box.connected = True
        orders = self.machines.tick(self.views(), self.now)
        for peer, _ in orders.leave:
            box = self.boxes[peer.partition("+")[0]]
            box.left.add(peer)
            if len(box.left) == self.agents:
                box.told, box.connected, box.samples = True, self.deaf, 0
        cordoned = self.machines.cordoned
        for box in self.boxes.values():
            if box.connected and self.works and box.id not in cordoned and not box.told:
                box.samples = 5
            elif not self.works:
                box.samples = 0
        for call in orders.calls:
            if isinstance(call, Add) and self.making_s:
                self._made[call.call] = [self._make() for _ in range(call.count)]
            if isinstance(call, Release) and self.grace_s:
                self._ending.add(call.machine)
            longer_s = {Add: self.making_s, Release: self.grace_s}.get(type(call), 0.0)
            self._pending.append((self.now + self.answer_s + longer_s, call))

    def views(self) -> list[InstanceView]:
        hand = [InstanceView(f"hand-{k}", f"hand-{k}", "desk", False, True, False, 5) for k in range(self.by_hand)]
        if self.under_other_names:
            booted = [box for box in self.boxes.values() if box.connected]
            return hand + [
                InstanceView(f"p{k}-{b.id}", f"gpu{k}" if k else f"ip-{b.id}", f"ip-{b.id}", False, True, False, 5)
                for b in booted
                for k in range(self.agents)
            ]
        return hand + [
            InstanceView(
                *(peer, peer if k == 0 else f"gpu{k}", f"{box.id}.internal", False, True, False, box.samples),
                rate=box.rate,
            )
            for box in self.boxes.values()
            for k in range(self.agents)
            if box.connected and ((peer := box.id + f"+{k}" * (k > 0)) not in box.left or self.deaf)
        ]

    def preempt(self, name: str) -> None:
        self.boxes.pop(name)

    def another_manager(self, keep_account: bool = True, away_s: float = 0.0) -> None:
        """The manager dies and another comes so long after, with or without its account."""
        spent = self.machines.purse.spent
        known = {m.id: m.unbilled_since or self.now for m in self.machines.machines if m.id}
        self.now += away_s
        self._pending.clear()
        wanted = self.machines.wanted
        self.machines = Provision(self.config, self.events.append, 1000.0)
        if keep_account:
            self.machines.restore(spent, known, self.now, self.by_hand)
        self.machines.want(wanted, self.now)

    # ---- what is looked at

    def alive(self) -> list[str]:
        return [box.id for box in self.boxes.values() if box.alive]

    def states(self) -> list[MachineState]:
        return [machine.state for machine in self.machines.machines]

    def machine(self, name: str) -> Machine:
        return next(machine for machine in self.machines.machines if machine.id == name)

    def changes(self, after: str) -> list[MachineChanged]:
        return [event for event in self.events if isinstance(event, MachineChanged) and event.after == after]

    def failures(self) -> list[ProvisionerFailed]:
        return [event for event in self.events if isinstance(event, ProvisionerFailed)]

    # ---- the provider

    def _answer(self, call: Call) -> None:
        kind = {"Add": "add", "Release": "release", "ListAll": "list"}[type(call).__name__]
        if kind in self.failing:
            self.machines.failed(call.call, f"{kind} is broken", self.now)
        elif isinstance(call, Add):
            ids = self._made.pop(call.call, None) or [self._make() for _ in range(min(call.count, self.given))]
            if "lost_add" in self.failing:
                self.machines.failed(call.call, "the connection was cut", self.now)
            else:
                self.machines.added(call.call, ids, self.now)
        elif isinstance(call, Release):
            box = self.boxes.pop(call.machine, None)
            self.killed_at_work += bool(box and box.connected and box.samples)
            self.machines.released(call.call, self.now)
        else:
            rows = [
                Seen(box.id, box.alive, "" if box.alive else "exit code 1", self.price)
                for box in self.boxes.values()
                if box.id not in self._ending
            ]
            self.machines.listed(call.call, rows, self.now)

    def _make(self) -> str:
        self.asked_in_all += 1
        name = f"m-{self.asked_in_all}"
        self.boxes[name] = Box(name, self.now, self.boots_s)
        return name


def grown(number: int, **options: object) -> World:
    """A world in which so many machines have joined."""
    world = World(**options)  # type: ignore[arg-type]
    world.machines.want(number, 0.0)
    world.pass_time(30)
    assert world.states() == [MachineState.JOINED] * number
    return world
