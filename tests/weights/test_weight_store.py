"""Publishing, serving and pulling over real sockets on loopback, and everything that may go wrong between them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import msgspec
import pytest

from penstock.errors import AuthError, PortInUse, ProtocolMismatch, WeightError
from penstock.weights import Manifest, StagedWeights, WeightStore, encode_manifest, pull
from penstock.weights import protocol as words
from penstock.weights.framed import FramedSocket
from penstock.weights.manifest import Encoding, Made, sign_manifest
from penstock.weights.memory import Recycled
from penstock.weights.published import TensorSource
from penstock.weights.tcp import TcpTransport
from penstock.weights.transport import Heard, Planned, WeightLink

TOKEN = "the-run's-token"
CONFIG = '{"model_type": "llama"}'
CHUNK = 1024


@pytest.fixture
def unpushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is asked for: a small version is here before anything can happen to its store."""
    monkeypatch.setattr("penstock.weights.puller.PUSH_BYTES", 0)


def tensors_of(seed: int) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    rng = random.Random(seed)
    shapes = {"embed": (100, 16), "norm": (16,), "empty": (0, 4), "head": (3, 7, 11)}
    sources = []
    for name, shape in shapes.items():
        count = 1
        for length in shape:
            count *= length
        sources.append((name, "F32", shape, rng.randbytes(4 * count)))
    return sources


@contextmanager
def running_store(port: int = 0, token: str = TOKEN, **options: object) -> Iterator[tuple[WeightStore, str]]:
    store = WeightStore("run", "127.0.0.1", port, token, chunk_bytes=CHUNK, **options)  # type: ignore[arg-type]
    try:
        yield store, store.start()
    finally:
        store.close()


def assert_whole(weights: StagedWeights, seed: int) -> None:
    assert {name: bytes(view) for name, view in weights.tensors.items()} == {s[0]: s[3] for s in tensors_of(seed)}


async def read_chunk(link: WeightLink, index: int) -> bytearray:
    """A chunk of version 0."""
    data = bytearray(CHUNK)
    await link.ask_chunks(Encoding(0), [index])
    assert await link.chunks_into([index], [memoryview(data)]) == 1
    return data


async def counted(store: WeightStore, what: str, amount: int) -> None:
    """Waits for a count of the store's thread, which may come a moment after the puller has its bytes."""
    async with asyncio.timeout(10):
        while store.counters().get(what, 0) < amount:
            await asyncio.sleep(0.01)
    assert store.counters()[what] == amount


@pytest.mark.parametrize("connections", [1, 2, 5, 64])
async def test_what_is_published_is_what_is_pulled(connections: int) -> None:
    with running_store() as (store, address):
        published = store.publish(3, tensors_of(3), CONFIG)
        weights = await pull(address, 3, TOKEN, connections=connections, deadline_s=10)
        assert weights.manifest == published
        assert weights.manifest.config_json == CONFIG
        assert weights.version == 3
        assert_whole(weights, 3)
        await counted(store, "chunks", len(published.chunks))
        assert store.counters()["connections"] <= min(connections, len(published.chunks))


async def test_buffers_may_change_once_publish_returns() -> None:
    source = array("f", range(1000))
    with running_store() as (store, address):
        store.publish(0, [("w", "F32", (1000,), memoryview(source))], CONFIG)
        before = source.tobytes()
        source[0] = 12345.0
        weights = await pull(address, 0, TOKEN, deadline_s=10)
        assert bytes(weights.tensors["w"]) == before


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (("w", "F32", (3,), bytes(11)), "needs 12 bytes"),
        (("w", "float32", (3,), bytes(12)), "'float32'"),
        (("w", "F32", (3,), memoryview(bytes(24))[::2]), "not contiguous"),
    ],
)
def test_a_tensor_that_is_not_as_described_is_not_published(source: tuple, named: str) -> None:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN)
    with pytest.raises(WeightError, match=named):
        store.publish(0, [source], CONFIG)
    assert store.versions() == []


