"""Instances on one machine share one copy of a version: one decodes it, each verifies it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_transfer import assert_whole, codecs, fetch, plans, store_of, tensors_of
from test_weight_store import CONFIG, TOKEN

from penstock.instance.loading import WeightLoader
from penstock.weights import WeightStore
from penstock.weights.manifest import Encoding
from penstock.weights.protocol import NoSuchVersion
from penstock.weights.relay import Relay
from penstock.weights.shm import SHM_FOLDER, SharedLender, SharedMapper
from penstock.weights.transport import Seen


@contextlib.asynccontextmanager
async def loaders(count: int, **options: object) -> AsyncIterator[list[WeightLoader]]:
    made = [
        WeightLoader(TOKEN, **{"codec": "delta", "ways": ["shm"], "relay_port": 0, **options}) for _ in range(count)
    ]  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for loader in made:
            await loader.close()


async def test_one_instance_fetches_and_the_others_see_it_through_each_other() -> None:
    async with store_of(0, 1, 2, keep_versions=3) as (store, address), loaders(4) as parts:
        for version in (0, 1, 2):
            before = store.counters().get("bytes", 0)
            first, *others = await asyncio.gather(*(loader.pull(address, version, 60) for loader in parts))
            for weights in (first, *others):
                assert_whole(weights, version)
            came = [weights.bytes_fetched for weights in (first, *others)]
            assert sorted(came)[:3] == [0, 0, 0], "three of them fetched nothing"
            assert store.counters().get("bytes", 0) - before == max(came)
            assert sum("shm of the instance at 127.0.0.1:" in weights.way for weights in (first, *others)) == 3
            for loader, weights in zip(parts, (first, *others), strict=True):
                loader.serves(weights)
            del first, others, weights


async def test_memory_that_others_look_at_is_not_written_to_for_the_next_version() -> None:
    async with store_of(0, 1, 2, 3, keep_versions=4) as (_, address), loaders(2, codec="lossless") as (one, other):
        seen = []
        for version in range(4):
            mine = await one.pull(address, version, 60)
            seen.append(await other.pull(address, version, 60))
            one.serves(mine)
            del mine
        for version, weights in enumerate(seen):
            assert_whole(weights, version)


async def test_what_is_seen_is_verified_and_what_does_not_verify_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = SharedMapper.map

    def spoiled(self: SharedMapper, place: str, nbytes: int, in_parts: bool = False) -> Seen:
        seen = mapped(self, place, nbytes, in_parts)
        data = bytearray(seen.stream)
        data[100] ^= 1
        return replace(seen, stream=memoryview(data))

    async with store_of(0) as (_, address), loaders(2) as (one, other):
        await one.pull(address, 0, 60)
        monkeypatch.setattr(SharedMapper, "map", spoiled)
        weights = await other.pull(address, 0, 60)
        assert_whole(weights, 0)
        assert weights.bytes_fetched > 0


async def test_an_instance_that_is_gone_or_gets_nothing_is_left_for_the_trainer() -> None:
    async with store_of(0, 1) as (_, address), loaders(3) as (one, other, third):
        await one.pull(address, 0, 60)
        await one.close()
        weights = await other.pull(address, 0, 60)
        assert_whole(weights, 0)
        assert weights.bytes_fetched > 0
        assert (await third.pull(address, 0, 60)).bytes_fetched == 0, "the second shares in its turn"


async def test_who_waits_for_a_version_that_its_neighbour_gave_up_for_a_newer_one_is_told() -> None:
    relay = Relay(TOKEN)
    waiting = asyncio.create_task(relay.open(Encoding(0), 600.0, "shm"))
    relay.expect(Encoding(0), b"", 1)
    relay.expect(Encoding(1), b"", 1)
    with pytest.raises(NoSuchVersion, match="gone on from weight version 0 to another one"):
        await waiting


async def test_who_has_only_seen_a_version_says_at_once_that_it_has_no_chunks_of_it() -> None:
    relay = Relay(TOKEN)
    relay.lend(1, b"", "shm", "/dev/shm/somewhere")
    with pytest.raises(NoSuchVersion, match="seen it in another instance's memory"):
        await relay.open(Encoding(1, "delta", 0), 0.0)


async def test_where_shared_memory_has_no_room_the_first_one_passes_chunks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedLender, "buffer", lambda self, nbytes: None)
    async with store_of(0, 1) as (store, address), loaders(4) as parts:
        for version in (0, 1):
            before = store.counters().get("bytes", 0)
            pulled = await asyncio.gather(*(loader.pull(address, version, 60) for loader in parts))
            for loader, weights in zip(parts, pulled, strict=True):
                assert_whole(weights, version)
                loader.serves(weights)
            assert {weights.bytes_fetched for weights in pulled} == {store.counters()["bytes"] - before}
            del pulled, weights


async def test_behind_one_that_lends_nothing_the_others_share_a_copy_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with store_of(0) as (store, address), loaders(4) as sharing, contextlib.AsyncExitStack() as closing:
        # It can see what others lend, and has no memory to lend any.
        monkeypatch.setattr("penstock.instance.loading.lenders_of", lambda kinds, where: [])
        (alone,) = await closing.enter_async_context(loaders(1))
        came = [await loader.pull(address, 0, 60) for loader in (alone, *sharing)]
        for weights in came:
            assert_whole(weights, 0)
        whole = store.counters()["bytes"]
        assert [weights.bytes_fetched for weights in came] == [whole, whole, 0, 0, 0]


def test_those_lend_the_same_memory_who_use_the_same_folder(tmp_path: Path) -> None:
    with contextlib.ExitStack() as closing:
        (tmp_path / "other").mkdir()
        lenders = [SharedLender(folder) for folder in (tmp_path, tmp_path, tmp_path / "other", SHM_FOLDER)]
        for lender in lenders:
            closing.callback(lender.close)
        first, same, *others = [lender.memory for lender in lenders]
        assert first == same
        assert len({first, *others}) == 3


async def test_an_instance_that_shakes_no_hands_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.neighbours.ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        async with store_of(0) as (store, address), loaders(1, codec="raw") as (loader,):
            await store.relay(Encoding(0), f"127.0.0.1:{hung.getsockname()[1]}")
            assert_whole(await loader.pull(address, 0, 10), 0)


async def test_who_comes_late_sees_what_its_neighbours_got_by_differences() -> None:
    async with store_of(0, keep_versions=4) as (store, address), loaders(2) as early, loaders(2, codec="auto") as late:
        for version in range(4):
            if version:
                await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
            for loader in early if version != 2 else early[:1]:
                loader.serves(await loader.pull(address, version, 60))
        sent = store.counters()["bytes"]
        # One has nothing, one was away for two versions.
        late[1].serves(await fetch(address, 1))
        assert store.counters()["bytes"] > sent
        sent = store.counters()["bytes"]
        for loader in late:
            weights = await loader.pull(address, 3, 60)
            assert_whole(weights, 3)
            assert weights.bytes_fetched == 0
            loader.serves(weights)
        assert store.counters()["bytes"] == sent


@pytest.mark.parametrize("trouble", ["nothing is lent", "gone"])
async def test_who_comes_late_and_sees_nothing_has_the_version_from_the_store(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trouble == "nothing is lent":
        monkeypatch.setattr(SharedLender, "buffer", lambda self, nbytes: None)
    async with store_of(0, 1) as (_, address), loaders(3) as (one, *late):
        for version in (0, 1):
            one.serves(await one.pull(address, version, 60))
        if trouble == "gone":
            await one.close()
        first, second = [await loader.pull(address, 1, 60) for loader in late]
        for weights in (first, second):
            assert_whole(weights, 1)
        assert first.bytes_fetched > 0
        assert (second.bytes_fetched == 0) == (trouble == "gone"), "the one that has it whole is gone to"


async def test_whose_difference_fails_waits_for_no_neighbour_with_the_whole_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with store_of(0) as (store, address), loaders(2) as (one, other):
        for loader in (one, other):
            loader.serves(await loader.pull(address, 0, 60))
        await asyncio.to_thread(store.publish, 1, tensors_of(1), CONFIG)
        assert one.base is not None
        assert other.relay is not None
        near = f"127.0.0.1:{other.relay.port}"
        monkeypatch.setattr(store, "neighbour", lambda steps, *rest: "" if steps[0].base is not None else near)
        rotten = bytearray(one.base.stream)
        rotten[100] ^= 1
        one._base = replace(one.base, stream=memoryview(rotten))
        before = other.relay.counters()
        weights = await one.pull(address, 1, 60)
        assert_whole(weights, 1)
        assert codecs(weights) == ["lossless:1"]
        assert other.relay.counters() == before


async def test_neighbours_that_get_a_version_in_no_worse_way_are_told_of() -> None:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN)
    delta, older, full = Encoding(5, "delta", 4), Encoding(5, "delta", 2), Encoding(5, "lossless")
    for number, encoding in enumerate((Encoding(5, "int8-delta", 4), delta, older, full)):
        await store.relay(encoding, f"a:{number}", "shm:x")
    quantized, direct, behind, whole = (f"a:{number}" for number in range(4))

    def told(*steps: Encoding, memory: str = "shm:x", without: Sequence[str] = ()) -> str:
        return store.neighbour(steps, "a:9", memory, without)

    assert told(Encoding(5)) == direct
    assert told(Encoding(5), without=[direct]) == behind
    assert told(Encoding(5), without=[direct, behind]) == whole
    assert told(Encoding(5, "delta", 3)) == direct
    assert told(Encoding(5, "delta", 3), without=[direct]) == ""
    assert told(Encoding(4, "delta", 3), delta) == direct
    assert told(Encoding(5, "int8")) == quantized
    assert told(Encoding(5), memory="shm:y") == told(Encoding(5), memory="") == ""
    # Who gets the same encoding has its chunks, too.
    assert told(full) == told(delta) == ""
    assert told(full, without=[whole]) == direct


async def test_without_shared_memory_instances_pass_chunks_on_as_they_come() -> None:
    async with store_of(0) as (store, address), loaders(2, ways=[]) as (one, other):
        await one.pull(address, 0, 60)
        weights = await other.pull(address, 0, 60)
        assert_whole(weights, 0)
        assert weights.bytes_fetched == store.counters().get("bytes", 0) > 0


async def test_the_chain_of_instances_comes_to_each_machine_once() -> None:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN)
    asked = ["a:1", "a:2", "b:1", "a:3", "b:2", "c:1", "", "b:1"]
    told = [await store.relay(Encoding(0), address) for address in asked]
    assert told == ["", "a:1", "a:1", "a:2", "b:1", "b:1", "c:1", "a:1"]


async def test_those_who_lend_the_same_memory_all_go_to_the_first_of_them() -> None:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN)
    asked = [("a:1", "shm:x"), ("a:2", "shm:x"), ("a:3", ""), ("a:4", "shm:x"), ("a:5", "shm:y"), ("a:6", "shm:y")]
    told = [await store.relay(Encoding(0), address, memory) for address, memory in asked]
    assert told == ["", "a:1", "a:2", "a:1", "a:4", "a:5"]
    assert await store.relay(Encoding(0), "b:1", "shm:z") == "a:1", "another machine's memory is not to be seen"
    assert await store.relay(Encoding(0), "c:1", "shm:z") == "b:1", "a machine may have several addresses"
    assert await store.relay(Encoding(0), "") == "c:1"


async def test_links_to_the_one_who_decodes_are_kept_from_version_to_version() -> None:
    async with store_of(0, keep_versions=3) as (store, address), loaders(4) as (one, *others):
        for version in range(4):
            if version:
                await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
            pulled = [await loader.pull(address, version, 60) for loader in (one, *others)]
            for loader, weights in zip((one, *others), pulled, strict=True):
                loader.serves(weights)
        assert one.relay is not None
        assert one.relay.counters()["connections"] == 3
        assert [other.relay.counters() for other in others if other.relay is not None] == [{}] * 3


async def test_who_was_first_on_a_machine_is_so_again_for_the_next_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.store.FIRST_S", 60.0)
    store = WeightStore("run", "127.0.0.1", 0, TOKEN)

    async def told(encoding: Encoding, *asked: str) -> list[str]:
        """What is said to each, in the order in which they ask."""
        waiting = []
        for address in asked:
            memory = f"shm of {address[0]}" if address else ""
            waiting.append(asyncio.create_task(store.relay(encoding, address, memory)))
            await asyncio.sleep(0)
        return await asyncio.gather(*waiting)

    # Whoever passes nothing on may have asked for all of them before.
    assert await told(Encoding(1, "delta", 0), "") == [""]
    assert await told(Encoding(0, "lossless"), "a:1", "a:2", "b:1", "b:2") == ["", "a:1", "a:1", "b:1"]
    # Who lends nothing has no turn, and takes nobody's.
    assert await store.relay(Encoding(1, "delta", 0), "a:0") == ""
    first = Encoding(1, "delta", 0)
    assert await told(first, "b:2", "a:2", "b:1", "a:1", "c:1") == ["b:1", "a:1", "a:0", "a:0", "b:1"]
    # One that does not come is not waited for much longer, nor by the next version.
    monkeypatch.setattr("penstock.weights.store.FIRST_S", 0.0)
    assert await told(Encoding(2, "delta", 1), "b:2", "b:3") == ["", "b:2"]
    monkeypatch.setattr("penstock.weights.store.FIRST_S", 60.0)
    assert await told(Encoding(3, "delta", 2), "b:1", "b:3", "b:2") == ["b:2", "b:2", ""]
    # A full encoding is nobody's turn: who has a base does not ask for it.
    assert await told(Encoding(3, "lossless"), "a:3", "a:4") == ["", "a:3"]


async def test_one_instance_of_a_machine_decodes_every_version_whoever_asks_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.weights.store.FIRST_S", 60.0)
    async with store_of(0) as (store, address), loaders(3) as (one, *others):
        for loader in (one, *others):
            loader.serves(await loader.pull(address, 0, 60))
        for version in (1, 2, 3):
            await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
            waiting = [asyncio.create_task(loader.pull(address, version, 60)) for loader in others]
            while Encoding(version, "delta", version - 1) not in store._relays:
                await asyncio.sleep(0.001)
            decoded, *seen = [await one.pull(address, version, 60), *await asyncio.gather(*waiting)]
            assert codecs(decoded) == [f"delta:{version}"]
            assert decoded.bytes_fetched > 0
            for weights in (decoded, *seen):
                assert_whole(weights, version)
            assert [weights.bytes_fetched for weights in seen] == [0, 0]
            for loader, weights in zip((one, *others), (decoded, *seen), strict=True):
                loader.serves(weights)


async def test_a_first_one_that_is_gone_is_not_waited_for_nor_expected_again() -> None:
    async with store_of(0, keep_versions=3) as (store, address), loaders(3) as (one, *others):
        for loader in (one, *others):
            loader.serves(await loader.pull(address, 0, 60))
        await one.close()
        for version in (1, 2):
            await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
            pulled = await asyncio.gather(*(loader.pull(address, version, 60) for loader in others))
            for loader, weights in zip(others, pulled, strict=True):
                assert_whole(weights, version)
                loader.serves(weights)
        assert sorted(weights.bytes_fetched > 0 for weights in pulled) == [False, True]


async def test_a_run_that_goes_on_from_an_earlier_version_is_passed_on_as_before() -> None:
    async with loaders(3) as parts:
        for versions in ((9, 10), (4, 5)):
            async with store_of(*versions) as (store, address):
                for version in versions:
                    before = store.counters().get("bytes", 0)
                    pulled = await asyncio.gather(*(loader.pull(address, version, 60) for loader in parts))
                    for weights in pulled:
                        assert_whole(weights, version)
                    assert sorted(weights.bytes_fetched for weights in pulled)[:2] == [0, 0]
                    assert store.counters()["bytes"] - before == max(weights.bytes_fetched for weights in pulled)
                    for loader, weights in zip(parts, pulled, strict=True):
                        loader.serves(weights)


async def test_chunks_of_earlier_versions_are_passed_on_too() -> None:
    relay = Relay(TOKEN, wait_s=0.0)
    for version in (9, 10, 4, 5):
        relay.expect(Encoding(version), b"", 1)
        relay.put(Encoding(version), 0, b"data")
    assert await (await relay.open(Encoding(4), 0.0)).chunk(0) == b"data"
    assert await (await relay.open(Encoding(5), 0.0)).chunk(0) == b"data"
    for gone in (9, 10):
        with pytest.raises(NoSuchVersion):
            await relay.open(Encoding(gone), 0.0)
        with pytest.raises(NoSuchVersion, match="gone on"):
            await relay.open(Encoding(gone), 600.0, "shm")


async def test_what_is_never_expected_is_not_waited_for_while_others_come() -> None:
    relay = Relay(TOKEN, wait_s=0.05)
    relay.expect(Encoding(7), b"", 1 << 20)

    async def come() -> None:
        for index in range(1 << 20):
            relay.put(Encoding(7), index, b"data")
            await asyncio.sleep(0.01)

    coming = asyncio.create_task(come())
    with pytest.raises(NoSuchVersion, match="nothing of weight version 3 has come here"):
        await relay.open(Encoding(3), 600.0, "shm")
    coming.cancel()


async def test_other_weights_under_the_same_number_are_not_lent() -> None:
    relay = Relay(TOKEN)
    for manifest in (b"of the run", b"of the run that goes on from before"):
        relay.expect(Encoding(10), manifest, 1)
        assert 10 not in relay._whole
        relay.lend(10, manifest, "shm", "/dev/shm/somewhere")
        assert (await relay.open(Encoding(10), 0.0, "shm")).manifest == manifest


async def test_an_instance_that_lends_other_weights_under_the_number_is_left() -> None:
    async with loaders(2) as (one, other), store_of(0) as (_, old):
        await one.pull(old, 0, 60)
        # Another run's store, of which this instance is the one before; it has the old one's version 0 whole.
        store = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=8192)
        try:
            address = await asyncio.to_thread(store.start)
            await asyncio.to_thread(store.publish, 0, tensors_of(1), CONFIG)
            assert one.relay is not None
            for codec in ("raw", "lossless"):
                await store.relay(Encoding(0, codec), f"127.0.0.1:{one.relay.port}")
            assert_whole(await other.pull(address, 0, 60), 1)
        finally:
            await asyncio.to_thread(store.close)


async def test_where_a_whole_fleet_is_gone_its_instances_are_not_tried_one_by_one() -> None:
    async with store_of(0) as (store, address), loaders(1, codec="raw", ways=[]) as (loader,):
        for port in range(1, 11):
            await store.relay(Encoding(0), f"127.0.0.1:{port}")
        weights = await loader.pull(address, 0, 60)
        assert_whole(weights, 0)
        assert plans(store) == 3
