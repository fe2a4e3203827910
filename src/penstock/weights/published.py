"""A published version as a store holds it: its bytes, its manifest, and what is promised before they are all there.

Pure but for the copying; decides nothing about how long a version is kept or how it is served.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from math import prod

from penstock.errors import WeightError
from penstock.weights.encodings import draft_of, encode, raw_manifest_of
from penstock.weights.growing import Growing
from penstock.weights.manifest import Manifest, TensorEntry, encode_manifest, sign_manifest
from penstock.weights.plan import DTYPE_BYTES, Bytes, check_tensor, cut_runs, digest, tensor_offsets
from penstock.weights.quantization import SCHEME_DTYPES

__all__ = [
    "Coded",
    "Publication",
    "Shaped",
    "TensorSource",
    "Version",
    "Writer",
    "comparable",
    "described",
    "entries_of",
    "filled",
    "made",
    "scheme_of_codec",
    "version_of",
]

COPY_BYTES = 16 * 1024 * 1024
"""Copied at once while publishing; other threads of the trainer run in between."""

Writer = Callable[[memoryview], None]
"""Writes a tensor's raw little-endian bytes to where they belong."""
Shaped = tuple[str, str, tuple[int, ...]]
"""Name, dtype as in safetensors, and shape of a tensor."""
TensorSource = tuple[str, str, tuple[int, ...], Bytes | Writer]
"""The same and its bytes: a contiguous buffer of them, or who writes them."""


@dataclass(slots=True, eq=False)
class Version:
    """One version as it is served; never changed while it is in the store's table."""

    manifest: Manifest
    signed: bytes
    stream: memoryview
    readers: int = 0


@dataclass(slots=True, eq=False)
class Coded:
    """An encoding as it is served, once it is whole."""

    manifest: Manifest
    signed: bytes
    growing: Growing
    """Its chunks."""


def made(
    codec: str, new: Version, old: Version | None, token: str, threads: Executor | None, begun: Future[Growing]
) -> Coded:
    """`new` by `codec`, as a difference to `old` where there is one. `begun` is done before the first chunk is made,
    and its result ends whole or given up with this call. Raises what stood in the way."""
    base = None if old is None else old.manifest
    growing = Growing(draft_of(new.manifest, codec, base), token)
    begun.set_result(growing)
    try:
        encoded = encode(
            new.manifest, new.stream, codec, base, None if old is None else old.stream, threads, growing.add
        )
        manifest = sign_manifest(encoded.manifest, token)
        coded = Coded(manifest, encode_manifest(manifest), growing)
    except BaseException as error:
        growing.give_up(error)
        raise
    growing.finish(manifest.mac)
    return coded


class Publication:
    """A version whose bytes are copied; its checksums come behind."""

    def __init__(self, raw_nbytes: int, manifest: Future[Manifest]) -> None:
        self.raw_nbytes = raw_nbytes
        self._manifest = manifest

    def manifest(self) -> Manifest:
        """Waits until the version can be had."""
        return self._manifest.result()

    @property
    def digest(self) -> str:
        return self.manifest().digest

    def digest_later(self) -> Future[str]:
        """Done once the version can be had, failed where it never will be."""
        later: Future[str] = Future()

        def tell(done: Future[Manifest]) -> None:
            error = done.exception()
            if error is None:
                later.set_result(done.result().digest)
            else:
                later.set_exception(error)

        self._manifest.add_done_callback(tell)
        return later


def version_of(
    run: str,
    version: int,
    entries: list[TensorEntry],
    stream: memoryview,
    config_json: str,
    chunk_bytes: int,
    token: str,
) -> Version:
    """Checksums of every tensor and chunk of `stream`, and the signed manifest: two passes over the bytes."""
    offsets = tensor_offsets(entries)
    bare = Manifest(
        run=run,
        version=version,
        codec="raw",
        base=None,
        config_json=config_json,
        tensors=tuple(
            TensorEntry(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                nbytes=entry.nbytes,
                xxh3=digest(stream[start : start + entry.nbytes]),
            )
            for entry, start in zip(entries, offsets)
        ),
        chunks=(),
    )
    raw = raw_manifest_of(bare, stream, cut_runs(entries, chunk_bytes))
    manifest = sign_manifest(raw, token)
    return Version(manifest, encode_manifest(manifest), stream)