def numbered(count: int) -> list[TensorSource]:
    return [(f"w{number}", "U8", (1000,), bytes([number]) * 1000) for number in range(count)]


def test_tensors_whose_shapes_are_known_before_are_copied_as_they_come_and_no_two_are_there_at_once() -> None:
    alive: list[int] = []

    class Made(bytearray):
        def __del__(self) -> None:
            alive.remove(1)

    def coming() -> Iterator[TensorSource]:
        for number in range(5):
            made = Made(bytes([number]) * 1000)
            alive.append(1)
            assert len(alive) <= 2, "the one that is made, and the one before it"
            yield f"w{number}", "U8", (1000,), made
            del made

    def written(into: memoryview) -> None:
        into[:] = b"abcd"

    shapes = [(f"w{number}", "U8", (1000,)) for number in range(5)]
    store = WeightStore("run", "127.0.0.1", 0, TOKEN)
    assert store.publish_behind(0, coming(), CONFIG, shapes).digest == store.publish(1, numbered(5), CONFIG).digest
    one, other = (store.publish(2 + k, [("w", "I32", (1,), data)], CONFIG) for k, data in enumerate((written, b"abcd")))
    assert one.tensors == other.tensors


@pytest.mark.parametrize(
    ("told", "came", "says"),
    [
        (2, 1, "tensor w1 did not come"),
        (1, 2, "tensor w1 came after the last of 1"),
        (0, 1, "tensor w0 came after the last of 0"),
    ],
)
def test_other_tensors_than_were_told_are_refused_and_nothing_is_published(told: int, came: int, says: str) -> None:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN)
    shapes = [(f"w{number}", "U8", (1000,)) for number in range(told)]
    with pytest.raises(WeightError, match=says):
        store.publish_behind(0, numbered(came), CONFIG, shapes)
    with pytest.raises(WeightError, match=r"w0 of dtype U8 and shape \[1000\] came where w0 of dtype I8"):
        store.publish_behind(0, numbered(1), CONFIG, [("w0", "I8", (1000,))])
    assert store.versions() == []
    assert store.publish(0, numbered(1), CONFIG).version == 0


def test_a_name_given_twice_or_a_version_published_twice_is_refused() -> None:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN)
    with pytest.raises(WeightError, match="tensor w is given twice"):
        store.publish(0, [("w", "U8", (1,), b"a"), ("w", "U8", (1,), b"a")], CONFIG)
    store.publish(0, [("w", "U8", (1,), b"a")], CONFIG)
    with pytest.raises(WeightError, match="version 0 is published already"):
        store.publish(0, [("w", "U8", (1,), b"b")], CONFIG)
    with pytest.raises(WeightError, match="version -1 is impossible"):
        store.publish(-1, [("w", "U8", (1,), b"b")], CONFIG)


async def test_old_versions_go_once_nobody_reads_them() -> None:
    with running_store(keep_versions=2) as (store, address):
        store.publish(0, tensors_of(0), CONFIG)
        link = await TcpTransport(TOKEN).connect(address)
        await link.manifest(Encoding(0), 0.0, 0)
        for version in (1, 2, 3):
            store.publish(version, tensors_of(version), CONFIG)
        assert store.versions() == [0, 2, 3]
        # The memory of a version that is still read is not given to another one.
        first = await read_chunk(link, 0)
        assert bytes(first) == b"".join(source[3] for source in tensors_of(0))[:CHUNK]
        link.close()
        async with asyncio.timeout(10):
            while 0 in store.versions():
                await asyncio.sleep(0.01)
        assert store.versions() == [2, 3]
        store.publish(4, tensors_of(4), CONFIG)
        for version in (3, 4):
            assert_whole(await pull(address, version, TOKEN, deadline_s=10), version)


