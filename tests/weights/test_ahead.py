"""The base that is copied ahead: what may be taken of it, and that no pull ends on anything but the version."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable

import pytest
from test_transfer import CONFIG, assert_whole, codecs, loader, patient, store_of, tensors_of
from test_weight_store import counted

from penstock.instance.loading import WeightLoader
from penstock.weights import StagedWeights, ahead, fetch
from penstock.weights.ahead import Ahead

__all__ = ["patient"]

BASE = memoryview(bytes(range(256)) * 64)


def spare(nbytes: int) -> memoryview | None:
    return memoryview(bytearray(nbytes))


# What is copied


def test_all_of_the_base_is_there_for_one_who_takes_it_for_that_base() -> None:
    prepared = Ahead(spare)
    prepared.begin(BASE)
    assert prepared.wait(30)
    taken = prepared.take(BASE)
    assert taken is not None
    assert taken == (BASE, len(BASE))
    assert prepared.take(BASE) is None
    assert not prepared.wait(0)


def test_for_another_base_or_none_it_is_memory_like_any_other() -> None:
    prepared = Ahead(spare)
    for base in (memoryview(bytes(BASE)), None):
        prepared.begin(BASE)
        assert prepared.wait(30)
        taken = prepared.take(base)
        assert taken is not None
        assert taken[1] == 0


def test_who_takes_it_in_mid_copy_is_told_how_much_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PIECE_BYTES", 16)
    for _ in range(20):
        prepared = Ahead(spare)
        prepared.begin(BASE)
        taken = prepared.take(BASE)
        if taken is not None:
            buffer, nbytes = taken
            assert buffer[:nbytes] == BASE[:nbytes]
            assert not any(buffer[nbytes:])
    assert not [thread for thread in threading.enumerate() if thread.name == "weight-ahead"]


def test_memory_that_is_still_in_use_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LOOK_S", 0.001)
    asked, free = threading.Event(), threading.Event()

    def later(nbytes: int) -> memoryview | None:
        asked.set()
        return spare(nbytes) if free.is_set() else None

    prepared = Ahead(later)
    prepared.begin(BASE)
    assert asked.wait(30)
    assert prepared.take(BASE) is None
    prepared.begin(BASE)
    free.set()
    assert prepared.wait(30)
    prepared.drop()
    assert prepared.take(BASE) is None


# What an agent does with it


class Decoding:
    """Of chunks: how many were changed in place, and how many applied to a copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.in_place = self.copied = 0
        whole = fetch.decode_chunk

        def decode_chunk(coder, dtype, chunk, data, base, staging) -> None:  # type: ignore[no-untyped-def]
            if coder.needs_base and base is None:
                self.in_place += 1
            elif coder.needs_base:
                self.copied += 1
            whole(coder, dtype, chunk, data, base, staging)

        monkeypatch.setattr(fetch, "decode_chunk", decode_chunk)

    def counted(self) -> tuple[bool, bool]:
        """Whether any was, since the last time."""
        found = self.in_place > 0, self.copied > 0
        self.in_place = self.copied = 0
        return found


IN_PLACE, COPIED, NEITHER = (True, False), (False, True), (False, False)


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Decoding:
    return Decoding(monkeypatch)


async def served(loading: WeightLoader, address: str, version: int, waits: bool = True) -> list[str]:
    """The way by which a version comes, which is whole, serves, and is copied ahead."""
    staged = await loading.pull(address, version, 30)
    assert_whole(staged, version)
    loading.serves(staged)
    came = codecs(staged)
    del staged
    if waits and came[0].startswith("delta"):
        assert await loading.base_is_ahead(30)
    return came


async def begun(address: str, **options: object) -> WeightLoader:
    """An agent that serves version 1, which came as a difference, and has it copied ahead."""
    loading = loader(codec="delta", **options)
    assert await served(loading, address, 0) == ["lossless:0"]
    assert await served(loading, address, 1) == ["delta:1"]
    return loading


@pytest.mark.parametrize("options", [{}, {"relay_port": 0}, {"relay_port": 0, "ways": ["shm"]}])
async def test_differences_are_applied_in_place_from_the_second_on(
    decoding: Decoding, options: dict[str, object]
) -> None:
    async with store_of(*range(6), keep_versions=9) as (_, address):
        loading = await begun(address, **options)
        assert decoding.counted() == COPIED
        for version in (2, 3, 5):
            assert await served(loading, address, version) == [f"delta:{version}"]
            assert decoding.counted() == IN_PLACE
        await loading.close()


