"""The words between the manager and whoever adds and releases machines for it.

A provisioner is asked three things: to add so many machines, to release one, to list those of this run. It decides
nothing: how many there should be and which one goes is decided in `provision`. Names are the provisioner's: an id
stands for one machine for ever, and the agent that runs there joins under it (`penstock join --name ID`) or on a host
of that name.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = [
    "Add",
    "Call",
    "InstanceView",
    "JoinOrder",
    "ListAll",
    "Machine",
    "MachineState",
    "Orders",
    "ProvisionConfig",
    "Provisioner",
    "Release",
    "Seen",
]


@dataclass(frozen=True, slots=True)
class JoinOrder:
    """What a machine needs to join this run; given to a provisioner when it is made."""

    run: str
    """Names the run as no other is named; a provisioner marks its machines with it, and lists those so marked."""
    manager_url: str
    """As machines reach it."""
    token: str = field(repr=False)
    """An agent's. It belongs into an environment or a secret, never on a command line."""
    arguments: tuple[str, ...] = ()
    """Further words for `penstock join`."""
    folder: str = ""
    """Where output of machines and scripts may be kept; empty: nowhere."""

    def words(self, name: str = "") -> list[str]:
        """`join --manager URL ...`, for the command `penstock`."""
        named = ["--name", name] if name else []
        return ["join", "--manager", self.manager_url, *named, *self.arguments]


@dataclass(frozen=True, slots=True)
class Seen:
    """A machine as the provisioner lists it."""

    id: str
    alive: bool = True
    """False: it has ended by itself, or failed, and what is left of it is to be released."""
    cause: str = ""
    """Why it has."""
    price_per_h: float | None = None
    """Dollars an hour, where the provisioner knows better than the configuration."""


class Provisioner(Protocol):
    """Adds and releases machines. Made with a `JoinOrder` and, by name, the options of `fleet.options`.

    Any call may be cut off at its deadline and made again; whatever it raises is told as its cause. Before `add` is
    called again, `list` is.
    """

    async def add(self, count: int) -> Sequence[str]:
        """Asks for machines; returns the ids of those on their way, without waiting for them to join."""
        ...

    async def release(self, machine: str) -> None:
        """Ends a machine for good. One that is gone already is no error."""
        ...

    async def list(self) -> Sequence[Seen]:
        """Every machine of this run that is there or on its way, whichever manager asked for it."""
        ...

    async def close(self) -> None:
        """Ends what belongs to this process alone."""
        ...


class MachineState(enum.Enum):
    ASKED = "asked"
    """The provisioner was asked and has not answered."""
    STARTING = "starting"
    """It has an id, and no instance."""
    JOINED = "joined"
    DRAINING = "draining"
    """Gets no more work; told to leave once it has none, or its time for that is over."""
    RELEASING = "releasing"
    """No instance is there any more, or the time to leave is over; the provisioner is asked to end it until it has."""
    RELEASED = "released"
    FAILED = "failed"
    """Ended otherwise than it should have; its cause says how."""


ENDED = (MachineState.RELEASED, MachineState.FAILED)