async def test_a_link_that_is_stopped_in_mid_answer_lets_go_of_where_the_rest_was_to_go() -> None:
    memory, chunk = Recycled(), 4 << 20
    store = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=chunk)
    try:
        proxy = Proxy(store.start())
        proxy.stall_after = [2 * chunk + chunk // 2]
        store.publish(0, [("w", "U8", (3 * chunk,), bytes(3 * chunk))], CONFIG)
        async with proxy.listening() as address:
            link = await TcpTransport(TOKEN).connect(address)
            staged = memory.buffer(3 * chunk)
            await link.ask_chunks(Encoding(0), [0, 1, 2])
            assert await link.chunks_into([0, 1, 2], [staged[k * chunk : (k + 1) * chunk] for k in range(3)]) < 3
            del staged
            assert memory.spare(3 * chunk) is None
            await link.stop()
            async with asyncio.timeout(10):
                # A thread that reads may still see to it.
                while memory.spare(3 * chunk) is None:
                    await asyncio.sleep(0.01)
    finally:
        store.close()


async def test_a_version_that_is_not_held_is_an_error_at_once_that_says_what_is_held() -> None:
    with running_store() as (store, address):
        store.publish(4, tensors_of(4), CONFIG)
        with pytest.raises(words.NoSuchVersion, match=r"does not hold weight version 5 \(held: 4\)"):
            await pull(address, 5, TOKEN, deadline_s=60)


async def test_a_wrong_token_is_refused_at_once_and_counted() -> None:
    with running_store() as (store, address):
        store.publish(0, tensors_of(0), CONFIG)
        with pytest.raises(AuthError, match="PENSTOCK_TOKEN"):
            await pull(address, 0, "another-token", deadline_s=60)
        await counted(store, "refused_token", 1)
        assert "bytes" not in store.counters()


async def test_another_protocol_version_is_refused_at_once_by_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_store() as (store, address):
        store.publish(0, tensors_of(0), CONFIG)
        monkeypatch.setattr("penstock.weights.tcp.PROTOCOL", 99)
        with pytest.raises(ProtocolMismatch, match=f"speaks weight protocol {words.PROTOCOL} and the puller 99"):
            await pull(address, 0, TOKEN, deadline_s=60)
        await counted(store, "refused_protocol", 1)


async def test_a_port_in_use_is_named() -> None:
    with running_store() as (store, address):
        port = int(address.rpartition(":")[2])
        with pytest.raises(PortInUse, match=rf"127\.0\.0\.1:{port}.*weights\.port"):
            WeightStore("run", "127.0.0.1", port, TOKEN).start()
        assert store.versions() == []


def test_a_host_that_is_not_this_machine_is_named() -> None:
    with pytest.raises(WeightError, match=r"can't listen on 192\.0\.2\.7:0"):
        WeightStore("run", "192.0.2.7", 0, TOKEN).start()


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [("", "127.0.0.1:{}"), ("trainer.example", "trainer.example:{}"), ("gate.example:99", "gate.example:99")]
    + [("fd00::1", "[fd00::1]:{}"), ("[fd00::1]:99", "[fd00::1]:99")],
)
def test_agents_are_given_the_advertised_address(advertise: str, expected: str) -> None:
    with running_store(advertise=advertise) as (store, address):
        assert address == store.address == expected.format(store._port)


def test_a_store_on_all_interfaces_names_one_that_others_can_dial() -> None:
    store = WeightStore("run", "0.0.0.0", 0, TOKEN)
    try:
        host = store.start().rpartition(":")[0]
        assert host not in ("", "0.0.0.0")
    finally:
        store.close()


def test_closing_twice_and_closing_what_never_started_do_nothing() -> None:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN)
    store.close()
    store.start()
    threads = threading.active_count()
    store.close()
    store.close()
    assert threading.active_count() == threads - 1


async def test_closing_the_store_cuts_those_that_still_read() -> None:
    with running_store() as (store, address):
        store.publish(0, tensors_of(0), CONFIG)
        link = await TcpTransport(TOKEN).connect(address)
        await link.manifest(Encoding(0), 0.0, 0)
        await asyncio.to_thread(store.close)
        with pytest.raises(words.LinkLost):
            await read_chunk(link, 0)
        link.close()


