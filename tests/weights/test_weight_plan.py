"""The pure parts of a pull: manifests that lie, chunks that don't verify, and who fetches what."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.errors import FrameTooLarge, WeightError, WireError
from penstock.weights import ChunkEntry, Manifest, TensorEntry, decode_manifest, encode_manifest
from penstock.weights.addresses import format_address, parse_address
from penstock.weights.manifest import Encoding
from penstock.weights.plan import (
    ChunkQueue,
    check_chunk,
    check_manifest,
    check_tensors,
    cut,
    cut_runs,
    digest,
    split_tensors,
    tensor_offsets,
)
from penstock.weights.protocol import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    GetChunks,
    decode_to_store,
    encode_message,
    message_length,
    prove,
    proven,
)
from penstock.weights.sums import TensorSums


def manifest_of(stream: bytes = bytes(range(24)), chunk_bytes: int = 8) -> Manifest:
    """Version 7: "a" of 3 float32, then "b" of 2 x 3 bfloat16."""
    tensors = (
        TensorEntry(name="a", dtype="F32", shape=(3,), nbytes=12, xxh3=digest(stream[:12])),
        TensorEntry(name="b", dtype="BF16", shape=(2, 3), nbytes=12, xxh3=digest(stream[12:])),
    )
    return Manifest(
        run="run",
        version=7,
        codec="raw",
        base=None,
        config_json="{}",
        tensors=tensors,
        chunks=tuple(
            ChunkEntry(offset=start, nbytes=size, raw_nbytes=size, xxh3=digest(stream[start : start + size]))
            for start, size, _ in cut_runs(tensors, chunk_bytes)
        ),
    )


LONG = (ChunkEntry(offset=0, nbytes=1 << 20, raw_nbytes=8, xxh3=0),)


def with_tensor(**changes: object) -> Callable[[Manifest], Manifest]:
    return lambda m: msgspec.structs.replace(
        m, tensors=(msgspec.structs.replace(m.tensors[0], **changes), m.tensors[1])
    )


def with_chunk(**changes: object) -> Callable[[Manifest], Manifest]:
    return lambda m: msgspec.structs.replace(m, chunks=(msgspec.structs.replace(m.chunks[0], **changes), *m.chunks[1:]))


def with_field(**changes: object) -> Callable[[Manifest], Manifest]:
    return lambda m: msgspec.structs.replace(m, **changes)


def test_an_honest_manifest_passes() -> None:
    check_manifest(decode_manifest(encode_manifest(manifest_of())), 7, max_bytes=24)


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        (with_field(version=8), "version 8"),
        (with_field(codec="zstd"), "'zstd'"),
        (with_field(base=6), "has a base where its codec has none"),
        (with_field(chunks=()), "hold 0 bytes"),
        (with_tensor(shape=(4,)), "needs 16 bytes"),
        (with_tensor(shape=(1 << 60, 1 << 60)), "needs"),
        (with_tensor(shape=(-3,)), "impossible shape"),
        (with_tensor(shape=(1,) * 33), "impossible shape"),
        (with_tensor(dtype="F31"), "'F31'"),
        (with_tensor(nbytes=8), "needs 12 bytes"),
        (with_tensor(name="b"), "lists tensor b twice"),
        (with_tensor(name=""), "no name"),
        (with_chunk(offset=1), "begins at 1"),
        (with_chunk(offset=-1), "begins at -1"),
        (with_chunk(raw_nbytes=0, nbytes=0), "has 0 bytes"),
        (with_chunk(raw_nbytes=-10, nbytes=-10), "has -10 bytes"),
        (with_chunk(raw_nbytes=1 << 40), "bytes"),
        (with_chunk(nbytes=9), "has 9 bytes on the wire"),
        (with_chunk(nbytes=6, raw_nbytes=6), "within an element of F32"),
        (with_chunk(nbytes=4, raw_nbytes=4), "begins at 8, not 4"),
        (with_chunk(nbytes=16, raw_nbytes=16), "beyond the last F32 at 12"),
        (with_field(codec="delta"), "or has none"),
        (with_field(codec="lossless", chunks=LONG), "bytes on the wire for 8"),
    ],
)
def test_a_manifest_that_lies_is_refused_by_name(lie: Callable[[Manifest], Manifest], named: str) -> None:
    with pytest.raises(WeightError, match=named):
        check_manifest(lie(manifest_of()), 7, max_bytes=1 << 20)


def test_a_version_over_the_limit_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(WeightError, match="24 bytes, over the limit of 23"):
        check_manifest(manifest_of(), 7, max_bytes=23)


@given(st.binary(max_size=200))
def test_no_bytes_make_the_parser_do_more_than_refuse(data: bytes) -> None:
    try:
        check_manifest(decode_manifest(data), 7, max_bytes=1 << 20)
    except WeightError:
        return
    raise AssertionError("random bytes passed for a manifest")


@given(st.integers(0, 300), st.integers(1, 100))
def test_cuts_cover_a_stream_without_gap_or_overlap(nbytes: int, chunk_bytes: int) -> None:
    ranges = cut(nbytes, chunk_bytes)
    assert sum(size for _, size in ranges) == nbytes
    assert all(0 < size <= chunk_bytes for _, size in ranges)
    assert [start for start, _ in ranges] == [sum(size for _, size in ranges[:k]) for k in range(len(ranges))]


def test_a_stream_is_split_into_read_only_tensors_in_manifest_order() -> None:
    stream = bytearray(range(24))
    tensors = split_tensors(manifest_of(), memoryview(stream))
    assert {name: bytes(view) for name, view in tensors.items()} == {"a": stream[:12], "b": stream[12:]}
    assert all(view.readonly for view in tensors.values())
    assert tensor_offsets(manifest_of().tensors) == [0, 12, 24]
    check_tensors(manifest_of(), tensors)


def test_one_flipped_bit_is_found_in_its_chunk_and_in_its_tensor() -> None:
    manifest = manifest_of()
    stream = bytearray(range(24))
    stream[13] ^= 1
    chunks = [memoryview(stream)[c.offset : c.offset + c.raw_nbytes] for c in manifest.chunks]
    assert [check_chunk(c, data) for c, data in zip(manifest.chunks, chunks, strict=True)] == [True, True, False, True]
    with pytest.raises(WeightError, match="tensor b of weight version 7"):
        check_tensors(manifest, split_tensors(manifest, memoryview(stream)))


class ChunkQueueMachine(RuleBasedStateMachine):
    """Any number of connections that finish, break and fetch garbage: no chunk is lost, none is fetched by two."""

    CHUNKS = 7
    RETRIES = 2

    def __init__(self) -> None:
        super().__init__()
        self.queue = ChunkQueue(self.CHUNKS, self.RETRIES, made=3)
        self.made = 3
        self.taken: list[int] = []
        self.finished: set[int] = set()
        self.wrong: dict[int, int] = {}
        self.random = random.Random(0)

    def _one(self) -> int:
        return self.taken.pop(self.random.randrange(len(self.taken)))

    @rule()
    def take(self) -> None:
        index = self.queue.take()
        if index is None:
            assert len(self.taken) + len(self.finished) == self.made
        else:
            assert index < self.made
            assert index not in self.taken
            assert index not in self.finished
            self.taken.append(index)

    @precondition(lambda self: self.made < self.CHUNKS)
    @rule()
    def more(self) -> None:
        count = self.random.randint(1, self.CHUNKS - self.made)
        self.queue.more(count)
        self.made += count

    @rule()
    def more_than_there_are(self) -> None:
        with pytest.raises(WeightError, match="chunks are made"):
            self.queue.more(self.CHUNKS - self.made + 1)

    @precondition(lambda self: self.taken)
    @rule()
    def done(self) -> None:
        index = self._one()
        self.queue.done(index)
        self.finished.add(index)

    @precondition(lambda self: self.taken)
    @rule()
    def put_back(self) -> None:
        self.queue.put_back(self._one())

    @precondition(lambda self: any(self.wrong.get(index, 0) < self.RETRIES for index in self.taken))
    @rule()
    def bad(self) -> None:
        index = next(index for index in self.taken if self.wrong.get(index, 0) < self.RETRIES)
        self.taken.remove(index)
        self.wrong[index] = self.wrong.get(index, 0) + 1
        self.queue.bad(index)

    @precondition(lambda self: any(self.wrong.get(index, 0) == self.RETRIES for index in self.taken))
    @rule()
    def bad_once_too_often(self) -> None:
        index = next(index for index in self.taken if self.wrong.get(index, 0) == self.RETRIES)
        with pytest.raises(WeightError, match=f"chunk {index} came with a wrong checksum"):
            self.queue.bad(index)
        # The pull has failed; go on as if it had ended well, to keep the machine's other rules meaningful.
        self.taken.remove(index)
        self.queue.done(index)
        self.finished.add(index)

    @invariant()
    def what_is_left_is_what_is_not_finished(self) -> None:
        assert self.queue.left == self.CHUNKS - len(self.finished)


TestChunkQueue = ChunkQueueMachine.TestCase


def test_messages_carry_their_length_and_come_back() -> None:
    message = GetChunks(encoding=Encoding(3), indices=(5,))
    data = encode_message(message)
    assert message_length(data[: LENGTH.size]) == len(data) - LENGTH.size
    assert decode_to_store(data[LENGTH.size :]) == message


def test_a_message_over_the_limit_is_refused_by_its_length_alone() -> None:
    with pytest.raises(FrameTooLarge, match=f"announces {MAX_MESSAGE_BYTES + 1} bytes"):
        message_length(LENGTH.pack(MAX_MESSAGE_BYTES + 1))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_a_wire_error(data: bytes) -> None:
    try:
        decode_to_store(data)
    except WireError:
        return
    raise AssertionError("random bytes passed for a message")


def test_a_proof_holds_for_one_token_one_side_and_one_pair_of_nonces() -> None:
    proof = prove("token", "puller", b"p" * 32, b"s" * 32)
    assert proven("token", "puller", b"p" * 32, b"s" * 32, proof)
    assert not proven("tokem", "puller", b"p" * 32, b"s" * 32, proof)
    assert not proven("token", "store", b"p" * 32, b"s" * 32, proof)
    assert not proven("token", "puller", b"p" * 32, b"t" * 32, proof)
    assert not proven("token", "puller", b"q" * 32, b"s" * 32, proof)
    assert not proven("token", "puller", b"p" * 32, b"s" * 32, b"")


@pytest.mark.parametrize("address", [("10.0.0.1", 80), ("::1", 65535), ("trainer.example", 1)])
def test_addresses_are_read_as_they_are_written(address: tuple[str, int]) -> None:
    assert parse_address(format_address(*address)) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x", "host:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(WeightError, match="expected host:port"):
        parse_address(text)


def test_connections_come_to_the_end_together() -> None:
    """What one asks for gets less as less is left, so that no other has nothing to do meanwhile."""
    queue, nbytes = ChunkQueue(32, 3), [4 << 20] * 32
    assert len(queue.take_batch(nbytes, 32 << 20, 2)) == 8, "bounded by the bytes"
    assert [len(queue.take_batch(nbytes, 32 << 20, 2)) for _ in range(8)] == [8, 8, 4, 2, 1, 1, 0, 0]
    assert queue.pending == 0
    alone = ChunkQueue(32, 3)
    assert [len(alone.take_batch(nbytes, 64 << 20)) for _ in range(3)] == [16, 16, 0]
    many = ChunkQueue(3, 3)
    assert [many.take_batch(nbytes, 64 << 20, 8) for _ in range(3)] == [[0], [1], [2]]


def test_a_little_is_asked_for_at_once_and_not_by_halves() -> None:
    """Each request costs a round trip: eight MiB of small chunks take two, not one for each half of what is left."""
    small = ChunkQueue(128, 3)
    assert [len(small.take_batch([64 << 10] * 128, 64 << 20, 4)) for _ in range(3)] == [64, 64, 0]


def to_be_summed(
    stream: bytes, sizes: list[int], chunk_bytes: int
) -> tuple[tuple[ChunkEntry, ...], bytearray, TensorSums]:
    """Chunks of `stream`, whose tensors have these sizes; where they are to come to; their checksums, none begun."""
    starts = list(accumulate(sizes, initial=0))
    tensors = tuple(
        TensorEntry(name=f"t{k}", dtype="U8", shape=(n,), nbytes=n, xxh3=digest(stream[at : at + n]))
        for k, (n, at) in enumerate(zip(sizes, starts, strict=False))
    )
    chunks = tuple(ChunkEntry(offset=a, nbytes=n, raw_nbytes=n, xxh3=0) for a, n in cut(len(stream), chunk_bytes))
    staging = bytearray(len(stream))
    manifest = msgspec.structs.replace(manifest_of(), tensors=tensors, chunks=chunks)
    return chunks, staging, TensorSums(manifest, memoryview(staging))


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    chunk_bytes=st.integers(1, 50),
    order=st.randoms(use_true_random=False),
)
def test_checksums_go_on_in_whatever_order_chunks_come(
    sizes: list[int], chunk_bytes: int, order: random.Random
) -> None:
    stream = order.randbytes(sum(sizes))
    chunks, staging, sums = to_be_summed(stream, sizes, chunk_bytes)
    bad = order.randrange(len(chunks)) if chunks else -1

    def come(index: int, flip: int) -> None:
        chunk = chunks[index]
        part = slice(chunk.offset, chunk.offset + chunk.nbytes)
        staging[part] = stream[part]
        staging[chunk.offset] ^= flip
        sums.came(index)

    for index in order.sample(range(len(chunks)), len(chunks)):
        with pytest.raises(WeightError, match=r"is not whole|does not verify"):
            sums.check()
        come(index, int(index == bad))
    if chunks:
        (wrong,) = sums.wrong()
        with pytest.raises(WeightError, match=f"tensor t{wrong} of .* does not verify"):
            sums.check()
        assert bad in sums.chunks_of([wrong])
        sums.lost(bad)
        assert sums.wrong() == []
        come(bad, 0)
    sums.check()


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    chunk_bytes=st.integers(1, 50),
    order=st.randoms(use_true_random=False),
)
def test_checksums_go_on_by_pieces_of_chunks_and_begin_anew_with_what_is_lost(
    sizes: list[int], chunk_bytes: int, order: random.Random
) -> None:
    stream = order.randbytes(sum(sizes))
    chunks, staging, sums = to_be_summed(stream, sizes, chunk_bytes)
    there = [0] * len(chunks)

    def come(index: int, nbytes: int, data: bytes) -> None:
        chunk = chunks[index]
        staging[chunk.offset + there[index] : chunk.offset + nbytes] = data[
            chunk.offset + there[index] : chunk.offset + nbytes
        ]
        there[index] = nbytes
        sums.came(index, nbytes)

    for _ in range(3 * len(chunks)):
        index = order.randrange(len(chunks))
        if order.random() < 0.2:
            # Half of it came, other bytes than those that come again.
            come(index, max(there[index], chunks[index].nbytes // 2), bytes(len(stream)))
            there[index] = 0
            sums.lost(index)
        else:
            come(index, order.randint(there[index], chunks[index].nbytes), stream)
        assert sums.has(index) == (there[index] == chunks[index].nbytes)
    for index in order.sample(range(len(chunks)), len(chunks)):
        come(index, chunks[index].nbytes, stream)
    assert staging == stream
    sums.check()


def test_one_thread_goes_on_for_those_that_bring_chunks_meanwhile() -> None:
    chunk_bytes, count = 1000, 400
    stream = random.Random(0).randbytes(chunk_bytes * count)
    tensor = TensorEntry(name="t", dtype="U8", shape=(len(stream),), nbytes=len(stream), xxh3=digest(stream))
    chunks = tuple(ChunkEntry(offset=a, nbytes=n, raw_nbytes=n, xxh3=0) for a, n in cut(len(stream), chunk_bytes))
    sums = TensorSums(msgspec.structs.replace(manifest_of(), tensors=(tensor,), chunks=chunks), memoryview(stream))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(sums.came, random.Random(1).sample(range(count), count)))
    sums.check()