@dataclass(slots=True)
class Machine:
    """One requested machine."""

    number: int
    price_per_h: float
    asked_at: float
    since: float
    state: MachineState = MachineState.ASKED
    id: str = ""
    cause: str = ""
    cost: float = 0.0
    """Dollars so far."""
    priced: bool = False
    """Its price is the provisioner's; else a guess."""
    unbilled_since: float | None = None
    """An earlier manager's account has it, and nothing has shown that it was there from then on."""
    billed_since: float | None = None
    """Where it differs from `asked_at`: it was asked for by an earlier manager, whose account ends there."""
    fault: str = ""
    """Once it is released, it has failed for this reason."""
    peers: tuple[str, ...] = ()
    """Of its instances, while any is there."""
    instances: int = 1
    """That it has had lately, however many of them are there at the moment; until that is known, as many as others."""
    seen: int = 0
    """Instances on it at the last look."""
    seen_since: float = 0.0
    """When there were others last."""
    samples: int = 0
    """On all of them."""
    instance_rate: float = 1.0
    """What one of its instances does in a time beside the fastest one of all, on the mean, as was last known."""
    adopted: bool = False
    """Not asked for by this manager."""
    joined_at: float | None = None
    """The first time."""
    was_ready: bool = False
    loading_at: float | None = None
    """Its instance began to load weights."""
    told: set[str] = field(default_factory=set)
    """Peers of its instances that were asked to leave."""
    told_at: float | None = None
    """The first of them."""
    ends: int = 0
    """Instances of it that were lost before they were ready."""
    missing: int = 0
    """Lists in a row without it."""
    call: int = 0
    """In flight for it; 0: none."""
    tries: int = 0
    """Releases that failed."""
    retry_at: float = 0.0

    @property
    def name(self) -> str:
        return self.id or f"ask-{self.number}"

    @property
    def known_price(self) -> float | None:
        """None where neither the provisioner nor the configuration tells one."""
        return self.price_per_h if self.priced or self.price_per_h > 0 else None

    @property
    def rate(self) -> float:
        """What all its instances do in a time, beside the fastest one of all."""
        return self.instances * self.instance_rate

    @property
    def may_go(self) -> bool:
        """It is known by a name, and not about to go already."""
        return self.state in (MachineState.STARTING, MachineState.JOINED)

    @property
    def living(self) -> bool:
        """It may cost something."""
        return self.state not in ENDED

    @property
    def counts(self) -> bool:
        """It works, or will."""
        return self.state in (MachineState.ASKED, MachineState.STARTING, MachineState.JOINED)


@dataclass(frozen=True, slots=True)
class InstanceView:
    """A living instance, as far as provisioning is concerned."""

    peer: str
    name: str
    host: str
    loading: bool
    ready: bool
    reserved: bool
    samples: int
    rate: float | None = None
    """What it does in a time beside the fastest one; 1 where they are alike, None while it is not known."""


@dataclass(frozen=True, slots=True)
class Add:
    call: int
    count: int


@dataclass(frozen=True, slots=True)
class Release:
    call: int
    machine: str


@dataclass(frozen=True, slots=True)
class ListAll:
    call: int


Call = Add | Release | ListAll


@dataclass(slots=True)
class Orders:
    """What is to be done now."""

    calls: list[Call] = field(default_factory=list)
    leave: list[tuple[str, str]] = field(default_factory=list)
    """(peer, cause): instances to be asked to leave."""


@dataclass(frozen=True, slots=True)
class ProvisionConfig:
    """Bounds, prices (dollars) and deadlines. See `fleet` in the run's configuration."""

    floor: int = 0
    """Of machines. Of this and the ceiling, instances that joined by hand are part, each as one."""
    ceiling: int = 8
    first: int = 1
    """Wanted before anything is known."""
    price_per_h: float = 0.0
    """Of one machine, where the provisioner tells none."""
    reserved_price_per_h: float = 0.0
    hour_worth: float = 0.0
    budget_per_h: float = float("inf")
    budget: float = float("inf")
    """For the run."""
    start_s: float = 120.0
    """From asking to joining, until that was measured."""
    patience: int = 2
    cool_down_s: float = 120.0
    """A number must be too large for so long, or for as long as a machine takes to start, before any is released."""
    join_deadline_s: float = 900.0
    drain_s: float = 60.0
    """For a machine's samples to end where they are; then they go on elsewhere."""
    settle_s: float = 10.0
    """More instances than a machine has had must be there for so long, since one whose connection was cut may be there
    twice for a moment; fewer for `rejoin_s`."""
    leave_s: float = 30.0
    """From being asked to leave until its instances are gone, as the fleet has it; then it is released all the same."""
    rejoin_s: float = 90.0
    """For a machine whose connection was lost to be back."""
    call_s: float = 60.0
    """Deadline of one call of the provisioner."""
    list_s: float = 30.0
    """Between two lists."""
    retry_first_s: float = 2.0
    retry_most_s: float = 120.0
    idle_s: float = 600.0
    """No trainer for so long, and no machine is wanted."""

    @property
    def tail_s(self) -> float:
        """A machine costs so long after it was decided that it goes, as long as calls don't fail."""
        return self.drain_s + self.leave_s + 2 * self.call_s
