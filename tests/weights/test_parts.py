"""A version that an instance writes is looked at by the others of its machine tensor by tensor, as each is verified."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_shared import loaders
from test_transfer import CONFIG, TOKEN, codecs, counted_at_least, fetch, plans, store_of, until

from penstock.instance.loading import WeightLoader
from penstock.weights import StagedWeights, WeightStore
from penstock.weights.encodings import decode_chunk
from penstock.weights.manifest import Manifest
from penstock.weights.mapped import check_tensor_bytes, verify_in_place
from penstock.weights.neighbours import Neighbours
from penstock.weights.protocol import LinkLost, NoSuchVersion, NotReady
from penstock.weights.relay import Relay
from penstock.weights.shm import SharedLender, SharedMapper
from penstock.weights.sums import TensorSums
from penstock.weights.transport import Planned, Seen, WeightLink

TENSORS, ELEMENTS = 6, 10_000
NBYTES = 1 << 16


def tensors_of(version: int) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """A model whose every version has changed one weight in fifty of each tensor."""
    made: list[tuple[str, str, tuple[int, ...], bytes]] = []
    for number in range(TENSORS):
        values = np.random.default_rng(number).integers(0, 1 << 16, ELEMENTS, np.uint16)
        for step in range(1, version + 1):
            values[np.random.default_rng(100 * step + number).random(ELEMENTS) < 0.02] ^= 1
        made.append((f"w{number}", "BF16", (ELEMENTS,), values.tobytes()))
    return made


def assert_whole(weights: StagedWeights, version: int) -> None:
    assert {name: bytes(view) for name, view in weights.tensors.items()} == {s[0]: s[3] for s in tensors_of(version)}


class Gate:
    """Who decodes the last chunk first does not do so before it is opened; says which tensors neighbours verified."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.armed = False
        self.spoils = False
        """What it kept back is not decoded at all."""
        self.verified: list[str] = []
        monkeypatch.setattr("penstock.weights.fetch.decode_chunk", self._decode)
        monkeypatch.setattr("penstock.weights.mapped.check_tensor_bytes", self._check)

    def _decode(self, coder: Any, dtypes: Any, chunk: Any, data: Any, base: Any, staging: memoryview) -> None:
        if self.armed and chunk.offset + chunk.raw_nbytes == len(staging):
            self.armed = False
            assert self.opened.wait(60)
            if self.spoils:
                return
        decode_chunk(coder, dtypes, chunk, data, base, staging)

    def _check(self, version: int, tensor: Any, data: Any) -> None:
        check_tensor_bytes(version, tensor, data)
        self.verified.append(tensor.name)

    async def all_but_the_last(self, times: int = 1) -> None:
        await until(lambda: len(self.verified) >= times * (TENSORS - 1))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


@contextlib.asynccontextmanager
async def instances(gate: Gate, count: int, codec: str = "delta", encoded: bool = True) -> Any:
    """So many that serve version 0 of a store that has version 1 too, the first of which is to decode that."""
    async with store_of(keep_versions=3) as (store, address), loaders(count, codec=codec) as made:
        for version in (0, 1):
            await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
            if version == 0:
                for loader in made:
                    loader.serves(await loader.pull(address, 0, 60))
                    loader._rates.cores = 2
        if encoded:
            base = await fetch(address, 0, codec="raw")
            await fetch(address, 1, codec=codec, base=base if codec == "delta" else None)
        gate.armed = True
        gate.verified.clear()
        yield store, address, made


async def begun(loader: WeightLoader, store: WeightStore, address: str) -> asyncio.Task[StagedWeights]:
    """A pull of version 1, of which the store has heard."""
    known = plans(store)
    task = asyncio.create_task(loader.pull(address, 1, 60))
    await until(lambda: plans(store) != known)
    return task


async def written_at(loader: WeightLoader) -> str:
    """Where it writes version 1, once that is to be seen."""
    assert loader.relay is not None
    written = loader.relay._written
    await until(lambda: 1 in written)
    return written[1][0].place


async def looked_at(
    gate: Gate, store: WeightStore, address: str, one: WeightLoader, other: WeightLoader
) -> tuple[asyncio.Task[StagedWeights], asyncio.Task[StagedWeights]]:
    """The pulls of who writes version 1 and of its neighbour, who has verified all but the last tensor. Nothing is too
    late for the writer's relay."""
    assert one.relay is not None
    one.relay._wait_s = 1000.0
    tasks = await begun(one, store, address), await begun(other, store, address)
    await gate.all_but_the_last()
    return tasks


async def cut(pull: asyncio.Task[StagedWeights]) -> None:
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull


