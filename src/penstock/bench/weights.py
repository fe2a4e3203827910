"""Weights on the move, as ratios to what one would otherwise use, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from penstock.bench.common import Result, at_least, at_most
from penstock.bench.weights_local import on_one_machine, stalls
from penstock.bench.weights_pair import changed_share, drawn, tiled, trained
from penstock.bench.weights_quantized import quantized
from penstock.bench.weights_shaped import over_shaped_links
from penstock.weights.codecs import get_codec
from penstock.weights.codecs.delta import entropy_bound_bytes
from penstock.weights.codecs.fused import compiled

DESCRIPTION = "weights: codecs, transfer on one machine and over shaped links, eight instances, stalls and pauses"
CHUNK_BYTES = 4 << 20


def run(quick: bool) -> list[Result]:
    size = (32 if quick else 128) << 20
    before, after = trained(12 if quick else 150)
    share = changed_share(before, after)
    results = [
        Result("changed by one AdamW step at 1e-6", 100 * share, "%", note=f"{len(before) // 2:,} bfloat16 weights"),
        *_deltas(size, (before, after)),
        *_lossless(size),
        *quantized(size, CHUNK_BYTES),
        *on_one_machine((128 if quick else 512) << 20, 3 if quick else 7),
        *stalls((256 if quick else 1024) << 20, 3 if quick else 7),
    ]
    large = (256 if quick else 1024) << 20
    results += over_shaped_links(tiled(before, large), tiled(after, large), (64 if quick else 128) << 20)
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
    compiled(2)  # As in an agent, which has it compiled once it serves what differences are applied to.
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
