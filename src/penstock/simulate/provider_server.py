"""A provider on a real socket: limits, latencies, stragglers and faults, for tests, benchmarks and examples offline.

Speaks enough HTTP/1.1 for an OpenAI-like API (chat, completions, embeddings, streaming, `/classify`, `/score`,
`/rerank`) on a bare asyncio protocol, so that it costs the machine it shares with a client next to nothing. Limits and
latencies are those of `providers.Provider`, on the wall clock. A model called `fault-NAME` gets that fault (`FAULTS`).

`python -m penstock.simulate.provider_server '{"rate": 100, "burst": 20}'` serves one and prints its port.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.simulate.providers import Provider

__all__ = ["FAULTS", "ProviderServer"]

FAULTS = (
    "reset",
    "truncated",
    "drip",
    "bad-json",
    "429",
    "429-once",
    "429-retry-after",
    "529",
    "spent",
    "500",
    "400",
    "404",
    "silent",
    "error-in-200",
    "closed",
)


class ProviderServer:
    """Serves one simulated provider on a loopback port."""

    def __init__(
        self,
        provider: Provider | None = None,
        seed: int = 0,
        key: str = "",
        answer: Callable[[str, dict[str, Any]], Any] | None = None,
    ) -> None:
        """`answer(path, body)` makes the JSON of a whole answer; without it answers echo what was asked."""
        self.provider = provider if provider is not None else Provider(median_s=0.0, round_trip_s=0.0)
        self.requests = 0
        self.seen: list[tuple[str, dict[str, Any]]] = []
        """(path, body) of every request that was let in, newest last; at most 10,000."""
        self.most_in_flight = 0
        self.connections = 0
        self._key = key
        self._value = answer if answer is not None else _value
        self._rng = random.Random(seed)
        self._once: set[str] = set()
        self._awaited: list[tuple[int, asyncio.Future[None]]] = []
        self._server: asyncio.Server | None = None
        self._open: set[_Connection] = set()
        self._began = 0.0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> ProviderServer:
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._server = await loop.create_server(lambda: _Connection(self, loop), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Closes the port and resets every connection."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._open):
                connection.reset()
            await self._server.wait_closed()
            self._server = None

    async def arrived(self, requests: int) -> None:
        """Returns when so many requests have come in."""
        if self.requests < requests:
            future = asyncio.get_running_loop().create_future()
            self._awaited.append((requests, future))
            await future

    async def __aenter__(self) -> ProviderServer:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def handle(self, connection: _Connection, path: str, headers: dict[str, str], raw: bytes) -> None:
        """Decides one request: refuse it, break it, or answer it after its service time."""
        self.requests += 1
        for count, future in self._awaited:
            if count <= self.requests and not future.done():
                future.set_result(None)
        if path == "/stats":
            connection.reply(200, {"requests": self.requests, "refused": self.provider.refused})
            return
        if self._key and headers.get("authorization") != f"Bearer {self._key}":
            connection.reply(401, {"error": {"message": "wrong key"}})
            return
        body: dict[str, Any] = msgspec.json.decode(raw) if raw else {}
        provider, now = self.provider, connection.loop.time() - self._began
        if not provider.alive(now):
            connection.reset()
            return
        wait_s = provider.admits(now, 1.0)
        told = self._told(now)
        if wait_s is not None:
            provider.refused += 1
            if "retry_after" in provider.tells and wait_s > 0:
                told["retry-after-ms"] = f"{wait_s * 1000:.1f}"
            connection.reply(429, {"error": {"message": "too many requests"}}, told)
            return
        if len(self.seen) < 10_000:
            self.seen.append((path, body))
        provider.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, provider.in_flight)
        connection.busy = True
        service_s = provider.service_s(self._rng) if provider.median_s else 0.0
        fate = self._rng.random()
        if fate < provider.errors:
            what: tuple[Any, ...] = (connection.reply, 500, {"error": {"message": "internal"}}, told)
        elif fate < provider.errors + provider.resets:
            what = (connection.reset,)
        else:
            what = (self._answer, connection, path, body, told)
        connection.loop.call_later(service_s, self._leave, connection, what) if service_s else self._leave(
            connection, what
        )

    def _told(self, now: float) -> dict[str, str]:
        told = self.provider.told(now)
        if told is None or told.requests is None:
            return {}
        limit, remaining, reset_s = told.requests
        return {
            "x-ratelimit-limit-requests": f"{limit:.0f}",
            "x-ratelimit-remaining-requests": f"{remaining:.0f}",
            "x-ratelimit-reset-requests": f"{(reset_s or 0.0) * 1000:.1f}ms",
        }

    def _leave(self, connection: _Connection, what: tuple[Any, ...]) -> None:
        self.free(connection)
        if not connection.closed:
            what[0](*what[1:])

    def free(self, connection: _Connection) -> None:
        """The request on this connection no longer counts as in flight."""
        if connection.busy:
            connection.busy = False
            self.provider.in_flight -= 1

    def _answer(self, connection: _Connection, path: str, body: dict[str, Any], told: dict[str, str]) -> None:
        model = str(body.get("model", ""))
        if model.startswith("fault-"):
            self._fault(connection, model.removeprefix("fault-"), path, body)
        elif body.get("stream"):
            connection.stream([_piece(body, n) for n in range(5)])
        else:
            connection.reply(200, self._value(path, body), told)

    def _fault(self, connection: _Connection, fault: str, path: str, body: dict[str, Any]) -> None:
        whole = msgspec.json.encode(_value(path, body))
        if fault == "reset":
            connection.raw(_head(200, len(whole)) + whole[:10])
            connection.reset()
        elif fault == "truncated":
            connection.raw(_head(200, len(whole)) + whole[:-5])
            connection.close()
        elif fault == "drip":
            connection.raw(_head(200, len(whole)))
            connection.drip(whole)
        elif fault == "bad-json":
            connection.raw(_head(200, len(whole) - 5) + whole[:-5])
        elif fault == "429":
            connection.reply(429, {"error": {"message": "slow down"}})
        elif fault in ("429-once", "429-retry-after"):
            if fault in self._once:
                connection.reply(200, _value(path, body))
            else:
                self._once.add(fault)
                connection.reply(429, {}, {"retry-after": "0.2"} if fault == "429-retry-after" else {})
        elif fault == "529":
            connection.reply(529, {"error": {"type": "overloaded_error"}})
        elif fault == "spent":
            connection.reply(429, {"error": {"code": "insufficient_quota"}})
        elif fault in ("500", "400", "404"):
            connection.reply(int(fault), {"error": {"message": f"told to answer {fault}"}})
        elif fault == "error-in-200":
            connection.reply(200, {"error": {"message": "model crashed", "code": 500}})
        elif fault == "closed":
            connection.close()
        elif fault != "silent":
            connection.reply(400, {"error": {"message": f"no fault is called {fault}"}})


class _Connection(asyncio.Protocol):
    """One connection: requests in, one at a time."""

    def __init__(self, server: ProviderServer, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.busy = False
        self.closed = False
        self._server = server
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections += 1
        self._server._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._server.free(self)
        self._server._open.discard(self)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            first, *lines = self._data[:end].decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            length = int(headers.get("content-length", "0"))
            if len(self._data) < end + 4 + length:
                return
            body = self._data[end + 4 : end + 4 + length]
            self._data = self._data[end + 4 + length :]
            self._server.handle(self, first.split(" ")[1].removeprefix("/v1"), headers, body)

    def raw(self, data: bytes) -> None:
        if self._transport is not None and not self.closed:
            self._transport.write(data)

    def reply(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = msgspec.json.encode(value)
        self.raw(_head(status, len(body), headers) + body)

    def stream(self, pieces: list[bytes]) -> None:
        self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in [*pieces, b"data: [DONE]\n\n"]:
            self.raw(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.raw(b"0\r\n\r\n")

    def drip(self, body: bytes) -> None:
        """One byte every 50 ms."""
        if body and not self.closed:
            self.raw(body[:1])
            self.loop.call_later(0.05, self.drip, body[1:])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        if self._transport is not None:
            linger = socket.SO_LINGER
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, linger, b"\1\0\0\0\0\0\0\0")
            self._transport.abort()


_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 429: "Too Many Requests", 500: "Internal Server Error"}


def _head(status: int, length: int, headers: dict[str, str] | None = None) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}",
        "content-type: application/json",
        f"content-length: {length}",
    ]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _said(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    return str(messages[-1].get("content", "")) if messages else str(body.get("prompt", ""))


def _value(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """An answer of the API's shape that echoes what was asked, so that a test sees whose answer it got."""
    model = body.get("model", "")
    items = body.get("input", body.get("documents", body.get("text_2", body.get("prompt"))))
    items = items if isinstance(items, list) else [items]
    if path == "/embeddings":
        data: list[Any] = [{"index": n, "embedding": [float(len(str(item))), 1.0]} for n, item in enumerate(items)]
        return {"object": "list", "model": model, "data": data, "usage": {"total_tokens": len(items)}}
    if path in ("/classify", "/score"):
        return {"model": model, "data": [{"index": n, "score": float(len(str(i)))} for n, i in enumerate(items)]}
    if path == "/rerank":
        return {"model": model, "results": [{"index": n, "relevance_score": 1.0 / (n + 1)} for n in range(len(items))]}
    if path == "/completions":
        choices: list[dict[str, Any]] = [{"index": n, "text": f"echo: {item}"} for n, item in enumerate(items)]
        return {"object": "text_completion", "model": model, "choices": choices, "usage": {"total_tokens": 7}}
    said = _said(body)
    logprobs = {"content": [{"token": "echo", "logprob": -0.5}]} if body.get("logprobs") else None
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": f"echo: {said}"},
                "logprobs": logprobs,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
        "asked": {name: value for name, value in body.items() if name != "messages"},
    }


def _piece(body: dict[str, Any], n: int) -> bytes:
    delta = {"choices": [{"index": 0, "delta": {"content": f"{_said(body)} {n} "}}]}
    return b"data: " + msgspec.json.encode(delta) + b"\n\n"


async def _main() -> None:
    declared: dict[str, Any] = msgspec.json.decode(sys.argv[1]) if len(sys.argv) > 1 else {}
    server = ProviderServer(Provider(**declared))
    await server.start()
    print(server.port, flush=True)
    # Its owner ends it by closing its input.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
