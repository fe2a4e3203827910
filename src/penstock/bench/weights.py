"""Weights on the move, as ratios to what one would otherwise use, in one run."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.bench.common import Result, at_least, at_most, skipped
from penstock.bench.weights_link import THERE, TOKEN, DelayProxy, StoreProcess, shaped, tensors_of
from penstock.bench.weights_pair import changed_share, drawn, tiled, trained
from penstock.errors import PenstockError
from penstock.weights import StagedWeights, WeightStore, pull
from penstock.weights.codecs import get_codec
from penstock.weights.codecs.delta import entropy_bound_bytes
from penstock.weights.memory import host_buffer
from penstock.weights.relay import Relay

DESCRIPTION = "weights: codecs, transfer over loopback and a shaped link, eight instances, the trainer's stall"
CHUNK_BYTES = 4 << 20
RATE = "1gbit"
ROUND_TRIP_S = 0.02
STREAMS = 2
COPY = """
import socket, sys
from penstock.weights.memory import host_buffer
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
data = host_buffer(int(sys.argv[1])); data[:] = bytes(len(data))
for _ in range(int(sys.argv[2])):
    peers = [listener.accept()[0] for _ in range(int(sys.argv[3]))]
    import threading
    share = len(data) // len(peers)
    sends = [threading.Thread(target=p.sendall, args=(data[k*share:(k+1)*share],)) for k, p in enumerate(peers)]
    [s.start() for s in sends]; [s.join() for s in sends]; [p.close() for p in peers]
"""


def run(quick: bool) -> list[Result]:
    size = (32 if quick else 128) << 20
    before, after = trained(12 if quick else 150)
    share = changed_share(before, after)
    results = [
        Result("changed by one AdamW step at 1e-6", 100 * share, "%", note=f"{len(before) // 2:,} bfloat16 weights"),
        *_deltas(size, (before, after)),
        *_lossless(size),
        *_loopback((128 if quick else 512) << 20, 2 if quick else 5),
        *_stall((256 if quick else 1024) << 20, 3 if quick else 7),
    ]
    large = (128 if quick else 1024) << 20
    results += _shaped(tiled(before, large), tiled(after, large), (64 << 20, 128 << 20))
    return results


def _rate(work: Callable[[], object], nbytes: int, times: int = 5) -> float:
    """GB/s, the median of a few; the first is thrown away."""
    took = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return nbytes / statistics.median(took[1:]) / 1e9


def _chunks(data: bytes) -> list[memoryview]:
    view = memoryview(data)
    return [view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES)]


def _deltas(size: int, real: tuple[bytes, bytes]) -> list[Result]:
    results = []
    codec = get_codec("delta")
    into = memoryview(bytearray(CHUNK_BYTES))
    cases = [("1.5 %", drawn(size, 0.015), 80.0), ("0.4 %", drawn(size, 0.004), 250.0), ("real pair", real, 0.0)]
    for name, (before, after), bound in cases:
        old, new = _chunks(before), _chunks(after)
        coded = [codec.encode(n, o, "BF16") for n, o in zip(new, old, strict=True)]
        nbytes = sum(map(len, coded))
        ratio = len(after) / nbytes

        def encode(new: Sequence[memoryview] = new, old: Sequence[memoryview] = old) -> None:
            for n, o in zip(new, old, strict=True):
                codec.encode(n, o, "BF16")

        def decode(coded: Sequence[bytes] = coded, old: Sequence[memoryview] = old) -> None:
            for data, o in zip(coded, old, strict=True):
                codec.decode(data, o, into[: len(o)], "BF16")

        encoding, decoding = _rate(encode, len(after)), _rate(decode, len(after))
        if not bound:
            results += [Result(f"delta, {name}: raw / wire", ratio, "x")]
            continue
        entropy = entropy_bound_bytes(after, before, "BF16")
        results += [
            at_least(f"delta, {name}: raw / wire", ratio, bound, "x"),
            at_most(f"delta, {name}: wire / entropy bound", nbytes / entropy, 1.25, "x", f"bound {entropy:,.0f} bytes"),
            at_least(f"delta, {name}: encode", encoding, 2.5, "GB/s a core"),
            at_least(f"delta, {name}: decode", decoding, 6.0, "GB/s a core"),
        ]
    return results


def _lossless(size: int) -> list[Result]:
    import zstandard

    data = drawn(size, 0.0)[0]
    parts = _chunks(data)
    codec, plain = get_codec("lossless"), zstandard.ZstdCompressor(level=1)
    coded = [codec.encode(part, None, "BF16") for part in parts]
    compressed = [plain.compress(part) for part in parts]
    into = memoryview(bytearray(CHUNK_BYTES))

    def decode() -> None:
        for part, one in zip(parts, coded, strict=True):
            codec.decode(one, None, into[: len(part)], "BF16")

    encoding = _rate(lambda: [codec.encode(part, None, "BF16") for part in parts], size)
    decoding = _rate(decode, size)
    deflating = _rate(lambda: [plain.compress(part) for part in parts], size)
    inflating = _rate(lambda: [zstandard.ZstdDecompressor().decompress(one) for one in compressed], size)
    return [
        at_least("lossless: raw / wire", size / sum(map(len, coded)), 1.45, "x"),
        at_least("lossless: encode / zstd-1", encoding / deflating, 1.0, "x", f"{encoding:.2f} GB/s a core"),
        at_least("lossless: decode / zstd-1", decoding / inflating, 1.0, "x", f"{decoding:.2f} GB/s a core"),
    ]


def _loopback(size: int, times: int) -> list[Result]:
    """A pull of raw weights against a bare copy of as many bytes over as many sockets, turn by turn."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "v0"
        path.write_bytes(drawn(size, 0.0)[0])
        store = StoreProcess([path], CHUNK_BYTES)
        command = [sys.executable, "-c", COPY, str(size), str(times + 1), str(STREAMS)]
        sender = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            port = int(sender.stdout.readline()) if sender.stdout else 0
            pulled, copied, cpu = [], [], []
            for _ in range(times + 1):
                began, used = time.perf_counter(), time.process_time()
                asyncio.run(pull(store.address, 0, TOKEN, codec="raw", connections=STREAMS, deadline_s=120))
                pulled.append(time.perf_counter() - began)
                cpu.append(time.process_time() - used)
                began = time.perf_counter()
                _copy_from(port, size)
                copied.append(time.perf_counter() - began)
        finally:
            store.kill()
            sender.kill()
            sender.wait(10)
    one, other = statistics.median(pulled[1:]), statistics.median(copied[1:])
    note = f"{size / one / 1e9:.2f} GB/s verified, against {size / other / 1e9:.2f}; {STREAMS} streams"
    return [
        at_least("raw over loopback / bare socket copy", other / one, 0.9, "x", note),
        Result("processor time of a raw pull", statistics.median(cpu[1:]) / size * 1e9, "s/GB", note="the puller's"),
    ]


