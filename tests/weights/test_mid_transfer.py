"""What goes wrong in the middle of a transfer, by name: links that are cut, senders that die, memory that is full.

A sender or receiver that is killed and comes back, a half-open connection, chunks that are corrupt, a full disk: in
test_weight_store and test_transfer. A newer version, an engine that refuses the swap: in tests/instance/test_agent.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import random
import socket
import struct
import termios
from collections.abc import AsyncIterator

import pytest
from test_transfer import CHUNK, TOKEN, assert_whole, fetch, store_of

from penstock.bench.weights_link import DelayProxy
from penstock.weights import WeightStore
from penstock.weights.addresses import parse_address
from penstock.weights.memory import NoMemory
from penstock.weights.puller import NotInTime
from penstock.weights.tcp import TcpTransport

WHOLE = 1 << 30
CONNECTIONS = 2
FRAMES_BYTES = 2048
"""Handshakes, plan and replies of a connection that is opened again."""


@pytest.fixture
def unpushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.puller.PUSH_BYTES", 0)


class Between:
    """Stands between a puller and a store. Each connection passes the next of `budgets` bytes of the store's, every one
    of which arrives, and is then reset; those beyond the list pass all. While `down`, it answers nobody."""

    def __init__(self, target: str, budgets: list[int]) -> None:
        self._target = parse_address(target)
        self._budgets = budgets
        self._answering: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.passed = 0
        self.refused = 0
        self.down = False
        self.pause_s = 0.0
        """After each piece: a slow link."""
        self.piece_bytes = 4096
        self.passing = asyncio.Event()
        """While it is not set, nothing passes."""
        self.passing.set()
        self.cut = asyncio.Event()
        """A connection was reset."""

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        accepting = asyncio.create_task(self._accept(listener))
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for task in (accepting, *self._answering):
                task.cancel()
            await asyncio.gather(accepting, *self._answering, return_exceptions=True)
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            sock.setblocking(False)
            self.connections += 1
            if self.down:
                self.refused += 1
                reset(sock)
                continue
            budget = self._budgets.pop(0) if self._budgets else WHOLE
            task = asyncio.create_task(self._answer(sock, budget))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, sock: socket.socket, budget: int) -> None:
        loop = asyncio.get_running_loop()
        up = socket.create_connection(self._target)
        up.setblocking(False)
        asking = asyncio.create_task(pass_on(sock, up))
        try:
            while budget and (data := await loop.sock_recv(up, min(budget, self.piece_bytes))):
                await loop.sock_sendall(sock, data)
                budget -= len(data)
                self.passed += len(data)
                await asyncio.sleep(self.pause_s)
                await self.passing.wait()
            while unsent(sock):
                await asyncio.sleep(0)
        finally:
            # Before its sockets are closed: the loop would forget the next connection of the same number.
            asking.cancel()
            await asyncio.wait([asking])
            up.close()
            reset(sock)
            self.cut.set()


async def pass_on(sock: socket.socket, up: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(sock, 4096):
        await loop.sock_sendall(up, data)


def unsent(sock: socket.socket) -> int:
    """Bytes that the other side's system does not have yet."""
    left = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, left)
    return left[0]


