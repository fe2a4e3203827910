"""`POST /instances`: the manager starts an agent beside a server that has none, keeps it and ends it with itself."""

from __future__ import annotations

import asyncio
import contextlib
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

from certificates import Papers
from penstock.rollout.server import ManagerServer, ServerConfig
from penstock.tls import client_context

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


@contextlib.asynccontextmanager
async def secured_operator(folder: Path, papers: Papers, *options: str) -> AsyncIterator[Operator]:
    tls, ready = papers.server(client_ca=True), folder / "ready.json"
    files = ("--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-client-ca", tls.client_ca)
    async with penstock("manager", "--ready-file", str(ready), *files, *options) as manager:
        async with asyncio.timeout(WITHIN_S):
            while not os.path.exists(ready):  # noqa: ASYNC240
                assert manager.process.returncode is None
                await asyncio.sleep(0.02)
        context = client_context(papers.ca_file, *papers.issue("operator/anna"))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:
            yield Operator(http, json.loads(ready.read_text())["url"], manager)


async def test_a_manager_that_asks_for_certificates_adopts_with_one_of_its_agents(tmp_path: Path) -> None:
    papers = Papers.of(tmp_path / "papers")
    cert, key = papers.issue("agent/adopted")
    files = ("--agent-tls-ca", papers.ca_file, "--agent-tls-cert", cert, "--agent-tls-key", key)
    async with StandIn() as server, secured_operator(tmp_path, papers, *files) as operator:
        assert operator.url.startswith("https://")
        assert await operator.adopt({"url": server.url, "engine": "vllm"}) == (201, '{"name": "adopted-1"}')
        assert (await operator.living())["name"] == "adopted-1"
        operator.manager.process.send_signal(signal.SIGTERM)
        assert (await operator.manager.ended())[0] == 0


async def test_a_manager_without_a_certificate_for_its_agents_says_so_to_who_asks_for_one(tmp_path: Path) -> None:
    async with secured_operator(tmp_path, Papers.of(tmp_path / "papers")) as operator:
        status, said = await operator.adopt({"url": "http://127.0.0.1:9", "engine": "vllm"})
        assert (status, "--agent-tls-cert and --agent-tls-key" in said) == (400, True), said


async def test_certificates_for_agents_that_can_not_be_used_keep_a_manager_from_starting(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    async with penstock("manager", "--agent-tls-cert", missing, "--agent-tls-key", "x") as manager:
        code, said = await manager.ended()
        assert code != 0
        assert f"the TLS file {missing} is not there" in said


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
