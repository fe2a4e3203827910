"""The pool as an OpenAI-compatible service on localhost: all processes of a run, in any language, share its limits.

Decides how HTTP becomes a job and how a job's end becomes HTTP. All fields of a request go out as they came in, an
answer comes back byte for byte. `x-penstock-priority` and `x-penstock-deadline-s` set what the API has no field for. A
caller that hangs up cancels its job. Refuses to know endpoints and limits (`pool`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import math
import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from penstock.errors import ConfigError, PoolError, PortInUse
from penstock.reward.failures import (
    BudgetSpent,
    DeadlinePassed,
    JobFailed,
    JobTooLarge,
    NoEndpoint,
    PoolClosed,
    QueueFull,
)
from penstock.reward.pool import ComputePool
from penstock.reward.report import prometheus_text

__all__ = ["Gateway"]

API_PATHS = (
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/classify",
    "/score",
    "/rerank",
    "/pooling",
    "/responses",
)
LARGEST_BODY = 64 * 2**20
LOOPBACK = ("127.0.0.1", "::1", "localhost")

_OBJECT = msgspec.json.Decoder(dict[str, Any])
_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_STATUS: tuple[tuple[type[PoolError], int], ...] = (
    (NoEndpoint, 404),
    (JobTooLarge, 413),
    (QueueFull, 429),
    (BudgetSpent, 402),
    (DeadlinePassed, 504),
    (PoolClosed, 503),
)


class Gateway:
    """Serves one pool. With a `token`, callers have to send it as their API key; off the loopback one is required."""

    def __init__(self, pool: ComputePool, host: str = "127.0.0.1", port: int = 0, token: str = "") -> None:
        if host not in LOOPBACK and not token:
            raise ConfigError(f"the gateway listens on {host}, where others may reach it: give it a token")
        self.pool = pool
        self.host = host
        self.port = port
        self.requests = 0
        self._token = token
        self._runner: web.ServerRunner | None = None
        self._ways: dict[str, tuple[str, _Handler]] = {
            "/v1/models": ("GET", self._models),
            "/healthz": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/pool": ("GET", self._rows),
        }
        for path in API_PATHS:
            self._ways[path] = self._ways["/v1" + path] = ("POST", self._serve)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    async def start(self) -> Gateway:
        """Listens; `port` 0 takes a free one and says which.

        Raises:
            PortInUse: something else listens there.
            ConfigError: there is no such address here, or it may not be listened on.
        """
        loop = asyncio.get_running_loop()

        def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=LARGEST_BODY)

        # The paths are few and fixed: aiohttp's server without its application and router answers sooner.
        server = web.Server(
            self._answer, request_factory=request, handler_cancellation=True, access_log=None, keepalive_timeout=300
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, backlog=2048)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            self._runner = None
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(f"{self.host}:{self.port} is in use: a gateway may run already") from None
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise ConfigError(f"the gateway can't listen on {self.host}:{self.port}: {why}") from None
        self.port = self._runner.addresses[0][1]
        return self

    async def shut_door(self) -> None:
        """Takes no more callers. Those that are in stay: once their pool is closed, each is told how its job ended."""
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()

    async def stop(self) -> None:
        """Takes no more requests; those in flight get a second to end, then they are cancelled."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Gateway:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        way = self._ways.get(request.path)
        if way is None:
            return _error(404, f"nothing is served at {request.path}; the API is at /v1", "not_found")
        method, handler = way
        if request.method != method and (method, request.method) != ("GET", "HEAD"):
            refused = _error(405, f"{request.path} takes {method}, not {request.method}", "method_not_allowed")
            refused.headers["Allow"] = method
            return refused
        return await handler(request)

    def _refused(self, request: web.BaseRequest) -> web.Response | None:
        if self._token:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return _error(401, "the gateway's token is missing or wrong: send it as the API key", "wrong_token")
        return None

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests += 1
        if (refused := self._refused(request)) is not None:
            return refused
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the request is larger than {LARGEST_BODY} bytes", "too_large")
        try:
            body = _OBJECT.decode(raw)
            priority = float(request.headers.get("x-penstock-priority", "0"))
            deadline = request.headers.get("x-penstock-deadline-s")
            deadline_s = float(deadline) if deadline is not None else None
            if not math.isfinite(priority) or not (deadline_s is None or deadline_s > 0):
                raise ValueError("x-penstock-priority has to be a finite number, x-penstock-deadline-s one above 0")
        except (msgspec.DecodeError, ValueError) as error:
            return _error(400, f"the request can't be understood: {error}", "bad_request")
        path = request.path.removeprefix("/v1")
        if body.get("stream"):
            return await self._stream(request, path, body, priority, deadline_s)
        try:
            reply = await self.pool.request(path, body, priority=priority, deadline_s=deadline_s, encoded=raw)
        except PoolError as error:
            return _failed(error)
        content = reply.body or msgspec.json.encode(reply.value)
        return web.Response(
            body=content, headers={"Content-Type": "application/json", "x-penstock-endpoint": reply.endpoint}
        )

    async def _stream(
        self, request: web.BaseRequest, path: str, body: dict[str, Any], priority: float, deadline_s: float | None
    ) -> web.StreamResponse:
        """Hands a streamed answer on as it comes. An error before the first piece has a status; a later one is data."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        pieces = self.pool.stream_bytes(path, body, priority=priority, deadline_s=deadline_s)
        async with contextlib.aclosing(pieces):
            try:
                async for piece in pieces:
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(piece)
            except PoolError as error:
                if not response.prepared:
                    return _failed(error)
                await response.write(b"data: " + _said(str(error), type(error).__name__) + b"\n\n")
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof()
        return response

    async def _models(self, request: web.BaseRequest) -> web.Response:
        names = sorted({pattern for endpoint in self.pool.endpoints for pattern in endpoint.models})
        data = [{"id": name, "object": "model", "owned_by": "penstock"} for name in names]
        return _json({"object": "list", "data": data})

    async def _health(self, request: web.BaseRequest) -> web.Response:
        rows = self.pool.snapshot()
        well = any(row.health == "closed" for row in rows)
        return _json({"ok": well, "waiting": self.pool.waiting, "running": self.pool.running}, 200 if well else 503)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        refused = self._refused(request)
        return refused or web.Response(text=prometheus_text(self.pool.snapshot(), self.pool.waiting))

    async def _rows(self, request: web.BaseRequest) -> web.Response:
        return self._refused(request) or _json(self.pool.snapshot())


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, headers={"Content-Type": "application/json"})


def _said(message: str, kind: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": kind}})


def _error(status: int, message: str, kind: str) -> web.Response:
    return web.Response(body=_said(message, kind), status=status, headers={"Content-Type": "application/json"})


def _failed(error: PoolError) -> web.Response:
    """A job's failure as the API's own kind of answer; a provider's final status is passed on, all else is a 502."""
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return _error(status, str(error), kind.__name__)
    status = error.status if isinstance(error, JobFailed) and 400 <= error.status < 500 else 502
    return _error(status, str(error), type(error).__name__)
