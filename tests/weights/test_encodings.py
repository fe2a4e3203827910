"""A version in its encodings: cut, coded, signed, offered and chosen; all of it without a socket."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import WeightError
from penstock.weights import Manifest, TensorEntry, WeightStore, decode_manifest, encode_manifest
from penstock.weights.choose import Rates, choose, time_s
from penstock.weights.encodings import Estimate, codec_of, decode_chunk, encode, estimate, raw_manifest_of
from penstock.weights.manifest import Encoding, is_authentic, sign_manifest
from penstock.weights.offers import offers_of
from penstock.weights.plan import (
    DTYPE_BYTES,
    check_manifest,
    chunk_dtypes,
    cut_runs,
    digest,
    dtype_runs,
    tensor_offsets,
)
from penstock.weights.protocol import GetOffers, Held, Offer

TENSORS = (("embed", "BF16", (64, 33)), ("scale", "F32", (7,)), ("none", "F32", (0, 3)), ("head", "BF16", (1001,)))


def version_of(number: int, stream: bytes, tensors: object = TENSORS, chunk_bytes: int = 512) -> Manifest:
    """The raw manifest of `stream`."""
    sizes = [int(np.prod(shape)) * DTYPE_BYTES[dtype] for _, dtype, shape in tensors]  # type: ignore[attr-defined]
    entries = [
        TensorEntry(name=name, dtype=dtype, shape=shape, nbytes=size, xxh3=0)
        for (name, dtype, shape), size in zip(tensors, sizes)  # type: ignore[call-overload]
    ]
    offsets = tensor_offsets(entries)
    entries = [
        msgspec.structs.replace(entry, xxh3=digest(stream[at : at + entry.nbytes]))
        for entry, at in zip(entries, offsets)
    ]
    bare = Manifest(
        run="run", version=number, codec="raw", base=None, config_json="{}", tensors=tuple(entries), chunks=()
    )
    return raw_manifest_of(bare, memoryview(stream), cut_runs(entries, chunk_bytes))


def nbytes_of(tensors: object = TENSORS) -> int:
    return sum(int(np.prod(shape)) * DTYPE_BYTES[dtype] for _, dtype, shape in tensors)  # type: ignore[attr-defined]


def pair(share: float = 0.02) -> tuple[bytes, bytes]:
    """Two versions, a share of whose bytes differ."""
    generator = np.random.default_rng(7)
    before = generator.integers(0, 256, nbytes_of(), np.uint8)
    after = before.copy()
    after[generator.random(len(after)) < share] ^= 1
    return before.tobytes(), after.tobytes()


def decoded(coded: Manifest, chunks: tuple[bytes, ...], base: bytes | None) -> bytes:
    staging = bytearray(coded.raw_nbytes)
    before = None if base is None else memoryview(base)
    for chunk, data, dtype in zip(coded.chunks, chunks, chunk_dtypes(coded), strict=True):
        decode_chunk(codec_of(coded.codec), dtype, chunk, data, before, memoryview(staging))
    return bytes(staging)


@given(
    st.lists(st.tuples(st.sampled_from(["BF16", "F32", "U8", "F64", "BOOL"]), st.integers(0, 60)), max_size=8),
    st.integers(1, 100),
)
def test_chunks_are_of_one_dtype_and_of_whole_elements(shapes: list[tuple[str, int]], chunk_bytes: int) -> None:
    tensors = [
        TensorEntry(name=str(k), dtype=dtype, shape=(n,), nbytes=n * DTYPE_BYTES[dtype], xxh3=0)
        for k, (dtype, n) in enumerate(shapes)
    ]
    total = sum(tensor.nbytes for tensor in tensors)
    cuts = cut_runs(tensors, chunk_bytes)
    assert [at for at, _, _ in cuts] == [sum(size for _, size, _ in cuts[:k]) for k in range(len(cuts))]
    assert sum(size for _, size, _ in cuts) == total
    runs = dtype_runs(tensors)
    for at, size, dtype in cuts:
        (run,) = [run for run in runs if run[0] <= at < run[1]]
        assert at + size <= run[1]
        assert run[2] == dtype
        assert (at - run[0]) % DTYPE_BYTES[dtype] == size % DTYPE_BYTES[dtype] == 0
    bare = Manifest(run="", version=0, codec="raw", base=None, config_json="", tensors=tuple(tensors), chunks=())
    manifest = raw_manifest_of(bare, memoryview(bytes(total)), cuts)
    check_manifest(manifest, 0, max_bytes=1 << 20)
    assert chunk_dtypes(manifest) == [dtype for _, _, dtype in cuts]


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("codec", ["lossless", "delta"])
def test_a_version_in_another_encoding_has_the_same_tensors_and_comes_back(codec: str, threads: int) -> None:
    before, after = pair()
    old, new = version_of(3, before), version_of(5, after)
    base = (old, memoryview(before)) if codec == "delta" else (None, None)
    pool = ThreadPoolExecutor(threads) if threads else None
    encoded = encode(new, memoryview(after), codec, *base, pool)
    if pool:
        pool.shutdown()
    manifest = decode_manifest(encode_manifest(encoded.manifest))
    check_manifest(manifest, 5, max_bytes=1 << 20)
    assert manifest.tensors == new.tensors
    assert manifest.digest == new.digest
    assert (manifest.encoding, manifest.base_digest) == (
        (Encoding(5, "delta", 3), old.digest) if codec == "delta" else (Encoding(5, "lossless"), "")
    )
    assert [len(data) for data in encoded.chunks] == [chunk.nbytes for chunk in manifest.chunks]
    assert decoded(manifest, encoded.chunks, before if codec == "delta" else None) == after


@pytest.mark.parametrize("tensors", [TENSORS, (("bytes", "U8", (3000,)),), (("wide", "F64", (500,)),)])
@pytest.mark.parametrize("seed", range(5))
def test_the_worst_difference_still_passes_the_bounds_of_a_manifest(seed: int, tensors: object) -> None:
    random = Random(seed)
    before, after = random.randbytes(nbytes_of(tensors)), random.randbytes(nbytes_of(tensors))
    old, new = version_of(0, before, tensors), version_of(1, after, tensors)
    encoded = encode(new, memoryview(after), "delta", old, memoryview(before))
    check_manifest(encoded.manifest, 1, max_bytes=1 << 20)
    assert decoded(encoded.manifest, encoded.chunks, before) == after


def test_a_chain_of_differences_is_applied_in_place() -> None:
    before, after = pair()
    third = bytes(byte ^ (k % 97 == 0) for k, byte in enumerate(after))
    versions = [version_of(k, stream) for k, stream in enumerate((before, after, third))]
    steps = [
        encode(versions[1], memoryview(after), "delta", versions[0], memoryview(before)),
        encode(versions[2], memoryview(third), "delta", versions[1], memoryview(after)),
    ]
    staging = memoryview(bytearray(before))
    for step in steps:
        for chunk, data, dtype in zip(step.manifest.chunks, step.chunks, chunk_dtypes(step.manifest), strict=True):
            decode_chunk(codec_of("delta"), dtype, chunk, data, None, staging)
    assert bytes(staging) == third


def test_only_the_holder_of_the_token_can_sign_and_every_field_is_signed() -> None:
    manifest = sign_manifest(version_of(1, pair()[0]), "token")
    assert is_authentic(decode_manifest(encode_manifest(manifest)), "token")
    assert not is_authentic(manifest, "another")
    changes: dict[str, object] = {
        "run": "other",
        "version": 2,
        "codec": "lossless",
        "base": 0,
        "base_digest": "x",
        "config_json": "[]",
        "tensors": manifest.tensors[1:],
        "chunks": manifest.chunks[1:],
        "mac": b"",
    }
    assert changes.keys() == set(Manifest.__struct_fields__)
    for name, value in changes.items():
        assert not is_authentic(msgspec.structs.replace(manifest, **{name: value}), "token"), name


def test_an_estimate_from_samples_is_near_the_truth() -> None:
    generator = np.random.default_rng(1)
    tensors = (("w", "BF16", (400_000,)),)
    before = ((generator.standard_normal(400_000) * 0.02).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    after = before.copy()
    after[generator.random(len(after)) < 0.015] += 1
    old, new = (version_of(k, data.tobytes(), tensors, 16_384) for k, data in enumerate((before, after)))
    for codec, base, stream in (("lossless", None, None), ("delta", old, memoryview(before.tobytes()))):
        guess = estimate(new, memoryview(after.tobytes()), codec, stream)
        truth = encode(new, memoryview(after.tobytes()), codec, base, stream).manifest.nbytes
        assert 0.8 * truth < guess.nbytes < 1.25 * truth
        assert guess.encode_s > 0


# What is offered


def ready_of(*links: tuple[int, int]) -> dict[Encoding, Manifest]:
    """Differences (version, base) that are there; digests are the versions' numbers."""
    ready = {}
    for version, base in links:
        manifest = version_of(version, bytes([version]) * nbytes_of())
        base_digest = version_of(base, bytes([base]) * nbytes_of()).digest
        ready[Encoding(version, "delta", base)] = msgspec.structs.replace(
            manifest, codec="delta", base=base, base_digest=base_digest
        )
    return ready


