"""Where the network begins: one request to one endpoint in, one reply or one named failure out.

`Transport` is the seam: `HttpTransport` is aiohttp (one session for the pool's life, connections kept alive and reused,
TLS verified, time-outs for connecting apart from those for answering), `FunctionTransport` is a Python function, and a
test can be a third. Decides how bytes, exceptions and error bodies become an `Outcome`; refuses to know limits, retries
or other endpoints. Keys are added here, last of all, and appear in no message.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import ssl
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec
from multidict import CIMultiDict
from yarl import URL

from penstock.reward.expiry import Expiry
from penstock.reward.headers import retry_after_s, told_limits
from penstock.reward.helpers import HELPERS
from penstock.reward.limits import Endpoint, read_key
from penstock.reward.retry import DONE, Kind, Outcome, kind_of_error, kind_of_status

__all__ = ["FunctionTransport", "HttpTransport", "Reply", "Request", "Transport"]

STREAM_TAIL = 8192
"""Bytes of a stream's end in which its usage is looked for."""
BODY_SHOWN = 500
"""Characters of an error's body that are kept."""
LET_GO_S = 1.0
"""Longest wait for another thread's loop to close what nobody has closed."""
ROOT_PATHS = ("/classify", "/score", "/rerank", "/pooling")
"""Served beside `/v1`, not below it, by vLLM and SGLang."""


@dataclass(slots=True)
class Request:
    """What is asked. `body` is the JSON object; `model` in it is renamed for endpoints that know it by another name."""

    path: str
    body: dict[str, Any]
    stream: bool = False
    encoded: bytes = b""
    """`body` as JSON, made once for all endpoints that don't rename the model."""

    def payload(self, endpoint: Endpoint) -> bytes:
        """The JSON to send to an endpoint."""
        name = endpoint.rename.get(self.body.get("model", "")) if endpoint.rename else None
        if name is not None:
            return msgspec.json.encode({**self.body, "model": name})
        if not self.encoded:
            self.encoded = msgspec.json.encode(self.body)
        return self.encoded


@dataclass(slots=True)
class Reply:
    """What was answered: `value` is the whole JSON, nothing left out; `body` its bytes."""

    value: Any
    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    endpoint: str = ""


class Transport(Protocol):
    """One way to reach endpoints. Raises nothing but CancelledError: what goes wrong is in the `Outcome`."""

    async def send(
        self, endpoint: Endpoint, request: Request, timeout_s: float, chunk: Callable[[bytes], Awaitable[None]] | None
    ) -> tuple[Outcome, Reply | None]:
        """Sends one request. With `chunk`, a successful body is handed to it piece by piece, not returned."""
        ...

    async def close(self) -> None: ...


