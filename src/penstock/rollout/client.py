"""The trainer's side of the manager's socket: batches out, finished samples in.

Lives on one asyncio loop, whose tasks it belongs to; listeners are called on that loop and must not block it. Decides
nothing about samples.

A manager that is lost is dialled again for `reconnect_s`. What it is then told is the state that it should be in, not
what was said before: the versions that may be needed, and each open batch with the samples of it that came. So calls
that the loss cut short need not be repeated, and no sample comes twice. Where it stays away, every open batch is told
so: nothing waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import ssl
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from penstock.errors import AuthError, DeadlineExceeded, ProtocolMismatch, RolloutError, WireError
from penstock.observe.events import Event, ManagerChanged, decode_event
from penstock.rollout.received import FinishedSample, Listener, OpenBatch, finished_samples
from penstock.sample import Prompt
from penstock.tls import HINT_TLS, hung_up, refusal_words
from penstock.wire import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    BatchDone,
    BatchFailed,
    CancelBatch,
    EventFrame,
    FinishedFrame,
    FleetStatus,
    FrameToManager,
    ReleaseBatch,
    Sampling,
    StepReport,
    SubmitBatch,
    TrainerHello,
    TrainerTurn,
    TurnGranted,
    VersionPublished,
    column_bytes,
    decode_from_manager,
    encode,
)
from penstock.wire.codec import PROTOCOL_HEADER, REFUSAL_HEADER

__all__ = ["FinishedSample", "Listener", "RolloutClient"]

log = logging.getLogger("penstock.rollout")

CONNECT_S = 15.0
SEND_S = 60.0
CLOSE_S = 2.0
DIAL_FIRST_S = 0.1
"""Pause before the second try to reach a manager that was lost; doubles up to DIAL_MOST_S."""
DIAL_MOST_S = 2.0
VERSIONS_TOLD = 2
"""Versions told again to a manager that is back, besides those that open batches need."""
MANAGER_SILENT_S = 60.0
"""The manager sends its status twice a second; one that is silent for so long is given up for dead."""


class RolloutClient:
    """The connection to the manager at `url` (http://host:port). `on_event` and `on_status` are called on the loop.

    `reconnect_s`: how long a manager that is lost is dialled again; 0: not at all. With `tls` the manager (https://) is
    verified as that says.
    """

    def __init__(
        self,
        url: str,
        token: str,
        on_event: Callable[[Event], None],
        on_status: Callable[[FleetStatus], None],
        name: str = "trainer",
        max_frame_bytes: int = MAX_FRAME_BYTES,
        reconnect_s: float = 0.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._on_event = on_event
        self._on_status = on_status
        self._name = name
        self._max_frame_bytes = max_frame_bytes
        self._reconnect_s = reconnect_s
        self._tls = tls
        self._id = secrets.token_hex(8)
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._open: dict[str, OpenBatch] = {}
        self._unreleased: set[str] = set()
        """Batches whose end has been heard."""
        self._published: dict[int, VersionPublished] = {}
        self._turn: TrainerTurn | None = None
        """Said last."""
        self._grant: asyncio.Future[float] | None = None
        self._settled = asyncio.Event()
        """The manager knows what it should, or is given up."""
        self._send_lock = asyncio.Lock()
        self._lost: _Lost | None = None
        self._closing = False
        self._ends = False
        """The manager is about to be ended by whoever started it."""

    async def connect(self) -> None:
        """Raises AuthError, ProtocolMismatch, or RolloutError where the manager can't be reached or is taken."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CONNECT_S))
        try:
            await self._dial()
        except BaseException:
            await self._session.close()
            raise
        self._settled.set()
        self._reader = asyncio.create_task(self._live(), name="rollout client")

    async def publish(self, version: int, source: str, digest: str = "") -> None:
        """Tells the manager that agents can pull weight version `version` from `source` (host:port).

        `digest`: of the weights' content; lets what was drawn with them outlive this trainer.
        """
        frame = VersionPublished(version=version, source=source, digest=digest)
        needed = {batch.frame.version for batch in self._open.values()}
        self._published.pop(version, None)
        self._published[version] = frame
        for old in list(self._published)[:-VERSIONS_TOLD]:
            if old not in needed:
                del self._published[old]
        await self._send(frame)

    async def submit(
        self,
        batch: str,
        version: int,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        run_seed: int,
        sampling: Sampling,
        deadline_s: float,
        listener: Listener,
    ) -> None:
        """Asks for `samples_per_prompt` samples of each prompt, drawn with weight version `version`."""
        if batch in self._open:
            raise RolloutError(f"batch {batch!r} is open already; give each batch a name of its own")
        frame = SubmitBatch(
            batch=batch,
            version=version,
            samples_per_prompt=samples_per_prompt,
            run_seed=run_seed,
            sampling=sampling,
            prompt_indices=column_bytes([prompt.index for prompt in prompts], "I"),
            prompt_ids=b"".join(column_bytes(prompt.token_ids, "i") for prompt in prompts),
            prompt_lengths=column_bytes([len(prompt.token_ids) for prompt in prompts], "I"),
            deadline_s=deadline_s,
        )
        # Before sending: the first samples may be back before the send returns.
        self._open[batch] = OpenBatch(frame, listener)
        try:
            await self._send(frame)
        except BaseException:
            self._open.pop(batch, None)
            raise

    async def cancel(self, batch: str, cause: str) -> None:
        """Ends a batch; its listener hears no more of it."""
        if self._open.pop(batch, None) is not None:
            await self._send(CancelBatch(batch=batch, cause=cause))

    async def release(self, batch: str) -> None:
        """Lets the manager forget a batch that is done."""
        if batch in self._open:
            raise RolloutError(f"batch {batch!r} is still open; cancel it instead")
        self._unreleased.discard(batch)
        await self._send(ReleaseBatch(batch=batch))

    async def report_step(self, step: int, step_s: float, train_s: float, trainer_wait_s: float) -> None:
        """Tells the manager how a step went, so that it can judge how many machines are worth having."""
        await self._send(StepReport(step=step, step_s=step_s, train_s=train_s, trainer_wait_s=trainer_wait_s))

    async def take_turn(self, turn: TrainerTurn) -> float:
        """Says where the trainer stands on its own devices; this side gives the number.

        With state "wants" it returns once they are the trainer's, with the seconds that the engines on them generated
        in this step; else 0.0 at once. Raises RolloutError where the manager is given up before.
        """
        number = self._turn.number + 1 if self._turn is not None else 1
        self._turn = msgspec.structs.replace(turn, number=number)
        if turn.state != "wants":
            await self._send(self._turn)
            return 0.0
        self._grant = asyncio.get_running_loop().create_future()
        await self._send(self._turn)
        return await self._grant

    def expect_end(self) -> None:
        """The manager is ended on purpose: once it goes it is not lost, and nobody dials it. From any thread."""
        self._ends = True

    async def close(self) -> None:
        """Ends the connection. Batches that are still open are told so."""
        self._closing = True
        if self._socket is not None:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(CLOSE_S):
                    await self._socket.close()
        if self._reader is not None:
            if not self._settled.is_set():
                # It is dialling, and nobody waits for that any more.
                self._reader.cancel()
            _, late = await asyncio.wait([self._reader], timeout=CLOSE_S)
            for task in late:
                task.cancel()
        if self._session is not None:
            await self._session.close()

    # ---- within

    def _refusal(self, error: aiohttp.WSServerHandshakeError) -> Exception:
        status = error.status
        told = error.headers.get(REFUSAL_HEADER, "") if error.headers else ""
        if status in (401, 403):
            return AuthError(
                f"the manager at {self._url} refuses this trainer (HTTP {status}): {told or 'it does not say why'}"
            )
        if status == 426:
            return ProtocolMismatch(
                f"the manager at {self._url} does not speak protocol {PROTOCOL}; install the same version of penstock"
            )
        if status == 409:
            return RolloutError(f"the manager at {self._url} has a trainer already; it serves one at a time")
        said = f": {told}" if told else ""
        return RolloutError(f"the manager at {self._url} answers with HTTP status {status}{said}")

    async def _send(self, frame: FrameToManager) -> None:
        data = encode(frame)
        if len(data) > self._max_frame_bytes:
            raise RolloutError(
                f"a {type(frame).__name__} of {len(data)} bytes is over manager.max_frame_mib "
                f"({self._max_frame_bytes} bytes); send fewer prompts in a step, or raise it"
            )
        if self._lost is not None:
            raise self._lost.error()
        socket = self._socket
        if socket is None or self._closing:
            raise RolloutError("the rollout client is not connected")
        if self._settled.is_set():
            try:
                await self._send_bytes(socket, frame, data)
                return
            except (ConnectionError, aiohttp.ClientError) as error:
                if not self._reconnect_s:
                    raise RolloutError(
                        f"the connection to the manager broke: {error or type(error).__name__}"
                    ) from error
                # The reader is about to find out, too. What is said to a manager that is back includes this.
                self._settled.clear()
        await self._until_settled(type(frame).__name__)
        if isinstance(frame, CancelBatch):
            # The manager may have been told of the batch before this was asked for.
            await self._send(frame)

    async def _send_bytes(self, socket: aiohttp.ClientWebSocketResponse, frame: FrameToManager, data: bytes) -> None:
        try:
            async with self._send_lock, asyncio.timeout(SEND_S):
                await socket.send_bytes(data)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the manager did not take a {type(frame).__name__} of {len(data)} bytes for {SEND_S:g} s"
            ) from error

    async def _until_settled(self, what: str) -> None:
        """Waits for a manager that is dialled again; it is then told all that matters."""
        try:
            async with asyncio.timeout(self._reconnect_s + CONNECT_S):
                await self._settled.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the manager at {self._url} was not back within {self._reconnect_s + CONNECT_S:g} s for a {what}"
            ) from error
        if self._lost is not None:
            raise self._lost.error()

    async def _dial(self) -> None:
        """Connects and says hello. Raises as `connect` does."""
        if self._session is None:
            raise RolloutError("the rollout client is not connected")
        headers = {"Authorization": f"Bearer {self._token}", PROTOCOL_HEADER: str(PROTOCOL)}
        try:
            async with asyncio.timeout(CONNECT_S):
                self._socket = await self._session.ws_connect(
                    f"{self._url}/trainer", headers=headers, ssl=self._tls or True, max_msg_size=0, compress=0
                )
                hello = TrainerHello(
                    name=self._name, pid=os.getpid(), session=self._id, open_batches=(*self._open, *self._unreleased)
                )
                await self._socket.send_bytes(encode(hello))
        except aiohttp.WSServerHandshakeError as error:
            raise self._refusal(error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if words := refusal_words(error):
                raise AuthError(f"no TLS connection to the manager at {self._url}: {words}") from error
            hint = HINT_TLS if hung_up(error) and self._url.startswith("http:") else "is it running?"
            raise RolloutError(
                f"can't reach the manager at {self._url}: {str(error) or type(error).__name__}; {hint}"
            ) from error

    async def _live(self) -> None:
        """Reads until the manager is given up. Whatever ends it is what open batches and later calls get."""
        manager = f"the manager at {self._url}"
        lost = _Lost(f"{manager} is lost: the reader was ended")
        try:
            while True:
                lost = await self._read(manager)
                if lost.final or self._closing or self._ends or not self._reconnect_s:
                    break
                self._settled.clear()
                given_up = await self._dial_again(lost)
                if given_up is not None:
                    lost = given_up
                    break
                self._settled.set()
        finally:
            self._give_up(_Lost(f"{manager} is lost: the client was closed") if self._closing else lost)

    async def _dial_again(self, lost: _Lost) -> _Lost | None:
        """None once the manager is back and knows what it should; else why it is given up."""
        began, pause_s = time.monotonic(), DIAL_FIRST_S
        try:
            self._on_event(ManagerChanged(ts=time.time(), state="lost", cause=lost.what))
            while True:
                try:
                    await self._dial()
                    await self._restate()
                    break
                except (AuthError, ProtocolMismatch) as error:
                    return _Lost(f"{lost.what}; when it was back it refused this trainer: {error}", error)
                except (RolloutError, ConnectionError, aiohttp.ClientError) as error:
                    if time.monotonic() - began + pause_s > self._reconnect_s:
                        return _Lost(f"{lost.what}; it was not back within {self._reconnect_s:g} s: {error}", error)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, DIAL_MOST_S)
            wait_s = time.monotonic() - began
            self._on_event(ManagerChanged(ts=time.time(), state="back", cause=lost.what, wait_s=wait_s))
        except Exception as error:  # noqa: BLE001 - as in `_read`
            return _of_this_side(f"the manager at {self._url}", error)
        return None

    async def _restate(self) -> None:
        """Says all that a manager which is back should know. What is published or submitted meanwhile is in it."""
        socket = self._socket
        if socket is None:
            raise RolloutError("the rollout client is not connected")
        versions: dict[int, VersionPublished] = {}
        batches: set[str] = set()
        turn: TrainerTurn | None = None
        while True:
            # Versions in the order in which they were published, and before the batches that need them.
            frame: VersionPublished | SubmitBatch | TrainerTurn | None
            frame = next((told for told in self._published.values() if versions.get(told.version) is not told), None)
            if frame is not None:
                versions[frame.version] = frame
            else:
                name = next((name for name in self._open if name not in batches), None)
                if name is not None:
                    batches.add(name)
                    frame = self._open[name].again()
                elif self._turn is not turn and self._turn is not None:
                    turn = frame = self._turn
                else:
                    return
            await self._send_bytes(socket, frame, encode(frame))

    async def _read(self, manager: str) -> _Lost:
        """Reads until the connection is of no more use; returns why."""
        try:
            return _Lost(f"{manager} is lost: {await self._read_frames()}", final=False)
        except WireError as error:
            return _Lost(f"{manager} is lost: it sent what is no frame: {error}", error)
        except TimeoutError as error:
            return _Lost(f"{manager} is lost: it was silent for {MANAGER_SILENT_S:g} s", error, final=False)
        except Exception as error:  # noqa: BLE001 - a listener's error is no loss of the manager, and is told as itself
            return _of_this_side(manager, error)

    async def _read_frames(self) -> str:
        socket = self._socket
        if socket is None:
            raise RolloutError("the rollout client is not connected")
        while True:
            message = await socket.receive(timeout=MANAGER_SILENT_S)
            if message.type is aiohttp.WSMsgType.BINARY:
                self._take(message.data)
            elif message.type is aiohttp.WSMsgType.TEXT:
                raise WireError("text, where frames are binary messages")
            elif message.type is aiohttp.WSMsgType.ERROR:
                return f"the connection broke: {socket.exception()}"
            else:
                reason = f" ({message.extra})" if message.extra else ""
                return f"it closed the connection, code {socket.close_code}{reason}"

    def _take(self, data: bytes) -> None:
        # The trainer trusts its manager with size: what comes in is what it asked for.
        frame = decode_from_manager(data, limit_bytes=2**31)
        if isinstance(frame, FinishedFrame):
            batch = self._open.get(frame.batch)
            if batch is not None and (fresh := batch.fresh(finished_samples(frame))):
                batch.listener.on_samples(fresh)
        elif isinstance(frame, BatchDone):
            # It stays in place until it has heard: one that fails on this is told why its batch came to nothing.
            batch = self._open.get(frame.batch)
            if batch is not None:
                batch.listener.on_done(frame)
                self._open.pop(frame.batch, None)
                self._unreleased.add(frame.batch)
        elif isinstance(frame, BatchFailed):
            batch = self._open.pop(frame.batch, None)
            if batch is not None:
                batch.listener.on_failed((DeadlineExceeded if frame.deadline else RolloutError)(frame.cause))
        elif isinstance(frame, TurnGranted):
            if self._turn is not None and frame.number == self._turn.number:
                self._turn.granted = True
                if self._grant is not None and not self._grant.done():
                    self._grant.set_result(frame.window_s)
        elif isinstance(frame, FleetStatus):
            self._on_status(frame)
        elif isinstance(frame, EventFrame):
            for event in frame.events:
                try:
                    self._on_event(decode_event(event))
                except msgspec.DecodeError as error:
                    raise WireError(f"an event of {len(event)} bytes can't be read: {error}") from error
        else:
            raise WireError(f"a {type(frame).__name__} is a frame for an agent, and came to the trainer")

    def _give_up(self, lost: _Lost) -> None:
        self._lost = lost
        self._settled.set()
        if self._grant is not None and not self._grant.done():
            self._grant.set_exception(lost.error())
        given_up, self._open = self._open, {}
        for batch, open_batch in given_up.items():
            try:
                open_batch.listener.on_failed(lost.error(f"batch {batch}: "))
            except Exception:
                # The others must hear of it all the same.
                log.exception("the listener of batch %s failed on being told that %s", batch, lost.what)


@dataclass(frozen=True, slots=True)
class _Lost:
    """Why the connection is of no more use: in words, and the error behind them where there is one."""

    what: str
    cause: Exception | None = None
    final: bool = True
    """Dialling again is no help."""

    def error(self, prefix: str = "") -> RolloutError:
        """A fresh error each time, since one that is raised twice collects the traces of both."""
        error = RolloutError(prefix + self.what)
        error.__cause__ = self.cause
        return error


def _of_this_side(manager: str, error: Exception) -> _Lost:
    told = "".join(traceback.format_exception_only(error)).strip()
    return _Lost(f"what {manager} sent could not be taken in on this side: {told}", error)
