"""Pure parts of a pull: how a version is cut in chunks, what a manifest must satisfy, which chunk is fetched next.

Decides nothing about sockets, threads or time. A manifest comes from a network and is believed only after
`check_manifest`; bytes are believed only after `check_chunk` and `check_tensors`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from math import prod

from penstock.errors import MissingExtra, WeightError
from penstock.weights.manifest import ChunkEntry, Made, Manifest, TensorEntry

Bytes = bytes | bytearray | memoryview

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes of one element, by the names of the safetensors format."""

CODECS = {
    "raw": False,
    "lossless": False,
    "zipnn": False,
    "delta": True,
    "int8": False,
    "int8-delta": True,
    "fp8": False,
    "fp8-delta": True,
}
"""Codecs that a puller of this build can decode, and whether they need a base."""
WIRE_SLACK_BYTES = 1024
"""A coded chunk may be four times its raw size and so much: a difference to something wholly other is no smaller than
three times. More is no encoding but an attack on memory."""

MAX_TENSORS = 1_000_000
MAX_CHUNKS = 1_000_000
ELEMENT_BYTES = 8
"""Of the widest dtype: chunks are cut at multiples of it from the beginning of their run, so elements stay whole."""
MAX_CHUNK_BYTES = 1 << 30
MAX_DIMENSIONS = 32
MAX_BATCH = 1024
"""Chunks asked for in one message."""
LEAST_SHARE_BYTES = 4 << 20
"""Less is asked for at once, whoever else has nothing to do: on a link with a round trip a request costs more."""


@cache
def _xxh3() -> Callable[[Bytes], int]:
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError as error:
        raise MissingExtra("xxhash", "engine", "the checksum of model weights") from error
    return xxh3_64_intdigest


def digest(data: Bytes) -> int:
    """xxh3-64 of `data`. Raises MissingExtra where xxhash is not installed."""
    return _xxh3()(data)


