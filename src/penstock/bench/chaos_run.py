"""One run in chaos: a manager with a journal, four machines, a trainer's client, and a seeded list of faults.

When a fault comes is counted in tokens drawn, not in seconds, so a slow machine meets the same faults at the same
places of the run. What is found is handed back as `Report`; what is good enough is decided by who asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bench.chaos_fleet import (
    FRAME_STEPS,
    MAX_RUNNING,
    TOKENS_PER_S,
    WAIT_S,
    HereSlot,
    Place,
    ProcessSlot,
    Slot,
    until,
)
from penstock.bench.chaos_links import DOWN, Link
from penstock.bench.chaos_nursery import Nursery, open_nursery, set_skew, skewed_wall_clock
from penstock.bench.chaos_plan import HERE, NO_SLOT, PROCESS, Fault
from penstock.errors import EngineError, RolloutError
from penstock.observe.events import Event, InstanceChanged, SampleFailed
from penstock.rollout.client import FinishedSample, RolloutClient
from penstock.sample import Prompt
from penstock.weights import WeightStore
from penstock.wire import BatchDone, FleetStatus, Sampling

HEARTBEAT_S = 0.3
VOCABULARY = 1000
RUN_SEED = 29
SCENE_LINES = 40
"""Of each log, when a run fails."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a run: how much is generated."""

    steps: int = 10
    prompts: int = 24
    samples_per_prompt: int = 4
    max_new_tokens: int = 512
    processes: int = 2
    """Slots with a process of their own, of four."""

    @property
    def tokens(self) -> int:
        """Of the whole run, undisturbed: every sample runs to its limit."""
        return self.steps * self.prompts * self.samples_per_prompt * self.max_new_tokens


@dataclass(slots=True)
class Report:
    """What became of a run."""

    rewards: list[float] = field(default_factory=list)
    """Mean of each step."""
    samples: list[dict[tuple[int, int], FinishedSample]] = field(default_factory=list)
    """Of each step."""
    twice: int = 0
    failed: list[str] = field(default_factory=list)
    """Causes of samples that were set aside."""
    wrong_version: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, float] = field(default_factory=dict)
    """By kind: the longest from a fault to the next token of the machine that it hit, within a step."""
    lost: int = 0
    """Instances that the manager counted as gone."""
    drawn: int = 0
    wall_s: float = 0.0


def reward(sample: FinishedSample) -> float:
    """Of tokens alone, and different for different ones."""
    return sum(token % 7 for token in sample.token_ids) / max(1, len(sample.token_ids))


