"""`POST /instances`: the manager starts an agent beside a server that has none, keeps it and ends it with itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_manager import TOKEN
from stand_in_server import StandIn
from test_agent_processes import Process, penstock
from test_supervise import gone

from penstock.rollout.server import ManagerServer, ServerConfig

WITHIN_S = 60.0


class Operator:
    def __init__(self, http: aiohttp.ClientSession, url: str, manager: Process) -> None:
        self.http, self.url, self.manager = http, url, manager

    async def adopt(self, body: Any) -> tuple[int, str]:
        async with self.http.post(f"{self.url}/instances", data=json.dumps(body)) as answer:
            return answer.status, await answer.text()

    async def living(self, but: int = 0) -> dict[str, Any]:
        """The one living instance, once there is one whose process is not `but`."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                async with self.http.get(f"{self.url}/instances") as answer:
                    rows = [row for row in await answer.json() if row["state"] != "gone" and row["pid"] != but]
                if rows:
                    return rows[0]
                await asyncio.sleep(0.05)


@pytest.fixture
async def operator(tmp_path: Path) -> AsyncIterator[Operator]:
    ready = tmp_path / "ready.json"
    async with penstock("manager", "--ready-file", str(ready), "--exit-with-stdin") as manager:
        async with asyncio.timeout(WITHIN_S):
            while not os.path.exists(ready):  # noqa: ASYNC240
                await asyncio.sleep(0.02)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            yield Operator(http, json.loads(ready.read_text())["url"], manager)


async def test_a_server_without_an_agent_is_adopted_kept_and_let_go(operator: Operator) -> None:
    async with StandIn() as server:
        assert await operator.adopt({"url": server.url, "engine": "vllm"}) == (201, '{"name": "adopted-1"}')
        first = await operator.living()
        assert (first["name"], first["engine"]) == ("adopted-1", "vllm")
        status, said = await operator.adopt({"url": f"{server.url}/", "engine": "vllm"})
        assert (status, "has the agent adopted-1 already" in said) == (400, True)
        os.kill(first["pid"], signal.SIGKILL)
        second = await operator.living(but=first["pid"])
        operator.manager.process.send_signal(signal.SIGTERM)
        code, said = await operator.manager.ended()
        assert code == 0, said
        await gone(second["pid"])
        assert server.calls["/pause"] == 0  # Without a run it was left alone.


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"url": "http://127.0.0.1:9", "engine": "vllm"}, "no vllm server answers at http://127.0.0.1:9"),
        ({"url": "http://127.0.0.1:9", "engine": "llama"}, "no engine server of kind 'llama'"),
        ({"url": "127.0.0.1:9/x", "engine": "vllm"}, "is not the address of a server"),
        ({"url": "http://127.0.0.1:9"}, "missing required field `engine`"),
        ({"url": "u", "engine": "e", "more": 1}, "unknown field `more`"),
        ({"url": "u" * 5000, "engine": "e"}, "over 4096 bytes"),
    ],
)
async def test_what_cant_be_adopted_is_refused_with_the_reason(body: Any, reason: str) -> None:
    from penstock.cli.adopted import AdoptedAgents

    agents = AdoptedAgents(TOKEN)
    server = ManagerServer(ServerConfig(token=TOKEN, adopt=agents.adopt))
    url = await server.start()
    try:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
            async with http.post(f"{url}/instances", data=json.dumps(body)) as answer:
                assert (answer.status, reason in await answer.text()) == (400, True), await answer.text()
        async with aiohttp.ClientSession() as http, http.post(f"{url}/instances", json=body) as answer:
            assert answer.status == 401
    finally:
        await agents.close()
        await server.close()