def cut(nbytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Cuts a stream of `nbytes` in (offset, length) ranges of at most `chunk_bytes`; an empty stream has none."""
    return [(offset, min(chunk_bytes, nbytes - offset)) for offset in range(0, nbytes, chunk_bytes)]


def dtype_runs(tensors: Iterable[TensorEntry]) -> list[tuple[int, int, str]]:
    """(begin, end, dtype) of the longest ranges of the byte stream that have one dtype; empty tensors have none."""
    runs: list[tuple[int, int, str]] = []
    position = 0
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        end = position + tensor.nbytes
        if runs and runs[-1][2] == tensor.dtype:
            runs[-1] = (runs[-1][0], end, tensor.dtype)
        else:
            runs.append((position, end, tensor.dtype))
        position = end
    return runs


def cut_runs(tensors: Iterable[TensorEntry], chunk_bytes: int) -> list[tuple[int, int, str]]:
    """(offset, length, dtype) of a version's chunks: of one dtype each, and with whole elements only."""
    whole = max(ELEMENT_BYTES, chunk_bytes - chunk_bytes % ELEMENT_BYTES)
    return [
        (begin + offset, length, dtype)
        for begin, end, dtype in dtype_runs(tensors)
        for offset, length in cut(end - begin, whole)
    ]


def chunk_dtypes(manifest: Manifest) -> list[str]:
    """The dtype of each chunk of a checked manifest."""
    runs = iter(dtype_runs(manifest.tensors))
    _, end, dtype = next(runs, (0, 0, ""))
    dtypes = []
    for chunk in manifest.chunks:
        while chunk.offset >= end:
            _, end, dtype = next(runs)
        dtypes.append(dtype)
    return dtypes


def tensor_offsets(tensors: Iterable[TensorEntry]) -> list[int]:
    """Where each tensor begins in the version's byte stream, with the total at the end."""
    return list(accumulate((tensor.nbytes for tensor in tensors), initial=0))


def check_tensor(tensor: TensorEntry) -> None:
    """Refuses an entry whose size is not that of its dtype and shape. Raises WeightError."""
    if not tensor.name:
        raise WeightError("a tensor has no name")
    size = DTYPE_BYTES.get(tensor.dtype)
    if size is None:
        raise WeightError(f"tensor {tensor.name} has the unknown dtype {tensor.dtype!r}; known: {_names(DTYPE_BYTES)}")
    if len(tensor.shape) > MAX_DIMENSIONS or any(length < 0 for length in tensor.shape):
        raise WeightError(f"tensor {tensor.name} has the impossible shape {list(tensor.shape[:MAX_DIMENSIONS])}")
    expected = prod(tensor.shape) * size
    if tensor.nbytes != expected:
        raise WeightError(
            f"tensor {tensor.name} of dtype {tensor.dtype} and shape {list(tensor.shape)} needs {expected} bytes, "
            f"and the manifest gives it {tensor.nbytes}"
        )


def check_manifest(manifest: Manifest, version: int, max_bytes: int, draft: bool = False) -> None:
    """Checks an untrusted manifest in itself before anything is allocated for it; a draft passes where `draft` says so.

    Raises WeightError where it is of another version, uses an unknown codec, is over `max_bytes`, or where base,
    sizes, shapes and chunk ranges don't fit together. `max_bytes` bounds the version in memory.
    """
    if manifest.version != version:
        raise WeightError(f"asked for weight version {version} and got the manifest of version {manifest.version}")
    if manifest.codec not in CODECS:
        raise WeightError(
            f"weight version {version} is coded as {manifest.codec!r}, which this build of Penstock does not know "
            f"(known: {_names(CODECS)}); use the same version of Penstock on both sides"
        )
    if CODECS[manifest.codec] != (manifest.base is not None):
        raise WeightError(f"{manifest.encoding} has a base where its codec has none, or has none")
    if len(manifest.tensors) > MAX_TENSORS or len(manifest.chunks) > MAX_CHUNKS:
        raise WeightError(
            f"the manifest of version {version} lists {len(manifest.tensors)} tensors and {len(manifest.chunks)} "
            f"chunks; at most {MAX_TENSORS} and {MAX_CHUNKS} are taken"
        )
    names: set[str] = set()
    for tensor in manifest.tensors:
        check_tensor(tensor)
        if tensor.name in names:
            raise WeightError(f"the manifest of version {version} lists tensor {tensor.name} twice")
        names.add(tensor.name)
    if manifest.raw_nbytes > max_bytes:
        raise WeightError(f"weight version {version} is {manifest.raw_nbytes} bytes, over the limit of {max_bytes}")
    _check_chunks(manifest, draft)


def check_made(draft: Manifest, known: int, made: Made) -> None:
    """Checks what is said of a draft's chunks, of which `known` are known. Raises WeightError."""
    if made.first != known or len(made.nbytes) != len(made.xxh3) or known + len(made.nbytes) > len(draft.chunks):
        raise WeightError(
            f"of {len(draft.chunks)} chunks of {draft.encoding} {known} are known, and {len(made.nbytes)} lengths and "
            f"{len(made.xxh3)} checksums come from {made.first} on"
        )
    for index, nbytes in enumerate(made.nbytes, known):
        _check_wire(f"chunk {index} of version {draft.version}", nbytes, draft.chunks[index].raw_nbytes)


def _check_wire(what: str, nbytes: int, raw_nbytes: int) -> None:
    if not 0 < nbytes <= 4 * raw_nbytes + WIRE_SLACK_BYTES:
        raise WeightError(f"{what} has {nbytes} bytes on the wire for {raw_nbytes}")


def _check_chunks(manifest: Manifest, draft: bool) -> None:
    position = 0
    runs = iter(dtype_runs(manifest.tensors))
    begin, end, dtype = next(runs, (0, 0, "U8"))
    for index, chunk in enumerate(manifest.chunks):
        what = f"chunk {index} of version {manifest.version}"
        if chunk.offset != position:
            raise WeightError(f"{what} begins at {chunk.offset}, not {position}")
        if not 0 < chunk.raw_nbytes <= MAX_CHUNK_BYTES:
            raise WeightError(f"{what} has {chunk.raw_nbytes} bytes")
        if manifest.codec == "raw" and chunk.nbytes != chunk.raw_nbytes:
            raise WeightError(f"{what} is raw, and has {chunk.nbytes} bytes on the wire for {chunk.raw_nbytes}")
        if chunk.nbytes or not draft:
            _check_wire(what, chunk.nbytes, chunk.raw_nbytes)
        if position == end and position:
            begin, end, dtype = next(runs, (end, end, dtype))
        position += chunk.raw_nbytes
        if position > end and end < manifest.raw_nbytes:
            raise WeightError(f"{what} ends at {position}, beyond the last {dtype} at {end}")
        if (position - begin) % DTYPE_BYTES[dtype]:
            raise WeightError(f"{what} ends at {position}, within an element of {dtype}")
    if position != manifest.raw_nbytes:
        raise WeightError(
            f"the chunks of version {manifest.version} hold {position} bytes and its tensors {manifest.raw_nbytes}"
        )


def check_chunk(chunk: ChunkEntry, data: Bytes) -> bool:
    """Whether the bytes that came are those that the manifest promises."""
    return digest(data) == chunk.xxh3


def split_tensors(manifest: Manifest, stream: memoryview) -> dict[str, memoryview]:
    """The version's byte stream as one read-only view for each tensor, without copying."""
    offsets = tensor_offsets(manifest.tensors)
    frozen = stream.toreadonly()
    return {tensor.name: frozen[start : start + tensor.nbytes] for tensor, start in zip(manifest.tensors, offsets[:-1])}


def check_tensors(manifest: Manifest, tensors: dict[str, memoryview], part: int = 0, parts: int = 1) -> None:
    """The last word before a swap: every tensor's own checksum. Raises WeightError naming the tensor.

    With `parts`, every so manieth tensor from the one at `part` on.
    """
    for tensor in manifest.tensors[part::parts]:
        check_tensor_bytes(manifest.version, tensor, tensors[tensor.name])


def check_tensor_bytes(version: int, tensor: TensorEntry, data: Bytes) -> None:
    """Raises WeightError naming the tensor."""
    found = digest(data)
    if found != tensor.xxh3:
        raise does_not_verify(version, tensor, found)


def does_not_verify(version: int, tensor: TensorEntry, found: int) -> WeightError:
    return WeightError(
        f"tensor {tensor.name} of weight version {version} does not verify: checksum {found:016x}, "
        f"expected {tensor.xxh3:016x}"
    )


class ChunkQueue:
    """Which chunk a connection fetches next, for any number of connections.

    A chunk is pending, taken, or done. One that came wrong goes back at most `retries` times; one whose
    connection broke goes back without being counted, since the pull's deadline bounds that. The first `made` (None for
    all) can be fetched from the beginning, the rest once `more` says so.
    """

    def __init__(self, chunks: int, retries: int, made: int | None = None) -> None:
        self._made = chunks if made is None else made
        self._pending = deque(range(self._made))
        self._taken: set[int] = set()
        self._bad: dict[int, int] = {}
        self._left = chunks
        self._chunks = chunks
        self._retries = retries

    @property
    def chunks(self) -> int:
        return self._chunks

    @property
    def left(self) -> int:
        """Chunks that are not done."""
        return self._left

    @property
    def pending(self) -> int:
        """Chunks that could be taken now."""
        return len(self._pending)

    @property
    def refetched(self) -> int:
        """Chunks that came wrong, counted each time."""
        return sum(self._bad.values())

    @property
    def made(self) -> int:
        """Chunks that there are, from the first on."""
        return self._made

    def more(self, count: int) -> None:
        """The next `count` chunks are there now."""
        if self._made + count > self._chunks:
            raise WeightError(f"{self._made} of {self._chunks} chunks are made, and now {count} more")
        self._pending.extend(range(self._made, self._made + count))
        self._made += count

    def take(self) -> int | None:
        """The next chunk to fetch, or None where every chunk is taken or done."""
        if not self._pending:
            return None
        index = self._pending.popleft()
        self._taken.add(index)
        return index

    def take_batch(self, nbytes: Sequence[int], most_bytes: int, sharers: int = 1) -> list[int]:
        """Chunks to ask for at once: at least one where any is pending, and no more than `most_bytes` beyond it, nor
        than one of so many `sharers` should have of what is pending, so that they come to the end together. So little
        that another request costs more than it brings (`LEAST_SHARE_BYTES`) is not shared out."""
        batch: list[int] = []
        total, share = 0, -(-len(self._pending) // sharers)
        while self._pending and len(batch) < MAX_BATCH:
            if len(batch) >= share and total >= LEAST_SHARE_BYTES:
                break
            total += nbytes[self._pending[0]]
            if batch and total > most_bytes:
                break
            batch.append(self._pending.popleft())
        self._taken.update(batch)
        return batch

    def take_first(self, count: int) -> list[int]:
        """The first chunks of all, which come without being asked for. Raises WeightError where there are fewer."""
        if count > len(self._pending):
            raise WeightError(f"{count} chunks are pushed, and there are {len(self._pending)} to be fetched")
        batch = [self._pending.popleft() for _ in range(count)]
        self._taken.update(batch)
        return batch

    def done(self, index: int) -> None:
        self._taken.remove(index)
        self._left -= 1

    def again(self, index: int) -> None:
        """It was done, and does not verify after all. Raises WeightError as `bad`."""
        self._taken.add(index)
        self._left += 1
        self.bad(index)

    def put_back(self, index: int) -> None:
        """Its connection broke before it was whole."""
        self._taken.remove(index)
        self._pending.appendleft(index)

    def is_pending(self, index: int) -> bool:
        return index in self._pending

    def here_already(self, index: int) -> None:
        """It was fetched before this pull began."""
        self._pending.remove(index)
        self._left -= 1

    def bad(self, index: int) -> None:
        """It came whole and does not verify. Raises WeightError once it has been fetched too often."""
        self._bad[index] = self._bad.get(index, 0) + 1
        if self._bad[index] > self._retries:
            raise WeightError(f"chunk {index} came with a wrong checksum {self._bad[index]} times")
        self.put_back(index)


def _names(known: Iterable[str]) -> str:
    return ", ".join(known)
