"""A store whose trainer publishes faster than it encodes, and what it does for those who wait meanwhile."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import pytest
from test_transfer import assert_whole, codecs, fetch, store_of, tensors_of
from test_weight_store import CONFIG, TOKEN

from penstock.errors import WeightError
from penstock.weights import WeightStore, holdings, pull
from penstock.weights.encoder import Encoder
from penstock.weights.manifest import Encoding
from penstock.weights.plan import MAX_CHUNK_BYTES
from penstock.weights.protocol import GetOffers, NoSuchCodec, NoSuchVersion, NotReady


@contextmanager
def held_up(encoder: Encoder) -> Iterator[None]:
    """It has its hands full within."""
    there, go_on = threading.Event(), threading.Event()

    def work() -> None:
        there.set()
        assert go_on.wait(60)

    encoder.submit(1 << 40, work)
    assert there.wait(60)
    try:
        yield
    finally:
        go_on.set()


def test_the_newest_versions_work_comes_first() -> None:
    encoder, done = Encoder(), []
    with held_up(encoder):
        work = [
            encoder.submit(version, lambda one=(version, k): done.append(one)) for k, version in enumerate((1, 3, 2, 3))
        ]
    for one in work:
        one.result(60)
    assert done == [(3, 1), (3, 3), (2, 2), (1, 0)]
    encoder.close()


def test_work_that_other_work_needs_is_done_ahead_of_its_turn_and_once() -> None:
    encoder, done = Encoder(), []
    with held_up(encoder):
        older = encoder.submit(1, lambda: done.append("older") or "its result")
        newer = encoder.submit(2, lambda: (encoder.made(older), encoder.made(older)))
    assert newer.result(60) == ("its result", "its result")
    assert older.result(60) == "its result"
    encoder.submit(0, lambda: None).result(60)
    assert done == ["older"]
    encoder.close()


def test_work_that_fails_says_so_to_whoever_waits_and_nobody_else() -> None:
    encoder = Encoder()
    failing = encoder.submit(1, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    assert encoder.submit(1, lambda: "well").result(60) == "well"
    encoder.close()


def test_what_waits_for_a_closed_encoder_is_cancelled() -> None:
    encoder = Encoder()
    with held_up(encoder):
        waiting = encoder.submit(1, lambda: "never")
        encoder.close()
        with pytest.raises(CancelledError):
            waiting.result(60)
    with pytest.raises(RuntimeError):
        encoder.submit(1, lambda: "never")


async def test_versions_beyond_those_promised_are_not_held_for_encodings_that_wait() -> None:
    async with store_of(0, 1) as (held, address):
        await fetch(address, 1, codec="delta", base=await fetch(address, 0, codec="raw"))
        with held_up(held._held._encoder):
            for version in range(2, 9):
                await asyncio.to_thread(held.publish, version, tensors_of(version), CONFIG)
                assert len(held.versions()) == 2
        # The first difference was to be made ahead, and its base is gone; the newest version can be had all the same.
        assert_whole(await fetch(address, 8, codec="delta"), 8)


async def test_full_encodings_of_older_versions_are_bounded_and_made_again() -> None:
    async with store_of(0, 1, 2, 3, keep_versions=5) as (held, address):
        kinds = ("lossless", "int8", "fp8")
        for version in range(4):
            for codec in kinds:
                await fetch(address, version, codec=codec)
        await asyncio.to_thread(held.publish, 4, tensors_of(4), CONFIG)
        with held._held._lock:
            full = {key: coded.result().manifest.nbytes for key, coded in held._held._coded.items() if key.base is None}
        assert full
        assert sum(full.values()) <= held._held._versions[4].stream.nbytes
        assert_whole(await fetch(address, 0, codec="lossless"), 0)
        for codec in kinds:
            await fetch(address, 4, codec=codec)
        assert {key.codec for key in held._held._coded if key.version == 4} == set(kinds)


async def test_the_next_difference_is_made_ahead_again_once_the_encoder_is_free() -> None:
    async with store_of(0, 1) as (held, address):
        base = await fetch(address, 1, codec="delta", base=await fetch(address, 0, codec="raw"))
        await asyncio.to_thread(held.publish, 2, tensors_of(2), CONFIG)
        async with asyncio.timeout(60):
            while held.counters()["encoded_delta"] < 2:
                await asyncio.sleep(0.01)
        assert codecs(await fetch(address, 2, codec="delta", base=base)) == ["delta:2"]


async def test_what_nobody_waits_for_any_more_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "ASKED_S", 0.0)
    async with store_of(0, 1, 2, keep_versions=3) as (held, address):
        with held_up(held._held._encoder):
            cut = [asyncio.create_task(fetch(address, version, codec="lossless")) for version in (0, 1)]
            async with asyncio.timeout(60):
                while len(held._held._awaited) < 2:
                    await asyncio.sleep(0.01)
            for task in cut:
                task.cancel()
            await asyncio.gather(*cut, return_exceptions=True)
            waits = asyncio.create_task(fetch(address, 2, codec="lossless"))
            async with asyncio.timeout(60):
                # The store learns of a puller that is gone when it has something to say to it, or from the socket.
                while len(held._held._awaited) != 1:
                    await asyncio.sleep(0.01)
        assert_whole(await waits, 2)
        assert held.counters()["encoded_lossless"] == 1
        # They can be had by whoever does wait.
        assert_whole(await fetch(address, 0, codec="lossless"), 0)


async def test_a_base_that_goes_while_the_plan_is_made_costs_the_difference_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with store_of(0, 1) as (held, address):
        base = await fetch(address, 0, codec="raw")
        estimate = holdings.estimate
        published = []

        def slow(*arguments: Any) -> Any:
            if not published:
                published.append(held.publish(2, tensors_of(2), CONFIG))
            return estimate(*arguments)

        monkeypatch.setattr(holdings, "estimate", slow)
        weights = await fetch(address, 1, codec="delta", base=base)
        assert_whole(weights, 1)
        assert codecs(weights) == ["lossless:1"]


async def test_a_codec_that_nobody_knows_is_named_by_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of(0) as (held, address):
        with pytest.raises(NoSuchCodec, match=r"no codec 'nonsense' \(there are auto, raw, "):
            await fetch(address, 0, codec="nonsense")
        assert not held.counters()
        # A newer agent's.
        monkeypatch.setattr("penstock.weights.puller.CODEC_CHOICES", ("nonsense",))
        with pytest.raises(NoSuchCodec, match=r"refused: there is no codec 'nonsense' here \(there are auto, raw, "):
            await fetch(address, 0, codec="nonsense")
        assert held.counters()["refused_codec"] == 1


async def test_no_connection_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="connections=0"):
        await pull("127.0.0.1:1", 0, TOKEN, connections=0)


def test_what_no_puller_would_take_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"over what pullers take, {MAX_CHUNK_BYTES}"):
        WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=MAX_CHUNK_BYTES + 1)
    monkeypatch.setattr("penstock.weights.plan.MAX_CHUNKS", 10)
    held = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=8)
    with pytest.raises(WeightError, match="lists 1 tensors and 11 chunks; at most"):
        held.publish(0, [("w", "U8", (88,), bytes(88))], CONFIG)
    assert held.versions() == []
    held.publish(0, [("w", "U8", (80,), bytes(80))], CONFIG)


def test_a_shape_of_other_things_than_integers_is_refused_by_the_tensors_name() -> None:
    import numpy as np

    held = WeightStore("run", "127.0.0.1", 0, TOKEN)
    with pytest.raises(WeightError, match=r"tensor w has the shape \(2.0,\)"):
        held.publish(0, [("w", "F32", (2.0,), bytes(8))], CONFIG)  # type: ignore[arg-type]
    manifest = held.publish(0, [("w", "F32", (np.int64(2),), bytes(8))], CONFIG)  # type: ignore[arg-type]
    assert type(manifest.tensors[0].shape[0]) is int


def test_a_closed_store_does_not_listen_again() -> None:
    held = WeightStore("run", "127.0.0.1", 0, TOKEN)
    held.start()
    held.close()
    with pytest.raises(WeightError, match="is closed"):
        held.start()


@pytest.mark.parametrize("codec", ["raw", "lossless"])
async def test_thousands_of_tiny_chunks_come_by_the_bufferful(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.weights.tcp import TcpLink

    calls: list[int] = []
    whole = TcpLink.chunks_into

    async def counted(link: TcpLink, *arguments: Any) -> int:
        came = await whole(link, *arguments)
        calls.append(came)
        return came

    monkeypatch.setattr(TcpLink, "chunks_into", counted)
    # Of two dtypes in turn: no chunk has two of them.
    tensors = [(f"w{k}", ("BF16", "F32")[k % 2], (1,), bytes([k % 256]) * (2, 4)[k % 2]) for k in range(3000)]
    async with store_of() as (held, address):
        await asyncio.to_thread(held.publish, 0, tensors, CONFIG)
        weights = await fetch(address, 0, codec=codec, connections=1)
    assert {name: bytes(view) for name, view in weights.tensors.items()} == {name: data for name, _, _, data in tensors}
    assert sum(calls) == 3000
    assert len(calls) < 100


async def test_an_encoding_that_fails_after_its_waiters_have_gone_is_nobodys_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with store_of(0, 1) as (held, address):
        base = await fetch(address, 0, codec="raw")
        with held_up(held._held._encoder):
            asks = [asyncio.create_task(fetch(address, 1, codec="lossless", base=base)) for _ in range(2)]
            async with asyncio.timeout(60):
                while not held._held._awaited:
                    await asyncio.sleep(0.01)
            await held._held._coded_soon(GetOffers(version=1), 0.0)
            for ask in asks:
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)
            async with asyncio.timeout(60):
                while held._held._awaited:
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while not all(coded.done() for coded in held._held._coded.values()):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        held._held._coded.clear()
        gc.collect()
    assert "never retrieved" not in caplog.text


async def test_whoever_asks_again_and_again_without_waiting_gets_it_too() -> None:
    async with store_of(0) as (held, _):
        key = Encoding(0, "lossless")
        with held_up(held._held._encoder), pytest.raises(NotReady):
            await held._held.coded(key, 0.0, draft=False)
        async with asyncio.timeout(60):
            while held._held.encodings() != [key]:
                await asyncio.sleep(0.01)
        assert held.counters()["encoded_lossless"] == 1


@pytest.mark.parametrize("codec", ["auto", "delta", "lossless"])
async def test_a_version_that_goes_while_its_plan_is_made_is_said_to_be_gone(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_of(2, 3) as (held, address):
        base = await fetch(address, 2, codec="raw")
        offers = held._held.offers

        async def late(ask: GetOffers) -> Any:
            found = await offers(ask)
            for version in (5, 6):
                await asyncio.to_thread(held.publish, version, tensors_of(version), CONFIG)
            return found

        monkeypatch.setattr(held._held, "offers", late)
        with pytest.raises(NoSuchVersion, match=r"held: 5, 6"):
            await fetch(address, 3, codec=codec, base=base)


async def test_a_store_that_is_closed_with_work_waiting_lets_go_of_what_it_held() -> None:
    async with store_of(0, 1) as (held, _):
        holding = held._held
        with held_up(holding._encoder):
            with pytest.raises(NotReady):
                await holding.coded(Encoding(1, "delta", 0), 0.0, draft=False)
            version = holding.hold(0)
            await asyncio.to_thread(held.close)
            holding.release(version)
        assert version.readers == 0
        assert holding.encodings() == []


@pytest.mark.parametrize("joined", [(), ("lossless",), ("lossless", "int8")])
async def test_full_encodings_of_older_versions_push_no_chain_of_differences_out(joined: tuple[str, ...]) -> None:
    async with store_of(0, keep_versions=3) as (held, address):
        away = follower = await fetch(address, 0, codec="raw")
        for version in range(1, 9):
            await asyncio.to_thread(held.publish, version, tensors_of(version), CONFIG)
            follower = await fetch(address, version, codec="delta", base=follower)
            for codec in joined:
                await fetch(address, version, codec=codec)
        back = await fetch(address, 8, codec="delta", base=away)
        assert_whole(back, 8)
        assert codecs(back) == [f"delta:{version}" for version in range(1, 9)]
