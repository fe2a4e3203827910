"""Versions as differences over real sockets: the base that an agent holds, what is passed on, what is resumed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from test_weight_store import CONFIG, TOKEN, Proxy, counted

from penstock.errors import WeightError
from penstock.instance.loading import WeightLoader
from penstock.weights import StagedWeights, WeightStore, decode_manifest, encode_manifest, pull
from penstock.weights import protocol as words
from penstock.weights.choose import Rates
from penstock.weights.manifest import Encoding, Made
from penstock.weights.memory import NoMemory
from penstock.weights.partial import Partial
from penstock.weights.relay import Relay
from penstock.weights.tcp import TcpLink, TcpTransport
from penstock.weights.transport import Heard, Planned, WeightLink

ELEMENTS = 60_000
CHUNK = 8192


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy is no relay that is gone."""
    for module in ("neighbours", "reconnecting"):
        monkeypatch.setattr(f"penstock.weights.{module}.RELAY_CONNECT_S", 60.0)


def tensors_of(version: int) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """A model whose every version has changed one weight in fifty."""
    drawn = (np.random.default_rng(0).standard_normal(ELEMENTS) * 0.02).astype(np.float32)
    values = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    for step in range(1, version + 1):
        values[np.random.default_rng(step).random(ELEMENTS) < 0.02] += 1
    return [("w", "BF16", (ELEMENTS,), values.tobytes()), ("scale", "F32", (3,), bytes([version]) * 12)]


def assert_whole(weights: StagedWeights, version: int) -> None:
    assert {name: bytes(view) for name, view in weights.tensors.items()} == {s[0]: s[3] for s in tensors_of(version)}


@contextlib.asynccontextmanager
async def store_of(*versions: int, port: int = 0, **options: object) -> AsyncIterator[tuple[WeightStore, str]]:
    store = WeightStore("run", "127.0.0.1", port, TOKEN, chunk_bytes=CHUNK, **options)  # type: ignore[arg-type]
    try:
        address = store.start()
        for version in versions:
            await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
        yield store, address
    finally:
        await asyncio.to_thread(store.close)


async def fetch(address: str, version: int, **options: object) -> StagedWeights:
    return await pull(address, version, TOKEN, **{"deadline_s": 30, **options})  # type: ignore[arg-type]


def codecs(weights: StagedWeights) -> list[str]:
    return [f"{step.codec}:{step.version}" for step in weights.steps]


@pytest.mark.parametrize("codec", ["raw", "lossless", "delta"])
async def test_each_codec_brings_the_same_weights_in_its_own_weight(codec: str) -> None:
    async with store_of(0, 1) as (_, address):
        base = await fetch(address, 0, codec="raw")
        weights = await fetch(address, 1, codec=codec, base=base)
        assert_whole(weights, 1)
        assert codecs(weights) == [f"{codec}:1"]
        most = {"raw": 1.0, "lossless": 0.75, "delta": 0.05}[codec]
        assert weights.bytes_fetched <= most * weights.manifest.raw_nbytes
        assert weights.manifest.digest == (await fetch(address, 1, codec="raw")).manifest.digest


async def test_left_to_itself_a_slow_link_takes_the_difference_and_a_fast_one_raw() -> None:
    async with store_of(0, 1) as (_, address):
        base = await fetch(address, 0, codec="raw")
        slow, fast = Rates(link_bytes_per_s=1e4), Rates(link_bytes_per_s=1e15)
        assert codecs(await fetch(address, 1, base=base, rates=slow)) == ["delta:1"]
        assert codecs(await fetch(address, 1, base=base, rates=fast)) == ["raw:1"]
        assert codecs(await fetch(address, 1, rates=Rates(link_bytes_per_s=1e4))) == ["lossless:1"]


