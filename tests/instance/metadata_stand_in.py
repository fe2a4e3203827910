"""A metadata service on loopback that answers as a cloud's does, or badly."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

AWS_TOKEN = "an-imds-token"
AWS_NOTICE = {"action": "terminate", "time": "2026-11-21T08:22:00Z"}
AZURE_NAME = "Spot-7"


class StandIn:
    """`cloud`: aws, gcp or azure. `notice` switches its notice on; `asked` counts questions by path."""

    def __init__(self, cloud: str) -> None:
        self.cloud = cloud
        self.asked: list[str] = []
        self.changed = asyncio.Condition()
        self.noticed = False
        self.rebalance = False
        self.maintenance = "NONE"
        self.events: list[dict[str, object]] = []
        self.approved: list[str] = []
        self.token = AWS_TOKEN
        self.trouble = ""
        """`hangs`, `404`, `500` or `garbage`: what every question gets instead."""
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> StandIn:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        self.trouble = "404"
        async with self.changed:
            self.noticed = True
            self.changed.notify_all()
        await self._runner.cleanup()

    async def notice(self) -> None:
        async with self.changed:
            self.noticed = True
            self.changed.notify_all()

    async def until_asked(self, times: int, within_s: float = 20.0) -> None:
        async with asyncio.timeout(within_s), self.changed:
            while len(self.asked) < times:
                await self.changed.wait()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        async with self.changed:
            self.asked.append(request.path)
            self.changed.notify_all()
        if self.trouble == "hangs":
            await asyncio.Event().wait()
        if self.trouble == "garbage":
            return web.Response(body=b"\xff<html>{", headers={"Metadata-Flavor": "?"})
        if self.trouble:
            return web.Response(status=int(self.trouble))
        return await getattr(self, f"_{self.cloud}")(request)

    async def _aws(self, request: web.Request) -> web.Response:
        if request.path == "/latest/api/token":
            asks_well = request.method == "PUT" and "X-aws-ec2-metadata-token-ttl-seconds" in request.headers
            return web.Response(text=self.token) if asks_well else web.Response(status=405)
        if request.headers.get("X-aws-ec2-metadata-token") != self.token:
            return web.Response(status=401)
        if request.path == "/latest/meta-data/spot/instance-action" and self.noticed:
            return web.Response(text=json.dumps(AWS_NOTICE))
        if request.path == "/latest/meta-data/events/recommendations/rebalance" and self.rebalance:
            return web.Response(text=json.dumps({"noticeTime": "2026-11-21T08:12:00Z"}))
        return web.Response(status=404)

    async def _gcp(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        flavor = {"Metadata-Flavor": "Google"}
        if request.path == "/computeMetadata/v1/instance/maintenance-event":
            return web.Response(text=self.maintenance, headers=flavor)
        if request.path != "/computeMetadata/v1/instance/preempted":
            return web.Response(status=404, headers=flavor)
        if request.query.get("wait_for_change") == "true" and request.query.get("last_etag") == self._etag():
            async with self.changed:
                seen = self._etag()
                held_s = float(request.query["timeout_sec"])
                try:
                    async with asyncio.timeout(held_s):
                        await self.changed.wait_for(lambda: self._etag() != seen)
                except TimeoutError:
                    pass
        return web.Response(text="TRUE" if self.noticed else "FALSE", headers={**flavor, "ETag": self._etag()})

    def _etag(self) -> str:
        return f"e{int(self.noticed)}"

    async def _azure(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata") != "true" or "api-version" not in request.query:
            return web.Response(status=400)
        if request.path == "/metadata/instance/compute/name":
            return web.Response(text=AZURE_NAME)
        if request.path != "/metadata/scheduledevents":
            return web.Response(status=404)
        if request.method == "POST":
            self.approved += [one["EventId"] for one in (await request.json())["StartRequests"]]
            return web.Response()
        if self.noticed and not self.events:
            self.events = [azure_event("Preempt", [AZURE_NAME.lower()])]
        return web.json_response({"DocumentIncarnation": 1, "Events": self.events})


def azure_event(kind: str, machines: list[str]) -> dict[str, object]:
    return {
        "EventId": f"id-of-{kind}",
        "EventStatus": "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": machines,
        "NotBefore": "Sat, 21 Nov 2026 08:22:00 GMT",
    }
