"""The agent: joins one engine to a manager over one WebSocket that it dials itself.

Joins the parts and decides little: which leases are live is in `leases`, when to come back and when an engine is stuck
in `liveness`, how frames come and go in `manager_link`, how weights are fetched in `penstock.weights`. A lost
connection loses nothing but time: the manager has every token that was sent and gives the samples to others, and this
agent comes back as another instance.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import ssl
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import aiohttp

from penstock.errors import EngineError, FrameTooLarge, PenstockError, WireError
from penstock.instance.engine import Engine
from penstock.instance.leases import CAUSE_CHARACTERS, Leases
from penstock.instance.liveness import Reconnect, StallWatch
from penstock.instance.loading import WeightLoader, came_by, check_vocabulary
from penstock.instance.manager_link import ManagerLink, agent_url, words_of
from penstock.weights.manifest import StagedWeights
from penstock.weights.protocol import Layout
from penstock.weights.puller import DEFAULT_MAX_BYTES
from penstock.wire import (
    MAX_FRAME_BYTES,
    AgentHello,
    Drain,
    FrameFromManager,
    Goodbye,
    HandedOver,
    HandOver,
    Heartbeat,
    LoadFailed,
    LoadWeights,
    StartFrame,
    StopFrame,
    VersionReady,
    Welcome,
)

FLUSH_S = 2.0
SETTLE_S = 0.02
"""While leaving: the engine's deltas count as taken once none came for so long after its flush."""

log = logging.getLogger("penstock.agent")


@runtime_checkable
class FitsContext(Protocol):
    """An engine that can be told, before its first weights, what context the run wants."""

    def fit_context(self, max_context_tokens: int) -> None: ...


@runtime_checkable
class FramesBySteps(Protocol):
    """An engine that can be told how many decode steps to gather in one delta."""

    frame_steps: int


@runtime_checkable
class HandsOver(Protocol):
    """An engine that can rest while its device is wanted for something else."""

    async def hand_over(self) -> None:
        """Makes every token drawn so far appear in `deltas`, ends every sequence and frees what memory only sequences
        need. It draws no more until the next `start`."""
        ...


class SwapStuck(EngineError):
    """An engine that does not end a swap can't be asked for anything else."""