def _copy_from(port: int, size: int) -> None:
    into = host_buffer(size)
    share = size // STREAMS

    def receive(part: memoryview) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            filled = 0
            while filled < len(part):
                got = sock.recv_into(part[filled:])
                if not got:
                    raise PenstockError("the bare copy broke off")
                filled += got

    threads = [threading.Thread(target=receive, args=(into[k * share : (k + 1) * share],)) for k in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _stall(size: int, times: int) -> list[Result]:
    """How long `publish_behind` keeps the trainer, against the bare copy; hashing goes on behind it."""
    data = drawn(size, 0.0)[0]
    tensors = tensors_of(data)
    store = WeightStore("bench", "127.0.0.1", 0, TOKEN, keep_versions=1)
    store.start()
    into = host_buffer(size)
    stalled, copied = [], []
    try:
        for version in range(times + 2):
            began = time.perf_counter()
            publication = store.publish_behind(version, tensors, "{}")
            stalled.append(time.perf_counter() - began)
            publication.manifest()
            began = time.perf_counter()
            into[:] = data
            copied.append(time.perf_counter() - began)
    finally:
        store.close()
    # The first two find no buffer of an older version to use again.
    one, other = statistics.median(stalled[2:]), statistics.median(copied[2:])
    note = f"{one * 1e9 / size:.3f} s/GB; the first two versions, on fresh memory, {max(stalled[:2]) * 1e9 / size:.3f}"
    return [at_most("trainer's stall / bare copy in memory", one / other, 1.1, "x", note)]


def _shaped(before: bytes, after: bytes, sizes: tuple[int, int]) -> list[Result]:
    what = ["delta of the real pair, 50 x sooner than raw", "8 instances / 1, delta", "8 instances / 1, raw"]
    with contextlib.ExitStack() as parts, tempfile.TemporaryDirectory() as folder:
        try:
            namespace = parts.enter_context(shaped(RATE))
        except PenstockError as error:
            return [skipped(name, "x", f"no shaped link here: {error}") for name in what]
        small = _files(Path(folder), "small", before[: sizes[1]], after[: sizes[1]])
        large = _files(Path(folder), "large", before, after)
        return [
            *asyncio.run(_one_link(StoreProcess(large, CHUNK_BYTES, namespace, THERE), len(after))),
            *asyncio.run(_eight(StoreProcess(small, CHUNK_BYTES // 4, namespace, THERE), "delta", 1.5)),
            *asyncio.run(_eight(StoreProcess(small, CHUNK_BYTES // 4, namespace, THERE), "raw", 1.5)),
        ]


def _files(folder: Path, name: str, *versions: bytes) -> list[Path]:
    paths = [folder / f"{name}-{k}" for k in range(len(versions))]
    for path, data in zip(paths, versions):
        path.write_bytes(data)
    return paths


async def _one_link(store: StoreProcess, size: int) -> list[Result]:
    proxy = DelayProxy(store.address, ROUND_TRIP_S / 2)
    try:
        async with proxy.listening() as address:
            began = time.perf_counter()
            base = await pull(address, 0, TOKEN, codec="raw", connections=4, deadline_s=300)
            raw_s = time.perf_counter() - began
            # Encoded once, for whoever asks first; what an instance then waits for is the transfer.
            began = time.perf_counter()
            await pull(address, 1, TOKEN, codec="delta", base=base, connections=4, deadline_s=300)
            first_s = time.perf_counter() - began
            took = []
            for _ in range(5):
                began = time.perf_counter()
                weights = await pull(address, 1, TOKEN, codec="delta", base=base, connections=4, deadline_s=300)
                took.append(time.perf_counter() - began)
    finally:
        store.kill()
    one_s = statistics.median(took)
    note = (
        f"{size / 2**20:.0f} MiB at 1 Gb/s (tc tbf) and {ROUND_TRIP_S * 1e3:.0f} ms there and back (userspace): raw "
        f"{raw_s:.2f} s, delta {one_s:.3f} s ({weights.bytes_fetched / 1e6:.1f} MB), with encoding {first_s:.3f} s; "
        "the pair is one of a small model, its tensors repeated"
    )
    return [
        at_least("delta of the real pair, sooner than raw", raw_s / one_s, 50, "x", note),
        Result("the same with the encoding", raw_s / first_s, "x"),
    ]


async def _eight(store: StoreProcess, codec: str, bound: float) -> list[Result]:
    """All eight and their relays are in this process; the trainer's link alone is shaped."""
    proxies = [DelayProxy(store.address, ROUND_TRIP_S / 2) for _ in range(8)]
    try:
        async with contextlib.AsyncExitStack() as parts:
            addresses = [await parts.enter_async_context(proxy.listening()) for proxy in proxies]
            base = await pull(addresses[0], 0, TOKEN, codec="raw", deadline_s=300)
            await pull(addresses[0], 1, TOKEN, codec=codec, base=base, deadline_s=300)
            ones = [await _together(addresses[:1], codec, base) for _ in range(3)]
            sent = sum(proxy.passed for proxy in proxies)
            eights = [await _together(addresses, codec, base) for _ in range(3)]
            sent = (sum(proxy.passed for proxy in proxies) - sent) // 3
    finally:
        store.kill()
    one_s, eight_s = statistics.median(ones), statistics.median(eights)
    size = base.manifest.raw_nbytes
    note = f"{size / 2**20:.0f} MiB: {one_s:.3f} s and {eight_s:.3f} s; the trainer sent {sent / 1e6:.1f} MB for eight"
    return [at_most(f"8 instances / 1, {codec}", eight_s / one_s, bound, "x", note)]


async def _together(addresses: list[str], codec: str, base: StagedWeights) -> float:
    relays = [Relay(TOKEN) for _ in addresses]
    for relay in relays:
        relay.start()
    try:
        began = time.perf_counter()
        await asyncio.gather(
            *(
                pull(address, 1, TOKEN, codec=codec, base=base, relay=relay, deadline_s=300)
                for address, relay in zip(addresses, relays, strict=True)
            )
        )
        return time.perf_counter() - began
    finally:
        for relay in relays:
            await relay.close()