class HttpTransport:
    """aiohttp, with what a client of many long requests needs and nothing else.

    One session for each event loop, one loop at a time: a session can't outlive its loop, and this can. What nobody
    closes is let go of when it is forgotten, and at the interpreter's exit.
    """

    KEEP_ALIVE_S = 60.0

    def __init__(self, ssl_context: ssl.SSLContext | None = None) -> None:
        self._ssl = ssl_context
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._expiry: Expiry | None = None
        self._let_go: Callable[[], object] = _nothing
        self._ways: dict[tuple[str, str], _Way] = {}

    def _open(self) -> tuple[aiohttp.ClientSession, Expiry]:
        loop = self._loop = asyncio.get_running_loop()
        self._let_go()
        # Concurrency is bounded by the endpoints' gates; a second bound here would queue behind their backs.
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=self.KEEP_ALIVE_S, ssl=self._ssl if self._ssl is not None else True
        )
        session = self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        expiry = self._expiry = Expiry(loop)
        self._let_go = weakref.finalize(self, _close_left_open, session, loop)
        return session, expiry

    def forget_headers(self) -> None:
        """Reads keys and headers again: the declaration changed."""
        self._ways.clear()

    async def close(self) -> None:
        if self._session is not None and self._expiry is not None:
            self._expiry.close()
            if self._loop is asyncio.get_running_loop():
                await self._session.close()
            else:
                self._let_go()
            self._session = None

    def _way(self, endpoint: Endpoint, path: str) -> _Way:
        way = self._ways.get((endpoint.name or endpoint.url, path))
        if way is None:
            way = self._ways[endpoint.label, path] = _Way.of(endpoint, path)
        return way

    async def send(
        self, endpoint: Endpoint, request: Request, timeout_s: float, chunk: Callable[[bytes], Awaitable[None]] | None
    ) -> tuple[Outcome, Reply | None]:
        session, expiry = self._session, self._expiry
        if session is None or expiry is None or session.closed or self._loop is not asyncio.get_running_loop():
            session, expiry = self._open()
        way = self._way(endpoint, request.path)
        if chunk is not None:
            return await self._stream(session, endpoint, way, request, timeout_s, chunk)
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        expiry.begin(task, timeout_s)
        try:
            response = await session.post(
                way.url,
                data=aiohttp.BytesPayload(request.payload(endpoint), content_type="application/json"),
                headers=way.headers,
                timeout=way.timeout,
                allow_redirects=False,
            )
            # Read to its end, or closed by what goes wrong: either way nothing is left to release. An answer in one
            # piece, as most are, is here already.
            content = response.content
            here = content.is_eof() and content.exception() is None
            body = content.read_nowait() if here else await response.read()
        except asyncio.CancelledError as cancelled:
            if not expiry.was_late(task, cancelling):
                raise
            return _broken(TimeoutError(*cancelled.args), timeout_s), None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return _broken(error, timeout_s), None
        finally:
            expiry.end(task, timeout_s)
        return _understood(endpoint, response.status, response.headers, body, way)

    async def _stream(
        self,
        session: aiohttp.ClientSession,
        endpoint: Endpoint,
        way: _Way,
        request: Request,
        timeout_s: float,
        chunk: Callable[[bytes], Awaitable[None]],
    ) -> tuple[Outcome, Reply | None]:
        """Hands a body on piece by piece. A break after the first piece is final: what was said can't be unsaid."""
        begun, tail = False, b""
        try:
            async with (
                asyncio.timeout(timeout_s),
                session.post(
                    way.url,
                    data=aiohttp.BytesPayload(request.payload(endpoint), content_type="application/json"),
                    headers=way.headers,
                    timeout=way.timeout,
                    allow_redirects=False,
                ) as response,
            ):
                status = response.status
                if not 200 <= status < 300 or response.content_type == "application/json":
                    outcome, reply = _understood(endpoint, status, response.headers, await response.read(), way)
                    if reply is not None:
                        return outcome.of_kind(Kind.FINAL, "a stream was asked for, and a whole answer came"), None
                    return outcome, None
                async for piece in response.content.iter_any():
                    begun = True
                    tail = (tail + piece)[-STREAM_TAIL:]
                    await chunk(piece)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            if not begun:
                return _broken(error, timeout_s), None
            return Outcome(Kind.FINAL, f"stream broke off: {_cause(error, timeout_s)}", 200, error=error), None
        told = told_limits(response.headers, time.time())
        return Outcome(Kind.DONE, status=status, tokens=_streamed_tokens(tail), told=told), Reply(None, b"", status)


class _Way(NamedTuple):
    """What all requests to one path of one endpoint have in common, made once."""

    url: URL
    headers: CIMultiDict[str]
    timeout: aiohttp.ClientTimeout
    key: str
    """The key that is sent, so that an answer which quotes it can be shown without."""

    @classmethod
    def of(cls, endpoint: Endpoint, path: str) -> _Way:
        base = endpoint.url.rstrip("/")
        base = base.removesuffix("/v1") if path in ROOT_PATHS else base
        headers, key = CIMultiDict(endpoint.headers), read_key(endpoint)
        if key:
            bearer = endpoint.api_key_header.lower() == "authorization"
            headers[endpoint.api_key_header] = f"Bearer {key}" if bearer else key
        # `connect` covers the name look-up as well, `sock_connect` one address of those that it gave. The time for the
        # whole answer is kept here, by one timer for all requests (`expiry`).
        connect_s = min(endpoint.connect_timeout_s, endpoint.timeout_s)
        timeout = aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s)
        return cls(URL(base + path), headers, timeout, key)


def _broken(error: BaseException, timeout_s: float) -> Outcome:
    unreachable = isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError)
    return Outcome(Kind.BROKEN, _cause(error, timeout_s), error=error, unreachable=unreachable)


