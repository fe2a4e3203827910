"""Connections before their first request: who takes too long for TLS or for HTTP is named and cut off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from certificates import Papers
from penstock.observe.events import ConnectionRefused, Event
from penstock.rollout.server import ManagerServer, ServerConfig
from penstock.tls import client_context
from penstock.wire import PROTOCOL

TOKEN = "token"
HEADERS = {"Authorization": f"Bearer {TOKEN}", "X-Penstock-Protocol": str(PROTOCOL)}
WITHIN_S = 60.0


class Server(ManagerServer):
    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self.events: list[Event] = []
        self._logbook.take = self.events.append  # type: ignore[method-assign]

    @property
    def refusals(self) -> list[tuple[str, str]]:
        return [(event.peer, event.cause) for event in self.events if isinstance(event, ConnectionRefused)]

    @property
    def knocking(self) -> list[Any]:
        """Connections that have asked for nothing yet."""
        return list(self._site._knocking.values())  # type: ignore[union-attr]

    async def until(self, condition: Callable[[], Any]) -> Any:
        async with asyncio.timeout(WITHIN_S):
            while not (found := condition()):
                await asyncio.sleep(0.01)
        return found

    @property
    def place(self) -> tuple[str, int]:
        host, port = self.url.partition("://")[2].split(":")
        return host, int(port)


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers.of(tmp_path / "papers")


@contextlib.asynccontextmanager
async def serving(papers: Papers | None, knock_s: float, client_ca: bool = False) -> AsyncIterator[Server]:
    tls = papers.server(client_ca=client_ca) if papers else None
    server = Server(ServerConfig(token=TOKEN, tls=tls, knock_s=knock_s, close_s=0.5, adopt=_never))
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def _never(url: str, engine: str) -> str:
    raise AssertionError


def context(papers: Papers | None) -> ssl.SSLContext | None:
    return client_context(papers.ca_file) if papers else None


async def cut_off(server: Server, words: bytes, tls: ssl.SSLContext | None) -> None:
    """Connects, says `words`, and waits to be cut off."""
    host = server.place[0] if tls else None
    reader, writer = await asyncio.open_connection(*server.place, ssl=tls, server_hostname=host)
    try:
        writer.write(words)
        async with asyncio.timeout(WITHIN_S):
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert await reader.read() == b""
    finally:
        writer.close()


@pytest.mark.parametrize("words", [b"", b"\x16\x03\x01\x02"])
async def test_a_tls_handshake_that_does_not_end_is_cut_off_and_named(papers: Papers, words: bytes) -> None:
    async with serving(papers, knock_s=0.2) as server:
        await cut_off(server, words, None)
        assert server.refusals == [("127.0.0.1", "it did not end the TLS handshake within 0.2 s")]


@pytest.mark.parametrize("expired", [False, True])
async def test_who_is_refused_for_its_certificate_is_named_by_its_address(papers: Papers, expired: bool) -> None:
    own = papers.issue("agent/late", expired=True) if expired else ("", "")
    async with serving(papers, knock_s=600.0, client_ca=True) as server, aiohttp.ClientSession() as http:
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            async with http.get(f"{server.url}/healthz", ssl=client_context(papers.ca_file, *own)):
                pass
        await server.until(lambda: server.refusals)
        says = "its certificate is refused: certificate has expired" if expired else "it gave no certificate"
        # A client may try again.
        assert set(server.refusals) == {("127.0.0.1", says)}


@pytest.mark.parametrize("says_so", [False, True])
async def test_who_refuses_the_manager_s_certificate_is_named_whether_it_says_so_or_just_leaves(
    papers: Papers, tmp_path: Path, says_so: bool
) -> None:
    strangers = client_context(Papers.of(tmp_path / "strangers").ca_file)
    async with serving(papers, knock_s=600.0) as server:
        host, port = server.place
        if says_so:
            # What asyncio's own client does not come to say: it closes before its alert is out.
            await asyncio.to_thread(refuse_aloud, host, port, strangers)
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                await asyncio.open_connection(host, port, ssl=strangers, server_hostname=host)
        [(peer, cause)] = await server.until(lambda: server.refusals)
        assert peer == "127.0.0.1"
        assert ("it refuses the certificate that it is shown here" if says_so else "which it may not trust") in cause


def refuse_aloud(host: str, port: int, tls: ssl.SSLContext) -> None:
    with socket.create_connection((host, port), timeout=WITHIN_S) as plain, pytest.raises(ssl.SSLError):
        tls.wrap_socket(plain, server_hostname=host)


@pytest.mark.parametrize("words", [b"", b"GET /samples HTTP/1.1\r\nHost: x\r\n"])
async def test_a_connection_without_a_whole_request_is_cut_off_and_named(words: bytes) -> None:
    async with serving(None, knock_s=0.2) as server:
        await cut_off(server, words, None)
        assert server.refusals == [("127.0.0.1", "it sent no HTTP request within 0.2 s")]


async def test_the_time_for_a_request_begins_when_tls_is_there(papers: Papers) -> None:
    async with serving(papers, knock_s=600.0) as server:
        asking = asyncio.create_task(cut_off(server, b"GET /samples HTTP/1.1\r\n", context(papers)))
        waiting = await server.until(lambda: [peer for peer in server.knocking if peer._timer])
        remaining_s = waiting[0]._timer.when() - asyncio.get_running_loop().time()
        assert 0 < remaining_s <= 600
        waiting[0]._late()  # What the timer would call.
        await asking
        assert server.refusals == [("127.0.0.1", "it sent no HTTP request within 600 s")]


@pytest.mark.parametrize("secured", [False, True])
async def test_who_has_asked_may_stay_and_who_leaves_is_not_named(papers: Papers, secured: bool) -> None:
    used = papers if secured else None
    tls = context(used)
    async with serving(used, knock_s=600.0) as server, aiohttp.ClientSession(headers=HEADERS) as http:
        async with http.ws_connect(f"{server.url}/agent", ssl=tls or True) as connection:
            assert not server.knocking
            # In the midst of the handshake, where there is one.
            _, writer = await asyncio.open_connection(*server.place)
            await server.until(lambda: server.knocking)
            writer.close()
            await server.until(lambda: not server.knocking)
            assert server.refusals == []
            assert not connection.closed
            async with http.get(f"{server.url}/samples", ssl=tls or True) as answer:
                assert answer.status == 200


async def test_a_request_whose_body_does_not_come_is_answered_so() -> None:
    async with serving(None, knock_s=0.2) as server:
        reader, writer = await asyncio.open_connection(*server.place)
        door = f"Authorization: Bearer {TOKEN}\r\n"
        writer.write(f"POST /instances HTTP/1.1\r\nHost: x\r\n{door}Content-Length: 9\r\n\r\n".encode())
        async with asyncio.timeout(WITHIN_S):
            assert b" 408 " in await reader.readline()
        writer.close()


async def test_a_server_closes_though_strangers_stand_at_its_door(papers: Papers) -> None:
    async with serving(papers, knock_s=600.0) as server:
        reader, writer = await asyncio.open_connection(*server.place)
        await server.until(lambda: server.knocking)
    async with asyncio.timeout(WITHIN_S):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()
