"""The remote machines of a simulated run: who is there by the trace, who of them is held and paid, who has the weights.

Decides which of the available machines are taken, when fewer are wanted than there are (those longest there first);
which are given back is the manager's rule (`rollout.releases`). Weight pulls share the store's link. Where a strategy
has differences, a machine that holds the version before pulls one; who has just come, or was still pulling that version
when the next was published, pulls the whole.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.rollout.answers import tell
from penstock.rollout.balanced import Balanced
from penstock.rollout.releases import first_to_go
from penstock.simulate.machine import Machine
from penstock.simulate.outcome import Asked, Stay
from penstock.simulate.traces import Change, Trace

if TYPE_CHECKING:
    from penstock.simulate.world import World

__all__ = ["RemoteTimes", "Remotes"]


@dataclass
class RemoteTimes:
    """A step on the remote side."""

    mean_held: float
    """Connected machines, mean over the step."""
    held_off: float
    """By which their number was off that mean, rounded: mean over the step."""
    paid_s: float
    dollars: float
    busy_s: float
    wait_s: float
    """With the weights and nothing to do, mean over machines."""
    waited_s: float
    """The same in all, in machine-seconds."""
    ready: list[tuple[float, float]]
    """(from, to) in which each machine had the step's weights."""


@dataclass(eq=False)
class _Held:
    machine: Machine
    taken_at: float
    connected_at: float | None = None
    ready_at: float | None = None
    """Of the step's weights."""
    holds: int | None = None
    """Its last whole version, by the step that it is of."""
    pull_s: float = 0.0
    """That it takes, or took, for the version that it pulled last."""
    busy_before: float = 0.0
    number: int = 0
    """As it was taken."""
    rate: float = 1.0
    known_price: float = 0.0
    """Dollars an hour."""

    @property
    def samples(self) -> int:
        return self.machine.samples

    @property
    def connected(self) -> bool:
        return self.connected_at is not None


@dataclass(eq=False)
class _Past:
    held: _Held
    left_at: float
    preempted: bool

    def stay(self) -> Stay:
        held = self.held
        return Stay(held.machine.name, held.taken_at, held.connected_at, held.ready_at, self.left_at, self.preempted)


