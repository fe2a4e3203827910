"""A version's encodings: how its chunks are coded against a base, and decoded again; all of it in memory.

Pure, and needs numpy and zstandard for anything but raw. Decides nothing about when a version is encoded, for whom, or
which encoding a puller takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.errors import MissingExtra
from penstock.weights.manifest import ChunkEntry, Manifest
from penstock.weights.plan import Bytes, check_chunk, chunk_dtypes, digest

__all__ = [
    "Encoded",
    "Estimate",
    "can_zipnn",
    "codec_of",
    "compile_ahead",
    "decode_chunk",
    "draft_of",
    "encode",
    "estimate",
    "raw_manifest_of",
]

if TYPE_CHECKING:
    from penstock.weights.codecs.base import Codec

SAMPLE_CHUNKS = 8
"""Encoded to learn what the whole will weigh: enough to be within some per cent, few enough to cost little."""
SAMPLE_BYTES = 512 * 1024

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A version in one encoding: its manifest (not signed yet) and the chunks as they go on the wire."""

    manifest: Manifest
    chunks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of an encoding that is not there yet."""

    nbytes: int
    encode_s: float
    """On one core."""


def codec_of(name: str) -> Codec:
    """Raises WeightError for an unknown one, MissingExtra where numpy is not installed."""
    try:
        from penstock.weights.codecs import get_codec
    except ImportError as error:
        raise MissingExtra("numpy", "engine", "compressed model weights") from error
    return get_codec(name)


def can_zipnn() -> bool:
    """Whether versions can be coded by the zipnn package here."""
    try:
        from penstock.weights.codecs.zipnn import has_zipnn
    except ImportError:
        return False
    return has_zipnn()


def compile_ahead(manifest: Manifest) -> None:
    """Has what differences to this version will be applied with compiled, on threads, where it can be: at the first
    difference somebody waits."""
    try:
        from penstock.weights.codecs.delta import WIDTHS
        from penstock.weights.codecs.fused import applier
    except ImportError:
        return  # Without numpy nothing comes as a difference.
    for dtype in {tensor.dtype for tensor in manifest.tensors}:
        applier(WIDTHS.get(dtype, 1))


def draft_of(raw: Manifest, codec: str, base: Manifest | None) -> Manifest:
    """The manifest of another encoding of the version of `raw`, as far as it is known before a chunk is made; not
    signed."""
    return msgspec.structs.replace(
        raw,
        codec=codec,
        base=None if base is None else base.version,
        base_digest="" if base is None else base.digest,
        chunks=tuple(msgspec.structs.replace(chunk, nbytes=0, xxh3=0) for chunk in raw.chunks),
        mac=b"",
    )


def encode(
    raw: Manifest,
    stream: memoryview,
    codec: str,
    base: Manifest | None,
    base_stream: memoryview | None,
    threads: Executor | None = None,
    made: Callable[[ChunkEntry, bytes], None] | None = None,
) -> Encoded:
    """The version of `raw` (its raw manifest) in another encoding. `base` has the same tensors, other values.

    Of a codec that quantizes, both are what `quantization.quantize` made of the versions.
    Chunks are encoded on `threads` where given, and `made` is called for each, in order, as soon as it is and those
    before it are. Takes (raw bytes) / (codec's rate) / threads.
    """
    coder = codec_of(codec)

    def one(work: tuple[ChunkEntry, str]) -> tuple[bytes, ChunkEntry]:
        chunk, dtype = work
        part = slice(chunk.offset, chunk.offset + chunk.raw_nbytes)
        data = coder.encode(stream[part], None if base_stream is None else base_stream[part], dtype)
        return data, msgspec.structs.replace(chunk, nbytes=len(data), xxh3=digest(data))

    entries, chunks = [], []
    for data, entry in spread(one, list(zip(raw.chunks, chunk_dtypes(raw), strict=True)), threads):
        entries.append(entry)
        chunks.append(data)
        if made is not None:
            made(entry, data)
    manifest = msgspec.structs.replace(draft_of(raw, codec, base), chunks=tuple(entries))
    return Encoded(manifest, tuple(chunks))


def estimate(raw: Manifest, stream: memoryview, codec: str, base_stream: memoryview | None) -> Estimate:
    """What `encode` would give and take, from a few pieces spread over the version."""
    coder = codec_of(codec)
    works = list(zip(raw.chunks, chunk_dtypes(raw), strict=True))
    picked = works[:: max(1, len(works) // SAMPLE_CHUNKS)]
    sampled = coded = 0
    began = time.perf_counter()
    for chunk, dtype in picked:
        size = min(chunk.raw_nbytes, SAMPLE_BYTES)
        part = slice(chunk.offset, chunk.offset + size)
        coded += len(coder.encode(stream[part], None if base_stream is None else base_stream[part], dtype))
        sampled += size
    took_s = time.perf_counter() - began
    share = raw.raw_nbytes / max(1, sampled)
    return Estimate(nbytes=int(coded * share), encode_s=took_s * share)


def decode_chunk(
    coder: Codec, dtype: str, chunk: ChunkEntry, data: Bytes, base: memoryview | None, staging: memoryview
) -> None:
    """Decodes one chunk into its place. Without the `base` of a difference `staging` holds it, and is changed in place.

    Raises WeightError for data that is not of this codec.
    """
    part = slice(chunk.offset, chunk.offset + chunk.raw_nbytes)
    coder.decode(data, None if base is None else base[part], staging[part], dtype)


def chunk_verifies(chunk: ChunkEntry, data: Bytes) -> bool:
    return len(data) == chunk.nbytes and check_chunk(chunk, data)


def raw_manifest_of(manifest: Manifest, stream: memoryview, cuts: Sequence[tuple[int, int, str]]) -> Manifest:
    """`manifest` with the chunks of the raw encoding."""
    return msgspec.structs.replace(
        manifest,
        codec="raw",
        base=None,
        base_digest="",
        mac=b"",
        chunks=tuple(
            ChunkEntry(offset=start, nbytes=size, raw_nbytes=size, xxh3=digest(stream[start : start + size]))
            for start, size, _ in cuts
        ),
    )


def spread(work: Callable[[T], R], items: Iterable[T], threads: Executor | None) -> Iterator[R]:
    """`work` of each item, in order and as they are done, on `threads` where given."""
    return map(work, items) if threads is None else threads.map(work, items)
