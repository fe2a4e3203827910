"""What the provisioner tells and is asked: machines that are had, the instances on them, and who has to leave.

Between `Provisioning`, which knows machines, and the fleet, which knows instances. Decides nothing about either; does
nothing while nobody adds machines for this manager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.rollout.fleet import Fleet, Instance, State
from penstock.rollout.outbox import Outbox
from penstock.rollout.provision_types import Add, Call, InstanceView, ProvisionConfig, Release
from penstock.rollout.provisioning import Provisioning
from penstock.rollout.tracker import Tracker

__all__ = ["MachineSide"]


class MachineSide:
    """`drain` asks an instance to leave."""

    def __init__(self, tracker: Tracker, fleet: Fleet, outbox: Outbox, drain: Callable[[Instance, str], None]) -> None:
        self._tracker = tracker
        self._fleet = fleet
        self._out = outbox
        self._drain = drain
        self.provisioning: Provisioning | None = None
        """None: nobody adds machines for this manager."""
        self.rates: Mapping[str, float] = {}
        """What instances do in a time beside the fastest one of their kind, as was last known."""

    def provide(self, config: ProvisionConfig, reserved_engines: int, saved: Mapping[str, Any] | None) -> None:
        """From now on machines are asked for and released. `saved`: the account of an earlier manager of the run."""
        out = self._out
        self.provisioning = Provisioning(config, out.emit, out.wall_offset_s, reserved_engines)
        if saved is not None:
            try:
                self.provisioning.restore(saved, out.now)
            except (KeyError, TypeError, ValueError) as error:
                out.warn(f"what an earlier manager spent on machines is not known: {error!r}", "provisioner")

    def answered(self, call: Call, result: Sequence[Any] | None, cause: str) -> None:
        """A call was answered, or failed for this cause."""
        if self.provisioning is None:
            return
        machines, now = self.provisioning.machines, self._out.now
        if cause:
            machines.failed(call.call, cause, now)
        elif isinstance(call, Add):
            machines.added(call.call, result or (), now)
        elif isinstance(call, Release):
            machines.released(call.call, now)
        else:
            machines.listed(call.call, result or (), now)

    def left(self, peer: str, cause: str) -> None:
        """The instance on it has said goodbye."""
        if self.provisioning is not None:
            self.provisioning.machines.left(peer, cause, self._out.now)

    def end(self, cause: str) -> None:
        """Every machine is released, and none is asked for any more."""
        if self.provisioning is not None:
            self.provisioning.machines.end(cause, self._out.now)
            self.tick()

    def tick(self) -> None:
        """Asks for machines and releases them; instances on those that go are asked to leave."""
        if self.provisioning is None:
            return
        views = [
            InstanceView(
                peer=instance.peer,
                name=instance.name,
                host=instance.host,
                loading=instance.state is State.LOADING,
                ready=instance.state is State.READY,
                reserved=instance.reserved,
                samples=self._tracker.leases_of(instance.id),
                rate=self.rates.get(instance.id),
            )
            for instance in self._fleet
            if instance.name
        ]
        orders = self.provisioning.tick(views, self._out.now, self._out.trainer_connected)
        machines = self.provisioning.machines
        cordoned, places = machines.cordoned, machines.places
        for instance in self._fleet:
            instance.cordoned = instance.peer in cordoned
            machine = places.get(instance.peer)
            if machine is None:
                instance.machine, instance.of_machine = "", 1
                instance.price_per_h = None if instance.reserved else 0.0
            else:
                instance.machine, instance.of_machine = machine.name, machine.instances
                instance.price_per_h = machine.known_price
        for peer, cause in orders.leave:
            leaving = self._fleet.get(peer)
            if leaving is not None:
                self._drain(leaving, cause)
        self._out.ask(orders.calls)