def held(version: int) -> Held:
    return Held(version, version_of(version, bytes([version]) * nbytes_of()).digest)


def steps_offered(ask: GetOffers, ready: dict[Encoding, Manifest], estimates: dict[Encoding, Estimate]) -> list[str]:
    return [
        " ".join(f"{step.codec}:{step.version}" for step in o.steps)
        for o in offers_of(ask, 100, ready, estimates).offers
    ]


def test_who_holds_nothing_is_offered_the_version_in_full() -> None:
    guess = {Encoding(4, "lossless"): Estimate(60, 0.1), Encoding(4, "delta", 3): Estimate(1, 0.1)}
    assert steps_offered(GetOffers(version=4), ready_of((4, 3)), guess) == ["raw:4", "lossless:4"]


def test_who_holds_a_version_is_offered_a_difference_and_the_chain_that_leads_to_it() -> None:
    ready = ready_of((2, 1), (3, 2), (4, 3))
    ask = GetOffers(version=4, held=(held(1),))
    assert steps_offered(ask, ready, {}) == ["raw:4", "delta:2 delta:3 delta:4"]
    direct = {Encoding(4, "delta", 1): Estimate(1, 0.1)}
    assert steps_offered(ask, ready, direct) == ["raw:4", "delta:4", "delta:2 delta:3 delta:4"]


