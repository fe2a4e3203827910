"""The manager's desk for machines: a provisioner's calls, the account on disk, the release of everything at the end.

The edge between `Provisioning` and whoever adds machines. Decides only when the account is written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.rollout.manager import Manager
from penstock.rollout.provision_edge import Account, ProvisionEdge
from penstock.rollout.provision_types import Call, ProvisionConfig, Provisioner
from penstock.rollout.provisioning import Provisioning

__all__ = ["FleetDesk"]

WRITE_S = 5.0
"""Between two writings of the account, while no machine comes or goes."""
TICK_S = 0.05


class FleetDesk:
    """`decide` asks the manager, with the time, and does what it says.

    `release_s`: for all machines to be released at the end.
    """

    def __init__(
        self,
        manager: Manager,
        config: ProvisionConfig,
        provisioner: Provisioner,
        decide: Callable[..., None],
        *,
        reserved_engines: int = 0,
        account: Path | None = None,
        release_s: float = 60.0,
    ) -> None:
        self._manager = manager
        self._decide = decide
        self._release_s = release_s
        self._account = Account(account)
        self._edge = ProvisionEdge(provisioner, config.call_s, self._answer)
        self._written_at = float("-inf")
        self._written: tuple[str, ...] = ()
        saved = self._account.read()
        decide(manager.provide, config, reserved_engines, saved)
        if self._account.trouble:
            decide(manager.warn, "provisioner", self._account.trouble)

    @property
    def provisioning(self) -> Provisioning:
        found = self._manager.provisioning
        assert found is not None
        return found

    def make(self, calls: Sequence[Call]) -> None:
        self._edge.carry_out(calls)

    def tick(self, now: float) -> None:
        machines = self.provisioning.machines.machines
        there = tuple(machine.id for machine in machines)
        if there != self._written or (machines and now - self._written_at >= WRITE_S):
            self._write(now)

    def release(self, cause: str) -> None:
        """Begins to release every machine for good."""
        self._decide(self._manager.end_provision, cause)

    async def release_all(self, cause: str) -> None:
        """Releases every machine and waits for that; what may still run then is told."""
        self.release(cause)
        deadline = time.monotonic() + self._release_s
        while not self.provisioning.machines.done and time.monotonic() < deadline:
            self._decide(self._manager.tick_machines)
            await asyncio.sleep(TICK_S)
        if not self.provisioning.machines.done:
            left = [machine.name for machine in self.provisioning.machines.machines]
            what = f"machines that may still run and cost money: {', '.join(left)}" if left else "no list confirmed it"
            message = f"not everything was released within {self._release_s:g} s: {what}"
            self._decide(self._manager.warn, "provisioner", message)

    async def close(self) -> None:
        self._write(time.monotonic())
        await self._edge.close()

    def _answer(self, call: Call, result: Sequence[Any] | None, cause: str) -> None:
        self._decide(self._manager.on_provisioner, call, result, cause)
        # Nobody may hear of a machine that the next manager would not.
        self.tick(time.monotonic())

    def _write(self, now: float) -> None:
        self._written_at = now
        self._written = tuple(machine.id for machine in self.provisioning.machines.machines)
        self._account.write(self.provisioning.saved(now + self._manager.wall_offset_s))
