"""How bytes move: links that are kept, several addresses, shared memory, Mooncake, and instances that speak TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import ssl
import subprocess
import sys
import threading
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_transfer import CHUNK, CONFIG, TOKEN, assert_whole, codecs, fetch, store_of, tensors_of
from test_weight_store import Proxy

from certificates import Papers
from penstock.errors import MissingExtra, WeightError
from penstock.instance.loading import WeightLoader
from penstock.tls import client_context, server_context
from penstock.weights import WeightStore
from penstock.weights import mooncake as mooncake_module
from penstock.weights import protocol as words
from penstock.weights import tcp as tcp_module
from penstock.weights.addresses import parse_addresses
from penstock.weights.framed import FramedSocket
from penstock.weights.manifest import Encoding
from penstock.weights.memory import NoMemory, Recycled
from penstock.weights.plan import check_tensors
from penstock.weights.protocol import LinkLost, Way
from penstock.weights.puller import NotInTime
from penstock.weights.relay import Relay
from penstock.weights.shm import PREFIX, SharedFetcher, SharedLender, SharedMapper
from penstock.weights.tcp import TcpTransport
from penstock.weights.tls_socket import relay_server_context
from penstock.weights.transport import WayClosed
from penstock.weights.ways import fetchers_of, lenders_of

# Links that are kept


async def test_links_stay_open_from_one_version_to_the_next() -> None:
    async with store_of(0, 1, 2, keep_versions=3) as (store, address):
        transport = TcpTransport(TOKEN)
        for version in range(3):
            # One at a time: a second one may be given up while it is opened, once nothing is left to fetch.
            assert_whole(await fetch(address, version, codec="raw", transport=transport, connections=1), version)
        opened = store.counters()["connections"]
        assert opened == 1
        transport.close()
        assert_whole(await fetch(address, 1, codec="raw", transport=transport), 1)
        assert store.counters()["connections"] > opened
        transport.close()


async def test_a_kept_link_that_died_costs_no_pause_and_no_word(caplog: pytest.LogCaptureFixture) -> None:
    transport = TcpTransport(TOKEN)
    async with store_of(0) as (_, address):
        assert_whole(await fetch(address, 0, codec="raw", transport=transport, connections=1), 0)
    async with store_of(0, port=int(address.rpartition(":")[2])) as (_, same):
        assert same == address
        assert_whole(await fetch(address, 0, codec="raw", transport=transport, connections=1), 0)
    assert "trying again" not in caplog.text
    transport.close()


async def test_a_puller_that_rests_holds_no_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.server.LEASE_IDLE_S", 0.05)
    async with store_of(0, keep_versions=1) as (store, address):
        transport = TcpTransport(TOKEN)
        assert_whole(await fetch(address, 0, codec="raw", transport=transport), 0)
        await asyncio.to_thread(store.publish, 1, tensors_of(1), CONFIG)
        async with asyncio.timeout(30):
            while store.versions() != [1]:
                await asyncio.sleep(0.01)
        assert_whole(await fetch(address, 1, codec="raw", transport=transport), 1)
        transport.close()


async def test_one_answer_has_the_plan_the_manifest_and_a_small_version() -> None:
    async with store_of(0, 1) as (_, address):
        base = await fetch(address, 0, codec="raw")
        transport = TcpTransport(TOKEN)
        link = await transport.connect(address)
        held = (words.Held(0, base.manifest.digest),)
        ask = words.GetOffers(version=1, held=held, wait_s=30)
        planned = await link.plan(words.GetPlan(ask=ask, codec="delta", push_bytes=1 << 20))
        assert planned.steps == (Encoding(1, "delta", 0),)
        assert planned.pushed == 2 * 60_000 // CHUNK + 2  # Chunks of bfloat16, and one of float32.
        transport.keep(address, link)
        transport.close()
        unpushed = await (await transport.connect(address)).plan(words.GetPlan(ask=ask, codec="raw"))
        assert (unpushed.steps, unpushed.pushed) == ((Encoding(1),), 0)


async def test_a_codec_that_nobody_has_is_refused_by_name() -> None:
    async with store_of(0) as (store, address):
        store.encodings()
        link = await TcpTransport(TOKEN).connect(address)
        with pytest.raises(WeightError, match="refused"):
            await link.plan(words.GetPlan(ask=words.GetOffers(version=0), codec="int8"))
        link.close()


# Several addresses


async def test_connections_are_spread_over_the_addresses_of_a_source() -> None:
    async with store_of(0) as (_, address):
        doors = [Proxy(address), Proxy(address)]
        async with contextlib.AsyncExitStack() as parts:
            source = ",".join([await parts.enter_async_context(door.listening()) for door in doors])
            transport = TcpTransport(TOKEN)
            for link in [await transport.connect(source) for _ in range(4)]:
                link.close()
            assert [door.connections for door in doors] == [2, 2]
            assert_whole(await fetch(source, 0, codec="raw", connections=4), 0)
            dead = "127.0.0.1:1," + source
            assert_whole(await fetch(dead, 0, codec="raw", connections=3), 0)
    with pytest.raises(WeightError, match="not the address of a weight store"):
        parse_addresses("a:1,,b:2")


def test_a_store_says_every_address_that_it_is_reached_by() -> None:
    store = WeightStore("run", "127.0.0.1", 7071, TOKEN, advertise="10.0.0.1, [fd00::1]:99,nic-b")
    assert store.address == "10.0.0.1:7071,[fd00::1]:99,nic-b:7071"
    assert parse_addresses(store.address) == [("10.0.0.1", 7071), ("fd00::1", 99), ("nic-b", 7071)]


# Shared memory


def left(folder: Path) -> list[Path]:
    return sorted(folder.glob(PREFIX + "*"))


async def test_on_one_machine_a_version_is_seen_where_the_store_has_it(tmp_path: Path) -> None:
    async with store_of(0, 1, lenders=[SharedLender(tmp_path)]) as (store, address):
        transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])
        base = await fetch(address, 0, codec="raw", transport=transport)
        assert_whole(base, 0)
        assert base.way == "shm"
        assert store.counters().get("bytes", 0) == 0
        assert store.counters()["lent_by_shm"] == 1
        assert base.stream.readonly
        store._held._versions[0].stream[100] ^= 1  # The same pages: what is written there is seen here.
        with pytest.raises(WeightError, match="does not verify"):
            check_tensors(base.manifest, dict(base.tensors))
        store._held._versions[0].stream[100] ^= 1
        # What is encoded is in no shared memory, and comes by the connection.
        weights = await fetch(address, 1, codec="delta", base=base, transport=transport)
        assert_whole(weights, 1)
        assert codecs(weights) == ["delta:1"]
        assert weights.way == "tcp (not by shm: this version does not lie there)"
        assert store.counters()["bytes"] == weights.bytes_fetched
        transport.close()
    assert left(tmp_path) == []


async def test_what_is_lent_is_counted_before_anybody_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send = FramedSocket.send

    async def tired(framed: FramedSocket, *parts: bytes) -> None:
        await send(framed, *parts)
        if threading.current_thread() is not threading.main_thread():
            # The store's, which goes on when all is fetched.
            await asyncio.sleep(0.3)

    monkeypatch.setattr(FramedSocket, "send", tired)
    async with store_of(0, lenders=[SharedLender(tmp_path)]) as (store, address):
        transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])
        base = await fetch(address, 0, codec="raw", transport=transport)
        assert base.way == "shm"
        assert store.counters()["lent_by_shm"] == 1
        transport.close()


@pytest.mark.parametrize("spoilt", ["other boot", "other folder", "other content", "none at the store"])
async def test_without_the_same_memory_it_comes_by_tcp_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    lender = SharedLender(tmp_path)
    expected = "no such way"
    if spoilt == "other boot":
        monkeypatch.setattr(lender, "_boot_id", "another")
    elif spoilt == "other folder":
        monkeypatch.setattr(lender, "_proof", tmp_path / "elsewhere" / "x")
        expected = "not to be seen from here"
    elif spoilt == "other content":
        monkeypatch.setattr(lender, "_nonce", "00" * 32)
        expected = "not what this store has written"
    lenders = [] if spoilt == "none at the store" else [lender]
    async with store_of(0, lenders=lenders) as (_, address):
        transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])
        weights = await fetch(address, 0, codec="raw", transport=transport)
        assert_whole(weights, 0)
        assert weights.way.startswith("tcp (not by shm: ")
        assert expected in weights.way
        transport.close()


async def test_memory_that_a_reader_looks_at_is_not_used_again_before_it_lets_go(tmp_path: Path) -> None:
    lender = SharedLender(tmp_path)
    async with store_of(0, 1, keep_versions=1, lenders=[lender]) as (store, address):
        transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])
        held = await fetch(address, 1, codec="raw", transport=transport)
        transport.close()
        places = [lender.place(store._held._versions[1].stream)]
        for version in range(2, 7):
            await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
            places.append(lender.place(store._held._versions[version].stream))
        # Four versions went by, and the one that is looked at is what it was.
        assert places[0] not in places[1:]
        assert len(set(places)) < len(places)
        check_tensors(held.manifest, dict(held.tensors))
        assert_whole(held, 1)
        del held
        gc.collect()
        assert len(left(tmp_path)) <= 4  # The proof, the newest version and two spares.
    assert left(tmp_path) == []


HOLDER = """
import sys
from pathlib import Path
from penstock.weights.shm import SharedMapper
view = SharedMapper(Path(sys.argv[1]).parent).map(sys.argv[1], 4096)
print("there", flush=True)
sys.stdin.read()
"""


def test_a_reader_that_is_killed_lets_go_of_the_memory(tmp_path: Path) -> None:
    lender = SharedLender(tmp_path)
    buffer = lender.buffer(4096)
    assert buffer is not None
    with pytest.raises(LinkLost, match="for another version"):
        SharedMapper(tmp_path).map(lender.place(buffer), 4096)  # It is being written to.
    lender.lend(buffer)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, lender.place(buffer)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"there\n"
        assert not lender.claim(buffer)
        holder.kill()
    assert lender.claim(buffer)
    lender.close()


async def test_a_version_that_its_store_was_killed_with_is_still_there_for_who_looks_at_it(tmp_path: Path) -> None:
    async with store_of(0, lenders=[SharedLender(tmp_path)]) as (_, address):
        transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])
        held = await fetch(address, 0, codec="raw", transport=transport)
        transport.close()
    assert left(tmp_path) == []
    assert_whole(held, 0)


async def test_a_base_that_is_seen_needs_no_copy_and_takes_differences(tmp_path: Path) -> None:
    async with store_of(0, 1, lenders=[SharedLender(tmp_path)]) as (_, address):
        near = WeightLoader(TOKEN, ways=["shm"], codec="auto", relay_port=0)
        staged = await near.pull(address, 0, 30)
        near.serves(staged)
        assert staged.way == "shm"
        # What is seen is passed on, too.
        far = WeightLoader(TOKEN, codec="raw", relay_port=0)
        assert_whole(await far.pull(address, 0, 30), 0)
        assert near.relay is not None
        assert near.relay.counters()["chunks"] > 0
        far_off = TcpTransport(TOKEN)
        assert_whole(await fetch(address, 1, codec="delta", base=staged, transport=far_off), 1)
        far_off.close()
        for loader in (near, far):
            await loader.close()


async def test_memory_that_vanishes_in_mid_pull_is_left_for_tcp(tmp_path: Path) -> None:
    async with store_of(0, lenders=[SharedLender(tmp_path)]) as (_, address):
        transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])
        for path in left(tmp_path)[:]:
            if path.stat().st_size > 1000:
                path.unlink()
        weights = await fetch(address, 0, codec="raw", transport=transport)
        assert_whole(weights, 0)
        again = await fetch(address, 0, codec="raw", transport=transport)
        assert "can't be opened" in again.way
        transport.close()


@pytest.mark.parametrize("doubted", [True, False])
async def test_a_way_that_failed_once_is_gone_again_after_a_while(
    doubted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not doubted:
        monkeypatch.setattr(tcp_module, "DOUBT_S", 0.0)
    async with store_of(0, lenders=[SharedLender(tmp_path)]) as (store, address):
        transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])
        for path in left(tmp_path):
            if path.stat().st_size > 1000:
                path.unlink()
        if doubted:
            assert "can't be opened" in (await fetch(address, 0, codec="raw", transport=transport)).way
        else:
            with pytest.raises(NotInTime):
                await fetch(address, 0, codec="raw", transport=transport, deadline_s=0.3)
        await asyncio.to_thread(store.publish, 1, tensors_of(1), CONFIG)
        weights = await fetch(address, 1, codec="raw", transport=transport)
        assert_whole(weights, 1)
        assert weights.way.startswith("tcp (not by shm: " if doubted else "shm")
        monkeypatch.setattr(transport, "_closed_ways", dict.fromkeys(transport._closed_ways, (0.0, "")))
        assert (await fetch(address, 1, codec="raw", transport=transport)).way == "shm"
        transport.close()


@pytest.mark.parametrize("short_at", [0, 1, 2])
async def test_a_store_that_once_had_no_shared_memory_has_it_for_the_next_version(
    short_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(nbytes: int) -> None:
        raise NoMemory("short")

    async with store_of(lenders=[SharedLender(tmp_path)]) as (store, address):
        transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])
        ways = []
        for version in range(8):
            with monkeypatch.context() as patched:
                if version == short_at:
                    patched.setattr("penstock.weights.shm.check_room", none)
                await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
            ways.append((await fetch(address, version, codec="raw", transport=transport)).way == "shm")
        assert ways == [version != short_at for version in range(8)]
        transport.close()


def test_memory_that_a_lender_lacked_once_is_its_own_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = SharedLender(tmp_path)
    memory = Recycled(lender=lender)
    with monkeypatch.context() as patched:
        patched.setattr(lender, "buffer", lambda nbytes: None)
        first = memory.buffer(8192)
        assert not lender.place(first)
        del first
        assert not lender.place(memory.buffer(8192)), "used again, where there is no other"
    both = [memory.buffer(8192) for _ in range(2)]
    assert all(lender.place(buffer) for buffer in both)
    both.clear()
    assert lender.place(memory.buffer(8192))
    lender.close()


@pytest.mark.parametrize(("code", "again"), [(errno.EMFILE, True), (errno.ENOENT, False)])
async def test_shared_memory_that_could_not_be_looked_at_for_want_of_a_descriptor_is_tried_by_the_next_pull(
    code: int, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where it is not to be seen at all: a link costs a handshake."""
    async with store_of(0, lenders=[SharedLender(tmp_path)]) as (_, address):
        transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])

        def refused(path: Any, *how: Any, **options: Any) -> int:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patched:
            patched.setattr("penstock.weights.shm.os.open", refused)
            assert os.strerror(code) in (await fetch(address, 0, codec="raw", transport=transport)).way
        assert any(transport._kept.values()) is not again
        assert ((await fetch(address, 0, codec="raw", transport=transport)).way == "shm") is again
        transport.close()


