"""The doors of people and monitors: JSON and Prometheus text about a manager over HTTP, and what they may ask for.

Who may come in is decided before, by `doors`; what an answer says, by `operators`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from penstock.errors import PenstockError
from penstock.rollout import operators
from penstock.rollout.journal_file import Journal
from penstock.rollout.manager import Manager
from penstock.rollout.provision_desk import FleetDesk

__all__ = ["OperatorDoors"]

CAUSE_CHARS = 200
"""Of an operator's own words for what is asked."""


class OperatorDoors:
    """`journal` and `desk` give what the server has at the moment. `adopt`: see `ServerConfig`.

    `body_s`: for a request's body to come.
    """

    def __init__(
        self,
        manager: Manager,
        journal: Callable[[], Journal | None],
        desk: Callable[[], FleetDesk | None],
        adopt: Callable[[str, str], Awaitable[str]] | None,
        body_s: float,
    ) -> None:
        self._manager = manager
        self._journal = journal
        self._desk = desk
        self._adopter = adopt
        self._body_s = body_s

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._pages),
            web.get("/instances", self._instances),
            web.post("/instances", self._adopt),
            web.get("/samples", self._samples),
            web.get("/fleet", self._fleet),
            web.post("/fleet/release", self._release_fleet),
            web.get("/status", self._status),
            web.get("/metrics", self._metrics),
            web.get("/healthz", self._health),
        ]

    async def _pages(self, request: web.Request) -> web.Response:
        return web.Response(text=operators.PAGES)

    async def _instances(self, request: web.Request) -> web.Response:
        return _json(operators.instances(self._manager, time.monotonic()))

    async def _adopt(self, request: web.Request) -> web.Response:
        """Takes a server without an agent: an agent is started beside it, and joins by itself."""
        if self._adopter is None:
            return web.Response(status=501, text="This manager can start no agents for servers.\n")
        try:
            async with asyncio.timeout(self._body_s):
                body = await request.content.read(operators.ADOPTION_BYTES + 1)
        except TimeoutError:
            return web.Response(status=408, text=f"The body of the request did not come within {self._body_s:g} s.\n")
        try:
            wanted = operators.read_adoption(body)
            name = await self._adopter(wanted.url, wanted.engine)
        except PenstockError as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.json_response({"name": name}, status=201)

    async def _status(self, request: web.Request) -> web.Response:
        return _json(operators.status(self._manager, time.monotonic()))

    async def _samples(self, request: web.Request) -> web.Response:
        return _json(operators.samples(self._manager, time.monotonic()))

    async def _fleet(self, request: web.Request) -> web.Response:
        found = operators.fleet(self._manager, time.monotonic())
        return _json(found) if found is not None else web.Response(status=404, text="Nobody adds machines here.\n")

    async def _release_fleet(self, request: web.Request) -> web.Response:
        """Releases every machine for good; GET /fleet says when that is done."""
        desk = self._desk()
        if desk is None:
            return web.Response(status=404, text="Nobody adds machines here.\n")
        desk.release(request.query.get("cause", "")[:CAUSE_CHARS] or "an operator asked for it")
        return await self._fleet(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        body = operators.metrics(self._manager, time.monotonic()).encode()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _health(self, request: web.Request) -> web.Response:
        journal = self._journal()
        state = "off" if journal is None else journal.trouble or "running"
        return _json(operators.health(self._manager, state))


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