class Remotes:
    def __init__(self, world: World, trace: Trace) -> None:
        self.world = world
        self.trace = trace
        self.wanted = world.strategy.size.wanted
        self._available: dict[str, None] = {}
        self._held: dict[str, _Held] = {}
        self._past: list[_Past] = []
        self._gone: list[_Past] = []
        """They left within the step that was added up last."""
        self._born = 0

    def start(self) -> None:
        self._note_asked()
        for change in self.trace.changes:
            if change.at_s <= 0:
                self.change(change, quiet=True)
            else:
                self.world.clock.at(change.at_s, lambda change=change: self.change(change))  # type: ignore[misc]
        # A run begins with its machines up: the paper's measurements do.
        for held in self._take():
            held.connected_at = self.world.clock.now

    # ---- who there is

    def held(self) -> list[Machine]:
        """Connected ones, with the weights or about to have them."""
        return [held.machine for held in self._held.values() if held.connected]

    def coming(self) -> int:
        """Connected ones that pull the step's weights."""
        return sum(held.connected and not held.machine.ready for held in self._held.values())

    def ready(self) -> list[Machine]:
        return [held.machine for held in self._held.values() if held.machine.ready]

    def by_name(self, name: str) -> Machine:
        return self._held[name].machine

    def all_since(self, _at_s: float) -> list[Machine]:
        """Held ones and those that left within the step that was added up last."""
        return [*(past.held.machine for past in self._gone), *(held.machine for held in self._held.values())]

    # ---- what happens

    def want(self, count: int) -> None:
        self.wanted = count
        self._note_asked()
        surplus = len(self._held) - count
        for held in self._first_to_go()[: max(0, surplus)]:
            self._leave(held.machine.name)
        for held in self._take():
            self._boot(held)

    def new_version(self) -> None:
        """Every connected machine pulls the weights that were just published."""
        pulling = len(self.held())
        for held in self._held.values():
            held.machine.ready = False
            held.ready_at = None
            if held.connected:
                self._pull(held, pulling)

    def pull_s(self, node: str) -> float:
        """The last pull of a held machine."""
        return self._held[node].pull_s

    def settle_step(self, began_s: float, now: float) -> RemoteTimes:
        """Adds up a step that ends now, and forgets who left within it."""
        rows = [(held, now) for held in self._held.values()] + [(past.held, past.left_at) for past in self._past]
        paid_s = dollars = busy_s = wait_s = 0.0
        connected: list[tuple[float, float]] = []
        ready: list[tuple[float, float]] = []
        for held, until in rows:
            held_s = until - max(began_s, held.taken_at)
            paid_s += held_s
            dollars += held.known_price * held_s / 3600
            busy = held.machine.busy_s - held.busy_before
            held.busy_before = held.machine.busy_s
            busy_s += busy
            if held.connected_at is not None:
                connected.append((max(began_s, held.connected_at), until))
            # Who was given back between two steps had the weights of the step before.
            if held.ready_at is not None and until > began_s:
                ready.append((held.ready_at, until))
                wait_s += max(0.0, until - held.ready_at - busy)
        stays = [Stay(h.machine.name, h.taken_at, h.connected_at, h.ready_at, None, False) for h in self._held.values()]
        self.world.outcome.stays.append((*(past.stay() for past in self._past), *stays))
        self._gone, self._past = self._past, []
        span_s = max(now - began_s, 1e-9)
        mean = sum(until - at for at, until in connected) / span_s
        off = _off_s(connected, round(mean), began_s, now) / span_s
        return RemoteTimes(mean, off, paid_s, dollars, busy_s, wait_s / max(1, len(ready)), wait_s, ready)

    # ---- within

    def _first_to_go(self) -> list[_Held]:
        balance = self.world.strategy.balance
        if isinstance(balance, Balanced):
            rates = balance.rates(self.world.loads([held.machine for held in self._held.values()]))
            for held in self._held.values():
                held.rate = rates.get(held.machine.name, 1.0)
        return first_to_go(self._held.values())

    def _note_asked(self) -> None:
        self.world.outcome.asked.append(Asked(self.wanted, self.world.strategy.size.cause))

    def change(self, change: Change, quiet: bool = False) -> None:
        """A machine becomes available or is taken away now; `quiet`: without anybody being taken on for it yet."""
        if change.there:
            self._available[change.node] = None
        else:
            self._available.pop(change.node, None)
            if change.node in self._held:
                self._leave(change.node, preempted=True)
        if not quiet:
            for held in self._take():
                self._boot(held)

    def _take(self) -> list[_Held]:
        taken = []
        spot = self.world.strategy.spot
        names = list(self._available) if spot else [f"fixed{k}" for k in range(self.wanted)]
        for node in names:
            if len(self._held) >= self.wanted:
                break
            if node not in self._held:
                self._born += 1
                profile, now = self.world.profile, self.world.clock.now
                machine = Machine(node, profile.remote(node), True, at_s=now)
                price = profile.price_per_h(node, spot)
                held = self._held[node] = _Held(machine, now, number=self._born, known_price=price)
                taken.append(held)
        return taken

    def _boot(self, held: _Held) -> None:
        def up() -> None:
            if self._held.get(held.machine.name) is held:
                held.connected_at = self.world.clock.now
                self._pull(held, self.coming())

        self.world.clock.after(held.machine.profile.boot_s, up)

    def _pull(self, held: _Held, pulling: int) -> None:
        """`pulling`: machines that share the store's link, this one among them."""
        step = self.world.step
        number = step.number if step is not None else 0
        profile, name = self.world.profile, held.machine.name
        if self.world.strategy.differences:
            held.pull_s = profile.agent_pull_s(name, pulling, difference=held.holds == number - 1)
        else:
            held.pull_s = profile.pull_s(name, pulling)

        def ready() -> None:
            if self._held.get(held.machine.name) is held and self.world.step is step:
                held.machine.ready = True
                held.holds = number
                held.ready_at = self.world.clock.now
                held.machine.at_s = max(held.machine.at_s, self.world.clock.now)
                # Behind those that get ready in the same moment: they share.
                self.world.clock.after(0.0, self.world.dispatch)

        self.world.clock.after(held.pull_s, ready)

    def _leave(self, node: str, preempted: bool = False) -> None:
        held = self._held.pop(node)
        machine = held.machine
        if machine.ready:
            self.world.advance(machine)
        machine.ready = False
        self._past.append(_Past(held, self.world.clock.now, preempted))
        # As in a run, one that comes again is a new one.
        tell(self.world.strategy.balance, "gone", node)
        if self.world.step is not None and preempted:
            self.world.lose(machine)


def _off_s(spans: list[tuple[float, float]], number: int, began_s: float, now: float) -> float:
    """Seconds times by how many the spans that are open differ from a number."""
    moments = sorted({began_s, now, *(moment for span in spans for moment in span)})
    return sum(
        abs(sum(at <= begin and end <= until for at, until in spans) - number) * (end - begin)
        for begin, end in itertools.pairwise(moments)
        if began_s <= begin and end <= now
    )