class Agent:
    """Runs `engine` for the manager at `manager_url` until it is drained or can't go on.

    `connections` is the number of TCP connections of one weight pull, `load_deadline_s` its deadline; `codec`,
    `keep_base`, `relay_port`, `partial_folder` and `ways` are the `WeightLoader`'s. A lost manager
    is dialled again for `reconnect_s` seconds. An engine that has work and makes no progress for `stall_s` is given up.
    `reserved`: on one of the trainer's own devices, which the manager is told. `start_s` is what the engine may take to
    start with its first weights, on top of `load_deadline_s`.
    With `tls`, manager (https://) and weight store are both spoken to over TLS; a certificate in it that names the role
    of agents makes `token` superfluous.
    """

    def __init__(
        self,
        engine: Engine,
        manager_url: str,
        token: str,
        name: str,
        *,
        connections: int = 2,
        load_deadline_s: float = 120.0,
        reconnect_s: float = 60.0,
        stall_s: float = 60.0,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_weight_bytes: int = DEFAULT_MAX_BYTES,
        codec: str = "auto",
        keep_base: bool = True,
        relay_port: int | None = None,
        partial_folder: Path | None = None,
        ways: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
        reserved: bool = False,
        start_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self._link = ManagerLink(agent_url(manager_url), token, max_frame_bytes, tls)
        self._name = name
        self._load_deadline_s = load_deadline_s
        self._reconnect_s = reconnect_s
        self._stall_s = stall_s
        self._reserved = reserved
        self._start_s = start_s
        self._loader = WeightLoader(
            token,
            connections=connections,
            max_bytes=max_weight_bytes,
            codec=codec,
            keep_base=keep_base,
            relay_port=relay_port,
            partial_folder=partial_folder,
            ways=ways,
            tls=tls,
        )
        self._leases = Leases()
        self._leaving = asyncio.Event()
        self._leave_cause = ""
        self._wanted: LoadWeights | None = None
        self._wanted_changed = asyncio.Event()
        self._pulling: asyncio.Task[StagedWeights] | None = None
        self._swap: asyncio.Task[None] | None = None
        self._loading = False
        self._deltas_taken = 0
        self._deltas_sent = 0
        self._pump_ended = False
        self._process = secrets.token_hex(8)
        self.instance = ""
        """The name that the manager gave this agent in its present or last session."""
        self.sessions = 0
        self.bad_frames = 0
        self.superseded_pulls = 0
        self.taken_back = 0
        """Times that the manager refused what the engine drew."""

    def drain(self, cause: str) -> None:
        """Leaves in good order: no more work, everything sent, goodbye. `run` returns within a few seconds."""
        if not self._leaving.is_set():
            self._leave_cause = cause
            self._leaving.set()

    async def run(self) -> None:
        """Returns once drained. Raises AuthError, ProtocolMismatch, EngineError, or PenstockError on giving up."""
        sessions = asyncio.create_task(self._sessions(), name="agent-sessions")
        pump = asyncio.create_task(self._pump(), name="agent-deltas")
        leaving = asyncio.create_task(self._leaving.wait(), name="agent-leaving")
        tasks = (sessions, pump, leaving)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                await self._engine_failed(pump.exception())
            elif leaving.done():
                await self._leave(pump)
            else:
                sessions.result()  # Sessions end only by an error.
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._loader.close()

    # ---- sessions

    async def _sessions(self) -> None:
        """One session after the other, until coming back makes no sense."""
        reconnect = Reconnect(self._reconnect_s, time.monotonic())
        async with aiohttp.ClientSession() as http:
            while True:
                cause = await self._session(http, reconnect)
                if self._leaving.is_set():
                    return
                pause_s = reconnect.lost(time.monotonic(), random.uniform(0.5, 1.0))
                if pause_s is None:
                    raise PenstockError(
                        f"no manager at {self._link.url} for {self._reconnect_s:g} s ({cause}); "
                        "check the address given as --manager and that the run still lives"
                    )
                log.warning("%s; next attempt in %.1f s", cause, pause_s)
                await asyncio.sleep(pause_s)

    async def _session(self, http: aiohttp.ClientSession, reconnect: Reconnect) -> str:
        """From dialling to the loss of the connection; returns the cause of the loss."""
        link = self._link
        try:
            await link.dial(http)
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            return f"no connection to the manager at {link.url}: {words_of(error)}"
        try:
            welcome = await link.introduce(self._hello())
            self._heed(welcome)
            reconnect.welcomed(time.monotonic())
            return await first_to_end(self._receive(), self._heartbeats(welcome), self._load_wanted())
        except EngineError as error:
            await self._say_goodbye(f"the engine failed: {error}", engine_failed=True)
            raise
        except WireError as error:
            self.bad_frames += 1
            code = aiohttp.WSCloseCode.MESSAGE_TOO_BIG if isinstance(error, FrameTooLarge) else 1002
            await link.close(int(code), str(error))
            return f"the manager broke the protocol: {error}"
        except (OSError, aiohttp.ClientError) as error:
            return f"the connection to the manager broke: {words_of(error)}"
        finally:
            link.silence()
            self._wanted = None
            # First of all: what the engine draws from here on is drawn in vain, and closing may take its time.
            if leases := self._leases.forget_all():
                self._engine.stop(leases)
            self._loader.let_links_go()
            await link.close(int(aiohttp.WSCloseCode.GOING_AWAY), "")

    def _hello(self) -> AgentHello:
        info = self._engine.info
        return AgentHello(
            name=self._name,
            engine=info.kind,
            pid=os.getpid(),
            host=socket.gethostname(),
            max_running=info.max_running,
            max_context_tokens=info.max_context_tokens,
            device=info.device,
            reserved=self._reserved,
            start_s=self._start_s if self._engine.version < 0 else 0.0,
            process=self._process,
        )

    def _heed(self, welcome: Welcome) -> None:
        """Does what the manager asks of its agents."""
        self.instance = welcome.instance
        self.sessions += 1
        if isinstance(self._engine, FramesBySteps):
            self._engine.frame_steps = welcome.frame_steps
        if welcome.max_context_tokens and isinstance(self._engine, FitsContext):
            self._engine.fit_context(welcome.max_context_tokens)
        log.info("joined %s as %s", self._link.url, welcome.instance)
        if welcome.hold_off_s:
            log.warning("came and was lost too often: the manager gives no work for %.0f s", welcome.hold_off_s)

    async def _receive(self) -> str:
        while True:
            frame = await self._link.receive()
            if isinstance(frame, str):
                return frame
            await self._take(frame)

    async def _take(self, frame: FrameFromManager) -> None:
        if isinstance(frame, StartFrame):
            if self._leaving.is_set():
                return  # The goodbye that is on its way gives it back.
            started = self._leases.start(frame, self._engine.version, self._link.frame_limit)
            if started.sequences:
                self._engine.start(started.sequences)
            for handed_back in started.handed_back:
                await self._link.send(handed_back)
        elif isinstance(frame, StopFrame):
            self._engine.stop(self._leases.stop(frame))
            if frame.cause:
                self._note_taken_back(len(frame.leases) // 8, frame.cause)
        elif isinstance(frame, LoadWeights):
            if self._loading and self._wanted == frame:
                return
            self._wanted = frame
            self._wanted_changed.set()
            if self._pulling is not None:
                self._pulling.cancel()
        elif isinstance(frame, HandOver):
            await self._hand_over(frame)
        elif isinstance(frame, Drain):
            self.drain(frame.cause)
        else:
            raise WireError(f"a {type(frame).__name__} is not meant for an agent")

    async def _hand_over(self, frame: HandOver) -> None:
        """Everything drawn goes out, nothing runs on, and the manager hears when that is so."""
        log.info("handing over: %s", frame.cause[:CAUSE_CHARACTERS])
        if isinstance(self._engine, HandsOver):
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._engine.hand_over()
                    await self._settle()
            except TimeoutError:
                log.warning("the engine did not hand over within %g s; its last tokens will be drawn again", FLUSH_S)
        if leases := self._leases.forget_all():
            self._engine.stop(leases)
        await self._link.send(HandedOver())

    def _note_taken_back(self, sequences: int, cause: str) -> None:
        """The engine's fault, said on its own screen: the 1st, 2nd, 4th, 8th ... time."""
        self.taken_back += 1
        if self.taken_back & (self.taken_back - 1) == 0:
            log.warning(
                "the manager took back %d sequences: %s (%d times so far)", sequences, cause[:500], self.taken_back
            )

    # ---- the engine's side

    async def _pump(self) -> None:
        """Every delta of the engine becomes a frame, for as long as the agent lives: sessions come and go beside it."""
        try:
            async for delta in self._engine.deltas():
                self._deltas_taken += 1
                for frame in self._leases.frames(delta, self._link.frame_limit):
                    if not await self._link.send(frame):
                        # The session is over, and what is left of the delta belongs to nobody.
                        break
                self._deltas_sent += 1
        finally:
            self._pump_ended = True

    async def _heartbeats(self, welcome: Welcome) -> str:
        """Tells the manager that the engine lives, which is looked at each time and not assumed."""
        watch = StallWatch(self._stall_s, time.monotonic())
        while True:
            load, now = self._engine.load(), time.monotonic()
            if self._loading or self._deltas_taken != self._deltas_sent:
                watch.excuse(now)
            if silent_s := watch.stalled_for(load, now, len(self._leases)):
                raise EngineError(
                    f"the engine made no progress for {silent_s:.0f} s with {load.running} sequences running and "
                    f"{load.waiting} waiting, of {len(self._leases)} that it was given"
                )
            beat = Heartbeat(
                running=load.running,
                waiting=load.waiting,
                kv_tokens=load.kv_tokens,
                tokens_generated=load.tokens_generated,
                tokens_prefilled=load.tokens_prefilled,
                tokens_per_s=load.tokens_per_s,
            )
            if not await self._link.send(beat):
                return "a heartbeat could not be sent"
            await asyncio.sleep(welcome.heartbeat_s)

    async def _load_wanted(self) -> str:
        """Loads the version last asked for; a newer one ends the pull of an older one, but not its swap."""
        while True:
            await self._wanted_changed.wait()
            self._wanted_changed.clear()
            frame = self._wanted
            if frame is None:
                continue
            self._loading = True
            try:
                await self._load(frame)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._wanted is frame or (task is not None and task.cancelling()):
                    raise
                self.superseded_pulls += 1
                log.info("stopped pulling weight version %d: a newer one is wanted", frame.version)
            except SwapStuck:
                raise
            except PenstockError as error:
                log.error("weight version %d could not be loaded: %s", frame.version, error)
                await self._link.send(LoadFailed(version=frame.version, cause=str(error)[:CAUSE_CHARACTERS]))
            finally:
                self._loading = False

    async def _load(self, frame: LoadWeights) -> None:
        began = time.monotonic()
        self._loader.layout = Layout(tensor_parallel_size=self._engine.info.tensor_parallel)
        self._pulling = asyncio.create_task(self._loader.pull(frame.source, frame.version, self._load_deadline_s))
        try:
            staged = await self._pulling
        finally:
            self._pulling.cancel()
            self._pulling = None
        await self._swap_in(staged)
        info = self._engine.info
        check_vocabulary(staged.manifest, info.vocab_size)
        self._loader.serves(staged)
        load_s = time.monotonic() - began
        log.info("serves weight version %d after %.2f s (%s)", frame.version, load_s, came_by(staged))
        await self._link.send(
            VersionReady(
                version=frame.version,
                vocab_size=info.vocab_size,
                max_context_tokens=info.max_context_tokens,
                max_running=info.max_running,
                load_s=load_s,
                bytes_fetched=staged.bytes_fetched,
                way=came_by(staged)[:CAUSE_CHARACTERS],
            )
        )

    async def _swap_in(self, staged: StagedWeights) -> None:
        """A swap that has begun is left to end, even where the session that asked for it does not outlive it."""
        deadline_s = self._load_deadline_s + (self._start_s if self._engine.version < 0 else 0.0)
        try:
            async with asyncio.timeout(deadline_s):
                if self._swap is not None:
                    await asyncio.wait((self._swap,))
                self._swap = asyncio.create_task(self._engine.update_weights(staged), name="agent-swap")
                await asyncio.shield(self._swap)
        except TimeoutError:
            version = staged.manifest.version
            raise SwapStuck(f"the engine did not take weight version {version} within {deadline_s:g} s") from None

    # ---- leaving

    async def _leave(self, pump: asyncio.Task[None]) -> None:
        log.info("leaving: %s", self._leave_cause)
        if pump.done():
            return
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._engine.flush()
                await self._settle()
        except TimeoutError:
            log.warning("the engine was not flushed within %g s; its last tokens will be drawn again", FLUSH_S)
        await self._say_goodbye(self._leave_cause)

    async def _settle(self) -> None:
        """Waits until the pump has sent every delta that the engine brought out, for as long as there is a pump."""
        while not self._pump_ended:
            taken = self._deltas_taken
            await asyncio.sleep(SETTLE_S)
            if taken == self._deltas_taken == self._deltas_sent:
                return

    async def _engine_failed(self, error: BaseException | None) -> None:
        error = error or EngineError("the engine ended its tokens though nobody asked it to")
        await self._say_goodbye(f"the engine failed: {error}", engine_failed=True)
        raise error

    async def _say_goodbye(self, cause: str, engine_failed: bool = False) -> None:
        """The last frame of a session, and its close; nothing where there is no session."""
        if await self._link.send(Goodbye(cause=cause[:CAUSE_CHARACTERS], engine_failed=engine_failed)):
            await self._link.close(int(aiohttp.WSCloseCode.OK), cause)


async def first_to_end(*jobs: Coroutine[Any, Any, str]) -> str:
    """Runs all, returns the result (or raises the error) of the first to end, and cancels the others."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        failed = next((task for task in done if not task.cancelled() and task.exception()), None)
        return (failed or done.pop()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