def comparable(one: Manifest, other: Manifest) -> bool:
    """Whether one can be a difference to the other: the same tensors, apart from their values."""
    return [(t.name, t.dtype, t.shape) for t in one.tensors] == [(t.name, t.dtype, t.shape) for t in other.tensors]


def scheme_of_codec(codec: str) -> str:
    """The quantization that a codec goes with; empty for none."""
    scheme = codec.removesuffix("-delta")
    return scheme if scheme in SCHEME_DTYPES else ""


def described(tensors: Iterable[TensorSource]) -> tuple[list[TensorEntry], list[TensorSource]]:
    """Entries without checksums, and the tensors once more. Raises WeightError for what can't be published."""
    sources = list(tensors)
    return entries_of((name, dtype, shape) for name, dtype, shape, _ in sources), sources


def entries_of(shapes: Iterable[Shaped]) -> list[TensorEntry]:
    """Entries without checksums. Raises WeightError for tensors that can't be published."""
    entries: dict[str, TensorEntry] = {}
    for name, dtype, shape in shapes:
        try:
            sizes = tuple(map(operator.index, shape))
        except TypeError:
            raise WeightError(f"tensor {name} has the shape {tuple(shape)}, of other things than integers") from None
        nbytes = prod(sizes) * DTYPE_BYTES.get(dtype, 0)
        entry = TensorEntry(name=name, dtype=dtype, shape=sizes, nbytes=nbytes, xxh3=0)
        check_tensor(entry)
        if name in entries:
            raise WeightError(f"tensor {name} is given twice")
        entries[name] = entry
    return list(entries.values())


def filled(stream: memoryview, entries: Sequence[TensorEntry], tensors: Iterable[TensorSource]) -> None:
    """Writes each tensor to its place as it comes, and keeps none. Raises WeightError for others than `entries`."""
    coming: Iterator[TensorSource] = iter(tensors)
    start = 0
    for entry in entries:
        source = next(coming, None)
        if source is None:
            raise WeightError(f"tensor {entry.name} did not come")
        _write(stream[start : start + entry.nbytes], entry, source)
        start += entry.nbytes
    more = next(coming, None)
    if more is not None:
        raise WeightError(f"tensor {more[0]} came after the last of {len(entries)}")


def _write(into: memoryview, entry: TensorEntry, source: TensorSource) -> None:
    name, dtype, shape, data = source
    if (name, dtype, tuple(shape)) != (entry.name, entry.dtype, entry.shape):
        raise WeightError(
            f"tensor {name} of dtype {dtype} and shape {list(shape)} came where {entry.name} of dtype {entry.dtype} "
            f"and shape {list(entry.shape)} was to come"
        )
    if callable(data):
        data(into)
        return
    view = memoryview(data)
    if not view.c_contiguous:
        raise WeightError(f"the buffer of tensor {name} is not contiguous")
    if view.nbytes != entry.nbytes:
        raise WeightError(
            f"tensor {name} of dtype {dtype} and shape {list(shape)} needs {entry.nbytes} bytes, and its buffer has "
            f"{view.nbytes}"
        )
    # An empty view can't be cast; it has no bytes to copy either.
    _copy_into(into, view.cast("B") if view.nbytes else view)


def _copy_into(into: memoryview, source: memoryview) -> None:
    """In pieces."""
    for start in range(0, len(into), COPY_BYTES):
        end = min(start + COPY_BYTES, len(into))
        into[start:end] = source[start:end]
