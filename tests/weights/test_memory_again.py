"""Shared memory that was short for a while: it is asked for again, and what stood in for it is given back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_transfer import CONFIG, TOKEN, assert_whole, codecs, store_of, tensors_of

from penstock.instance.loading import WeightLoader
from penstock.weights import holdings, shm
from penstock.weights.holdings import Holdings
from penstock.weights.manifest import Encoding
from penstock.weights.memory import NoMemory, Recycled
from penstock.weights.protocol import Way
from penstock.weights.shm import SharedLender
from penstock.weights.spares import Spares

NBYTES = 1 << 16


class Short:
    """Whether there is no shared memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = False
        monkeypatch.setattr("penstock.weights.shm.check_room", self.check)

    def check(self, nbytes: int) -> None:
        if self.now:
            raise NoMemory("short")


class Registrar:
    """Lends any memory once it is registered, as Mooncake does."""

    kind = "registrar"
    makes_memory = False

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def way(self, said: str) -> Way | None:
        return None

    def buffer(self, nbytes: int) -> memoryview | None:
        return None

    def lend(self, stream: memoryview) -> None:
        self.registered.add(id(stream.obj))

    def claim(self, stream: memoryview) -> bool:
        return True

    def place(self, stream: memoryview) -> str:
        return "1" if id(stream.obj) in self.registered else ""

    def close(self) -> None:
        pass


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[SharedLender]:
    made = SharedLender(tmp_path)
    yield made
    made.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Short:
    return Short(monkeypatch)


@pytest.mark.parametrize("registers", [False, True], ids=["shm", "shm and another"])
def test_a_store_keeps_no_memory_that_stood_in_for_shared_memory(
    registers: bool, lender: SharedLender, short: Short
) -> None:
    lenders = [lender, *([Registrar()] if registers else [])]
    spares, held, places = Spares(lenders), [], []
    for version in range(12):
        short.now = version < 3
        buffer = spares.buffer(NBYTES)
        for one in lenders:
            one.lend(buffer)
        held.append(buffer)
        places.append(bool(lender.place(buffer)))
        if len(held) > 2:
            spares.put(held.pop(0))
    assert places == [False] * 3 + [True] * 9
    assert all(lender.place(spare) for spare in spares._held)


def test_without_shared_memory_a_store_uses_its_memory_again() -> None:
    spares = Spares([Registrar()])
    first = spares.buffer(NBYTES)
    spares.put(first)
    assert spares.buffer(NBYTES).obj is first.obj


def test_memory_for_the_next_difference_is_shared_again_as_soon_as_there_is_some(
    lender: SharedLender, short: Short
) -> None:
    memory = Recycled(lender=lender)
    assert memory.spare(NBYTES) is None, "none was given out: there is nothing that it could stand for"
    short.now = True
    first, second = memory.buffer(NBYTES), memory.buffer(NBYTES)
    assert not lender.place(first)
    del first
    short.now = False
    again = memory.spare(NBYTES)
    assert again is not None
    assert lender.place(again)
    del again, second
    assert lender.place(memory.buffer(NBYTES))
    assert sum(len(mapped) for mapped in memory._held) == NBYTES, "what stood in for it is given back"


def test_memory_of_another_size_is_given_back_before_more_is_asked_for(lender: SharedLender) -> None:
    memory, held = Recycled(lender=lender), []
    memory.buffer(NBYTES)

    def buffer(nbytes: int) -> memoryview | None:
        held.append(len(memory._held))
        return None

    lender.buffer = buffer  # type: ignore[method-assign]
    memory.buffer(2 * NBYTES)
    assert held == [0]


async def test_an_agent_that_takes_differences_shares_its_copy_again(short: Short) -> None:
    async with store_of(0, keep_versions=2) as (store, address):
        loader = WeightLoader(TOKEN, codec="delta", relay_port=0, ways=["shm"])
        assert loader._lender is not None
        shared = []
        for version in range(6):
            short.now = version < 2
            if version:
                await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
            staged = await loader.pull(address, version, 30)
            assert_whole(staged, version)
            assert codecs(staged) == ([f"delta:{version}"] if version else codecs(staged))
            loader.serves(staged)
            shared.append(bool(loader._lender.place(staged.stream)))
            del staged
            if version > 1:
                # Memory for the next one is looked for now; the first version's is passed on until then.
                assert await loader.base_is_ahead(30)
        # Memory for the third one was looked for while there was none yet, or was not.
        assert (shared[:2], shared[3:]) == ([False] * 2, [True] * 3)
        await loader.close()


@pytest.mark.parametrize("end", ["import sys; sys.exit(0)", "del buffer; import gc; gc.collect(); os._exit(0)"])
def test_a_process_that_was_forked_off_removes_nothing_when_it_ends(end: str, tmp_path: Path) -> None:
    lines = [
        "import os, pathlib, sys",
        "from penstock.weights.shm import SharedFetcher, SharedLender",
        "lender = SharedLender(pathlib.Path(sys.argv[1]))",
        "buffer = lender.buffer(65536)",
        "lender.lend(buffer)",
        "place = lender.place(buffer)",
        "way = lender.way(SharedFetcher().says())",
        "child = os.fork()",
        "if not child:",
        f"    {end}",
        "os.waitpid(child, 0)",
        "SharedFetcher().open(way).map(place, 65536)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob(shm.PREFIX + "*")), "the one that made them removes them"


def holding(newest_bytes: int) -> Holdings:
    made = Holdings("t", 2, 0, 1, Spares([]), lambda what: None)
    for version in (9, 10):
        stream: Any = SimpleNamespace(nbytes=newest_bytes)
        manifest: Any = SimpleNamespace(version=version)
        made._versions[version] = SimpleNamespace(stream=stream, manifest=manifest, readers=0)  # type: ignore[assignment]
    return made


def encoded(made: Holdings, encoding: Encoding, nbytes: int) -> None:
    done: Future[Any] = Future()
    done.set_result(SimpleNamespace(manifest=SimpleNamespace(nbytes=nbytes)))
    made._coded[encoding] = done


@pytest.mark.parametrize("heavy_bytes", [600, 900, 990])
def test_a_difference_hardly_lighter_than_a_version_pushes_no_chain_out(heavy_bytes: int) -> None:
    made = holding(1000)
    encoded(made, Encoding(10, "lossless"), 600)
    chain = [Encoding(version, "delta", version - 1) for version in range(2, 11)]
    heavy = Encoding(10, "delta", 1)
    for encoding in (heavy, *chain):
        encoded(made, encoding, heavy_bytes if encoding is heavy else 15)
    made._collect_coded()
    kept = set(made._coded)
    assert kept >= {*chain, Encoding(10, "lossless")}
    assert (heavy in kept) == (heavy_bytes + 15 * len(chain) <= 1000)
    made.close()


def test_estimates_are_kept_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    made = holding(1000)

    class Guarded(dict[Encoding, Any]):
        def get(self, key: Encoding, default: Any = None) -> Any:
            assert made._lock.locked()
            return super().get(key, default)

        def __setitem__(self, key: Encoding, value: Any) -> None:
            assert made._lock.locked()
            super().__setitem__(key, value)

    made._estimates = Guarded()
    monkeypatch.setattr(holdings, "estimate", lambda *args: holdings.Estimate(10, 2.0))
    held = made._versions[10]
    for _ in range(2):
        found = made._estimated(Encoding(10, "lossless"), held, {})
        assert found is not None
        assert found.nbytes == 10
    made.close()