@pytest.mark.parametrize("encoded", [True, False])
@pytest.mark.parametrize("codec", ["delta", "lossless"])
async def test_neighbours_verify_what_is_there_while_the_rest_is_written(codec: str, encoded: bool, gate: Gate) -> None:
    async with instances(gate, 3, codec, encoded) as (store, address, (one, *others)):
        writing = await begun(one, store, address)
        looking = [await begun(other, store, address) for other in others]
        await gate.all_but_the_last(times=2)
        assert not writing.done()
        assert sorted(gate.verified) == sorted(2 * [f"w{number}" for number in range(TENSORS - 1)])
        gate.opened.set()
        weights = await writing
        assert codecs(weights) == [f"{codec}:1"]
        assert_whole(weights, 1)
        for seen in await asyncio.gather(*looking):
            assert_whole(seen, 1)
            assert seen.bytes_fetched == 0
            assert "shm of the instance" in seen.way
        assert len(gate.verified) == 2 * TENSORS


async def test_a_writer_that_gives_up_is_left_and_another_one_decodes(gate: Gate) -> None:
    async with instances(gate, 3) as (store, address, (one, *others)):
        writing = await begun(one, store, address)
        looking = [await begun(other, store, address) for other in others]
        await gate.all_but_the_last(times=2)
        place = await written_at(one)
        assert one.relay is not None
        one.relay._wait_s = 0.05
        await cut(writing)
        pulled = await asyncio.gather(*looking)
        for weights in pulled:
            assert_whole(weights, 1)
        assert sorted(weights.bytes_fetched > 0 for weights in pulled) == [False, True]
        # A thread still decodes there: nobody may take it for memory that does not change.
        mapper = SharedMapper(Path(place).parent)
        with pytest.raises(LinkLost):
            mapper.map(place, len(pulled[0].stream))
        gate.opened.set()
        seen = mapper.map(place, len(pulled[0].stream), in_parts=True)
        await until(lambda: seen.hold(0, len(seen.stream)))


