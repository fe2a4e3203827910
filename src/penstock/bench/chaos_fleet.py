"""The machines of a chaos run: agents in this process with engines that fail when told to, and `penstock join`s.

A slot is a place in the fleet. What runs there dies, and then another takes its place, under the same name, as a
machine that comes back does. Every agent reaches its manager over a relay of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bench.chaos_engine import SLOWER, FaultyEngine
from penstock.bench.chaos_links import UP, Link
from penstock.bench.chaos_nursery import Nursery
from penstock.errors import DeadlineExceeded, PenstockError
from penstock.instance.agent import Agent

TOKENS_PER_S = 8000.0
MAX_RUNNING = 16
FRAME_STEPS = 8
STALL_S = 1.0
WAIT_S = 120.0
"""For anything that ought to happen: generous, since the machine may be busy. Beyond it the run has hung."""


@dataclass(frozen=True, slots=True)
class Place:
    """What all slots share."""

    nursery: Nursery
    folder: Path
    token: str
    manager: Callable[[], tuple[str, int]]


@dataclass(slots=True)
class Slot:
    """One place in the fleet. `draws()` counts over all that ever stood there."""

    name: str
    place: Place
    link: Link
    busy: bool = False
    """A fault is under way."""
    ready_at_tokens: int = 0
    """Of `draws()`: hit again only once it has drawn so many, so that faults hit machines at work."""
    _drawn_before: int = 0
    _keeper: asyncio.Task[None] | None = None
    _closing: bool = False

    async def open(self) -> None:
        await self.link.open()
        self._keeper = asyncio.create_task(self._keep(), name=f"slot {self.name}")

    async def close(self) -> None:
        self._closing = True
        self.link.heal()
        await self._end()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        await self.link.close()

    @property
    def free(self) -> bool:
        return not self.busy and self.link.connected and self.draws() >= self.ready_at_tokens

    async def given_up(self, since: int) -> None:
        """Until the manager has closed its connection, as it does with what is silent."""
        link = self.link
        await until(lambda: link.ended_by_target > since or not link.connected, f"{self.name} to be given up")

    def draws(self) -> int:
        raise NotImplementedError

    def check(self) -> None:
        """Raises what broke the slot itself, which is a fault of the benchmark."""
        if self._keeper is not None and self._keeper.done() and not self._closing:
            self._keeper.result()
            raise PenstockError(f"slot {self.name} has ended")

    async def _keep(self) -> None:
        raise NotImplementedError

    async def _end(self) -> None:
        raise NotImplementedError

    # ---- faults of the network, which any machine may have

    async def swallowed(self) -> None:
        """Until the manager has given it up: a silent death."""
        before = self.link.ended_by_target
        self.link.swallow()
        try:
            await self.given_up(before)
        finally:
            self.link.heal()

    async def delayed(self, rest: Callable[[], AsyncIterator[None]]) -> None:
        self.link.delay_s = 0.05
        try:
            async for _ in rest():
                pass
        finally:
            self.link.delay_s = 0.0

    def cut_within_a_frame(self) -> None:
        self.link.cut_within(UP)


@dataclass(slots=True)
class HereSlot(Slot):
    """An agent and an engine in this process."""

    engine: FaultyEngine = field(init=False)
    agent: Agent = field(init=False)

    def __post_init__(self) -> None:
        self._make()

    def _make(self) -> None:
        self.engine = FaultyEngine(tokens_per_s=TOKENS_PER_S, max_running=MAX_RUNNING, frame_steps=FRAME_STEPS)

    def draws(self) -> int:
        return self._drawn_before + self.engine.tokens_drawn

    async def _keep(self) -> None:
        while not self._closing:
            self.agent = Agent(
                self.engine,
                f"http://127.0.0.1:{self.link.port}",
                self.place.token,
                self.name,
                stall_s=STALL_S,
                reconnect_s=WAIT_S,
            )
            try:
                await self.agent.run()
            except (PenstockError, MemoryError):
                # An engine that fails takes its agent along, as it should; another comes.
                pass
            finally:
                await self.engine.close()
            self._drawn_before += self.engine.tokens_drawn
            self._make()

    async def _end(self) -> None:
        if self._keeper is not None and not self._keeper.done() and hasattr(self, "agent"):
            self.agent.drain("the run is over")
            await asyncio.wait([self._keeper], timeout=10)

    async def slowed(self, rest: Callable[[], AsyncIterator[None]]) -> None:
        engine = self.engine
        engine.slow(SLOWER)
        try:
            async for _ in rest():
                pass
        finally:
            engine.slow(1.0)


@dataclass(slots=True)
class ProcessSlot(Slot):
    """A `penstock join` in a process of its own."""

    pid: int = 0
    _lives: int = 0

    def draws(self) -> int:
        return self._drawn_before + self._drawn_now()

    def _drawn_now(self) -> int:
        with contextlib.suppress(OSError, struct.error):
            return int(struct.unpack("<Q", self._progress.read_bytes()[:8])[0])
        return 0

    @property
    def _progress(self) -> Path:
        return self.place.folder / f"{self.name}.{self._lives}.progress"

    async def _keep(self) -> None:
        nursery, folder = self.place.nursery, self.place.folder
        while not self._closing:
            self._lives += 1
            words = ["join", "--manager", f"http://127.0.0.1:{self.link.port}", "--name", self.name]
            words += ["--engine", "paced", "--tokens-per-s", str(TOKENS_PER_S), "--max-running", str(MAX_RUNNING)]
            words += ["--preemption", "none", "--progress-file", str(self._progress)]
            words += ["--reconnect-s", str(WAIT_S)]
            self.pid = await nursery.start(words, folder / f"{self.name}.log")
            while await nursery.lives(self.pid):  # noqa: ASYNC110 - what ends is a process of another one
                await asyncio.sleep(0.02)
            pid, self.pid = self.pid, 0
            await nursery.end(pid)
            self._drawn_before, self._lives = self.draws(), self._lives + 1

    async def _end(self) -> None:
        self.send(signal.SIGTERM)
        if self._keeper is not None:
            await asyncio.wait([self._keeper], timeout=10)

    def send(self, number: signal.Signals) -> bool:
        """False where there is no process just now."""
        if self.pid:
            os.kill(self.pid, number)
        return bool(self.pid)

    async def ended_by(self, number: signal.Signals) -> None:
        """Until another process has taken its place."""
        lives = self._lives
        await until(lambda: self.send(number), f"a process in {self.name}")
        await until(lambda: self._lives > lives, f"{self.name} to end by {number.name}")

    async def stopped(self) -> None:
        """SIGSTOP until the manager has given it up; then it goes on, with what it had on its way."""
        before = self.link.ended_by_target
        await until(lambda: self.send(signal.SIGSTOP), f"a process in {self.name}")
        try:
            await self.given_up(before)
        finally:
            self.send(signal.SIGCONT)


async def until(condition: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
    """Raises DeadlineExceeded, which names what was waited for."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"waited {within_s:g} s for {what}")
        await asyncio.sleep(0.005)
