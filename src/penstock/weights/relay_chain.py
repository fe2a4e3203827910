"""Who fetches an encoding from whom: a chain of the instances that pass it on, which comes to each machine once.

Those that lend the same memory all go to the first of them: there is nothing to be sent on from one to the next. Who
lends none is no first of theirs, whatever it can see. Decides by the order in which they ask; refuses to know whether
they are still there. Driven by one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

__all__ = ["RelayChain"]


class RelayChain:
    """The instances that pass one encoding on, in the order in which they asked for it."""

    def __init__(self) -> None:
        self._asked: dict[str, str] = {}
        """The memory in which each lends versions, as it says; empty for none."""
        self._came = asyncio.Event()
        """Replaced each time that somebody asked."""

    def firsts(self) -> dict[str, str]:
        """By the memory that they lend, the first that asked."""
        return {memory: address for address, memory in reversed(self._asked.items()) if memory}

    def first_in(self, memory: str, without: Sequence[str]) -> str:
        """The first that lends `memory`, of all but those `without`; empty for none."""
        return next((one for one, lent in self._asked.items() if lent == memory and one not in without), "")

    async def first_first(self, address: str, memory: str, base: RelayChain, wait_s: float) -> None:
        """Of a difference to the version of `base`: who asked for that one first of those that lend `memory`, as
        `address` does, may be so again, if it asks within `wait_s`. It has a version of its own there, which the others
        have mapped."""
        first = base.firsts().get(memory, address)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while first != address and memory not in self.firsts():
                    await self._came.wait()

    def before(self, address: str, memory: str = "", without: Sequence[str] = ()) -> str:
        """For who passes it on at `address` (host:port; empty: it does not) the one to fetch it from, empty for the
        trainer: the first that lends the same `memory`; or else the one that asked before it on its own machine; else
        the first of the machine before. So they form a chain that comes to each machine once. Those `without` which it
        wants to do are as if they had not asked."""
        if address and address not in self._asked:
            self._asked[address] = memory
            self._came.set()
            self._came = asyncio.Event()
        asked = list(self._asked)
        before = [other for other in asked[: asked.index(address) if address else None] if other not in without]
        if not address:
            before = before[-1:]
        firsts = {_machine(other): other for other in reversed(before)}
        near = [other for other in before if _machine(other) == _machine(address)]
        sharing = [other for other in before if memory and self._asked[other] == memory]
        return sharing[0] if sharing else (near or sorted(firsts.values(), key=before.index) or [""])[-1]


def _machine(address: str) -> str:
    return address.rpartition(":")[0]