def _cause(error: BaseException, timeout_s: float) -> str:
    """A failure of the network in words a person can act on."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection in time"
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:.3g} s"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"name look-up failed: {error.host}"
    if isinstance(error, aiohttp.ClientSSLError):
        return f"TLS failed: {error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"can't connect: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "connection closed without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "body cut off"
    if isinstance(error, ConnectionResetError):
        return "connection reset"
    return f"{type(error).__name__}: {error}"


def _nothing() -> None:
    return


def _close_left_open(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    """Closes a session from wherever its transport was forgotten: another loop or thread, or the interpreter's exit."""
    if session.closed:
        return
    try:
        here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    if loop.is_closed() or (here is not None and not loop.is_running()):
        closing = session.close()
        try:
            closing.send(None)  # no loop to wait on: what it does before it would wait is all that can be done
        except StopIteration:
            return
        closing.close()
    elif loop is here:
        loop.create_task(session.close(), name="penstock-session-close")
    elif loop.is_running():
        future = asyncio.run_coroutine_threadsafe(session.close(), loop)
        with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            future.result(LET_GO_S)
    else:
        loop.run_until_complete(session.close())


def _shown(text: str, key: str) -> str:
    """The start of an error's text; some services quote the key that they refuse."""
    return (text.replace(key, "[key]") if key else text)[:BODY_SHOWN]


def _understood(
    endpoint: Endpoint, status: int, headers: Mapping[str, str], body: bytes, way: _Way
) -> tuple[Outcome, Reply | None]:
    """What a whole answer means. A 200 that isn't JSON, or that holds nothing but an error, is no answer."""
    wall_s = time.time()
    told = told_limits(headers, wall_s)
    if 200 <= status < 300:
        try:
            value = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            return Outcome(Kind.BROKEN, f"answer is not JSON: {error}", status, told=told), None
        if isinstance(value, dict):
            if value.get("error"):
                return _error_in_body(value["error"], told, way.key), None
            tokens = _tokens(value)
        else:
            tokens = None
        return Outcome(DONE, "", status, tokens, None, told), Reply(
            value, body, status, headers, endpoint.name or endpoint.url
        )
    shown = _shown(body[: 4 * BODY_SHOWN].decode("utf-8", "replace"), way.key)
    kind = Kind.FINAL if 300 <= status < 400 else kind_of_status(status, shown)
    return Outcome(kind, f"HTTP {status}", status, None, retry_after_s(headers, wall_s), told, shown), None


def _tokens(value: dict[str, Any]) -> float | None:
    """What an answer, or a piece of one, says that it cost."""
    usage = value.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return float(tokens) if isinstance(tokens, int | float) else None


def _streamed_tokens(tail: bytes) -> float | None:
    """The last piece of a stream that says what it cost, as services do where `stream_options` ask for it."""
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data:") and b"total_tokens" in line:
            with contextlib.suppress(msgspec.DecodeError):  # the tail begins anywhere
                value = msgspec.json.decode(line[5:])
                if isinstance(value, dict) and (tokens := _tokens(value)) is not None:
                    return tokens
    return None


def _error_in_body(error: Any, told: Any, key: str) -> Outcome:
    shown = _shown(str(error), key)
    code = error.get("code", error.get("status")) if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return Outcome(kind_of_status(status, shown), "HTTP 200 with an error", status, told=told, body=shown)


class FunctionTransport:
    """A Python function as an endpoint: it gets the request's JSON object and returns the answer's value.

    Async functions (and objects with an async `__call__`) run on the pool's loop; sync ones in threads, as many as the
    endpoint's concurrency asks for. One that is past its time goes on in its thread, which can't be stopped.
    """

    def __init__(
        self, function: Callable[[dict[str, Any]], Any], hook: Callable[[BaseException], Kind | None] | None = None
    ) -> None:
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self._hook = hook

    async def send(
        self, endpoint: Endpoint, request: Request, timeout_s: float, chunk: Callable[[bytes], Awaitable[None]] | None
    ) -> tuple[Outcome, Reply | None]:
        try:
            async with asyncio.timeout(timeout_s):
                if self._is_async:
                    value = await self._function(request.body)
                else:
                    value = await HELPERS.call_async(functools.partial(self._function, request.body))
                    if inspect.isawaitable(value):  # a plain function that hands back a coroutine
                        value = await value
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; it becomes the outcome
            kind = kind_of_error(error, self._hook)
            return Outcome(kind, f"{type(error).__name__}: {error}", error=error), None
        return Outcome(Kind.DONE), Reply(value, endpoint=endpoint.label)

    async def close(self) -> None:
        return


async def lines_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Data of server-sent events, one JSON document each, from a body in pieces of any size; ends at `[DONE]`."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.strip()
            if data == b"data: [DONE]":
                return
            if data.startswith(b"data:"):
                yield data[5:].strip()