@pytest.mark.parametrize("spoils", [True, False])
async def test_a_writer_that_gives_up_late_is_not_waited_for_and_what_was_seen_there_is_let_go_of(
    spoils: bool, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def lent(self: Neighbours, link: WeightLink, in_parts: bool) -> Planned:
        if not in_parts:
            asked.set()
        return await lent_before(self, link, in_parts)

    lent_before = Neighbours._lent
    monkeypatch.setattr("penstock.weights.neighbours.SOON_S", 0.01)
    monkeypatch.setattr("penstock.weights.neighbours.LAST_S", 0.05)
    monkeypatch.setattr(Neighbours, "_lent", lent)
    async with instances(gate, 2) as (store, address, (one, other)):
        writing, looking = await looked_at(gate, store, address, one, other)
        await asked.wait()
        place = await written_at(one)
        gc.collect()
        gc.disable()
        try:
            await cut(writing)
            gate.spoils = spoils
            gate.opened.set()
            async with asyncio.timeout(30):
                weights = await looking
            assert_whole(weights, 1)
            # Without it every tensor has come to be whole, and is held, though the writer never says so.
            assert (weights.bytes_fetched > 0) == spoils
            assert one._lender is not None
            (buffer,) = [view for view in map(memoryview, one._memory._held) if one._lender.place(view) == place]
            assert spoils or not one._lender.claim(buffer)
            del weights
            lender = one._lender
            await until(lambda: not spoils or lender.claim(buffer))
        finally:
            gc.enable()


async def test_a_writer_that_answers_no_more_is_left(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its process is stopped, or its loop stuck: the kernel goes on answering for it.
    monkeypatch.setattr("penstock.weights.neighbours.SOON_S", 0.01)
    monkeypatch.setattr("penstock.weights.neighbours.ASK_S", 0.05)
    monkeypatch.setattr("penstock.weights.neighbours.ANSWER_S", 0.05)

    async def hung(*args: Any) -> Any:
        await asyncio.Event().wait()

    async with instances(gate, 2) as (store, address, (one, other)):
        writing = await begun(one, store, address)
        await written_at(one)
        monkeypatch.setattr(one.relay, "open", hung)
        # Within less than links wait for a byte.
        async with asyncio.timeout(15):
            weights = await other.pull(address, 1, 60)
        assert_whole(weights, 1)
        assert weights.bytes_fetched > 0
        gate.opened.set()
        assert_whole(await writing, 1)


WRITER = """
import asyncio, sys
from penstock.instance.loading import WeightLoader
from penstock.weights import fetch
decode, told = fetch.decode_chunk, []
def decode_chunk(coder, dtypes, chunk, data, base, staging):
    if told and chunk.offset + chunk.raw_nbytes == len(staging):
        sys.stdin.read()
    decode(coder, dtypes, chunk, data, base, staging)
fetch.decode_chunk = decode_chunk
async def main(address, token):
    loader = WeightLoader(token, codec="delta", ways=["shm"], relay_port=0)
    loader.serves(await loader.pull(address, 0, 60))
    print("serves", flush=True)
    told.append(await asyncio.to_thread(sys.stdin.readline))
    await loader.pull(address, 1, 60)
asyncio.run(main(*sys.argv[1:]))
"""
"""Pulls version 0, and when it is told to, all of version 1 but the last chunk."""


@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_writer_whose_process_is_stopped_or_killed_is_left(
    fate: signal.Signals, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.weights.neighbours.SOON_S", 0.01)
    monkeypatch.setattr("penstock.weights.neighbours.ASK_S", 0.1)
    monkeypatch.setattr("penstock.weights.neighbours.ANSWER_S", 1.0)
    async with store_of(keep_versions=3) as (store, address), loaders(1) as (other,):
        await asyncio.to_thread(store.publish, 0, tensors_of(0), CONFIG)
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITER, address, TOKEN, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert writer.stdin is not None
        assert writer.stdout is not None
        try:
            assert await writer.stdout.readline() == b"serves\n"
            other.serves(await other.pull(address, 0, 60))
            await asyncio.to_thread(store.publish, 1, tensors_of(1), CONFIG)
            gate.verified.clear()
            known = plans(store)
            writer.stdin.write(b"go\n")
            await until(lambda: plans(store) != known)
            looking = asyncio.create_task(other.pull(address, 1, 60))
            await gate.all_but_the_last()
            assert not looking.done()
            writer.send_signal(fate)
            # Within less than links wait for a byte.
            async with asyncio.timeout(15):
                weights = await looking
        finally:
            with contextlib.suppress(ProcessLookupError):
                writer.kill()
            await writer.wait()
        assert_whole(weights, 1)
        assert codecs(weights) == ["delta:1"]
        assert weights.bytes_fetched > 0


async def test_a_writer_that_hangs_is_asked_and_left(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.neighbours.SOON_S", 0.01)
    async with instances(gate, 2) as (store, address, (one, other)):
        assert one.relay is not None
        writing = await begun(one, store, address)
        await written_at(one)
        one.relay._wait_s = 0.05
        looking = await begun(other, store, address)
        await gate.all_but_the_last()
        weights = await looking
        assert_whole(weights, 1)
        assert weights.bytes_fetched > 0
        assert one.relay.counters()["refused_version"] == 1
        assert not writing.done()
        gate.opened.set()
        assert_whole(await writing, 1)


async def test_a_long_write_is_waited_for(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.neighbours.SOON_S", 0.01)
    monkeypatch.setattr("penstock.weights.neighbours.ASK_S", 0.05)
    async with instances(gate, 2) as (store, address, (one, other)):
        writing, looking = await looked_at(gate, store, address, one, other)
        assert one.relay is not None
        await counted_at_least(one.relay, "refused_not_ready", 2)
        gate.opened.set()
        weights = await looking
        assert weights.bytes_fetched == 0
        assert_whole(weights, 1)
        assert_whole(await writing, 1)
        # The link is in order: the next version is asked for on it.
        await asyncio.to_thread(store.publish, 2, tensors_of(2), CONFIG)
        for loader, came in ((one, writing.result()), (other, weights)):
            loader.serves(came)
        before = one.relay.counters()["connections"]
        for loader in (one, other):
            assert_whole(await loader.pull(address, 2, 60), 2)
        assert one.relay.counters()["connections"] == before


async def test_what_does_not_verify_while_it_is_written_is_had_elsewhere(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, kept = SharedMapper.map, []

    def spoiled(self: SharedMapper, place: str, nbytes: int, in_parts: bool = False) -> Seen:
        assert in_parts
        seen = mapped(self, place, nbytes, in_parts)
        kept.append(seen.stream)
        data = bytearray(seen.stream)
        data[100] ^= 1
        return replace(seen, stream=memoryview(data))

    async with instances(gate, 2) as (store, address, (one, other)):
        monkeypatch.setattr(SharedMapper, "map", spoiled)
        writing = await begun(one, store, address)
        weights = await other.pull(address, 1, 60)
        assert_whole(weights, 1)
        assert weights.bytes_fetched > 0
        gate.opened.set()
        assert_whole(await writing, 1)


# ---- the locks


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[SharedLender]:
    made = SharedLender(tmp_path)
    yield made
    made.close()


def test_what_is_held_in_part_is_not_claimed_and_what_is_written_is_not_held(
    tmp_path: Path, lender: SharedLender
) -> None:
    buffer = lender.buffer(NBYTES)
    assert buffer is not None
    mapper = SharedMapper(tmp_path)
    with pytest.raises(LinkLost):
        mapper.map(lender.place(buffer), NBYTES)
    seen = mapper.map(lender.place(buffer), NBYTES, True)
    assert not seen.hold(0, 100)
    assert seen.hold(0, 0), "no bytes are nobody's"
    lender.lend_part(buffer, 100, 0)
    assert not seen.hold(NBYTES - 1, 1), "and stand for no others"
    lender.lend_part(buffer, 0, 100)
    assert lender.claim(buffer), "nobody holds any of it yet"
    lender.lend_part(buffer, 0, 100)
    assert seen.hold(0, 100)
    assert not seen.hold(0, 101)
    assert not seen.hold(100, 1)
    assert not lender.claim(buffer)
    lender.lend(buffer)
    assert seen.hold(0, NBYTES)
    assert not lender.claim(buffer)
    del seen
    assert lender.claim(buffer)


def manifest_of(lengths: list[int], chunk_bytes: int = 64) -> tuple[Manifest, bytes]:
    content = [random.Random(number).randbytes(length) for number, length in enumerate(lengths)]
    stream = b"".join(content)
    entries = [(f"t{number}", "U8", (len(part),), part) for number, part in enumerate(content)]
    store = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=chunk_bytes)
    return store.publish(0, entries, "{}"), stream


async def test_a_pull_that_is_cut_leaves_no_thread_that_waits_for_a_tensor() -> None:
    manifest, stream = manifest_of([100, 100])
    seen = Seen(memoryview(stream), lambda start, nbytes: start == 0, lambda start, nbytes: None)
    with ThreadPoolExecutor(2) as threads:
        verifying = asyncio.create_task(verify_in_place(manifest, seen, threads, 8, threading.Event()))
        await asyncio.sleep(0.01)
        assert not verifying.done()
        verifying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await verifying
    # Leaving the block has waited for both.


async def test_who_wrote_again_to_what_was_lent_is_left() -> None:
    manifest, stream = manifest_of([100, 100])
    lent = threading.Event()
    lent.set()
    seen = Seen(memoryview(stream), lambda start, nbytes: start == 0, lambda start, nbytes: None)
    with ThreadPoolExecutor(2) as threads, pytest.raises(LinkLost, match="for another version"):
        await verify_in_place(manifest, seen, threads, 2, lent)


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=6).filter(any),
    order=st.randoms(use_true_random=False),
    told_after=st.integers(0, 20),
)
def test_each_tensor_is_told_of_once_it_is_whole_and_never_before(
    lengths: list[int], order: random.Random, told_after: int
) -> None:
    manifest, stream = manifest_of(lengths)
    staging = memoryview(bytearray(len(stream)))
    sums = TensorSums(manifest, staging)
    told: set[tuple[int, int]] = set()

    def heard(start: int, nbytes: int) -> None:
        assert bytes(staging[start : start + nbytes]) == stream[start : start + nbytes]
        told.add((start, nbytes))

    chunks = list(range(len(manifest.chunks)))
    order.shuffle(chunks)
    for number, index in enumerate(chunks):
        if number == told_after:
            sums.tell(heard)
        chunk = manifest.chunks[index]
        end = chunk.offset + chunk.raw_nbytes
        staging[chunk.offset : end] = stream[chunk.offset : end]
        sums.came(index)
        here = set(chunks[: number + 1])
        whole = {
            (sum(lengths[:tensor]), length)
            for tensor, length in enumerate(lengths)
            if length and here.issuperset(sums.chunks_of([tensor]))
        }
        assert {part for part in told if part[1]} == (whole if number >= told_after else set())


async def test_the_relay_says_where_a_version_is_written_and_no_more_once_that_ends() -> None:
    relay = Relay(TOKEN, lenders=[lending := Lending()])
    stream = memoryview(bytearray(8))
    part = relay.lend_in_parts(3, b"signed", stream)
    assert part is not None
    part(2, 4)
    assert lending.said == [("part", 2, 4)]
    relay._recent[3] = None
    let_go = relay.take_back(3)
    assert len(lending.said) == 1, "somebody may still write there"
    assert let_go is not None
    let_go()
    assert lending.said[1:] == [("all",)]
    assert relay.take_back(3) is None
    with pytest.raises(NotReady):
        await relay._lent(3, 0.0, True)
    relay._wait_s = 0.0
    with pytest.raises(NoSuchVersion):
        await relay._lent(3, 60.0, True)


class Lending:
    """A lender that lends all memory."""

    kind = "shm"
    memory = "shm of here"
    makes_memory = True

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []

    def way(self, said: str) -> None:
        return None

    def buffer(self, nbytes: int) -> None:
        return None

    def lend(self, stream: memoryview) -> None:
        self.said.append(("all",))

    def lend_part(self, stream: memoryview, start: int, nbytes: int) -> None:
        self.said.append(("part", start, nbytes))

    def claim(self, stream: memoryview) -> bool:
        return True

    def place(self, stream: memoryview) -> str:
        return "somewhere"

    def close(self) -> None:
        return None