# ---- peers that misbehave


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        words.LENGTH.pack(5) + b"\xc1\xc1\xc1\xc1\xc1",
        words.LENGTH.pack(1 << 31),
        words.encode_message(words.GetManifest(encoding=Encoding(0))),
        words.encode_message(words.Hello(magic="another", protocol=1, nonce=bytes(32))),
        words.encode_message(words.Hello(magic=words.MAGIC, protocol=1, nonce=b"short")),
    ],
)
async def test_a_stranger_gets_no_weights_and_the_store_goes_on(data: bytes) -> None:
    with running_store() as (store, address):
        store.publish(0, tensors_of(0), CONFIG)
        host, port = words_address(address)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(data)
        try:
            answer = await asyncio.wait_for(reader.read(), 10)
        except ConnectionResetError:
            answer = b""  # Closed with bytes of ours unread.
        writer.close()
        assert len(answer) < 200
        assert_whole(await pull(address, 0, TOKEN, deadline_s=10), 0)
        counters = store.counters()
        assert counters.get("bad_messages", 0) + counters.get("refused_request", 0) == 1


async def test_a_chunk_that_does_not_exist_is_refused_by_name() -> None:
    with running_store() as (store, address):
        store.publish(0, tensors_of(0), CONFIG)
        link = await TcpTransport(TOKEN).connect(address)
        with pytest.raises(WeightError, match=r"version 0 \(raw\) has no chunk 999"):
            await read_chunk(link, 999)
        link.close()


def words_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


class Proxy:
    """Passes bytes on between a puller and a store, and does one bad thing to what the store says."""

    def __init__(self, target: str) -> None:
        self._target = words_address(target)
        self.cut_after: list[int | None] = []
        """For each connection in order: how many of the store's bytes pass before it is cut; None passes all."""
        self.flip_at: list[int | None] = []
        """For each connection in order: which byte from the store is changed."""
        self.stall_after: list[int | None] = []
        self.connections = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        plans = [plan[number] if number < len(plan) else None for plan in (self.cut_after, self.flip_at)]
        stall = self.stall_after[number] if number < len(self.stall_after) else None
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        asking = asyncio.create_task(self._pass(reader, up_writer, None, None, None))
        try:
            await self._pass(up_reader, writer, *plans, stall)
        finally:
            asking.cancel()
            writer.close()
            up_writer.close()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        cut_after: int | None,
        flip_at: int | None,
        stall_after: int | None,
    ) -> None:
        passed = 0
        while data := bytearray(await reader.read(512)):
            if flip_at is not None and passed <= flip_at < passed + len(data):
                data[flip_at - passed] ^= 0x40
            if cut_after is not None and passed + len(data) >= cut_after:
                writer.write(data[: cut_after - passed])
                return
            if stall_after is not None and passed + len(data) >= stall_after:
                await asyncio.sleep(3600)
            passed += len(data)
            try:
                writer.write(data)
                await writer.drain()
            except ConnectionError:
                return


async def handshake_and_manifest_bytes(address: str) -> int:
    """How many bytes the store sends before the first chunk's reply on a first connection."""
    proxy_bytes = 0
    host, port = words_address(address)
    sock = socket.create_connection((host, port))
    framed = FramedSocket(sock, "the store")
    nonce = bytes(32)
    for message in (words.Hello(magic=words.MAGIC, protocol=words.PROTOCOL, nonce=nonce),):
        await framed.send(words.encode_message(message))
    body = await framed.read_message()
    proxy_bytes += words.LENGTH.size + len(body)
    challenge = words.decode_from_store(body)
    assert isinstance(challenge, words.Challenge)
    await framed.send(words.encode_message(words.Proof(mac=words.prove(TOKEN, "puller", nonce, challenge.nonce))))
    body = await framed.read_message()
    proxy_bytes += words.LENGTH.size + len(body)
    await framed.send(words.encode_message(words.GetManifest(encoding=Encoding(0))))
    body = await framed.read_message()
    reply = words.decode_from_store(body)
    assert isinstance(reply, words.ManifestReply)
    framed.close()
    return proxy_bytes + words.LENGTH.size + len(body) + reply.nbytes


