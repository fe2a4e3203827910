"""Codecs: exact for every bit pattern, small where few weights change, and believing nothing that comes over a wire."""

from __future__ import annotations

import struct
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import WeightError
from penstock.weights.codecs import CODECS as ALL_CODECS
from penstock.weights.codecs import delta, fused, get_codec
from penstock.weights.codecs.delta import HEADER, changed_elements, entropy_bound_bytes
from penstock.weights.codecs.fused import compiled
from penstock.weights.encodings import can_zipnn
from penstock.weights.plan import DTYPE_BYTES

SEED = 20_261_121
LOOPS = [lambda width: None, *([compiled] if find_spec("numba") else [])]
"""By which a difference is applied: NumPy's, and the compiled one where Numba is installed."""
CODECS = [name for name in ALL_CODECS if name != "zipnn" or can_zipnn()]


def trained(elements: int, dtype: str, seed: int = SEED) -> bytes:
    """Weights as a trained model has them: normal, a small spread."""
    values = (np.random.default_rng(seed).standard_normal(elements) * 0.02).astype(np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


def stepped(data: bytes, share: float, width: int, seed: int = SEED) -> bytes:
    """A share of the elements one step up or down."""
    generator = np.random.default_rng(seed)
    values = np.frombuffer(data, f"i{width}").copy()
    hit = generator.random(len(values)) < share
    values[hit] += generator.choice([-1, 1], int(hit.sum())).astype(values.dtype)
    return values.tobytes()


def through(name: str, new: bytes, base: bytes | None, dtype: str) -> bytes:
    """Decoded to memory of its own and, what is applied to a base, in place, by every loop: all must be the same."""
    codec = get_codec(name)
    data = codec.encode(new, base, dtype)
    found = []
    for loop in LOOPS if codec.needs_base else LOOPS[:1]:
        with mock.patch.object(delta, "applier", loop):
            into = bytearray(len(new))
            codec.decode(data, base, memoryview(into), dtype)
            found.append(bytes(into))
            if codec.needs_base and base is not None:
                changed = bytearray(base)
                codec.decode(data, None, memoryview(changed), dtype)
                found.append(bytes(changed))
    assert len(set(found)) == 1
    return found[0]


@pytest.mark.parametrize("dtype", list(DTYPE_BYTES))
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_codec_is_exact_for_any_bits(dtype: str, data: st.DataObject) -> None:
    width = DTYPE_BYTES[dtype]
    elements = data.draw(st.integers(0, 300))
    new = data.draw(st.binary(min_size=elements * width, max_size=elements * width))
    base = bytearray(new if data.draw(st.booleans()) else bytes(len(new)))
    for at in data.draw(st.lists(st.integers(0, max(0, len(new) - 1)), max_size=9)) if new else []:
        base[at] ^= 1 + at % 255
    for name in CODECS:
        assert through(name, new, bytes(base), dtype) == new, name


SPECIAL = {
    "BF16": ("H", [0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001]),
    "F32": ("I", [0x7FC00001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x80000001]),
}


@pytest.mark.parametrize("dtype", list(SPECIAL))
@pytest.mark.parametrize("name", list(CODECS))
def test_nan_payloads_infinities_and_negative_zero_arrive_as_they_are(name: str, dtype: str) -> None:
    code, patterns = SPECIAL[dtype]
    new = struct.pack(f"<{len(patterns)}{code}", *patterns)
    base = struct.pack(f"<{len(patterns)}{code}", *reversed(patterns))
    assert through(name, new, base, dtype) == new


@pytest.mark.parametrize("elements", [0, 1, 3, 4, 5, 65_535, 65_536, 65_537, 200_003])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
def test_lengths_around_words_and_blocks_are_exact(dtype: str, elements: int) -> None:
    base = trained(elements, dtype)
    new = stepped(base, 0.02, DTYPE_BYTES[dtype])
    for name in CODECS:
        assert through(name, new, base, dtype) == new


@pytest.mark.parametrize(("share", "smaller"), [(0.015, 80), (0.004, 250)])
def test_a_delta_comes_near_the_entropy_of_what_changed(share: float, smaller: float) -> None:
    base = trained(1 << 21, "BF16")
    new = stepped(base, share, 2)
    encoded = len(get_codec("delta").encode(new, base, "BF16"))
    assert len(new) / encoded >= smaller
    assert encoded <= 1.25 * entropy_bound_bytes(new, base, "BF16")


@pytest.mark.parametrize("share", [0.0, 1e-6, 1e-4, 0.001, 0.03, 0.3, 1.0])
def test_a_delta_stays_near_its_bound_at_any_density(share: float) -> None:
    base = trained(1 << 20, "BF16")
    new = stepped(base, share, 2)
    encoded = get_codec("delta").encode(new, base, "BF16")
    assert len(encoded) <= 1.25 * entropy_bound_bytes(new, base, "BF16") + 128
    assert through("delta", new, base, "BF16") == new


def test_a_full_version_is_smaller_without_loss_by_what_its_exponents_leave() -> None:
    data = trained(1 << 20, "BF16")
    assert len(data) / len(get_codec("lossless").encode(data, None, "BF16")) >= 1.45
    noise = np.random.default_rng(SEED).bytes(1 << 20)
    assert len(get_codec("lossless").encode(noise, None, "BF16")) <= len(noise) + 64


def test_changed_elements_are_told_by_their_bits_and_not_by_their_values() -> None:
    zero, minus_zero = struct.pack("<4H", 0, 0, 0, 0), struct.pack("<4H", 0, 0x8000, 0, 0)
    indices, steps = changed_elements(minus_zero, zero, "BF16")
    assert indices.tolist() == [1]
    assert steps.tolist() == [-0x8000]


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64", "U8"])
def test_a_difference_with_long_gaps_is_exact(dtype: str) -> None:
    """Changes at both ends, next to each other, and a MiB apart."""
    width, far = DTYPE_BYTES[dtype], 512 * 1024
    base = np.random.default_rng(SEED).bytes(3 * far + 24)
    new = bytearray(base)
    for at in (0, far - width, far, 3 * far - width, 3 * far, len(new) - width):
        new[at] ^= 0xFF
    assert through("delta", bytes(new), base, dtype) == new


def test_an_unknown_codec_is_named_with_the_known_ones() -> None:
    with pytest.raises(WeightError, match=r"'gzip'.*raw, lossless, delta"):
        get_codec("gzip")


def test_a_delta_without_its_base_is_refused() -> None:
    codec = get_codec("delta")
    for base in (None, b"12"):
        with pytest.raises(WeightError, match="base version"):
            codec.encode(b"1234", base, "BF16")
    with pytest.raises(WeightError, match="base version"):
        codec.decode(HEADER.pack(0, 0, 0), b"12", memoryview(bytearray(4)), "BF16")


@pytest.mark.parametrize("name", ["lossless", "delta", "raw"])
@given(cut=st.integers(0, 400), flips=st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 255)), max_size=4))
@settings(max_examples=80, deadline=None)
def test_data_that_was_tampered_with_is_an_error_or_other_bytes_and_never_harm(
    name: str, cut: int, flips: list[tuple[int, int]]
) -> None:
    """A checksum finds it as well; a codec must stay within its buffers whatever it is given."""
    base = trained(2000, "BF16")
    new = stepped(base, 0.1, 2)
    codec = get_codec(name)
    wire = bytearray(codec.encode(new, base, "BF16"))
    for at, change in flips:
        wire[at % len(wire)] ^= change
    data = bytes(wire[: max(0, len(wire) - cut)])
    for before in (base, None):
        found = []
        for loop in LOOPS:
            guarded = bytearray(len(new) + 16)
            try:
                with mock.patch.object(delta, "applier", loop):
                    codec.decode(data, before, memoryview(guarded)[8:-8], "BF16")
                found.append(bytes(guarded))
            except WeightError as error:
                found.append(str(error))
            assert guarded[:8] == guarded[-8:] == bytes(8)
        assert len(set(found)) == 1