async def test_a_version_that_comes_before_the_copy_is_whole_takes_the_part_that_is(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_of(*range(6), keep_versions=9) as (_, address):
        loading = await begun(address)
        monkeypatch.setattr(ahead, "PIECE_BYTES", 8192)
        waited, whole = threading.Event(), time.perf_counter

        def slow() -> float:
            waited.set()
            return whole() * 1e6  # What took a moment is paused for for hours.

        monkeypatch.setattr("penstock.weights.ahead.time.perf_counter", slow)
        decoding.counted()
        for version in (2, 3, 4):
            waited.clear()
            assert await served(loading, address, version, waits=False) == [f"delta:{version}"]
            if version > 2:
                assert decoding.counted() == (True, True)
            assert await asyncio.to_thread(waited.wait, 30)
            while not loading._ahead._nbytes:
                await asyncio.sleep(0.001)
            decoding.counted()
        await loading.close()


async def test_a_copy_that_was_written_to_is_found_out_and_the_base_copied_again(decoding: Decoding) -> None:
    async with store_of(*range(3), keep_versions=9) as (_, address):
        loading = await begun(address)
        buffer = loading._ahead._buffer
        assert buffer is not None
        buffer[1000] ^= 4
        del buffer
        decoding.counted()
        assert await served(loading, address, 2) == ["delta:2"]
        assert decoding.counted() == (True, True)
        await loading.close()


async def test_a_base_that_has_rotted_is_found_out_though_it_was_copied_ahead() -> None:
    async with store_of(*range(3), keep_versions=9) as (_, address):
        loading = loader(codec="delta")
        assert await served(loading, address, 0) == ["lossless:0"]
        staged = await loading.pull(address, 1, 30)
        place = next(held for held in loading._memory._held if held is staged.stream.obj)
        place[1000] ^= 4
        loading.serves(staged)
        del staged
        assert await loading.base_is_ahead(30)
        assert await served(loading, address, 2) == ["lossless:2"]
        await loading.close()


async def test_a_version_that_the_engine_refused_leaves_nothing_to_build_on(decoding: Decoding) -> None:
    async with store_of(*range(4), keep_versions=9) as (_, address):
        loading = await begun(address)
        refused: StagedWeights | None = await loading.pull(address, 2, 30)
        assert refused is not None
        assert decoding.counted() == (True, True)
        refused = None
        assert await served(loading, address, 3) == ["delta:3"]
        assert decoding.counted() == COPIED
        await loading.close()


def halting(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event, Callable[..., None]]:
    """Decoding stops behind a chunk: (that it has done so, that it may go on, what decoded before)."""
    changed, goes_on, whole = threading.Event(), threading.Event(), fetch.decode_chunk

    def halts(*work: object) -> None:
        whole(*work)  # type: ignore[arg-type]
        changed.set()
        goes_on.wait(30)

    monkeypatch.setattr(fetch, "decode_chunk", halts)
    return changed, goes_on, whole


async def test_what_a_cut_pull_left_half_changed_is_not_built_on(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_of(*range(5), keep_versions=9) as (_, address):
        loading = await begun(address)
        changed, goes_on, whole = halting(monkeypatch)
        pulling = asyncio.create_task(loading.pull(address, 2, 30))
        assert await asyncio.to_thread(changed.wait, 30)
        pulling.cancel()
        await asyncio.wait((pulling,))
        assert pulling.cancelled()
        del pulling  # With its error, and so with all that it had.
        # A newer version is asked for while the thread of the old pull still has its chunk.
        monkeypatch.setattr(fetch, "decode_chunk", whole)
        assert await served(loading, address, 3, waits=False) == ["delta:3"]
        goes_on.set()
        gc.collect()  # A task group that was cancelled and its error refer to each other.
        assert await served(loading, address, 4) == ["delta:4"]
        await loading.close()


async def test_the_next_pull_is_staged_where_a_cut_one_was(decoding: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of(*range(4), keep_versions=9) as (_, address):
        loading = await begun(address)
        loading._ahead.drop()
        changed, goes_on, whole = halting(monkeypatch)
        gc.disable()
        try:
            pulling = asyncio.create_task(loading.pull(address, 2, 30))
            assert await asyncio.to_thread(changed.wait, 30)
            goes_on.set()
            pulling.cancel()
            await asyncio.wait((pulling,))
            assert pulling.cancelled()
            del pulling
            held = set(map(id, loading._memory._held))
            monkeypatch.setattr(fetch, "decode_chunk", whole)
            while any(thread.name.startswith("weight-decode") for thread in threading.enumerate()):
                await asyncio.sleep(0.01)
            staged = await loading.pull(address, 3, 30)
            assert id(staged.stream.obj) in held
            assert_whole(staged, 3)
        finally:
            gc.enable()
        await loading.close()


async def test_a_full_version_in_between_ends_it_until_differences_come_again(decoding: Decoding) -> None:
    async with store_of(*range(5), keep_versions=9) as (_, address):
        loading = await begun(address)
        loading._codec = "raw"
        assert await served(loading, address, 2) == ["raw:2"]
        loading._codec = "delta"
        decoding.counted()
        assert await served(loading, address, 3) == ["delta:3"]
        assert decoding.counted() == COPIED
        assert await served(loading, address, 4) == ["delta:4"]
        assert decoding.counted() == IN_PLACE
        await loading.close()


async def test_a_chain_goes_on_in_place(decoding: Decoding) -> None:
    async with store_of(0, 1, keep_versions=2) as (store, address):
        loading = await begun(address)
        for version in (2, 3, 4):
            await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
            await counted(store, "encoded_delta", version)
        assert 1 not in store.versions()
        decoding.counted()
        assert await served(loading, address, 4) == ["delta:2", "delta:3", "delta:4"]
        assert decoding.counted() == IN_PLACE
        await loading.close()