async def test_a_corrupt_chunk_is_fetched_again() -> None:
    with running_store() as (store, address):
        published = store.publish(0, tensors_of(0), CONFIG)
        proxy = Proxy(address)
        proxy.flip_at = [await handshake_and_manifest_bytes(address) + 500]
        async with proxy.listening() as through:
            assert_whole(await pull(through, 0, TOKEN, codec="raw", connections=1, deadline_s=10), 0)
        await counted(store, "chunks", len(published.chunks) + 1)


async def test_a_corrupt_manifest_is_fetched_again() -> None:
    with running_store() as (store, address):
        store.publish(0, tensors_of(0), CONFIG)
        proxy = Proxy(address)
        proxy.flip_at = [await handshake_and_manifest_bytes(address) - 100]
        async with proxy.listening() as through:
            assert_whole(await pull(through, 0, TOKEN, codec="raw", connections=1, deadline_s=10), 0)
        assert proxy.connections == 2


@pytest.mark.usefixtures("unpushed")
async def test_a_pull_goes_on_where_it_was_cut() -> None:
    with running_store() as (store, address):
        published = store.publish(0, tensors_of(0), CONFIG)
        before = await handshake_and_manifest_bytes(address)
        proxy = Proxy(address)
        proxy.cut_after = [10, before - 20, before + 3 * CHUNK, before // 4 + 2 * CHUNK]
        async with proxy.listening() as through:
            assert_whole(await pull(through, 0, TOKEN, codec="raw", connections=1, deadline_s=20), 0)
        assert proxy.connections == 5
        # What had come whole was not asked for again: at most one chunk was under way at each of the two cuts.
        assert store.counters()["chunks"] <= len(published.chunks) + 2


async def test_a_store_that_goes_silent_is_left_and_dialled_again() -> None:
    with running_store() as (store, address):
        store.publish(0, tensors_of(0), CONFIG)
        proxy = Proxy(address)
        proxy.stall_after = [await handshake_and_manifest_bytes(address) + 2 * CHUNK]
        async with proxy.listening() as through:
            transport = TcpTransport(TOKEN, io_s=0.2)
            assert_whole(
                await pull(through, 0, TOKEN, codec="raw", connections=1, deadline_s=20, transport=transport), 0
            )
        assert proxy.connections == 2


async def test_a_store_that_never_answers_ends_the_pull_at_its_deadline_with_the_cause() -> None:
    with running_store() as (store, address):
        store.publish(0, tensors_of(0), CONFIG)
        proxy = Proxy(address)
        proxy.stall_after = [0] * 1000
        async with proxy.listening() as through:
            transport = TcpTransport(TOKEN, io_s=0.1)
            with pytest.raises(WeightError, match=r"within 0.5 s \(no manifest yet; last trouble: .*sent no byte"):
                await pull(through, 0, TOKEN, deadline_s=0.5, transport=transport)


async def test_nobody_listening_is_said_and_ends_the_pull_at_its_deadline_with_the_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    caplog.set_level("WARNING", "penstock.weights.puller")
    with pytest.raises(WeightError, match=r"did not come .* within 0.3 s .*no connection to the weight store"):
        await pull(address, 0, TOKEN, deadline_s=0.3)
    assert f"weight version 0 from {address}" in caplog.text


# ---- stores that die, and stores that lie


STORE_PROCESS = """
import sys, random
sys.path.insert(0, sys.argv[3])
from test_weight_store import CHUNK, CONFIG, TOKEN, tensors_of
from penstock.weights import WeightStore
store = WeightStore("run", "127.0.0.1", int(sys.argv[1]), TOKEN, chunk_bytes=CHUNK)
store.publish(0, tensors_of(int(sys.argv[2])), CONFIG)
print(store.start(), flush=True)
sys.stdin.read()
"""


def start_store_process(port: int, seed: int = 0) -> tuple[subprocess.Popen[bytes], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", STORE_PROCESS, str(port), str(seed), os.path.dirname(__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().decode().strip()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


class Gate:
    """A transport that runs a step of the test's after some chunks, by name of the moment."""

    def __init__(self, after: int) -> None:
        self.inner = TcpTransport(TOKEN)
        self.left = after
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def connect(self, source: str, connect_s: float = 10.0, relay: bool = False) -> WeightLink:
        return GatedLink(self, await self.inner.connect(source, connect_s, relay))

    def keep(self, source: str, link: WeightLink) -> None:
        link.close()


class GatedLink:
    def __init__(self, gate: Gate, link: WeightLink) -> None:
        self.gate = gate
        self.link = link
        self.way, self.sees, self.direct, self.kept, self.round_trip_s = link.way, "", False, False, link.round_trip_s

    async def plan(self, ask: words.GetPlan) -> Planned:
        return await self.link.plan(msgspec.structs.replace(ask, push_bytes=0))

    async def manifest(self, encoding: Encoding, wait_s: float, relay_port: int) -> tuple[bytes, str]:
        return await self.link.manifest(encoding, wait_s, relay_port)

    async def made(self, encoding: Encoding, first: int, wait_s: float) -> Made:
        return await self.link.made(encoding, first, wait_s)

    async def ask_chunks(self, encoding: Encoding, indices: Sequence[int]) -> None:
        for index in indices:  # Each comes by itself.
            await self.link.ask_chunks(encoding, [index])

    async def chunks_into(
        self, indices: Sequence[int], intos: Sequence[memoryview], heard: Heard | None = None, gladly: int = 0
    ) -> int:
        self.gate.left -= 1
        if self.gate.left == 0:
            self.gate.reached.set()
            await self.gate.go_on.wait()
        return await self.link.chunks_into(indices[:1], intos[:1], heard)

    async def stop(self) -> None:
        self.close()

    def close(self) -> None:
        self.link.close()


async def test_a_sender_killed_in_mid_transfer_and_back_at_the_same_port_completes_the_pull() -> None:
    process, address = await asyncio.to_thread(start_store_process, 0)
    gate = Gate(after=3)
    pulling = asyncio.create_task(pull(address, 0, TOKEN, connections=1, deadline_s=30, transport=gate))
    try:
        await gate.reached.wait()
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait, 10)
        gate.go_on.set()
        end(process)
        process, again = await asyncio.to_thread(start_store_process, words_address(address)[1])
        assert again == address
        assert_whole(await pulling, 0)
    finally:
        pulling.cancel()
        end(process)


@pytest.mark.usefixtures("unpushed")
async def test_a_store_restarted_with_other_weights_under_the_same_number_never_mixes_the_two() -> None:
    gate = Gate(after=4)
    with running_store() as (first, address):
        first.publish(0, tensors_of(0), CONFIG)
        pulling = asyncio.create_task(pull(address, 0, TOKEN, connections=1, deadline_s=30, transport=gate))
        await gate.reached.wait()
        port = words_address(address)[1]
        await asyncio.to_thread(first.close)
    with running_store(port=port) as (second, _):
        second.publish(0, tensors_of(1), CONFIG)
        gate.go_on.set()
        with pytest.raises(WeightError, match="wrong checksum 4 times"):
            await pulling


@pytest.mark.usefixtures("unpushed")
async def test_a_store_restarted_without_the_version_ends_the_pull_by_name() -> None:
    gate = Gate(after=2)
    with running_store() as (first, address):
        first.publish(0, tensors_of(0), CONFIG)
        pulling = asyncio.create_task(pull(address, 0, TOKEN, connections=1, deadline_s=30, transport=gate))
        await gate.reached.wait()
        port = words_address(address)[1]
        await asyncio.to_thread(first.close)
    with running_store(port=port) as (second, _):
        second.publish(9, tensors_of(1), CONFIG)
        gate.go_on.set()
        with pytest.raises(words.NoSuchVersion, match=r"held: 9"):
            await pulling


class LyingTransport:
    """A peer with the right token and a manifest of its own making."""

    def __init__(self, manifest: Manifest, stream: bytes) -> None:
        self.manifest_, self.stream, self.closed = sign_manifest(manifest, TOKEN), stream, 0

    way, sees, direct, kept, round_trip_s = "tcp", "", False, False, 0.0

    async def connect(self, source: str, connect_s: float = 10.0, relay: bool = False) -> LyingTransport:
        return self

    def keep(self, source: str, link: WeightLink) -> None:
        link.close()

    async def plan(self, ask: words.GetPlan) -> Planned:
        return Planned((Encoding(ask.ask.version, self.manifest_.codec, self.manifest_.base),), self.signed())

    def signed(self) -> bytes:
        return encode_manifest(self.manifest_)

    async def manifest(self, encoding: Encoding, wait_s: float, relay_port: int) -> tuple[bytes, str]:
        return encode_manifest(self.manifest_), ""

    async def ask_chunks(self, encoding: Encoding, indices: Sequence[int]) -> None:
        return None

    async def chunks_into(
        self, indices: Sequence[int], intos: Sequence[memoryview], heard: Heard | None = None, gladly: int = 0
    ) -> int:
        chunk = self.manifest_.chunks[indices[0]]
        intos[0][:] = self.stream[chunk.offset : chunk.offset + chunk.raw_nbytes]
        return 1

    async def stop(self) -> None:
        self.close()

    def close(self) -> None:
        self.closed += 1


def published_by(seed: int) -> tuple[Manifest, bytes]:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=CHUNK)
    return store.publish(0, tensors_of(seed), CONFIG), b"".join(source[3] for source in tensors_of(seed))


