"""The trainer's side of the manager's socket: batches out, finished samples in.

Lives on one asyncio loop, whose tasks it belongs to; listeners are called on that loop and must not block it. Decides
nothing about samples. When the manager is lost every open batch is told so: nothing waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import traceback
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp
import msgspec

from penstock.errors import AuthError, DeadlineExceeded, ProtocolMismatch, RolloutError, WireError
from penstock.observe.events import Event, decode_event
from penstock.sample import Finish, Prompt, VersionSpan
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
    SubmitBatch,
    TrainerHello,
    VersionPublished,
    column,
    column_bytes,
    decode_from_manager,
    encode,
)
from penstock.wire.codec import PROTOCOL_HEADER

__all__ = ["FinishedSample", "Listener", "RolloutClient"]

log = logging.getLogger("penstock.rollout")

CONNECT_S = 15.0
SEND_S = 60.0
CLOSE_S = 2.0
MANAGER_SILENT_S = 60.0
"""The manager sends its status twice a second; one that is silent for so long is given up for dead."""


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """A sample that is finished, or failed with its cause; then it has no tokens."""

    prompt: int
    """Index of the prompt, as in `Prompt.index`."""
    replica: int
    token_ids: array[int]
    """i[length]"""
    logprobs: array[float]
    """f[length]"""
    version_spans: tuple[VersionSpan, ...]
    finish: Finish
    cause: str = ""


class Listener(Protocol):
    """Hears of one batch, on the client's loop. After `on_done` or `on_failed` it hears no more."""

    def on_samples(self, samples: list[FinishedSample]) -> None: ...

    def on_done(self, done: BatchDone) -> None: ...

    def on_failed(self, error: RolloutError) -> None: ...


class RolloutClient:
    """One connection to the manager at `url` (http://host:port). `on_event` and `on_status` are called on the loop."""

    def __init__(
        self,
        url: str,
        token: str,
        on_event: Callable[[Event], None],
        on_status: Callable[[FleetStatus], None],
        name: str = "trainer",
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._on_event = on_event
        self._on_status = on_status
        self._name = name
        self._max_frame_bytes = max_frame_bytes
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._listeners: dict[str, Listener] = {}
        self._send_lock = asyncio.Lock()
        self._lost: _Lost | None = None
        self._closing = False

    async def connect(self) -> None:
        """Raises AuthError, ProtocolMismatch, or RolloutError where the manager can't be reached or is taken."""
        headers = {"Authorization": f"Bearer {self._token}", PROTOCOL_HEADER: str(PROTOCOL)}
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CONNECT_S))
        try:
            async with asyncio.timeout(CONNECT_S):
                self._socket = await self._session.ws_connect(
                    f"{self._url}/trainer", headers=headers, max_msg_size=0, compress=0
                )
        except aiohttp.WSServerHandshakeError as error:
            await self._session.close()
            raise await self._refusal(error.status) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self._session.close()
            raise RolloutError(
                f"can't reach the manager at {self._url}: {error or type(error).__name__}; is it running?"
            ) from error
        await self._send(TrainerHello(name=self._name, pid=os.getpid()))
        self._reader = asyncio.create_task(self._read(), name="rollout client")

    async def publish(self, version: int, source: str) -> None:
        """Tells the manager that agents can pull weight version `version` from `source` (host:port)."""
        await self._send(VersionPublished(version=version, source=source))

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
        if batch in self._listeners:
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
        self._listeners[batch] = listener
        try:
            await self._send(frame)
        except BaseException:
            self._listeners.pop(batch, None)
            raise

    async def cancel(self, batch: str, cause: str) -> None:
        """Ends a batch; its listener hears no more of it."""
        if self._listeners.pop(batch, None) is not None:
            await self._send(CancelBatch(batch=batch, cause=cause))

    async def release(self, batch: str) -> None:
        """Lets the manager forget a batch that is done."""
        if batch in self._listeners:
            raise RolloutError(f"batch {batch!r} is still open; cancel it instead")
        await self._send(ReleaseBatch(batch=batch))

    async def close(self) -> None:
        """Ends the connection. Batches that are still open are told so."""
        self._closing = True
        if self._socket is not None:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(CLOSE_S):
                    await self._socket.close()
        if self._reader is not None:
            _, late = await asyncio.wait([self._reader], timeout=CLOSE_S)
            for task in late:
                task.cancel()
        if self._session is not None:
            await self._session.close()

    # ---- within

    async def _refusal(self, status: int) -> Exception:
        """What the manager says about it, which the WebSocket handshake does not carry."""
        if status == 401:
            return AuthError(f"the manager at {self._url} refuses the token; give the run's PENSTOCK_TOKEN")
        if status == 426:
            return ProtocolMismatch(
                f"the manager at {self._url} does not speak protocol {PROTOCOL}; install the same version of penstock"
            )
        if status == 409:
            return RolloutError(f"the manager at {self._url} has a trainer already; it serves one at a time")
        return RolloutError(f"the manager at {self._url} answers with HTTP status {status}")

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
        try:
            async with self._send_lock, asyncio.timeout(SEND_S):
                await socket.send_bytes(data)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the manager did not take a {type(frame).__name__} of {len(data)} bytes for {SEND_S:g} s"
            ) from error
        except (ConnectionError, aiohttp.ClientError) as error:
            raise RolloutError(f"the connection to the manager broke: {error or type(error).__name__}") from error

    async def _read(self) -> None:
        """Reads until the connection is of no more use. Whatever ends it is what open batches and later calls get."""
        manager = f"the manager at {self._url}"
        lost = _Lost(f"{manager} is lost: the reader was ended")
        try:
            lost = _Lost(f"{manager} is lost: {await self._read_frames()}")
        except WireError as error:
            lost = _Lost(f"{manager} is lost: it sent what is no frame: {error}", error)
        except TimeoutError as error:
            lost = _Lost(f"{manager} is lost: it was silent for {MANAGER_SILENT_S:g} s", error)
        except Exception as error:  # noqa: BLE001 - a listener's error is no loss of the manager, and is told as itself
            told = "".join(traceback.format_exception_only(error)).strip()
            lost = _Lost(f"what {manager} sent could not be taken in on this side: {told}", error)
        finally:
            self._give_up(_Lost(f"{manager} is lost: the client was closed") if self._closing else lost)

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
            listener = self._listeners.get(frame.batch)
            if listener is not None:
                listener.on_samples(_samples(frame))
        elif isinstance(frame, BatchDone):
            # It stays in place until it has heard: one that fails on this is told why its batch came to nothing.
            listener = self._listeners.get(frame.batch)
            if listener is not None:
                listener.on_done(frame)
                self._listeners.pop(frame.batch, None)
        elif isinstance(frame, BatchFailed):
            listener = self._listeners.pop(frame.batch, None)
            if listener is not None:
                listener.on_failed((DeadlineExceeded if frame.deadline else RolloutError)(frame.cause))
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
        listeners, self._listeners = self._listeners, {}
        for batch, listener in listeners.items():
            try:
                listener.on_failed(lost.error(f"batch {batch}: "))
            except Exception:
                # The others must hear of it all the same.
                log.exception("the listener of batch %s failed on being told that %s", batch, lost.what)