def test_a_decompression_bomb_is_refused_before_it_is_unpacked() -> None:
    codec = get_codec("lossless")
    bomb = codec.encode(bytes(1 << 24), None, "I8")
    assert len(bomb) < 1 << 14
    with pytest.raises(WeightError, match="16777216 bytes where 1000 are possible"):
        codec.decode(bomb, None, memoryview(bytearray(1000)), "I8")


def test_a_gap_beyond_the_chunk_is_refused() -> None:
    codec = get_codec("delta")
    far = bytearray(trained(1000, "BF16"))
    base = bytes(far)
    far[1999] ^= 1
    for loop in LOOPS:
        with mock.patch.object(delta, "applier", loop):
            with pytest.raises(WeightError, match="changes element 999 of 500"):
                codec.decode(codec.encode(bytes(far), base, "BF16"), base[:1000], memoryview(bytearray(1000)), "BF16")


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64"])
def test_weights_that_lie_at_odd_addresses_are_changed_as_well(dtype: str) -> None:
    base = trained(5000, "BF16") * 4
    new = stepped(base, 0.02, 2)
    codec = get_codec("delta")
    for loop in LOOPS:
        with mock.patch.object(delta, "applier", loop):
            memory = bytearray(len(base) + 1)
            memory[1:] = base
            codec.decode(codec.encode(new, base, dtype), None, memoryview(memory)[1:], dtype)
            assert memory[1:] == new


def test_until_the_loop_is_compiled_and_where_it_does_not_compile_numpy_does_the_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(width: int) -> fused.Apply:
        raise RuntimeError("no such processor")

    monkeypatch.setattr(fused, "_has_numba", lambda: True)
    monkeypatch.setattr(fused, "_compile", broken)
    monkeypatch.setattr(fused, "_threads", {})
    monkeypatch.setattr(fused, "_ready", {})
    base = trained(1000, "BF16")
    new = stepped(base, 0.1, 2)
    codec, into = get_codec("delta"), bytearray(len(new))
    codec.decode(codec.encode(new, base, "BF16"), base, memoryview(into), "BF16")
    assert into == new
    assert compiled(2) is None
    assert [record.getMessage() for record in caplog.records] == [
        "differences are applied by NumPy, since Numba does not compile: no such processor"
    ]