def test_a_chain_takes_the_lightest_links_and_needs_every_one() -> None:
    assert steps_offered(GetOffers(version=4, held=(held(1),)), ready_of((2, 1), (4, 3)), {}) == ["raw:4"]
    ready = ready_of((2, 1), (3, 2), (4, 3), (4, 2))
    offered = steps_offered(GetOffers(version=4, held=(held(1),)), ready, {})
    assert offered == ["raw:4", "delta:2 delta:4"]


def test_other_weights_under_the_same_number_are_no_base() -> None:
    ask = GetOffers(version=3, held=(Held(2, "another digest"),))
    assert steps_offered(ask, ready_of((3, 2)), {}) == ["raw:3"]


# What is chosen

RAW = 1_000_000_000


def offer(codec: str, nbytes: float, encode_s: float = 0.0, steps: int = 1) -> Offer:
    bases = [None if codec != "delta" else k for k in range(steps)]
    return Offer(steps=tuple(Encoding(9, codec, base) for base in bases), nbytes=int(nbytes), encode_s=encode_s)


OFFERS = (offer("raw", RAW), offer("lossless", RAW / 1.5, 0.5), offer("delta", RAW / 100, 0.2))


def rates(link: float, cores: int = 1, **decode: float) -> Rates:
    return Rates(cores=cores, link_bytes_per_s=link, decode={"lossless": 2e9, "delta": 10e9, **decode})


