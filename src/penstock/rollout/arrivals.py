"""Remote machines in the order in which they joined, by which a further one is judged.

Those that are there may be what was kept of many, so the ones that joined last count, gone or not. A machine whose
instance was away and is back has joined once, and last.
"""

from __future__ import annotations

from penstock.rollout.step_replay import Engine

__all__ = ["Arrivals"]

JOINED = 16
"""Machines that are remembered, beside those that are there."""


class Arrivals:
    """Instances are told of by their names; an instance on no machine is one by itself."""

    def __init__(self) -> None:
        self._count = 0
        self._of: dict[str, str | int] = {}
        """The machine of each instance that is there: its name, or a number."""
        self._machines: dict[str | int, tuple[int, Engine]] = {}
        """As which of all instances the last one of each machine came, and what it was known to be then."""

    def see(self, instance: str, engine: Engine) -> None:
        """It is there, and is now known to be this."""
        before = self._of.get(instance)
        machine = engine.machine or (self._count if before is None else before)
        if before is None:
            self._count += 1
            number = self._count
        else:
            number = self._machines[before][0]
        self._of[instance] = machine
        if before not in (None, machine) and before not in self._of.values():
            # Nobody knew where it was when it came.
            del self._machines[before]
        self._machines[machine] = number, engine

    def gone(self, instance: str) -> None:
        if self._of.pop(instance, None) is not None:
            here = set(self._of.values())
            # Whoever came last counts, whoever went last.
            gone = sorted(self._machines.keys() - here, key=lambda machine: -self._machines[machine][0])
            for machine in gone[JOINED:]:
                del self._machines[machine]

    def newest(self) -> list[Engine]:
        """Of each of the machines that joined last, an instance; the newest first."""
        return [engine for _, engine in sorted(self._machines.values(), key=lambda came: -came[0])[:JOINED]]
