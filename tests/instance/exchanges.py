"""Exchanges with a real server: recorded by a proxy between it and its client, played again over a real socket.

One JSON object a line: what was asked, and what was answered part by part. A player answers a request only where the
recording holds the very same one, so that a test over it checks what is asked, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

RECORDED = Path(__file__).parent / "recorded"


@dataclass
class Exchange:
    method: str
    path: str
    """With its query."""
    body: Any
    status: int
    parts: list[str]
    """Of the answer, as they came."""
    headers: dict[str, str] = field(default_factory=dict)
    scene: str = ""

    def asks(self, method: str, path: str, body: Any) -> bool:
        return (self.method, self.path, self.body) == (method, path, body)


class Recorder:
    """A proxy before the server at `upstream`. `names` are put in the place of what is this machine's own."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.exchanges: list[Exchange] = []
        self.scene = ""
        """Written beside each exchange."""
        self.names: dict[str, str] = {}
        self.kept: Callable[[str, Any], Any] = lambda path, answer: answer
        """What of an answer, by its path, goes into the recording."""

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(self._line(exchange) + "\n" for exchange in self.exchanges))

    def _line(self, exchange: Exchange) -> str:
        values = dict(vars(exchange))
        if "json" in exchange.headers["Content-Type"] and (answer := "".join(exchange.parts)):
            values["parts"] = [json.dumps(self.kept(exchange.path, json.loads(answer)))]
        elif exchange.path == "/metrics":
            values["parts"] = [self.kept(exchange.path, "".join(exchange.parts))]
        line = json.dumps(values, separators=(",", ":"))
        for own, name in self.names.items():
            line = line.replace(own, name)
        return line

    async def handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        body = json.loads(data) if data else None
        exchange = Exchange(request.method, request.path_qs, body, 0, [], scene=self.scene)
        self.exchanges.append(exchange)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            async with http.request(request.method, self.upstream + request.path_qs, json=body) as answer:
                kept = {"Content-Type": answer.headers.get("Content-Type", "text/plain")}
                exchange.status, exchange.headers = answer.status, kept
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    exchange.parts.append(part.decode())
                    with contextlib.suppress(ConnectionResetError):  # Who asked has heard enough.
                        await response.write(part)
        with contextlib.suppress(ConnectionResetError):
            await response.write_eof()
        return response


class Player:
    """Answers from a recording, or one scene of it, each exchange once and in its order.

    `missing` are requests that it does not hold.
    """

    def __init__(self, path: Path, scene: str = "") -> None:
        exchanges = [Exchange(**json.loads(line)) for line in path.read_text().splitlines()]
        self.exchanges = [exchange for exchange in exchanges if scene in ("", exchange.scene)]
        self.missing: list[tuple[str, str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        body = json.loads(data) if data else None
        asked = (request.method, request.path_qs, body)
        exchange = next((exchange for exchange in self.exchanges if exchange.asks(*asked)), None)
        if exchange is None:
            self.missing.append(asked)
            return web.Response(status=501, text=f"not in the recording: {asked}")
        self.exchanges.remove(exchange)
        response = web.StreamResponse(status=exchange.status, headers=exchange.headers)
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):
            for part in exchange.parts:
                await response.write(part.encode())
                await asyncio.sleep(0)
            await response.write_eof()
        return response


class Serving:
    """`async with Serving(handler) as url`: a loopback server for one handler of everything."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    async def __aenter__(self) -> str:
        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{anything:.*}", self._handler)
        self._runner = web.AppRunner(application, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{port}"

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()
