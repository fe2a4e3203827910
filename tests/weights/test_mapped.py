"""Memory of a store that stays mapped from version to version: how often, how long, and who may write there."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_transfer import CONFIG, TOKEN, assert_whole, fetch, store_of, tensors_of

from penstock.instance.loading import WeightLoader
from penstock.weights import shm
from penstock.weights.mapped import MappedFile
from penstock.weights.protocol import LinkLost
from penstock.weights.shm import PREFIX, SharedFetcher, SharedLender, SharedMapper
from penstock.weights.tcp import KEEP_S, TcpTransport
from penstock.weights.transport import WayClosed

NBYTES = 1 << 20


def mapped_here(folder: Path) -> list[str]:
    """What this process has of `folder` in its memory for reading alone; a store's own mapping is written to."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return [line[5] for line in lines if len(line) == 6 and line[1] == "r--s" and line[5].startswith(f"{folder}/")]


def resident_bytes(folder: Path) -> int:
    """Of the first such mapping."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = found or ("r--s" in line and f"{folder}/{PREFIX}" in line)
        if found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("nothing is mapped")


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[SharedLender]:
    made = SharedLender(tmp_path)
    yield made
    made.close()


def lent(lender: SharedLender, content: bytes = b"") -> memoryview:
    buffer = lender.buffer(NBYTES)
    assert buffer is not None
    buffer[: len(content)] = content
    lender.lend(buffer)
    return buffer


async def test_versions_that_follow_are_seen_by_mappings_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Counted(MappedFile):
        def __init__(self, file: int, nbytes: int) -> None:
            super().__init__(file, nbytes)
            made.append(nbytes)

    monkeypatch.setattr(shm, "MappedFile", Counted)
    async with store_of(0, keep_versions=1, lenders=[SharedLender(tmp_path)]) as (store, address):
        loader = WeightLoader(TOKEN, ways=["shm"], codec="auto")
        loader._transport._fetchers[:] = [SharedFetcher()]
        for version in range(12):
            if version:
                await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
            weights = await loader.pull(address, version, 30)
            assert weights.way == "shm"
            assert_whole(weights, version)
            loader.serves(weights)
            del weights
        assert len(made) <= 4, "one that is served, one that comes, and the store's spares"
        assert len(mapped_here(tmp_path)) <= 4
        await loader.close()
        assert len(mapped_here(tmp_path)) == 1, "what is served last"
        del loader
        gc.collect()
        assert mapped_here(tmp_path) == []


def test_a_place_is_free_once_the_last_part_of_a_view_is_gone_though_it_stays_mapped(
    tmp_path: Path, lender: SharedLender
) -> None:
    buffer, mapper = lent(lender, b"one"), SharedMapper(tmp_path)
    for content in (b"one", b"two"):
        seen, again = (mapper.map(lender.place(buffer), NBYTES) for _ in range(2))
        part = again.stream[1:3].cast("B")[1:]
        assert bytes(seen.stream[:3]) == content
        assert seen.stream.readonly
        with pytest.raises(TypeError):
            part[0] = 0
        del seen
        assert not lender.claim(buffer)
        del again
        assert not lender.claim(buffer), "a part of it is left"
        del part
        assert lender.claim(buffer)
        assert len(mapped_here(tmp_path)) == 1
        with pytest.raises(LinkLost, match="for another version"):
            mapper.map(lender.place(buffer), NBYTES)  # It is being written to.
        buffer[:3] = b"two"
        lender.lend(buffer)


def test_no_descriptor_is_left_of_views_that_are_gone_or_never_came(tmp_path: Path, lender: SharedLender) -> None:
    buffer, mapper = lent(lender), SharedMapper(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        mapper.map(lender.place(buffer), NBYTES)
    assert lender.claim(buffer)
    for _ in range(3):
        with pytest.raises(LinkLost):
            mapper.map(lender.place(buffer), NBYTES)
        with pytest.raises(WayClosed, match="ends at"):
            mapper.map(lender.place(buffer), NBYTES + 1)
    mapper.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_the_store_gave_up_is_let_go_of_with_the_next_version(tmp_path: Path, lender: SharedLender) -> None:
    first, second, mapper = lent(lender, b"first"), lent(lender, b"second"), SharedMapper(tmp_path)
    seen = mapper.map(lender.place(first), NBYTES)
    del first
    assert "(deleted)" in mapped_here(tmp_path)[0]
    mapper.map(lender.place(second), NBYTES)
    assert bytes(seen.stream[:5]) == b"first", "what somebody looks at lasts"
    del seen
    assert mapped_here(tmp_path) == [lender.place(second)]
    mapper.close()
    assert mapped_here(tmp_path) == []


def test_what_one_link_has_mapped_another_one_sees_too(tmp_path: Path, lender: SharedLender) -> None:
    buffer = lent(lender, b"one")
    fetcher = SharedFetcher()
    way = lender.way(fetcher.says())
    assert way is not None
    one, other = fetcher.open(way), fetcher.open(way)
    for mapper in (one, other):
        assert bytes(mapper.map(lender.place(buffer), NBYTES).stream[:3]) == b"one"
    assert len(mapped_here(tmp_path)) == 1
    one.close()
    gc.collect()
    assert len(mapped_here(tmp_path)) == 1
    other.close()
    gc.collect()
    assert not mapped_here(tmp_path)


def test_a_view_outlives_the_mapper(tmp_path: Path, lender: SharedLender) -> None:
    buffer, mapper = lent(lender, b"bytes"), SharedMapper(tmp_path)
    seen = mapper.map(lender.place(buffer), NBYTES)
    mapper.close()
    del mapper
    assert bytes(seen.stream[:5]) == b"bytes"
    assert not lender.claim(buffer)
    del seen
    assert mapped_here(tmp_path) == []
    assert lender.claim(buffer)


def test_another_file_under_the_name_is_not_taken_for_the_one_that_is_mapped(
    tmp_path: Path, lender: SharedLender
) -> None:
    buffer, mapper = lent(lender, b"one"), SharedMapper(tmp_path)
    place = Path(lender.place(buffer))
    mapper.map(str(place), NBYTES)
    place.unlink()
    place.write_bytes(b"two" + bytes(NBYTES - 3))
    assert bytes(mapper.map(str(place), NBYTES).stream[:3]) == b"two"
    assert bytes(mapper.map(str(place), 3).stream) == b"two", "and no more of it than was asked for"


def test_pages_are_mapped_at_once(tmp_path: Path, lender: SharedLender) -> None:
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < (5, 14):
        pytest.skip("this kernel maps pages as they are read")
    buffer, mapper = lent(lender), SharedMapper(tmp_path)
    seen = mapper.map(lender.place(buffer), NBYTES)
    assert resident_bytes(tmp_path) == 0
    seen.touch(5000, NBYTES // 2)
    assert NBYTES // 2 <= resident_bytes(tmp_path) < NBYTES
    seen.touch(0, NBYTES)
    assert resident_bytes(tmp_path) == NBYTES


async def test_a_source_that_ended_leaves_nothing_mapped_once_links_are_let_go(tmp_path: Path) -> None:
    transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])
    async with store_of(0, lenders=[SharedLender(tmp_path)]) as (_, address):
        assert_whole(await fetch(address, 0, codec="raw", transport=transport), 0)
    assert len(mapped_here(tmp_path)) == 1
    transport.close()
    assert mapped_here(tmp_path) == []


async def test_a_source_that_ended_leaves_nothing_mapped_once_another_one_is_asked(tmp_path: Path) -> None:
    """As an engine beside this one does, when it is killed and comes again at another port."""
    transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])
    for version in range(4):
        async with store_of(version, lenders=[SharedLender(tmp_path)]) as (_, address):
            assert_whole(await fetch(address, version, codec="raw", transport=transport), version)
        assert len(mapped_here(tmp_path)) == 1
        async with asyncio.timeout(10):
            while not all(link.hung_up() for links in transport._kept.values() for _, link in links):
                await asyncio.sleep(0.01)
    transport.close()


async def test_a_source_that_nobody_asks_any_more_is_let_go_of_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = TcpTransport(TOKEN, fetchers=[SharedFetcher()])
    one, other = (store_of(version, lenders=[SharedLender(tmp_path)]) for version in (0, 1))
    async with one as (_, first), other as (_, second):
        await fetch(first, 0, codec="raw", transport=transport)
        await fetch(second, 1, codec="raw", transport=transport)
        assert len(mapped_here(tmp_path)) == 2
        later = time.monotonic() + KEEP_S
        monkeypatch.setattr("penstock.weights.tcp.time.monotonic", lambda: later)
        await fetch(second, 1, codec="raw", transport=transport)
        assert len(mapped_here(tmp_path)) == 1
    transport.close()


def test_a_process_that_was_forked_off_takes_no_lock_along(
    tmp_path: Path, lender: SharedLender, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, parent = lent(lender), os.getpid()
    file = os.open(lender.place(buffer), os.O_RDONLY)
    assert shm._lock(file, fcntl.F_RDLCK)
    # A child's descriptor is another, of the same open file.
    inherited = os.dup(file)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: parent + 1)
        shm._leave(inherited, parent)
    assert not lender.claim(buffer)
    shm._leave(file, parent)
    assert lender.claim(buffer)