class _Listener:
    """Gathers one batch, what comes twice included."""

    def __init__(self) -> None:
        self.samples: list[FinishedSample] = []
        self.done: asyncio.Future[BatchDone] = asyncio.get_running_loop().create_future()

    def on_samples(self, samples: list[FinishedSample]) -> None:
        self.samples.extend(samples)

    def on_done(self, done: BatchDone) -> None:
        self.done.set_result(done)

    def on_failed(self, error: RolloutError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class ChaosRun:
    """Made by `chaos_run`."""

    def __init__(self, shape: Shape, faults: Sequence[Fault], nursery: Nursery, folder: Path, token: str) -> None:
        self.shape = shape
        self.report = Report()
        self._faults = list(faults)
        self._nursery = nursery
        self._folder = folder
        self._token = token
        self._extras = 0
        self._manager_pid = 0
        self._manager_port = 0
        self._manager_busy = False
        self._in_step = False
        self._store = WeightStore("chaos", "127.0.0.1", 0, token, chunk_bytes=512)
        self._weights_link = Link(lambda: _address(self._store.address))
        place = Place(nursery, folder, token, lambda: ("127.0.0.1", self._manager_port))
        self._place = place
        self._slots: list[Slot] = [
            (ProcessSlot if number < shape.processes else HereSlot)(f"slot-{number}", place, Link(place.manager))
            for number in range(4)
        ]
        self._retired_draws = 0

    def drawn(self) -> int:
        return self._retired_draws + sum(slot.draws() for slot in self._slots)

    # ---- the house

    async def run(self) -> Report:
        began = time.monotonic()
        async with self._house() as client:
            injecting = asyncio.create_task(self._inject(), name="faults")
            training = asyncio.create_task(self._train(client, injecting), name="trainer")
            try:
                await asyncio.wait([injecting, training], return_when=asyncio.FIRST_EXCEPTION)
                for task in (injecting, training):
                    if task.done():
                        task.result()
                await training
            except Exception as error:
                error.add_note(self._scene())
                raise
            finally:
                for task in (injecting, training):
                    task.cancel()
                await asyncio.gather(injecting, training, return_exceptions=True)
        self.report.drawn = self.drawn()
        self.report.wall_s = time.monotonic() - began
        return self.report

    def _scene(self) -> str:
        """How things stood, for whoever has to find out why a run hung: the folder goes with the run."""
        where = f"step {len(self.report.samples)}, {'within' if self._in_step else 'between steps'}"
        lines = [f"{where}, {self.drawn()} tokens drawn, injected: {dict(self.report.injected)}"]
        for slot in self._slots:
            state = f"connected={slot.link.connected} busy={slot.busy} draws={slot.draws()} of {slot.ready_at_tokens}"
            lines.append(f"{slot.name}: {state}")
        for log in sorted(self._folder.glob("*.log")):
            lines += [f"---- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-SCENE_LINES:]]
        return "\n".join(lines)

    @contextlib.asynccontextmanager
    async def _house(self) -> AsyncIterator[RolloutClient]:
        async with contextlib.AsyncExitStack() as stack:
            await asyncio.to_thread(self._store.start)
            stack.push_async_callback(asyncio.to_thread, self._store.close)
            await self._weights_link.open()
            stack.push_async_callback(self._weights_link.close)
            await self._start_manager()
            client = RolloutClient(
                f"http://127.0.0.1:{self._manager_port}", self._token, self._on_event, _ignore, reconnect_s=WAIT_S
            )
            await client.connect()
            stack.push_async_callback(client.close)
            for slot in self._slots:
                await slot.open()
                stack.push_async_callback(slot.close)
            yield client

    async def _start_manager(self) -> None:
        ready = self._folder / "manager.json"
        ready.unlink(missing_ok=True)
        words = ["manager", "--port", str(self._manager_port), "--ready-file", str(ready)]
        words += ["--journal", str(self._folder / "journal"), "--heartbeat-s", str(HEARTBEAT_S)]
        words += ["--frame-steps", str(FRAME_STEPS), "--max-context", str(2 * self.shape.max_new_tokens)]
        # Everybody here comes and is lost all the time: the wait that is due to them is kept short.
        words += ["--hold-off-s", "0.2"]
        self._manager_pid = await self._nursery.start(words, self._folder / "manager.log")
        await until(ready.exists, "the manager to listen")
        self._manager_port = int(json.loads(ready.read_text())["url"].rpartition(":")[2])

    def _on_event(self, event: Event) -> None:
        if isinstance(event, InstanceChanged) and event.after == "gone":
            self.report.lost += 1
        elif isinstance(event, SampleFailed):
            self.report.failed.append(event.cause)

    # ---- the trainer

    async def _train(self, client: RolloutClient, injecting: asyncio.Task[None]) -> None:
        shape = self.shape
        asked = [
            Prompt(index=k, text="", token_ids=[1 + k, 2, 3, 5 + k % 4], row={}, source="chaos")
            for k in range(shape.prompts)
        ]
        sampling = Sampling(max_new_tokens=shape.max_new_tokens)
        step = 0
        while step < shape.steps or not injecting.done():
            manifest = self._store.publish(
                step, [("w", "F32", (500,), array("f", [step] * 500).tobytes())], f'{{"vocab_size": {VOCABULARY}}}'
            )
            await client.publish(step, f"127.0.0.1:{self._weights_link.port}", manifest.digest)
            listener = _Listener()
            await client.submit(
                f"step-{step}", step, asked, shape.samples_per_prompt, RUN_SEED, sampling, WAIT_S, listener
            )
            self._in_step = True
            await listener.done
            self._in_step = False
            await client.release(f"step-{step}")
            self._note(step, listener.samples)
            step += 1

    def _note(self, step: int, samples: list[FinishedSample]) -> None:
        report = self.report
        found = {(sample.prompt, sample.replica): sample for sample in samples}
        report.twice += len(samples) - len(found)
        report.wrong_version += sum({span.version for span in s.version_spans} != {step} for s in samples)
        report.samples.append(found)
        report.rewards.append(sum(map(reward, found.values())) / max(1, len(found)))

    # ---- faults

    async def _inject(self) -> None:
        """Each fault once it is due, on a machine at work that can have it; one that finds none lets others pass."""
        waiting = list(self._faults)
        async with asyncio.TaskGroup() as group:
            while waiting:
                fault = await self._next_due(waiting)
                waiting.remove(fault)
                slot = self._slot_for(fault)
                if slot is not None:
                    slot.busy = True
                self._manager_busy |= fault.kind.startswith("manager")
                group.create_task(self._carry_out(fault, slot), name=fault.kind)

    async def _next_due(self, waiting: Sequence[Fault]) -> Fault:
        found: list[Fault] = []

        def look() -> bool:
            for slot in self._slots:
                slot.check()
            if self._in_step:
                drawn = self.drawn()
                found[:] = [fault for fault in waiting if drawn >= fault.at_tokens and self._can_have(fault)][:1]
            return bool(found)

        await until(look, f"a machine at work for one of {len(waiting)} faults, the first a {waiting[0].kind}")
        return found[0]

    def _can_have(self, fault: Fault) -> bool:
        if fault.kind.startswith("manager"):
            return not self._manager_busy
        return fault.kind in NO_SLOT or bool(self._able(fault))

    def _able(self, fault: Fault) -> list[Slot]:
        kind = HereSlot if fault.kind in HERE else ProcessSlot if fault.kind in PROCESS else Slot
        return [slot for slot in self._slots if isinstance(slot, kind) and slot.free]

    def _slot_for(self, fault: Fault) -> Slot | None:
        """None where it is no machine's fault."""
        if fault.kind in NO_SLOT:
            return None
        slots = self._able(fault)
        return slots[int(fault.pick * len(slots))]

    async def _carry_out(self, fault: Fault, slot: Slot | None) -> None:
        began, step = time.monotonic(), len(self.report.samples)
        if slot is None:
            await self._to_all(fault)
        else:
            await self._to_slot(fault, slot)
        self.report.injected[fault.kind] += 1
        before = slot.draws() if slot else self.drawn()
        if slot is not None:
            # A frame for each of its places: machines are hit at work, not while they come.
            slot.ready_at_tokens = before + 2 * FRAME_STEPS * MAX_RUNNING
            slot.busy = False
        draws = slot.draws if slot else self.drawn
        await until(lambda: draws() > before or len(self.report.samples) > step, f"tokens after {fault.kind}")
        if len(self.report.samples) == step:
            took_s = time.monotonic() - began
            self.report.recovery_s[fault.kind] = max(took_s, self.report.recovery_s.get(fault.kind, 0.0))

    async def _to_slot(self, fault: Fault, slot: Slot) -> None:
        kind = fault.kind
        if kind == "cut":
            slot.link.cut()
        elif kind == "cut in mid-frame":
            before = slot.link.cuts_within
            slot.cut_within_a_frame()
            await until(lambda: slot.link.cuts_within > before, f"{slot.name} to send")
        elif kind == "blackhole":
            await slot.swallowed()
        elif kind == "delay":
            await slot.delayed(self._a_while)
        elif isinstance(slot, ProcessSlot):
            if kind == "SIGSTOP":
                await slot.stopped()
            else:
                await slot.ended_by(signal.SIGKILL if kind == "SIGKILL" else signal.SIGTERM)
        elif isinstance(slot, HereSlot):
            await self._to_engine(kind, slot)

    async def _to_engine(self, kind: str, slot: HereSlot) -> None:
        engine = slot.engine
        if kind == "crash":
            engine.crash(EngineError("device lost"))
        elif kind == "out of memory":
            engine.crash(MemoryError("out of memory"))
        elif kind == "slow":
            await slot.slowed(self._a_while)
        elif kind == "stuck":
            engine.hang()
            await until(lambda: slot.engine is not engine, f"{slot.name} to give its stuck engine up")
        elif kind == "swap fails":
            engine.fail_swap()
        else:
            engine.spoil(kind)

    async def _to_all(self, fault: Fault) -> None:
        if fault.kind == "weight pull cut":
            self._weights_link.cut_within(DOWN, 1 + int(fault.size * 2500))
        elif fault.kind == "clock jump":
            set_skew(self._folder / "clock", (fault.size - 0.5) * 2e7)
        elif fault.kind == "joins and leaves":
            await self._join_and_leave()
        else:
            await self._to_manager(fault)

    async def _to_manager(self, fault: Fault) -> None:
        try:
            if fault.kind == "manager SIGKILL":
                await self._nursery.end(self._manager_pid)
                await self._start_manager()
            else:
                os.kill(self._manager_pid, signal.SIGSTOP)
                # Longer than it bears silence from others.
                await asyncio.sleep(4 * HEARTBEAT_S)
                os.kill(self._manager_pid, signal.SIGCONT)
        finally:
            self._manager_busy = False

    async def _join_and_leave(self) -> None:
        self._extras += 1
        slot = HereSlot(f"extra-{self._extras}", self._place, Link(self._place.manager))
        await slot.open()
        step = len(self.report.samples)
        try:
            await until(lambda: slot.draws() > 0 or len(self.report.samples) > step, f"{slot.name} to draw")
        finally:
            await slot.close()
            self._retired_draws += slot.draws()

    async def _a_while(self) -> AsyncIterator[None]:
        """Until the fleet has drawn some more tokens, or the step is over."""
        at, step = self.drawn() + 2000, len(self.report.samples)
        await until(lambda: self.drawn() >= at or len(self.report.samples) > step, "tokens")
        yield


async def chaos_run(shape: Shape, faults: Sequence[Fault]) -> Report:
    """Runs it, in a folder of its own."""
    token = secrets.token_urlsafe(16)
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as name:
        folder = Path(name)
        set_skew(folder / "clock", 0.0)
        async with open_nursery(folder / "clock", {"PENSTOCK_TOKEN": token}) as nursery:
            with skewed_wall_clock(folder / "clock"):
                return await ChaosRun(shape, faults, nursery, folder, token).run()


def quiet_seconds(shape: Shape) -> float:
    """What an undisturbed run takes at least."""
    return shape.tokens / (4 * TOKENS_PER_S)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _ignore(status: FleetStatus) -> None:
    """The run is watched by its events."""