def chosen(offers: tuple[Offer, ...], known: Rates, codec: str = "auto") -> str:
    return choose(offers, RAW, known, codec).steps[0].codec


def test_raw_and_lossless_cross_where_the_saved_third_pays_for_encoding() -> None:
    # Raw takes RAW / link; lossless 0.5 s and RAW / 1.5 / link: equal at RAW / 3 / 0.5 s.
    crossing = RAW / 3 / 0.5
    assert chosen(OFFERS[:2], rates(crossing * 1.01)) == "raw"
    assert chosen(OFFERS[:2], rates(crossing * 0.99)) == "lossless"


def test_raw_and_delta_cross_where_coding_takes_as_long_as_the_wire() -> None:
    # On a fast link a difference takes 0.2 s to encode and RAW / 10e9 to decode.
    crossing = RAW / 0.3
    assert chosen(OFFERS, rates(crossing * 0.98)) == "delta"
    assert chosen(OFFERS, rates(crossing * 1.02)) == "raw"


def test_more_cores_and_a_faster_decoder_move_the_crossing() -> None:
    link = RAW / 0.25
    assert chosen(OFFERS, rates(link)) == "raw"
    assert chosen(OFFERS, rates(link, cores=4)) == "delta"
    assert chosen(OFFERS, rates(link, delta=40e9)) == "delta"


def test_what_is_encoded_already_is_worth_more() -> None:
    ready = (OFFERS[0], offer("delta", RAW / 100))
    assert chosen(OFFERS, rates(RAW / 0.2)) == "raw"
    assert chosen(ready, rates(RAW / 0.2)) == "delta"


def test_a_dense_difference_loses_to_lossless_on_a_slow_link() -> None:
    dense = (*OFFERS[:2], offer("delta", RAW / 1.3, 0.4))
    assert chosen(dense, rates(1e6)) == "lossless"
    assert chosen(OFFERS, rates(1e6)) == "delta"


def test_a_chain_pays_for_decoding_and_a_round_trip_each_step() -> None:
    direct, chain = offer("delta", RAW / 30, 0.2), offer("delta", RAW / 100, 0.0, steps=4)
    known = rates(125e6)
    assert choose((direct, chain), RAW, known) is chain
    known.round_trip_s = 0.05
    assert choose((direct, chain), RAW, known) is direct
    assert time_s(chain, RAW, known) == pytest.approx(4 * 0.1 + 4 * 2 * 0.05)


@pytest.mark.parametrize("codec", ["raw", "lossless", "delta"])
def test_a_fixed_codec_is_taken_though_another_were_faster(codec: str) -> None:
    for link in (1e6, 1e12):
        assert chosen(OFFERS, rates(link), codec) == codec


def test_a_fixed_codec_that_is_not_to_be_had_falls_back() -> None:
    assert chosen(OFFERS[:2], rates(1e12), "delta") == "lossless"
    assert chosen(OFFERS[:1], rates(1e6), "delta") == "raw"
    with pytest.raises(WeightError, match="none of the 0 encodings"):
        choose((), RAW, rates(1e6))


def test_rates_are_learned_and_small_transfers_say_nothing() -> None:
    known = Rates()
    known.fetched(1000, 0.1)
    assert known.link_bytes_per_s == Rates().link_bytes_per_s
    known.fetched(10 << 20, 1.0)
    assert known.link_bytes_per_s == 10 << 20
    known.fetched(30 << 20, 1.0)
    assert known.link_bytes_per_s == 20 << 20
    known.fetched(1000, 0.1)
    assert known.link_bytes_per_s == 20 << 20
    before = known.decode["delta"]
    known.decoded("delta", 1 << 30, 1.0)
    assert known.decode["delta"] == (before + (1 << 30)) / 2


def test_a_store_encodes_on_as_many_threads_as_it_is_given() -> None:
    assert WeightStore("run", "127.0.0.1", 0, "t", threads=3)._held._cores == 3
    assert WeightStore("run", "127.0.0.1", 0, "t")._held._cores >= 1