@dataclass(frozen=True, slots=True)
class _Lost:
    """Why the connection is of no more use: in words, and the error behind them where there is one."""

    what: str
    cause: Exception | None = None

    def error(self, prefix: str = "") -> RolloutError:
        """A fresh error each time, since one that is raised twice collects the traces of both."""
        error = RolloutError(prefix + self.what)
        error.__cause__ = self.cause
        return error


def _samples(frame: FinishedFrame) -> list[FinishedSample]:
    """Rows of a FinishedFrame. Raises WireError where its columns disagree."""
    prompts = column(frame.prompts, "I").tolist()
    rows = len(prompts)
    replicas = column(frame.replicas, "I", rows).tolist()
    finishes = column(frame.finishes, "B", rows).tolist()
    lengths = column(frame.lengths, "I", rows).tolist()
    total = sum(lengths)
    column(frame.token_ids, "i", total)
    column(frame.logprobs, "f", total)
    span_counts = column(frame.span_counts, "I", rows).tolist()
    span_versions = column(frame.span_versions, "I", sum(span_counts)).tolist()
    span_ends = column(frame.span_ends, "I", sum(span_counts)).tolist()
    if rows and max(finishes) >= len(Finish):
        raise WireError(f"a finish of {max(finishes)}; the last one known is {len(Finish) - 1}")
    samples = []
    begin = span = 0
    for row in range(rows):
        end = begin + 4 * lengths[row]
        spans, start = [], 0
        for k in range(span, span + span_counts[row]):
            spans.append(VersionSpan(span_versions[k], start, span_ends[k]))
            start = span_ends[k]
        if start != lengths[row]:
            raise WireError(f"version spans cover {start} of the {lengths[row]} tokens of row {row}")
        samples.append(
            FinishedSample(
                prompt=prompts[row],
                replica=replicas[row],
                token_ids=array("i", frame.token_ids[begin:end]),
                logprobs=array("f", frame.logprobs[begin:end]),
                version_spans=tuple(spans),
                finish=Finish(finishes[row]),
                cause=frame.causes.get(row, ""),
            )
        )
        begin, span = end, span + span_counts[row]
    return samples
