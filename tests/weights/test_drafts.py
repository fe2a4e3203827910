"""A version that is fetched while it is being encoded: what is told of it, what is believed, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import msgspec
import pytest
from test_encodings import pair, version_of
from test_transfer import assert_whole, codecs, counted_at_least, fetch, relay_of, store_of
from test_weight_store import TOKEN

from penstock.errors import WeightError
from penstock.weights import ChunkEntry, Manifest, WeightStore, decode_manifest
from penstock.weights import protocol as words
from penstock.weights.choose import DRAFT_PARTS, Rates, choose, time_s
from penstock.weights.encodings import Encoded, draft_of, encode
from penstock.weights.growing import Growing
from penstock.weights.manifest import (
    Encoding,
    Made,
    completed,
    is_authentic,
    is_made,
    sign_made,
    sign_manifest,
)
from penstock.weights.plan import check_made, check_manifest
from penstock.weights.tcp import TcpLink, TcpTransport

CHUNKS = 16
"""Of the versions of `store_of`."""


class Halting:
    """An encoder that halts before the chunk at `after`, until it may go on; or fails there."""

    def __init__(self, after: int, error: Exception | None = None) -> None:
        self.after = after
        self.error = error
        self.go_on = threading.Event()
        self.halts = 0

    def __call__(
        self,
        raw: Manifest,
        stream: memoryview,
        codec: str,
        base: Manifest | None,
        base_stream: memoryview | None,
        threads: Executor | None,
        made: Callable[[ChunkEntry, bytes], None],
    ) -> Encoded:
        count = 0

        def halting(entry: ChunkEntry, data: bytes) -> None:
            nonlocal count
            if count == self.after:
                self.halts += 1
                if self.error is not None:
                    raise self.error
                assert self.go_on.wait(30)
            made(entry, data)
            count += 1

        return encode(raw, stream, codec, base, base_stream, threads, halting)


def halting(monkeypatch: pytest.MonkeyPatch, after: int, error: Exception | None = None) -> Halting:
    found = Halting(after, error)
    monkeypatch.setattr("penstock.weights.published.encode", found)
    return found


# What is said and believed; no socket.


def drafted() -> tuple[Manifest, Encoded]:
    before, after = pair()
    old, new = version_of(1, before), version_of(2, after)
    draft = sign_manifest(draft_of(new, "delta", old), TOKEN)
    return draft, encode(new, memoryview(after), "delta", old, memoryview(before))


def told(encoded: Encoded, first: int, count: int, final: bytes = b"") -> Made:
    part = encoded.manifest.chunks[first : first + count]
    return Made(first, tuple(chunk.nbytes for chunk in part), tuple(chunk.xxh3 for chunk in part), final=final)


def test_a_draft_becomes_the_manifest_that_is_signed_at_the_end() -> None:
    draft, encoded = drafted()
    final = sign_manifest(encoded.manifest, TOKEN)
    assert draft.is_draft
    assert not final.is_draft
    assert draft.digest == final.digest
    count = len(final.chunks)
    half = completed(draft, told(encoded, 0, count // 2))
    assert half.is_draft
    whole = completed(half, told(encoded, count // 2, count, final.mac))
    assert whole == final
    assert is_authentic(whole, TOKEN)
    assert not is_authentic(completed(half, told(encoded, count // 2, count)), TOKEN)


def test_a_draft_passes_only_where_one_was_asked_for() -> None:
    draft, encoded = drafted()
    check_manifest(draft, 2, 1 << 20, draft=True)
    with pytest.raises(WeightError, match="0 bytes on the wire"):
        check_manifest(draft, 2, 1 << 20)
    long = (msgspec.structs.replace(draft.chunks[0], nbytes=1 << 30), *draft.chunks[1:])
    with pytest.raises(WeightError, match="bytes on the wire"):
        check_manifest(msgspec.structs.replace(draft, chunks=long), 2, 1 << 20, draft=True)
    with pytest.raises(WeightError, match="0 bytes on the wire"):
        check_manifest(msgspec.structs.replace(draft, codec="raw", base=None), 2, 1 << 20, draft=True)
    assert encoded.manifest.chunks[0].nbytes


@pytest.mark.parametrize(
    "lie",
    [
        lambda made: msgspec.structs.replace(made, first=1),
        lambda made: msgspec.structs.replace(made, xxh3=made.xxh3[1:]),
        lambda made: msgspec.structs.replace(made, nbytes=made.nbytes * 100, xxh3=made.xxh3 * 100),
        lambda made: msgspec.structs.replace(made, nbytes=(0, *made.nbytes[1:])),
        lambda made: msgspec.structs.replace(made, nbytes=(1 << 30, *made.nbytes[1:])),
    ],
)
def test_what_does_not_fit_the_draft_is_refused_before_memory_is_taken_for_it(lie: Callable[[Made], Made]) -> None:
    draft, encoded = drafted()
    made = told(encoded, 0, 3)
    check_made(draft, 0, made)
    with pytest.raises(WeightError, match=r"chunk"):
        check_made(draft, 0, lie(made))


def test_only_the_holder_of_the_token_can_say_what_was_made_and_of_one_draft_alone() -> None:
    draft, encoded = drafted()
    made = sign_made(draft, told(encoded, 0, 3, b"final"), TOKEN)
    assert is_made(draft, made, TOKEN)
    assert not is_made(draft, made, "another token")
    assert not is_made(sign_manifest(msgspec.structs.replace(draft, version=3), TOKEN), made, TOKEN)
    for changes in (
        {"first": 1},
        {"nbytes": (*made.nbytes[:2], 9)},
        {"xxh3": (*made.xxh3[:2], 9)},
        {"final": b"other"},
    ):
        assert not is_made(draft, msgspec.structs.replace(made, **changes), TOKEN)


async def test_the_last_chunk_is_told_of_with_the_final_signature_and_not_before() -> None:
    draft, encoded = drafted()
    growing = Growing(draft, TOKEN)
    assert growing.nbytes(0) == 0
    for entry, data in zip(encoded.manifest.chunks, encoded.chunks, strict=True):
        growing.add(entry, data)
    count = len(encoded.chunks)
    before = await growing.made(0, 0.0)
    assert len(before.nbytes) == count - 1
    assert before.final == b""
    assert await growing.chunk(count - 1, 0.0) == encoded.chunks[-1]
    with pytest.raises(words.NotReady, match="being encoded"):
        await growing.made(count - 1, 0.0)
    waiting = asyncio.create_task(growing.made(count - 1, 30.0))
    await asyncio.sleep(0)
    growing.finish(b"the end")
    last = await waiting
    assert (last.first, len(last.nbytes), last.final) == (count - 1, 1, b"the end")
    assert is_made(growing.draft, last, TOKEN)
    assert (await growing.made(0, 0.0)).final == b"the end"


async def test_who_waits_for_what_is_given_up_is_told_so() -> None:
    growing = Growing(drafted()[0], TOKEN)
    waiting = [asyncio.create_task(growing.made(0, 30.0)), asyncio.create_task(growing.chunk(0, 30.0))]
    await asyncio.sleep(0)
    growing.give_up(MemoryError())
    for one in waiting:
        with pytest.raises(words.GivenUp, match="MemoryError"):
            await one


def test_encoding_beside_the_wire_counts_once() -> None:
    offer = words.Offer(steps=(Encoding(1, "lossless"),), nbytes=1000, encode_s=3.0)
    rates = Rates(link_bytes_per_s=500.0, round_trip_s=0.1, decode={"lossless": 1e9})
    assert time_s(offer, 1500, rates) == pytest.approx(3.0 + 2.0 + 0.2)
    assert time_s(offer, 1500, rates, draft=True) == pytest.approx(3.0 + 2.0 / DRAFT_PARTS + 0.3)
    ready = msgspec.structs.replace(offer, encode_s=0.0)
    assert time_s(ready, 1500, rates, draft=True) == time_s(ready, 1500, rates)
    raw = words.Offer(steps=(Encoding(1),), nbytes=1500 + 400)
    assert choose([raw, offer], 1500, rates) is raw
    assert choose([raw, offer], 1500, rates, draft=True) is offer


# Over real sockets.


@pytest.mark.parametrize(("codec", "connections"), [("delta", 1), ("delta", 3), ("lossless", 2), ("int8", 2)])
async def test_chunks_come_while_others_are_still_to_be_encoded(
    monkeypatch: pytest.MonkeyPatch, codec: str, connections: int
) -> None:
    async with store_of(0, 1) as (store, address):
        base = await fetch(address, 0, codec="raw")
        whole = await fetch(address, 1, codec=codec) if codec == "int8" else None
        before = store.counters().get("chunks", 0)
        encoder = halting(monkeypatch, after=9)
        if codec == "int8":
            # Encoded anew: the version is quantized already, as it is once its quantized base was asked for.
            store._held._coded.clear()
        pulling = asyncio.create_task(fetch(address, 1, codec=codec, base=base, connections=connections))
        await counted_at_least(store, "chunks", before + 8)
        assert not pulling.done()
        encoder.go_on.set()
        weights = await pulling
        assert codecs(weights) == [f"{codec}:1"]
        assert not weights.manifest.is_draft
        assert is_authentic(weights.manifest, TOKEN)
        if whole is None:
            assert_whole(weights, 1)
        else:
            assert weights.manifest.digest == whole.manifest.digest
        assert weights.bytes_fetched == weights.manifest.nbytes
        assert store.counters()["drafts"] == 1 + (codec == "int8")
        # Who comes later gets the final manifest.
        assert (await fetch(address, 1, codec=codec, base=base)).manifest == weights.manifest
        assert store.counters()["drafts"] == 1 + (codec == "int8")


async def test_who_does_not_say_that_a_draft_will_do_gets_the_final_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of(0) as (store, address):
        encoder = halting(monkeypatch, after=3)
        link = await TcpTransport(TOKEN).connect(address)
        asking = asyncio.create_task(
            link.plan(words.GetPlan(ask=words.GetOffers(version=0, wait_s=30.0), codec="lossless"))
        )
        async with asyncio.timeout(30):
            while not encoder.halts:
                await asyncio.sleep(0.01)
        assert not asking.done()
        encoder.go_on.set()
        assert not decode_manifest((await asking).manifest).is_draft
        link.close()
        assert "drafts" not in store.counters()


async def test_what_is_kept_on_disk_waits_for_the_final_manifest(tmp_path: Path) -> None:
    async with store_of(0) as (store, address):
        assert_whole(await fetch(address, 0, codec="lossless", partial=tmp_path), 0)
        assert "drafts" not in store.counters()
        assert store.counters()["manifests"] == 1


@pytest.mark.parametrize(("codec", "instead"), [("delta", "lossless"), ("lossless", "raw")])
async def test_an_encoding_that_is_given_up_comes_in_full_by_the_next_codec(
    monkeypatch: pytest.MonkeyPatch, codec: str, instead: str
) -> None:
    async with store_of(0, 1) as (store, address):
        base = await fetch(address, 0, codec="raw")
        encoder = Halting(5, OSError("no memory for another chunk"))
        whole = encode

        def failing(raw: Manifest, stream: memoryview, by: str, *rest: object) -> Encoded:
            return (encoder if by == codec else whole)(raw, stream, by, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr("penstock.weights.published.encode", failing)
        weights = await fetch(address, 1, codec=codec, base=base)
        assert_whole(weights, 1)
        assert codecs(weights) == [f"{instead}:1"]
        assert encoder.halts >= 1
        assert store.counters()["refused_given_up"] >= 1


async def test_a_quantized_version_that_is_given_up_is_no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of(0) as (_, address):
        halting(monkeypatch, 5, OSError("no memory for another chunk"))
        with pytest.raises(WeightError, match=r"given up: no memory"):
            await fetch(address, 0, codec="int8")


@pytest.mark.parametrize("codec", ["lossless", "delta"])
async def test_a_sender_that_dies_while_it_encodes_and_comes_back_completes_the_pull(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    async with contextlib.AsyncExitStack() as parts:
        first, address = await parts.enter_async_context(store_of(0, 1))
        base = await fetch(address, 0, codec="raw")
        encoder = halting(monkeypatch, after=9)
        before = first.counters().get("chunks", 0)
        pulling = asyncio.create_task(fetch(address, 1, codec=codec, base=base, connections=3))
        await counted_at_least(first, "chunks", before + 5)
        await asyncio.to_thread(first.close)
        monkeypatch.setattr("penstock.weights.published.encode", encode)
        async with store_of(0, 1, port=int(address.rpartition(":")[2])):
            weights = await pulling
        encoder.go_on.set()
        assert_whole(weights, 1)
        assert codecs(weights) == [f"{codec}:1"]
        assert weights.bytes_fetched == weights.manifest.nbytes, "what came of the draft is not fetched again"


async def test_a_link_that_is_cut_while_the_version_is_encoded_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = TcpLink.made
    cuts = 0

    async def cut(self: TcpLink, encoding: Encoding, first: int, wait_s: float) -> Made:
        nonlocal cuts
        made = await asked(self, encoding, first, wait_s)
        if cuts < 3:
            cuts += 1
            raise words.LinkLost("cut")
        return made

    monkeypatch.setattr(TcpLink, "made", cut)
    async with store_of(0) as (_, address):
        weights = await fetch(address, 0, codec="lossless")
        assert_whole(weights, 0)
        assert weights.bytes_fetched == weights.manifest.nbytes
        assert cuts == 3


async def test_instances_pass_on_what_is_still_being_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of(0, 1) as (store, address), contextlib.AsyncExitStack() as parts:
        base = await fetch(address, 0, codec="raw")
        encoder = halting(monkeypatch, after=9)
        relays = [await parts.enter_async_context(relay_of()) for _ in range(3)]
        before = store.counters()["bytes"]
        pulling = [asyncio.create_task(fetch(address, 1, codec="delta", base=base, relay=relay)) for relay in relays]
        async with asyncio.timeout(30):
            # Eight of nine that are made, to two of three instances.
            while sum(relay.counters().get("chunks", 0) for relay in relays) < 16:
                await asyncio.sleep(0.01)
        encoder.go_on.set()
        pulled = await asyncio.gather(*pulling)
        for weights in pulled:
            assert_whole(weights, 1)
        assert store.counters()["drafts"] == 3
        assert store.counters()["bytes"] - before == pulled[0].bytes_fetched


@pytest.mark.parametrize(
    "lie",
    [
        lambda made: msgspec.structs.replace(made, xxh3=(made.xxh3[0] ^ 1, *made.xxh3[1:])),
        lambda made: msgspec.structs.replace(made, mac=bytes(32)),
        lambda made: msgspec.structs.replace(made, final=bytes(32)),
    ],
)
async def test_what_the_trainer_did_not_sign_of_a_draft_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, lie: Callable[[Made], Made]
) -> None:
    asked = TcpLink.made

    async def lying(self: TcpLink, encoding: Encoding, first: int, wait_s: float) -> Made:
        return lie(await asked(self, encoding, first, wait_s))

    monkeypatch.setattr(TcpLink, "made", lying)
    async with store_of(0) as (_, address):
        with pytest.raises(WeightError, match=r"chunks of .* is not signed"):
            await fetch(address, 0, codec="lossless")


async def test_a_final_signature_that_is_not_the_manifests_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Growing, mac: bytes) -> None:
        finish(self, bytes(32))

    finish = Growing.finish
    monkeypatch.setattr(Growing, "finish", other)
    async with store_of(0) as (_, address):
        with pytest.raises(WeightError, match=r"manifest of .* is not signed"):
            await fetch(address, 0, codec="lossless")


async def test_a_store_refuses_what_is_no_chunk_of_a_draft() -> None:
    async with store_of(0) as (store, address):
        link = await TcpTransport(TOKEN).connect(address)
        with pytest.raises(WeightError, match="has no chunk 17"):
            await link.made(Encoding(0, "lossless"), CHUNKS + 1, 5.0)
        link.close()
        link = await TcpTransport(TOKEN).connect(address)
        with pytest.raises(WeightError, match="has no chunk 0 to be made"):
            await link.made(Encoding(0), 0, 5.0)
        link.close()
        assert isinstance(store, WeightStore)
