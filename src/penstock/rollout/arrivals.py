"""Remote instances in the order in which they joined, by which a further machine is judged.

Those that are there may be what was kept of many, so the ones that joined last count, gone or not. Of a machine that
lost an instance and has it back only those that are there count: it is one machine, with as many as it has.
"""

from __future__ import annotations

from penstock.rollout.step_replay import Engine

__all__ = ["Arrivals"]

JOINED = 16
"""Machines that are remembered."""


class Arrivals:
    """Each instance is known by its name, and as which of all of them it came."""

    def __init__(self) -> None:
        self._count = 0
        self._here: dict[str, tuple[int, Engine]] = {}
        self._left: list[tuple[int, Engine]] = []

    def see(self, instance: str, engine: Engine) -> None:
        """It is there, and is now known to be this."""
        if instance in self._here:
            number = self._here[instance][0]
        else:
            number, self._count = self._count, self._count + 1
            if engine.machine:
                # It is back, or was never gone.
                self._left = [gone for gone in self._left if gone[1].machine != engine.machine]
        self._here[instance] = number, engine

    def gone(self, instance: str) -> None:
        if (arrival := self._here.pop(instance, None)) is not None:
            # Whoever came last counts, whoever went last.
            self._left = _newest([*self._left, arrival])

    def newest(self) -> list[Engine]:
        """Those of the machines that joined last, the newest first."""
        return [engine for _, engine in _newest([*self._here.values(), *self._left])]


def _newest(arrivals: list[tuple[int, Engine]]) -> list[tuple[int, Engine]]:
    found: list[tuple[int, Engine]] = []
    machines: set[str | int] = set()
    for number, engine in sorted(arrivals, key=lambda arrival: -arrival[0]):
        machine = engine.machine or number
        if machine in machines or len(machines) < JOINED:
            machines.add(machine)
            found.append((number, engine))
    return found