async def test_a_manifest_that_lies_about_sizes_is_refused_and_the_link_closed() -> None:
    manifest, stream = published_by(0)
    huge = msgspec.structs.replace(manifest.tensors[0], shape=(1 << 40,), nbytes=4 << 40)
    liar = LyingTransport(msgspec.structs.replace(manifest, tensors=(huge, *manifest.tensors[1:])), stream)
    with pytest.raises(WeightError, match="over the limit"):
        await pull("liar:1", 0, TOKEN, deadline_s=10, max_bytes=1 << 30, transport=liar)
    assert liar.closed == 1


async def test_tensors_that_do_not_verify_are_refused_though_every_chunk_did() -> None:
    manifest, stream = published_by(0)
    wrong = msgspec.structs.replace(manifest.tensors[1], xxh3=manifest.tensors[1].xxh3 ^ 1)
    tensors = (manifest.tensors[0], wrong, *manifest.tensors[2:])
    liar = LyingTransport(msgspec.structs.replace(manifest, tensors=tensors), stream)
    with pytest.raises(WeightError, match="tensor norm of weight version 0 does not verify"):
        await pull("liar:1", 0, TOKEN, deadline_s=10, transport=liar)


async def test_an_unknown_codec_is_refused_by_its_name() -> None:
    manifest, stream = published_by(0)
    liar = LyingTransport(msgspec.structs.replace(manifest, codec="sparse-delta"), stream)
    with pytest.raises(WeightError, match="'sparse-delta'"):
        await pull("liar:1", 0, TOKEN, codec="raw", deadline_s=10, transport=liar)


async def test_a_store_that_holds_another_token_is_not_believed() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def read() -> bytes:
            return await reader.readexactly(words.message_length(await reader.readexactly(words.LENGTH.size)))

        await read()
        writer.write(words.encode_message(words.Challenge(protocol=words.PROTOCOL, nonce=bytes(32))))
        await read()
        writer.write(words.encode_message(words.Accepted(mac=bytes(32))))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(AuthError, match="does not hold this run's token"):
            await pull(address, 0, TOKEN, deadline_s=10)