def reset(sock: socket.socket) -> None:
    """As the system closes the sockets of a process that was killed with requests unread."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.usefixtures("unpushed")
@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("budgets", [[3000, 40_000], [25_000, 25_001, 7000, 60_000], [9000] * 6])
async def test_a_sender_that_is_reset_costs_at_most_the_chunk_under_way_on_each_connection(
    codec: str, budgets: list[int]
) -> None:
    async with store_of(0) as (_, address):
        between = Between(address, list(budgets))
        async with between.listening() as through:
            weights = await fetch(through, 0, codec=codec, connections=CONNECTIONS)
        assert_whole(weights, 0)
        assert weights.bytes_fetched == weights.manifest.nbytes, "no whole chunk came twice"
        cuts = len(budgets)
        assert between.passed <= weights.manifest.nbytes + cuts * CHUNK + (cuts + CONNECTIONS) * FRAMES_BYTES


@pytest.mark.usefixtures("unpushed")
async def test_what_a_thread_has_read_and_not_told_yet_when_the_sender_is_reset_does_not_come_again() -> None:
    """Large raw chunks: the loop is told of many at once."""
    data = random.Random(0).randbytes(24 << 20)
    chunk_bytes, cuts = 1 << 20, [(5 << 20) + 12_345, (3 << 20) + 1]
    store = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=chunk_bytes)
    try:
        await asyncio.to_thread(store.publish, 0, [("w", "U8", (len(data),), data)], "{}")
        between = Between(store.start(), list(cuts))
        between.piece_bytes = 1 << 18
        async with between.listening() as through:
            weights = await fetch(through, 0, codec="raw", connections=CONNECTIONS)
    finally:
        await asyncio.to_thread(store.close)
    assert weights.tensors["w"] == data
    assert weights.bytes_fetched == len(data), "no whole chunk came twice"
    assert between.passed <= len(data) + len(cuts) * chunk_bytes + (len(cuts) + CONNECTIONS) * FRAMES_BYTES


@pytest.mark.usefixtures("unpushed")
@pytest.mark.parametrize("slow_one", [0, 1])
async def test_a_fast_connection_takes_over_what_a_slow_one_has_not_asked_for(slow_one: int) -> None:
    async with store_of(0) as (_, address), contextlib.AsyncExitStack() as parts:
        ways = [Between(address, []), Between(address, [])]
        ways[slow_one].pause_s = 0.03
        source = ",".join([await parts.enter_async_context(way.listening()) for way in ways])
        assert_whole(await fetch(source, 0, codec="raw", connections=2), 0)
        slow, fast = ways[slow_one].passed, ways[1 - slow_one].passed
        assert CHUNK < slow < fast  # A quarter is asked for at once, and the next before it is all there.


@pytest.mark.usefixtures("unpushed")
async def test_a_link_that_is_cut_for_a_second_is_taken_up_again_with_what_came() -> None:
    async with store_of(0) as (_, address):
        between = Between(address, [30_000, 30_000])
        async with between.listening() as through:
            pulling = asyncio.create_task(fetch(through, 0, codec="raw", connections=CONNECTIONS))
            await between.cut.wait()
            between.down = True
            await asyncio.sleep(1.0)
            assert not pulling.done()
            between.down = False
            weights = await pulling
        assert_whole(weights, 0)
        assert between.refused > 0
        assert weights.bytes_fetched == weights.manifest.raw_nbytes
        assert between.passed <= weights.manifest.raw_nbytes + 2 * CHUNK + 4 * FRAMES_BYTES


@pytest.mark.usefixtures("unpushed")
async def test_a_link_that_is_cut_for_good_ends_the_pull_at_its_deadline_and_says_what_came() -> None:
    async with store_of(0) as (_, address):
        between = Between(address, [30_000, 30_000])
        async with between.listening() as through:
            pulling = asyncio.create_task(fetch(through, 0, codec="raw", connections=CONNECTIONS, deadline_s=2.0))
            await between.cut.wait()
            between.down = True
            with pytest.raises(NotInTime, match=r"within 2 s \([1-9]\d* of 16 chunks came; last trouble: .+"):
                await pulling


async def test_memory_that_runs_out_in_mid_transfer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("penstock.weights.fetch.decode_chunk", full)
    async with store_of(0) as (_, address):
        with pytest.raises(NoMemory, match=r"memory ran out while weight version 0 came \(\d+ of 16 chunks"):
            await fetch(address, 0, codec="lossless")


@pytest.mark.usefixtures("unpushed")
@pytest.mark.parametrize("connections", [1, 3])
async def test_nothing_more_is_fetched_of_what_can_not_be_decoded(
    monkeypatch: pytest.MonkeyPatch, connections: int
) -> None:
    """The rest of a version would be kept in memory, where that has just run out."""

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("penstock.weights.fetch.decode_chunk", full)
    async with store_of(0) as (_, address):
        way = Between(address, [])
        way.pause_s = 0.03
        async with way.listening() as source:
            transport = TcpTransport(TOKEN)
            with pytest.raises(NoMemory, match=r"memory ran out while weight version 0 came \(\d of 16 chunks"):
                await fetch(source, 0, codec="lossless", connections=connections, transport=transport)
            # No link is kept on which answers are still to come.
            way.pause_s, opened = 0.0, way.connections
            monkeypatch.undo()
            assert_whole(await fetch(source, 0, codec="lossless", connections=1, transport=transport), 0)
            assert way.connections == opened + 1
            transport.close()


async def test_what_the_benchmarks_proxy_counts_does_arrive() -> None:
    size = 400_000

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(size))
        writer.write_eof()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(send, "127.0.0.1", 0)
    proxy = DelayProxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server, proxy.listening() as address:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            sock.setblocking(False)
            await loop.sock_connect(sock, parse_address(address))
            while proxy.passed < size:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # The sender has ended; nobody is there any more to hear of another chunk.
            await loop.sock_sendall(sock, b"next")
            await asyncio.sleep(0.1)
            got = 0
            while data := await loop.sock_recv(sock, 65536):
                got += len(data)
    assert got == proxy.passed == size
