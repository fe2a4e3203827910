"""Who passes weights on holds two versions of memory, however many went through it."""

from __future__ import annotations

import asyncio
import mmap
from typing import cast

import pytest
from test_mid_transfer import Between
from test_transfer import assert_whole, store_of
from test_weight_store import TOKEN

from penstock.instance.loading import WeightLoader
from penstock.weights import memory
from penstock.weights.manifest import Encoding
from penstock.weights.memory import NoMemory
from penstock.weights.protocol import NotReady
from penstock.weights.puller import NotInTime
from penstock.weights.relay import Relay


async def test_raw_versions_that_are_passed_on_are_staged_in_two_buffers_in_turn() -> None:
    async with store_of(0, 1, 2, 3, 4, keep_versions=5) as (_, address):
        one, other = (WeightLoader(TOKEN, codec="raw", relay_port=0) for _ in range(2))
        try:
            buffers: list[set[int]] = [set(), set()]
            for version in range(5):
                both = await asyncio.gather(*(loader.pull(address, version, 60) for loader in (one, other)))
                for held, weights in zip(buffers, both, strict=True):
                    assert_whole(weights, version)
                    held.add(id(weights.stream.obj))
                del both, weights
            assert [len(held) for held in buffers] == [2, 2]
        finally:
            await one.close()
            await other.close()


async def test_a_version_that_is_still_looked_at_is_not_written_over() -> None:
    async with store_of(0, 1, 2, 3, keep_versions=4) as (_, address):
        loader = WeightLoader(TOKEN, codec="raw", relay_port=0)
        try:
            seen = [await loader.pull(address, version, 60) for version in range(4)]
            for version, weights in enumerate(seen):
                assert_whole(weights, version)
        finally:
            await loader.close()


async def test_who_reads_a_forgotten_version_is_sent_elsewhere_and_its_memory_is_let_go() -> None:
    relay = Relay(TOKEN)
    data = bytearray(8)
    relay.expect(Encoding(1), b"manifest", 2)
    relay.put(Encoding(1), 0, memoryview(data))
    lease = await relay.open(Encoding(1), 0.0)
    waiting = asyncio.create_task(lease.chunk(1))
    await asyncio.sleep(0)
    relay.expect(Encoding(2), b"manifest", 2)
    assert bytes(await lease.chunk(0)) == data, "the version before the newest is still passed on"
    relay.expect(Encoding(3), b"manifest", 2)
    with pytest.raises(NotReady, match="gone on"):
        await waiting
    with pytest.raises(NotReady, match="gone on"):
        await lease.chunk(0)
    data.clear()  # Fails with a view of it left.


async def test_a_chunk_is_waited_for_while_others_of_its_version_come(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    clock, later_s = loop.time, [0.0]
    monkeypatch.setattr(loop, "time", lambda: clock() + later_s[0])
    relay = Relay(TOKEN, wait_s=50.0)
    relay.expect(Encoding(1), b"manifest", 5)
    lease = await relay.open(Encoding(1), 0.0)
    third, last = (asyncio.create_task(lease.chunk(index)) for index in (3, 4))
    for index in range(4):
        for _ in range(5):
            await asyncio.sleep(0)
        later_s[0] += 40.0
        relay.put(Encoding(1), index, memoryview(bytes([index])))
    assert bytes(await third) == b"\3"
    assert not last.done()
    later_s[0] += 60.0
    with pytest.raises(NotReady, match=r"chunk 4 .* nothing of it did for 50 s"):
        await last


@pytest.mark.parametrize("served", [False, True])
async def test_a_pull_that_was_cut_leaves_room_for_the_next_try(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, served: bool
) -> None:
    """Chunks that came raw are passed on from where they were staged."""
    given: list[mmap.mmap] = []

    def little_room(nbytes: int) -> memoryview:
        if sum(not memory._is_free(mapped) for mapped in given) >= 1 + served:
            raise NoMemory("full")
        buffer = memoryview(mmap.mmap(-1, nbytes))
        given.append(cast(mmap.mmap, buffer.obj))
        return buffer

    monkeypatch.setattr("penstock.weights.memory.host_buffer", little_room)
    monkeypatch.setattr("penstock.weights.puller.PUSH_BYTES", 0)
    async with store_of(0, 1, keep_versions=2) as (_, address):
        loader = WeightLoader(TOKEN, codec="raw", relay_port=0)
        way = Between(address, [])
        try:
            if served:
                loader.serves(await loader.pull(address, 0, 60))
            way.pause_s = 0.1
            async with way.listening() as source:
                with pytest.raises(NotInTime):
                    await loader.pull(source, 1, 1.0)
            assert_whole(await loader.pull(address, 1, 60), 1)
            assert "what was to be passed on is given up" in caplog.text
        finally:
            await loader.close()
