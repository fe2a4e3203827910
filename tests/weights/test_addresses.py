"""A source with several addresses: all of them are used, and one that is dead costs next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace

import pytest
from test_mid_transfer import FRAMES_BYTES, Between
from test_transfer import CHUNK, TOKEN, assert_whole, fetch, store_of

from penstock.weights.addresses import parse_address
from penstock.weights.dial import first_to_answer, open_socket
from penstock.weights.tcp import TcpTransport


@pytest.fixture
def unpushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.puller.PUSH_BYTES", 0)


class Closable:
    closed = False

    def close(self) -> None:
        self.closed = True


async def never() -> Closable:
    await asyncio.Event().wait()
    raise AssertionError


async def refused() -> Closable:
    raise ConnectionRefusedError("refused")


async def test_what_does_not_answer_has_the_next_one_tried_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.dial.STAGGER_S", 0.01)
    got, late = Closable(), Closable()

    async def answers() -> Closable:
        return got

    async def answers_when_ended() -> Closable:
        try:
            return await never()
        except asyncio.CancelledError:
            return late

    assert await first_to_answer([never, answers, never]) == (got, 1)
    assert await first_to_answer([answers_when_ended, answers]) == (got, 1)
    assert late.closed
    assert not got.closed


async def test_what_has_answered_is_closed_where_the_caller_is_cancelled_while_the_others_end() -> None:
    got = Closable()
    ending = asyncio.Event()

    async def answers() -> Closable:
        await asyncio.sleep(0.01)
        return got

    async def ends_slowly() -> Closable:
        try:
            return await never()
        finally:
            ending.set()
            await asyncio.sleep(0.05)

    asking = asyncio.create_task(first_to_answer([ends_slowly, answers]))
    await ending.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0.1)
    assert got.closed


async def test_what_fails_has_the_next_one_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.dial.STAGGER_S", 1000.0)
    got = Closable()

    async def answers() -> Closable:
        return got

    assert await first_to_answer([refused, refused, answers]) == (got, 2)
    with pytest.raises(ConnectionRefusedError):
        await first_to_answer([refused, refused])


class Deaf:
    """Opens sockets, but to the addresses of `ports`, from which no answer comes."""

    def __init__(self, *ports: int) -> None:
        self.ports = set(ports)
        self.asked: list[int] = []

    async def __call__(self, host: str, port: int) -> socket.socket:
        self.asked.append(port)
        if port in self.ports:
            await asyncio.Event().wait()
        return await open_socket(host, port)


@pytest.mark.parametrize("place", [0, 1])
async def test_an_address_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    deaf = Deaf(1)
    monkeypatch.setattr("penstock.weights.tcp.open_socket", deaf)
    async with store_of(0) as (_, address):
        both = ["127.0.0.1:1", address]
        transport = TcpTransport(TOKEN)
        links = [await transport.connect(",".join([both[place], both[1 - place]]), 1000.0) for _ in range(5)]
        # On a machine that is busy the other one may take so long too.
        assert 1 <= deaf.asked.count(1) <= 3
        assert deaf.asked.count(parse_address(address)[1]) == 5
        for link in links:
            link.close()


async def test_an_address_that_answers_again_is_used_again_beside_links_that_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.weights.dial.STAGGER_S", 0.01)
    async with store_of(0) as (_, address), contextlib.AsyncExitStack() as parts:
        doors = [await parts.enter_async_context(Between(address, []).listening()) for _ in range(2)]
        source = ",".join(doors)
        deaf = Deaf(parse_address(doors[0])[1])
        monkeypatch.setattr("penstock.weights.tcp.open_socket", deaf)
        transport, now = TcpTransport(TOKEN), 0.0
        monkeypatch.setattr("penstock.weights.tcp.time", SimpleNamespace(monotonic=lambda: now))

        async def addresses() -> list[str]:
            links = [await transport.connect(source, 1000.0) for _ in range(2)]
            for link in links:
                transport.keep(source, link)
            return sorted(link.address for link in links)

        assert await addresses() == [doors[1]] * 2
        deaf.ports.clear()
        assert await addresses() == [doors[1]] * 2, "not so soon"
        now += 61.0
        monkeypatch.setattr("penstock.weights.dial.STAGGER_S", 1000.0)
        assert await addresses() == sorted(doors)
        transport.close()


@pytest.mark.usefixtures("unpushed")
async def test_a_pull_has_a_connection_to_each_address() -> None:
    async with store_of(0) as (_, address), contextlib.AsyncExitStack() as parts:
        ways = [Between(address, []) for _ in range(4)]
        for way in ways:
            way.pause_s = 0.03
        source = ",".join([await parts.enter_async_context(way.listening()) for way in ways])
        assert_whole(await fetch(source, 0, codec="raw", connections=1), 0)
        assert all(way.passed for way in ways)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.usefixtures("unpushed")
async def test_what_a_link_that_fell_silent_was_asked_for_comes_by_the_others(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr("penstock.weights.fetch.SILENT_S", 0.2)
    async with store_of(0) as (_, address), contextlib.AsyncExitStack() as parts:
        ways = [Between(address, []) for _ in range(2)]
        source = ",".join([await parts.enter_async_context(way.listening()) for way in ways])
        # The other one leaves it some chunks, however much later it is opened.
        ways[0].pause_s, ways[1].pause_s = 0.0, 0.05

        async def fall_silent() -> None:
            while ways[0].passed < CHUNK + 4096:
                await asyncio.sleep(0)
            ways[0].pause_s, ways[1].pause_s = 1e6, 0.01

        silencing = asyncio.create_task(fall_silent())
        try:
            weights = await fetch(source, 0, codec=codec, connections=2, transport=TcpTransport(TOKEN, io_s=1000.0))
            assert silencing.done()
        finally:
            silencing.cancel()
        assert_whole(weights, 0)
        assert weights.bytes_fetched == weights.manifest.nbytes, "no whole chunk came twice"
        assert ways[0].connections == 1, "it is not come back to so soon"
        assert sum(way.passed for way in ways) <= weights.manifest.nbytes + CHUNK + 4 * FRAMES_BYTES


@pytest.mark.usefixtures("unpushed")
async def test_links_on_which_bytes_come_by_fits_and_starts_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.fetch.SILENT_S", 0.02)
    async with store_of(0) as (_, address), contextlib.AsyncExitStack() as parts:
        ways = [Between(address, []) for _ in range(2)]
        for way in ways:
            way.pause_s = 0.1
        source = ",".join([await parts.enter_async_context(way.listening()) for way in ways])
        assert_whole(await fetch(source, 0, codec="raw", connections=2), 0)


@pytest.mark.usefixtures("unpushed")
async def test_a_connection_that_is_not_there_by_the_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.reconnecting.CONNECT_S", 1000.0)

    async def first_alone(host: str, port: int) -> socket.socket:
        nonlocal opened
        opened += 1
        if opened > 1:
            await asyncio.Event().wait()
        return await open_socket(host, port)

    async def hold() -> None:
        while way.passed < CHUNK + 4096:
            await asyncio.sleep(0)
        way.passing.clear()
        while opened < 3:
            await asyncio.sleep(0)
        way.passing.set()

    opened = 0
    monkeypatch.setattr("penstock.weights.tcp.open_socket", first_alone)
    async with store_of(0) as (_, address):
        way = Between(address, [])
        async with way.listening() as source:
            holding = asyncio.create_task(hold())
            assert_whole(await fetch(source, 0, codec="raw", connections=3), 0)
            assert holding.done()
    assert opened == 3