async def test_shared_memory_that_was_written_over_is_found_out(tmp_path: Path) -> None:
    async with store_of(0, lenders=[SharedLender(tmp_path)]) as (store, address):
        stream = store._held._versions[0].stream
        stream[5000] ^= 1
        with pytest.raises(WeightError, match="tensor w of weight version 0 does not verify"):
            await fetch(address, 0, codec="raw", transport=TcpTransport(TOKEN, fetchers=[SharedFetcher()]))


def test_where_shared_memory_is_full_other_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    lender = SharedLender(tmp_path)
    monkeypatch.setattr("penstock.weights.shm.os.posix_fallocate", full)
    store = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=CHUNK, lenders=[lender])
    assert store.publish(0, tensors_of(0), CONFIG).version == 0
    assert "No space left on device" in caplog.text
    assert len(left(tmp_path)) == 1  # The proof alone.
    lender.close()
    with pytest.raises(WayClosed, match="no shared memory in"):
        SharedLender(tmp_path / "none")


def test_a_store_that_starts_beside_another_takes_none_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, others = fcntl.flock, []

    def beside(file: int, operation: int) -> None:
        if not others and operation == fcntl.LOCK_EX:
            others.append(None)
            others.append(SharedLender(tmp_path))  # It sweeps between the other's making of a file and its lock.
        lock(file, operation)

    monkeypatch.setattr("penstock.weights.shm.fcntl.flock", beside)
    lender = SharedLender(tmp_path)
    assert lender._proof.exists()
    others.clear()
    buffer = lender.buffer(4096)
    assert buffer is not None
    assert len(others) == 2
    assert Path(lender.place(buffer)).exists()
    lender.close()


