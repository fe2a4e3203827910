"""The compute pool: many rate-limited services as one.

What callers use, and its life; what happens on the loop is `running`'s, and every decision is `schedule`'s. One pool
serves callers on any event loop and any thread: the first loop that uses it is its home, calls from elsewhere are
carried over; when the home loop is closed, the next caller's becomes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from penstock.errors import ConfigError, PoolError
from penstock.reward.asking import check_options, estimated_tokens_of, own_options
from penstock.reward.cache import AnswerCache, SingleFlight, content_key
from penstock.reward.elsewhere import carried, carried_stream
from penstock.reward.failures import DeadlinePassed, PoolClosed
from penstock.reward.jobs import Job
from penstock.reward.limits import Endpoint, PoolConfig, PoolOptions, load_pool, read_key
from penstock.reward.report import AttemptEnded, EndpointRow, Watcher, rows_of
from penstock.reward.running import Call, Classify, Runner
from penstock.reward.schedule import Scheduler
from penstock.reward.transport import HttpTransport, Reply, Request, Transport, lines_of

__all__ = ["ComputePool", "open_pools"]

_T = TypeVar("_T")
CLOSE_S = 60.0
"""Longest wait, beyond the grace, for a pool that is closed from another loop than its own."""
STREAM_AHEAD = 64
"""Pieces of a streamed body that may wait for the reader before the provider's are left in the socket."""


_OPEN: weakref.WeakSet[ComputePool] = weakref.WeakSet()


def open_pools() -> list[ComputePool]:
    """The pools of this process that are not closed, in no order."""
    return list(_OPEN)


