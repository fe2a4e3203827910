"""One end speaks TLS and the other does not: both say so at once, and nobody retries to a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from test_transfer import TOKEN, fetch, store_of

from certificates import Papers
from penstock.tls import client_context, server_context
from penstock.weights.protocol import OtherProtocol
from penstock.weights.puller import NotInTime
from penstock.weights.tcp import TcpTransport


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers.of(tmp_path / "ca")


async def test_a_plain_puller_is_told_that_the_store_speaks_tls(
    papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    tls = papers.server(client_ca=False)
    async with store_of(0, tls=server_context(tls.cert, tls.key, "", lambda _: None)) as (store, address):
        with pytest.raises(OtherProtocol, match=f"{address} refused: it speaks TLS .*, unlike the puller"):
            await fetch(address, 0)
        assert store.counters()["connections"] == 1
    assert "speaks no TLS, and this weight store does" in caplog.text


async def test_a_puller_that_speaks_tls_is_told_that_the_store_does_not(
    papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    async with store_of(0) as (store, address):
        with pytest.raises(OtherProtocol, match=f"{address}: .* does not speak TLS at that port, and this side does"):
            await fetch(address, 0, transport=TcpTransport(TOKEN, tls=client_context(papers.ca_file)))
        assert store.counters()["connections"] == 1
    assert "speaks TLS, and this side does not" in caplog.text


@asynccontextmanager
async def answering(said: bytes) -> AsyncIterator[str]:
    """A server that answers what comes first with `said`, and ends the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_tls_alert_is_no_answer_of_a_store(caplog: pytest.LogCaptureFixture) -> None:
    async with answering(b"\x15\x03\x03\x00\x02\x02\x28") as address:
        with pytest.raises(OtherProtocol, match=f"{address} speaks TLS, and this side does not"):
            await fetch(address, 0)


async def test_a_handshake_that_is_cut_is_tried_again_and_named(
    papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that is killed cuts it too."""
    caplog.set_level(logging.WARNING)
    async with answering(b"") as address:
        transport = TcpTransport(TOKEN, tls=client_context(papers.ca_file))
        with pytest.raises(NotInTime, match="it ended the connection in the handshake, as one does that speaks no TLS"):
            await fetch(address, 0, transport=transport, deadline_s=1.0)
    assert "trying again" in caplog.text


@pytest.mark.parametrize("secure", [False, True])
async def test_a_kept_link_whose_source_is_gone_is_closed_when_another_is_asked(papers: Papers, secure: bool) -> None:
    tls = papers.server(client_ca=False)
    context = server_context(tls.cert, tls.key, "", lambda _: None) if secure else None
    transport = TcpTransport(TOKEN, tls=client_context(papers.ca_file) if secure else None)
    async with store_of(0, tls=context) as (_, address):
        await fetch(address, 0, transport=transport)
    links = [link for kept in transport._kept.values() for _, link in kept]
    assert links
    assert not any(link.closed for link in links)
    async with store_of(1, tls=context) as (_, address):
        async with asyncio.timeout(10):
            while not all(link.hung_up() for link in links):
                await asyncio.sleep(0.01)
        await fetch(address, 1, transport=transport)
        assert all(link.closed for link in links)
        assert len(transport._kept) == 1
        transport.close()