@pytest.mark.parametrize("how", ["raw", "kept on disk", "lossless"])
async def test_only_of_raw_chunks_that_nobody_waits_for_the_loop_hears_late(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    async def chunks_into(link: TcpLink, indices: Sequence[int], intos: Sequence[memoryview], *rest: Any) -> int:
        asked.append((rest[1], sum(map(len, intos))))
        return await whole(link, indices, intos, *rest)

    whole = TcpLink.chunks_into
    monkeypatch.setattr(TcpLink, "chunks_into", chunks_into)
    monkeypatch.setattr("penstock.weights.puller.PUSH_BYTES", 0)
    async with store_of(0) as (_, address):
        partial = tmp_path if how == "kept on disk" else None
        codec = "lossless" if how == "lossless" else "raw"
        weights = await fetch(address, 0, codec=codec, partial=partial, connections=1)
    assert_whole(weights, 0)
    if how == "raw":
        # Where more can be asked for, it is, once half is there; the last ones come together.
        assert any(0 < gladly < coming for gladly, coming in asked)
        assert asked[-1][0] == asked[-1][1] > 0
    else:
        assert {gladly for gladly, _ in asked} == {0}


async def test_a_direct_difference_over_several_versions_is_encoded_once() -> None:
    async with store_of(0, 1, 2, 3, keep_versions=4) as (store, address):
        base = await fetch(address, 0, codec="raw")
        for _ in range(3):
            weights = await fetch(address, 3, codec="delta", base=base)
            assert codecs(weights) == ["delta:3"]
            assert_whole(weights, 3)
        assert store.counters()["encoded_delta"] == 1


async def test_a_chain_leads_on_from_a_base_that_the_store_no_longer_holds() -> None:
    async with store_of(0, 1) as (store, address):
        old = await fetch(address, 0, codec="raw")
        newer = await fetch(address, 1, codec="delta", base=old)
        for version in (2, 3):  # From the first difference that is asked for, they are encoded as soon as published.
            await asyncio.to_thread(store.publish, version, tensors_of(version), CONFIG)
            await counted(store, "encoded_delta", version)
        assert 0 not in store.versions()
        weights = await fetch(address, 3, codec="delta", base=old)
        assert codecs(weights) == ["delta:1", "delta:2", "delta:3"]
        assert_whole(weights, 3)
        assert_whole(await fetch(address, 3, codec="delta", base=newer), 3)
        assert_whole(old, 0)  # The base itself is never written to.


async def test_other_weights_under_the_bases_number_are_noticed_and_it_comes_in_full() -> None:
    async with store_of(5) as (_, address):
        base = await fetch(address, 5, codec="raw")
    async with store_of(0, 1) as (_, address):
        stranger = StagedWeights(
            manifest=msgspec.structs.replace(base.manifest, version=0), tensors=base.tensors, stream=base.stream
        )
        weights = await fetch(address, 1, codec="delta", base=stranger)
        assert codecs(weights) == ["lossless:1"]
        assert_whole(weights, 1)


async def test_a_base_that_has_rotted_in_memory_is_found_out_and_the_version_comes_in_full() -> None:
    async with store_of(0, 1) as (_, address):
        base = await fetch(address, 0, codec="raw")
        rotten = bytearray(base.stream)
        rotten[1000] ^= 4
        bad = StagedWeights(manifest=base.manifest, tensors=base.tensors, stream=memoryview(rotten))
        weights = await fetch(address, 1, codec="delta", base=bad)
        assert codecs(weights) == ["lossless:1"]
        assert_whole(weights, 1)


async def test_a_manifest_that_the_trainer_did_not_sign_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of(0) as (store, address):
        forged = msgspec.structs.replace(decode_manifest(store._held._versions[0].signed), config_json="{}")
        store._held._versions[0].signed = encode_manifest(forged)
        with pytest.raises(WeightError, match="not signed with this run's token"):
            await fetch(address, 0)


async def test_a_version_can_be_asked_for_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of(0) as (store, address):
        go_on = threading.Event()
        whole = WeightStore._held_version

        def late(self: WeightStore, *args: object) -> object:
            assert go_on.wait(30)
            return whole(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(WeightStore, "_held_version", late)
        monkeypatch.setattr("penstock.weights.puller.WAIT_S", 0.05)
        # Returns while the manifest is still to be made.
        publication = store.publish_behind(1, tensors_of(1), CONFIG)
        assert publication.raw_nbytes == 2 * ELEMENTS + 12
        assert store.versions() == [0]
        with pytest.raises(WeightError, match="published already"):
            store.publish_behind(1, tensors_of(1), CONFIG)
        pulling = asyncio.create_task(fetch(address, 1))
        await counted_at_least(store, "refused_not_ready", 1)
        go_on.set()
        assert_whole(await pulling, 1)
        assert publication.digest == publication.manifest().digest


def plans(store: WeightStore) -> int:
    """That it has given out."""
    return store.counters().get("manifests", 0) + store.counters().get("drafts", 0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def counted_at_least(counting: WeightStore | Relay, what: str, amount: int) -> None:
    await until(lambda: counting.counters().get(what, 0) >= amount)


async def test_a_store_keeps_versions_within_its_bytes() -> None:
    size = 2 * ELEMENTS + 12
    async with store_of(0, 1, 2, keep_versions=5, keep_bytes=2 * size) as (store, _):
        assert store.versions() == [1, 2]
    async with store_of(0, 1, 2, keep_versions=5, keep_bytes=size // 2) as (store, _):
        assert store.versions() == [2]
    async with store_of(0, 1, 2, keep_versions=5) as (store, _):
        assert store.versions() == [0, 1, 2]


# Passed on by instances


@contextlib.asynccontextmanager
async def relay_of(wait_s: float = 15.0) -> AsyncIterator[Relay]:
    relay = Relay(TOKEN, "127.0.0.1", wait_s=wait_s)
    relay.start()
    try:
        yield relay
    finally:
        await relay.close()


@pytest.mark.parametrize("codec", ["raw", "lossless", "delta"])
async def test_instances_pass_a_version_on_and_the_trainer_sends_it_about_once(codec: str) -> None:
    async with store_of(0, 1) as (store, address), contextlib.AsyncExitStack() as parts:
        base = await fetch(address, 0, codec="raw")
        relays = [await parts.enter_async_context(relay_of()) for _ in range(5)]
        before = store.counters()["bytes"]
        pulled = await asyncio.gather(*(fetch(address, 1, codec=codec, base=base, relay=relay) for relay in relays))
        for weights in pulled:
            assert_whole(weights, 1)
        assert store.counters()["bytes"] - before == pulled[0].bytes_fetched
        # One that passes nothing on itself is served by the others, too.
        assert_whole(await fetch(address, 1, codec=codec, base=base), 1)
        assert store.counters()["bytes"] - before == pulled[0].bytes_fetched


async def test_a_relay_that_is_gone_costs_a_retry_at_the_trainer() -> None:
    async with store_of(0) as (store, address):
        async with relay_of() as relay:
            assert_whole(await fetch(address, 0, codec="raw", relay=relay), 0)
        before = store.counters()["bytes"]
        weights = await fetch(address, 0, codec="raw")
        assert_whole(weights, 0)
        assert store.counters()["bytes"] - before == weights.bytes_fetched


async def test_a_relay_that_never_gets_the_version_itself_is_left_for_the_trainer() -> None:
    async with store_of(0) as (store, address), relay_of(wait_s=0.05) as relay:
        await store.relay(Encoding(0), f"127.0.0.1:{relay.port}")
        assert_whole(await fetch(address, 0, codec="raw"), 0)
        assert relay.counters()["refused_version"] >= 1
        half = relay_of(wait_s=0.05)
        async with half as stuck:
            manifest = store._held._versions[0]
            stuck.expect(Encoding(0), manifest.signed, len(manifest.manifest.chunks))
            await store.relay(Encoding(0), f"127.0.0.1:{stuck.port}")
            assert_whole(await fetch(address, 0, codec="raw"), 0)
            assert stuck.counters()["refused_not_ready"] >= 1


async def test_a_relay_that_lies_is_found_out_and_left() -> None:
    async with store_of(0) as (store, address), relay_of() as liar:
        signed = store._held._versions[0].signed
        chunks = decode_manifest(signed).chunks
        liar.expect(Encoding(0), signed, len(chunks))
        for index, chunk in enumerate(chunks):
            liar.put(Encoding(0), index, bytes(chunk.nbytes))
        await store.relay(Encoding(0), f"127.0.0.1:{liar.port}")
        assert_whole(await fetch(address, 0, codec="raw", connections=2), 0)
        assert 1 <= liar.counters()["chunks"] < len(chunks) / 2


async def test_a_relay_asks_for_the_token_and_forgets_old_versions() -> None:
    async with store_of(0, 1, 2, keep_versions=3) as (_, address), relay_of() as relay:
        for version in (0, 1, 2):
            await fetch(address, version, codec="raw", relay=relay)
        there = f"127.0.0.1:{relay.port}"
        with pytest.raises(words.TokenRefused):
            await TcpTransport("another").connect(there)
        link = await TcpTransport(TOKEN).connect(there)
        with pytest.raises(words.NoSuchVersion):
            await link.plan(words.GetPlan(ask=words.GetOffers(version=2)))
        link.close()
    with pytest.raises(WeightError, match="without the run's token"):
        Relay("")


async def test_a_relays_port_in_use_is_named() -> None:
    async with relay_of() as relay:
        with pytest.raises(WeightError, match=f"can't listen on 127.0.0.1:{relay.port}"):
            Relay(TOKEN, "127.0.0.1", relay.port).start()


# Cut, and gone on with


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def wipe(folder: Path) -> None:
    (data,) = folder.glob("*.part")
    data.write_bytes(bytes(data.stat().st_size))


class CutAfter:
    """A transport whose links break for good after some chunks."""

    def __init__(self, chunks: int) -> None:
        self.left = chunks
        self.inner = TcpTransport(TOKEN)

    async def connect(self, source: str, connect_s: float = 10.0, relay: bool = False) -> CutLink:
        return CutLink(self, await self.inner.connect(source, connect_s, relay))

    def keep(self, source: str, link: WeightLink) -> None:
        link.close()


class CutLink:
    def __init__(self, cut: CutAfter, link: WeightLink) -> None:
        self.cut = cut
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
        if not self.cut.left:
            raise WeightError("cut for good")
        self.cut.left -= 1
        return await self.link.chunks_into(indices[:1], intos[:1], heard)

    async def stop(self) -> None:
        self.close()

    def close(self) -> None:
        self.link.close()


class DeafAfter(CutAfter):
    """A sender that hears no request after the first so many, and has sent what it was asked for before."""

    async def connect(self, source: str, connect_s: float = 10.0, relay: bool = False) -> CutLink:
        return DeafLink(self, await self.inner.connect(source, connect_s, relay))


class DeafLink(CutLink):
    async def ask_chunks(self, encoding: Encoding, indices: Sequence[int]) -> None:
        self.cut.left -= 1
        if self.cut.left == 0:
            raise words.LinkLost("the other side is gone")
        for index in indices:  # Each comes by itself.
            await self.link.ask_chunks(encoding, [index])

    async def chunks_into(
        self, indices: Sequence[int], intos: Sequence[memoryview], heard: Heard | None = None, gladly: int = 0
    ) -> int:
        return await self.link.chunks_into(indices[:1], intos[:1], heard)


async def test_what_a_sender_sent_before_it_died_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.weights.puller.PUSH_BYTES", 0)
    async with store_of(0) as (store, address):
        transport = DeafAfter(3)
        weights = await fetch(address, 0, codec="raw", transport=transport, connections=1)
        assert_whole(weights, 0)
        assert transport.left < 0
        assert store.counters()["bytes"] == weights.bytes_fetched == weights.manifest.raw_nbytes


@pytest.mark.parametrize("codec", ["raw", "lossless"])
async def test_a_pull_that_died_goes_on_from_the_disk(tmp_path: Path, codec: str) -> None:
    async with store_of(0) as (_, address):
        with pytest.raises(WeightError, match="cut for good"):
            await fetch(address, 0, codec=codec, transport=CutAfter(7), connections=1, partial=tmp_path)
        assert names(tmp_path)
        whole = await fetch(address, 0, codec=codec)
        weights = await fetch(address, 0, codec=codec, partial=tmp_path)
        assert_whole(weights, 0)
        came = sum(chunk.nbytes for chunk in whole.manifest.chunks[:7])
        assert weights.bytes_fetched == whole.bytes_fetched - came
        assert not names(tmp_path)


RECEIVER = """
import asyncio, sys
from pathlib import Path
from typing import Any
sys.path.insert(0, sys.argv[3])
from test_transfer import CutAfter, fetch
async def main():
    cut = CutAfter(7)
    try:
        await fetch(sys.argv[1], 0, codec="raw", transport=cut, connections=1, partial=Path(sys.argv[2]))
    except Exception:
        print("cut", flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


def receive_and_die(address: str, folder: Path) -> None:
    command = [sys.executable, "-c", RECEIVER, address, str(folder), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"cut\n"
        receiver.kill()


async def test_a_receiver_that_was_killed_goes_on_from_the_disk_in_another_process(tmp_path: Path) -> None:
    async with store_of(0) as (_, address):
        await asyncio.to_thread(receive_and_die, address, tmp_path)
        weights = await fetch(address, 0, codec="raw", partial=tmp_path)
        assert_whole(weights, 0)
        came = sum(chunk.nbytes for chunk in weights.manifest.chunks[:7])
        assert weights.bytes_fetched == weights.manifest.raw_nbytes - came


async def test_a_link_that_is_cut_in_mid_difference_is_taken_up_again() -> None:
    async with store_of(0, 1) as (_, address):
        base = await fetch(address, 0, codec="raw")
        proxy = Proxy(address)
        proxy.cut_after = [3000, 1000, 2500]
        async with proxy.listening() as through:
            weights = await fetch(through, 1, codec="delta", base=base, connections=2)
        assert codecs(weights) == ["delta:1"]
        assert_whole(weights, 1)
        assert proxy.connections >= 3


async def test_what_the_disk_has_is_not_believed_and_what_is_anothers_is_deleted(tmp_path: Path) -> None:
    async with store_of(0, 1) as (_, address):
        with pytest.raises(WeightError, match="cut for good"):
            await fetch(address, 0, codec="raw", transport=CutAfter(7), connections=1, partial=tmp_path)
        wipe(tmp_path)
        weights = await fetch(address, 0, codec="raw", partial=tmp_path)
        assert_whole(weights, 0)
        assert weights.bytes_fetched == weights.manifest.raw_nbytes
        (tmp_path / "7-raw-0123.part").write_bytes(b"old")
        with pytest.raises(WeightError, match="cut for good"):
            await fetch(address, 1, codec="raw", transport=CutAfter(1), connections=1, partial=tmp_path)
        assert {name[:5] for name in names(tmp_path)} == {"1-raw"}


async def test_a_full_disk_costs_the_resumption_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock.weights.partial.os.pwrite", full)
    async with store_of(0) as (_, address):
        assert_whole(await fetch(address, 0, partial=tmp_path), 0)
    assert "No space left on device" in caplog.text
    assert "a pull that is cut begins again" in caplog.text


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    store = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=CHUNK)
    manifest = store.publish(0, tensors_of(0), CONFIG)
    partial = Partial(tmp_path / "taken", manifest, encode_manifest(manifest))
    assert "not kept on disk" in partial.trouble
    assert partial.indices() == []


# An agent's base


def loader(**options: object) -> WeightLoader:
    return WeightLoader(TOKEN, **options)  # type: ignore[arg-type]


async def test_the_base_moves_only_once_the_engine_serves_the_version() -> None:
    async with store_of(0, 1, 2, keep_versions=3) as (_, address):
        loading = loader(codec="delta")
        first = await loading.pull(address, 0, 30)
        assert loading.base is None
        loading.serves(first)
        refused = await loading.pull(address, 1, 30)
        assert [step.base for step in refused.steps] == [0]
        # The engine refused it: the next difference is still to what serves.
        after = await loading.pull(address, 2, 30)
        assert [step.base for step in after.steps] == [0]
        assert_whole(after, 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"codec": "delta"}, "delta"), ({"codec": "delta", "keep_base": False}, "lossless"), ({"codec": "raw"}, "raw")],
)
async def test_what_an_agent_keeps_decides_how_the_next_version_comes(
    options: dict[str, object], expected: str
) -> None:
    async with store_of(0, 1) as (_, address):
        loading = loader(**options)
        loading.serves(await loading.pull(address, 0, 30))
        assert (loading.base is not None) == (expected == "delta")
        assert (await loading.pull(address, 1, 30)).steps[0].codec == expected
    with pytest.raises(ValueError, match="is not one of auto"):
        loader(codec="zip")


async def test_an_agent_with_a_relay_port_passes_weights_on_and_one_without_does_not() -> None:
    async with store_of(0) as (_, address):
        quiet, giving = loader(), loader(relay_port=0)
        await quiet.pull(address, 0, 30)
        await giving.pull(address, 0, 30)
        assert quiet.relay is None
        assert giving.relay is not None
        assert_whole(await fetch(f"127.0.0.1:{giving.relay.port}", 0, codec="raw"), 0)
        await giving.close()


async def test_where_memory_is_short_the_base_is_given_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of(0, 1) as (_, address):
        loading = loader(codec="delta")
        loading.serves(await loading.pull(address, 0, 30))
        from penstock.weights import memory

        whole: Callable[[int], memoryview] = memory.host_buffer

        def short(nbytes: int) -> memoryview:
            if loading.base is not None:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return whole(nbytes)

        monkeypatch.setattr(memory, "host_buffer", short)
        weights = await loading.pull(address, 1, 30)
        assert weights.steps[0].codec == "lossless"
        assert_whole(weights, 1)
        monkeypatch.setattr(memory, "host_buffer", lambda nbytes: (_ for _ in ()).throw(MemoryError("none")))
        with pytest.raises(NoMemory, match="to stage weight version 1"):
            await loading.pull(address, 1, 30)


async def test_a_pull_that_was_cut_and_begun_again_goes_on_for_those_who_wait_at_the_relay() -> None:
    async with store_of(0) as (store, _), relay_of() as relay:
        signed = store._held._versions[0].signed
        chunks = decode_manifest(signed).chunks
        relay.expect(Encoding(0), signed, len(chunks))
        lease = await relay.open(Encoding(0), 0.0)
        waiting = asyncio.create_task(lease.chunk(0))
        relay.expect(Encoding(0), signed, len(chunks))
        relay.put(Encoding(0), 0, b"whole")
        assert await waiting == b"whole"