class ComputePool:
    """Many rate-limited services as one. Safe to share between tasks, event loops and threads.

    `transports` maps an endpoint's url (such as `local:sandbox`) to what reaches it; others go over HTTP. `on_event` is
    called with an `AttemptEnded` for each attempt, on the pool's loop; it must be quick. `classify(outcome, reply)`
    says what an attempt's end means: a `Kind`, or None to leave it as it is. With `single_flight`, equal requests in
    flight are sent once (wrong for sampled answers that are meant to differ, so off unless asked for); with a `cache`,
    answers are kept on disk, too. `watchers` are told of jobs and attempts (`tracing.Tracing` is one).
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        options: PoolOptions | None = None,
        transports: Mapping[str, Transport] | None = None,
        on_event: Callable[[AttemptEnded], None] | None = None,
        classify: Classify | None = None,
        http: Transport | None = None,
        single_flight: bool = False,
        cache: AnswerCache | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        declared = list(endpoints)
        if not declared:
            raise ConfigError("a pool needs at least one endpoint")
        self._transports = dict(transports or {})
        self._http: Transport = http if http is not None else HttpTransport()
        self._check(declared)
        self._scheduler = Scheduler(declared, options or PoolOptions())
        self._runner = Runner(self._scheduler, self._transport_of, on_event, classify, watchers)
        self._watched = bool(watchers)
        self._flights = SingleFlight() if single_flight or cache is not None else None
        self._cache = cache
        self._loop: asyncio.AbstractEventLoop | None = None
        self._binding = threading.Lock()
        _OPEN.add(self)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], **kwargs: Any) -> ComputePool:
        """A pool as declared in a file; see `limits.load_pool`."""
        config = load_pool(path)
        return cls(config.endpoints, config.pool, **kwargs)

    def _transport_of(self, url: str) -> Transport:
        return self._transports.get(url, self._http)

    def _check(self, endpoints: Sequence[Endpoint]) -> None:
        for endpoint in endpoints:
            if endpoint.url.startswith("local:") and endpoint.url not in self._transports:
                raise ConfigError(f"no transport is given for '{endpoint.url}'; known: {sorted(self._transports)}")
        labels = [endpoint.label for endpoint in endpoints]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ConfigError(f"two endpoints are called '{twice[0]}'; give one of them another name")

    # What callers use

    async def chat(self, *, model: str, messages: Sequence[Mapping[str, Any]], **params: Any) -> Any:
        """A chat completion: the whole answer as a dict, every field kept. See `request` for the pool's own options."""
        own = own_options(params)
        return (await self.request("/chat/completions", {"model": model, "messages": messages, **params}, **own)).value

    async def completions(self, *, model: str, prompt: Any, **params: Any) -> Any:
        own = own_options(params)
        return (await self.request("/completions", {"model": model, "prompt": prompt, **params}, **own)).value

    async def embeddings(self, *, model: str, input: Any, **params: Any) -> Any:
        own = own_options(params)
        return (await self.request("/embeddings", {"model": model, "input": input, **params}, **own)).value

    async def classify(self, *, model: str, input: Any, **params: Any) -> Any:
        own = own_options(params)
        return (await self.request("/classify", {"model": model, "input": input, **params}, **own)).value

    async def score(self, *, model: str, text_1: Any, text_2: Any, **params: Any) -> Any:
        own = own_options(params)
        return (
            await self.request("/score", {"model": model, "text_1": text_1, "text_2": text_2, **params}, **own)
        ).value

    async def rerank(self, *, model: str, query: str, documents: Sequence[str], **params: Any) -> Any:
        own = own_options(params)
        return (
            await self.request("/rerank", {"model": model, "query": query, "documents": documents, **params}, **own)
        ).value

    async def request(
        self,
        path: str,
        body: dict[str, Any],
        *,
        priority: float = 0.0,
        deadline_s: float | None = None,
        estimated_tokens: float | None = None,
        attempts: int | None = None,
        hedge_after_s: float | None = None,
        encoded: bytes = b"",
    ) -> Reply:
        """Sends one JSON request by way of the pool, wherever it is best answered.

        `encoded` is `body` as JSON, where the caller has it already: it then goes out byte for byte.

        Raises:
            PoolError: there is no answer; its kind (`penstock.reward.failures`) says why.
        """
        if body.get("stream"):
            raise ConfigError("'stream' is set: use ComputePool.stream, which yields the pieces")
        home, request = self._loop, Request(path, body, encoded=encoded)
        if home is None or home.is_closed():
            home = self._bind()
        if home is asyncio.get_running_loop() and self._flights is None:
            call = Call(request)
            job = self._submit(call, priority, deadline_s, estimated_tokens, attempts, hedge_after_s)
            return await self._runner.answer(call, job)
        ask = self._request if self._flights is None else self._once

        def work(left_s: float) -> Coroutine[Any, Any, Reply]:
            within_s = None if deadline_s is None else left_s
            return ask(request, priority, within_s, estimated_tokens, attempts, hedge_after_s)

        return await self._at_home(work, self._scheduler.options.timeout_s if deadline_s is None else deadline_s)

    async def stream(
        self,
        path: str,
        body: dict[str, Any],
        *,
        priority: float = 0.0,
        deadline_s: float | None = None,
        estimated_tokens: float | None = None,
        attempts: int | None = None,
    ) -> AsyncIterator[Any]:
        """Yields the JSON of each server-sent event of a streamed answer.

        Retried while nothing has come; raises `JobFailed` when it breaks off later. Leaving it cancels the request.
        """
        pieces = self.stream_bytes(
            path,
            {**body, "stream": True},
            priority=priority,
            deadline_s=deadline_s,
            estimated_tokens=estimated_tokens,
            attempts=attempts,
        )
        async with contextlib.aclosing(pieces):
            async for data in lines_of(pieces):
                yield msgspec.json.decode(data)

    async def stream_bytes(
        self,
        path: str,
        body: dict[str, Any],
        *,
        priority: float = 0.0,
        deadline_s: float | None = None,
        estimated_tokens: float | None = None,
        attempts: int | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """The pieces of a streamed answer as they come."""
        loop = self._bind()
        if loop is not asyncio.get_running_loop():
            how: dict[str, Any] = {"priority": priority, "deadline_s": deadline_s}
            how |= {"estimated_tokens": estimated_tokens, "attempts": attempts}
            async with contextlib.aclosing(
                carried_stream(lambda: self.stream_bytes(path, body, **how), loop)
            ) as carried_pieces:
                async for piece in carried_pieces:
                    yield piece
            return
        pieces: asyncio.Queue[bytes] = asyncio.Queue(STREAM_AHEAD)
        call = Call(Request(path, body, stream=True), pieces)
        ended = call.waiter = loop.create_future()
        job = self._submit(call, priority, deadline_s, estimated_tokens, attempts, None)
        try:
            while True:
                following = asyncio.ensure_future(pieces.get())
                await asyncio.wait((following, ended), return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    break
                yield following.result()
            while not pieces.empty():
                yield pieces.get_nowait()
            if call.error is not None:
                raise call.error
        finally:
            self._runner.cancel(job)

    async def _request(
        self,
        request: Request,
        priority: float,
        deadline_s: float | None,
        tokens: float | None,
        attempts: int | None,
        hedge_after_s: float | None,
    ) -> Reply:
        """`request` on the pool's own loop."""
        call = Call(request)
        job = self._submit(call, priority, deadline_s, tokens, attempts, hedge_after_s)
        return await self._runner.answer(call, job)

    async def _once(self, request: Request, priority: float, deadline_s: float | None, *options: Any) -> Reply:
        """One request, unless an equal one is in flight or its answer is in the cache."""
        assert self._flights is not None
        try:
            key = content_key(request.path, request.body)
        except TypeError as error:
            raise PoolError(f"the request can't be written as JSON: {error}") from None
        if self._cache is not None and (body := await asyncio.to_thread(self._cache.get, key)) is not None:
            return Reply(msgspec.json.decode(body), body, endpoint="cache")

        async def send() -> Reply:
            reply = await self._request(request, priority, deadline_s, *options)
            if self._cache is not None and reply.body:
                await asyncio.to_thread(self._cache.keep, key, reply.body)
            return reply

        wait_s = self._scheduler.options.timeout_s if deadline_s is None else deadline_s
        ends_at = (loop := asyncio.get_running_loop()).time() + wait_s
        while True:
            shared = key in self._flights
            try:
                async with asyncio.timeout_at(ends_at if shared and ends_at < math.inf else None):
                    reply: Reply = await self._flights.run(key, send)
                return reply
            except TimeoutError:
                raise DeadlinePassed(f"no answer after {wait_s:.3g} s (an equal request is in flight)") from None
            except DeadlinePassed:
                # Whoever sent it had less time than this caller, who sends it again with what is left of its own.
                if not shared or loop.time() >= ends_at:
                    raise
                deadline_s = None if deadline_s is None else ends_at - loop.time()

    # How they are carried out

    def _bind(self) -> asyncio.AbstractEventLoop:
        """The pool's home loop; the running one if there is none yet or the old one is closed."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            return loop
        with self._binding:
            if self._loop is None or self._loop.is_closed():
                if self._loop is not None:
                    self._runner.abandon()
                self._loop = self._runner.loop = asyncio.get_running_loop()
        return self._loop

    async def _at_home(self, work: Callable[[float], Coroutine[Any, Any, _T]], wait_s: float) -> _T:
        """Carries work over to the pool's loop; where that one ends under it, the work is begun again on the next.

        `work` is told how many seconds are left.

        Raises:
            DeadlinePassed: the pool's loop has been standing still, though not closed, until the time was up.
        """
        here = asyncio.get_running_loop()
        ends_at = here.time() + wait_s
        while True:
            home, left_s = self._bind(), ends_at - here.time()
            if home is here:
                return await work(left_s)
            coroutine = work(left_s)
            try:
                future = asyncio.run_coroutine_threadsafe(coroutine, home)
            except RuntimeError:  # closed since we looked
                coroutine.close()
                continue
            if await carried(future, home, ends_at):
                return future.result()

    def _submit(
        self,
        call: Call,
        priority: float,
        deadline_s: float | None,
        tokens: float | None,
        attempts: int | None,
        hedge_after_s: float | None,
    ) -> Job:
        assert self._loop is not None
        if (
            deadline_s is not None
            or priority
            or attempts is not None
            or hedge_after_s is not None
            or tokens is not None
        ):
            check_options(priority, deadline_s, attempts, hedge_after_s, tokens)
        now = self._loop.time()
        body = call.request.body
        if tokens is None:
            tokens = estimated_tokens_of(call.request)
        wait_s = self._scheduler.options.timeout_s if deadline_s is None else deadline_s
        job = self._scheduler.submit(
            call,
            now,
            model=str(body.get("model", "")),
            tokens=tokens,
            priority=priority,
            deadline=now + wait_s,
            attempts=attempts,
            hedge_after_s=math.inf if call.pieces is not None else hedge_after_s,
            patient=deadline_s is None,
        )
        if self._watched:
            self._runner.queued(job)
        self._runner.pump()
        return job

    # Its life

    async def __aenter__(self) -> ComputePool:
        self._bind()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace_s: float = 0.0) -> None:
        """Takes no more jobs, fails waiting ones with `PoolClosed`, gives running ones `grace_s`, then cancels them."""
        _OPEN.discard(self)
        home = self._loop
        if home is None:
            self._scheduler.close()
        elif home is asyncio.get_running_loop() or home.is_running():
            await self._at_home(lambda _: self._close(grace_s), grace_s + CLOSE_S)
        else:  # closed, or standing still: nothing can be waited for there
            self._scheduler.close()
            self._runner.abandon()
            for transport in (self._http, *self._transports.values()):
                await transport.close()

    async def _close(self, grace_s: float) -> None:
        idle = self._runner.idle = asyncio.Event()
        self._scheduler.close()
        self._runner.pump()
        if self._scheduler.running:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await idle.wait()
        if self._scheduler.running:
            self._runner.give_up(PoolClosed("the pool was shut down before the job was answered"))
            idle.clear()
            if self._scheduler.running:  # until those that were stopped have let go of their connections
                await idle.wait()
        self._runner.rest()
        for transport in (self._http, *self._transports.values()):
            await transport.close()

    def reload(self, source: str | os.PathLike[str] | PoolConfig) -> None:
        """Takes over another declaration, all or nothing, without losing a job; call it on the pool's loop.

        Endpoints of the same name keep what they learned and have in flight; those left out finish their work.

        Raises:
            ConfigError: the declaration is wrong, or a key that it names is missing; the pool goes on as it was.
        """
        config = source if isinstance(source, PoolConfig) else load_pool(source)
        self._check(config.endpoints)
        for endpoint in config.endpoints:
            read_key(endpoint)
        self._scheduler.redeclare(config.endpoints, config.pool, self._loop.time() if self._loop else 0.0)
        if isinstance(self._http, HttpTransport):
            self._http.forget_headers()
        if self._loop is not None:
            self._runner.pump()

    def snapshot(self) -> list[EndpointRow]:
        """One row for each endpoint: in flight, rate against limit, 429s, latency, spend, health."""
        return rows_of(self._scheduler, self._loop.time() if self._loop is not None else 0.0)

    @property
    def endpoints(self) -> list[Endpoint]:
        """What is declared now."""
        return [place.endpoint for place in self._scheduler.places if not place.retired]

    def check_keys(self) -> None:
        """Reads every declared key once, so that a missing one is found before the first job needs it.

        Raises:
            ConfigError: names the variable or file.
        """
        for endpoint in self.endpoints:
            read_key(endpoint)

    @property
    def waiting(self) -> int:
        """Jobs queued."""
        return self._scheduler.waiting

    @property
    def running(self) -> int:
        """Attempts in flight."""
        return self._scheduler.running

    @property
    def spent(self) -> float:
        """Money, in the endpoints' currency."""
        return self._scheduler.spent