OWNER = """
import sys
from pathlib import Path
from penstock.weights.shm import SharedLender
lender = SharedLender(Path(sys.argv[1]))
buffer = lender.buffer(4096)
print("there", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_store_left_is_removed_by_the_next_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    living = SharedLender(tmp_path)
    buffer = living.buffer(100)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"there\n"
        assert len(left(tmp_path)) == 4
        owner.kill()
    assert len(left(tmp_path)) == 4
    third = SharedLender(tmp_path)
    assert len(left(tmp_path)) == 3
    assert buffer is not None
    place = living.place(buffer[10:20])
    assert Path(place).exists()
    del buffer
    assert not Path(place).exists()
    for lender in (living, third):
        lender.close()
    assert left(tmp_path) == []


async def test_a_store_can_lead_a_reader_to_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(100))
    mapper = SharedMapper(tmp_path)
    for place in (str(tmp_path / "secret"), f"{tmp_path}/../{PREFIX}x", f"/etc/{PREFIX}x"):
        with pytest.raises(WayClosed, match="no shared memory of a weight store"):
            mapper.map(place, 4)
    (tmp_path / f"{PREFIX}short").write_bytes(b"ab")
    with pytest.raises(WayClosed, match="ends at 2, before the version does"):
        mapper.map(str(tmp_path / f"{PREFIX}short"), 4)
    with pytest.raises(WayClosed, match="not to be seen"):
        SharedFetcher().open(Way("shm", str(tmp_path / "none"), "x"))


async def test_an_agent_uses_the_ways_that_it_is_given(tmp_path: Path) -> None:
    async with store_of(0, lenders=[SharedLender(tmp_path)]) as (_, address):
        for ways, expected in ((("shm",), "shm"), ((), "tcp")):
            loader = WeightLoader(TOKEN, ways=ways, codec="raw")
            assert (await loader.pull(address, 0, 30)).way == expected
            await loader.close()
    assert [fetcher.kind for fetcher in fetchers_of(["shm"])] == ["shm"]


# Memory that is used again


async def test_the_memory_of_the_version_before_the_base_is_used_again() -> None:
    async with store_of(0, 1, 2, 3, keep_versions=4) as (_, address):
        loader = WeightLoader(TOKEN, codec="delta")
        seen = []
        for version in range(4):
            staged = await loader.pull(address, version, 30)
            assert_whole(staged, version)
            loader.serves(staged)
            seen.append(id(staged.stream.obj))
        # Two buffers, turn by turn: what serves is never written to.
        assert seen[0] == seen[2] != seen[1] == seen[3]
        await loader.close()


def test_memory_that_somebody_still_looks_at_is_not_given_out_again() -> None:
    memory = Recycled()
    first = memory.buffer(8192)
    first[:3] = b"abc"
    view = first[:3].toreadonly()
    del first
    other = memory.buffer(8192)
    other[:3] = b"xyz"
    assert bytes(view) == b"abc"
    del view
    assert bytes(memory.buffer(8192)[:3]) == b"abc"
    assert len(memory.buffer(100)) == 100


def test_memory_that_only_garbage_refers_to_is_given_out_before_more_is_taken() -> None:
    memory = Recycled()
    serving, staged = memory.buffer(8192), memory.buffer(8192)
    staged[:3] = b"abc"
    ring: list[object] = [staged]
    ring.append(ring)
    gc.disable()
    try:
        del staged, ring
        assert memory.spare(8192) is None
        memory.littered = True
        assert bytes(memory.buffer(8192)[:3]) == b"abc"
        assert not memory.littered
    finally:
        gc.enable()
    assert not any(serving)


# Instances that speak TLS


@contextlib.asynccontextmanager
async def secured(papers: Papers, *versions: int) -> AsyncIterator[tuple[WeightStore, str, ssl.SSLContext]]:
    tls = papers.server(client_ca=False)
    async with store_of(*versions, tls=server_context(tls.cert, tls.key, "", lambda _: None)) as (store, address):
        yield store, address, client_context(papers.ca_file)


async def test_instances_pass_weights_on_over_tls_and_know_each_other_by_the_token(tmp_path: Path) -> None:
    async with secured(Papers.of(tmp_path / "ca"), 0, 1) as (store, address, tls):
        loaders = [WeightLoader(TOKEN, codec="raw", relay_port=0, tls=tls) for _ in range(3)]
        for version in (0, 1):
            before = store.counters().get("bytes", 0)
            staged = await asyncio.gather(*(loader.pull(address, version, 30) for loader in loaders))
            for weights in staged:
                assert_whole(weights, version)
            assert store.counters()["bytes"] - before == staged[0].manifest.raw_nbytes
        assert staged[0].way == "tls"
        assert sum(loader.relay.counters().get("chunks", 0) for loader in loaders if loader.relay is not None) > 0
        for loader in loaders:
            await loader.close()


async def test_who_stands_between_two_instances_with_a_certificate_of_its_own_is_found_out(tmp_path: Path) -> None:
    async with secured(Papers.of(tmp_path / "ca"), 0) as (store, address, tls):
        loader = WeightLoader(TOKEN, codec="raw", relay_port=0, tls=tls)
        await loader.pull(address, 0, 30)
        assert loader.relay is not None
        proxy = await asyncio.start_server(
            lambda reader, writer: between(reader, writer, loader.relay.port if loader.relay else 0),
            "127.0.0.1",
            0,
            ssl=relay_server_context()[0],
        )
        async with proxy:
            middle = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
            transport = TcpTransport(TOKEN, tls=tls)
            with pytest.raises(words.TokenRefused):
                await transport.connect(middle, relay=True)
            (await transport.connect(f"127.0.0.1:{loader.relay.port}", relay=True)).close()
            # One that is named by the store costs a try, and the version comes from the trainer.
            await store.relay(Encoding(0), middle)
            assert_whole(await fetch(address, 0, codec="raw", transport=transport), 0)
        await loader.close()


async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Decrypts and encrypts again, as a man in the middle does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)

    async def pass_on(one: asyncio.StreamReader, other: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await one.read(65536):
                other.write(data)
                await other.drain()
        other.close()

    await asyncio.gather(pass_on(reader, up_writer), pass_on(up_reader, writer))


def test_without_the_package_that_makes_certificates_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtra, match=r"penstock\[tls\]"):
        Relay(TOKEN, secure=True)


# Mooncake, by its contract; the package itself is tested by `make test-mooncake`


class FakeEngine:
    """Reads this process's own memory, as the transfer engine reads another's: registered ranges alone."""

    ranges: ClassVar[dict[int, int]] = {}
    fails: ClassVar[bool] = False

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        assert (metadata, protocol, device) == ("P2PHANDSHAKE", "tcp", "")
        return -1 if host == "10.9.9.9" else 0

    def get_rpc_port(self) -> int:
        return 15555

    def register_memory(self, address: int, nbytes: int) -> int:
        self.ranges[address] = nbytes
        return 0

    def unregister_memory(self, address: int) -> int:
        self.ranges.pop(address, None)
        return 0

    def transfer_sync_read(self, segment: str, own: int, address: int, nbytes: int) -> int:
        assert segment == "127.0.0.1:15555"  # The store's, as it calls itself.
        for first in (own, address):
            if not any(start <= first and first + nbytes <= start + size for start, size in self.ranges.items()):
                return -2
        if self.fails:
            return -1
        ctypes.memmove(own, address, nbytes)
        return 0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeEngine]]:
    package = types.SimpleNamespace(TransferEngine=FakeEngine)
    monkeypatch.setitem(sys.modules, "mooncake", types.SimpleNamespace(engine=package))
    monkeypatch.setitem(sys.modules, "mooncake.engine", package)
    monkeypatch.setattr(mooncake_module, "_carrier", lambda: "tcp")
    mooncake_module._engine.cache_clear()
    monkeypatch.setattr(FakeEngine, "ranges", {})
    yield FakeEngine
    mooncake_module._engine.cache_clear()


async def test_with_mooncake_chunks_are_read_out_of_the_stores_registered_memory(engine: type[FakeEngine]) -> None:
    async with store_of(0, 1, lenders=lenders_of(["mooncake"], "127.0.0.1")) as (store, address):
        transport = TcpTransport(TOKEN, fetchers=fetchers_of(["mooncake"]))
        for version in (0, 1):
            weights = await fetch(address, version, codec="raw", transport=transport)
            assert_whole(weights, version)
            assert weights.way == "mooncake"
        assert store.counters().get("bytes", 0) == 0
        del weights
        gc.collect()
        assert len(engine.ranges) == 2  # What the store holds; memory that is gone is registered no longer.
        transport.close()


def test_memory_that_has_the_place_of_such_as_was_given_back_stays_registered_with_mooncake(
    engine: type[FakeEngine],
) -> None:
    """Pages are unmapped before anybody hears of it: another thread may have been given them by then."""
    pages = mmap.mmap(-1, 8192)
    made = mooncake_module._engine("127.0.0.1")
    old, new = ((ctypes.c_char * size).from_buffer(pages) for size in (4096, 8192))
    address = made.register(memoryview(old))
    assert made.register(memoryview(new)) == address
    del old
    assert made.registered(address)
    assert engine.ranges == {address: 8192}
    assert made.register(memoryview(new)) == address
    del new
    assert not made.registered(address)
    assert engine.ranges == {}


async def test_a_read_that_mooncake_refuses_is_made_by_tcp(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "fails", True)
    async with store_of(0, lenders=lenders_of(["mooncake"], "127.0.0.1")) as (_, address):
        transport = TcpTransport(TOKEN, fetchers=fetchers_of(["mooncake"]))
        assert_whole(await fetch(address, 0, codec="raw", transport=transport), 0)
        assert "code -1" in (await fetch(address, 0, codec="raw", transport=transport)).way
        transport.close()


@pytest.mark.parametrize("cause", ["can't be loaded: libibverbs.so.1", "does not start on 10.9.9.9 over tcp"])
async def test_an_agent_without_mooncake_goes_by_its_other_ways_and_says_why(
    engine: type[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    cause: str,
) -> None:
    monkeypatch.setattr("penstock.weights.ways.outward_address", lambda: "10.9.9.9")
    if "loaded" in cause:
        monkeypatch.setattr(mooncake_module.importlib, "import_module", without_its_libraries)
    lenders = [*lenders_of(["mooncake"], "127.0.0.1"), SharedLender(tmp_path)]
    async with store_of(0, lenders=lenders) as (_, address):
        for ways, expected in (
            (["mooncake", "shm"], "shm"),
            (["mooncake"], "tcp (not by mooncake: Mooncake's transfer"),
        ):
            loader = WeightLoader(TOKEN, ways=ways, codec="raw")
            assert f"weights do not come by mooncake: Mooncake's transfer engine {cause}" in caplog.text
            staged = await loader.pull(address, 0, 30)
            assert staged.way.startswith(expected)
            assert (cause in staged.way) == (ways == ["mooncake"])
            await loader.close()


def without_its_libraries(name: str) -> None:
    raise ImportError("libibverbs.so.1: cannot open shared object file")


def test_mooncake_that_is_missing_or_does_not_start_is_said(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert lenders_of(["mooncake"], "10.9.9.9") == []
    assert "does not start on 10.9.9.9 over tcp (code -1)" in caplog.text
    mooncake_module._engine.cache_clear()
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(MissingExtra, match=r"penstock\[mooncake\]"):
        fetchers_of(["mooncake"])
