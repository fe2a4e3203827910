"""The difference computed on tensors is, bit for bit, the one computed on bytes, on whatever device they lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import WeightError
from penstock.weights.codecs import get_codec
from penstock.weights.codecs.delta_torch import apply_delta, encode_delta, encode_deltas

torch.set_num_threads(1)
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


def tensor(data: bytes, dtype: str, device: str) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=DTYPES[dtype], device=device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(DTYPES[dtype]).to(device)


def raw(values: torch.Tensor) -> bytes:
    return values.cpu().view(torch.uint8).numpy().tobytes()


def check(new: bytes, base: bytes, dtype: str, device: str) -> None:
    codec = get_codec("delta")
    after, before = tensor(new, dtype, device), tensor(base, dtype, device)
    coded = encode_delta(after, before)
    assert coded == codec.encode(new, base, dtype)
    apply_delta(coded, before)
    assert raw(before) == new
    into = bytearray(len(new))
    codec.decode(coded, base, memoryview(into), dtype)
    assert into == new


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(DTYPES))
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_bits_of_any_dtype_give_the_same_bytes(dtype: str, device: str, data: st.DataObject) -> None:
    elements = data.draw(st.integers(0, 300))
    nbytes = elements * DTYPES[dtype].itemsize
    new = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    base = bytearray(new if data.draw(st.booleans()) else bytes(len(new)))
    for at in data.draw(st.lists(st.integers(0, max(0, len(new) - 1)), max_size=9)) if new else []:
        base[at] ^= 1 + at % 255
    check(new, bytes(base), dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.004, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_steps_of_a_model_give_the_same_bytes_at_every_density(share: float, dtype: str, device: str) -> None:
    generator = np.random.default_rng(7)
    kind = np.int16 if dtype == "BF16" else np.int32
    base = generator.integers(-30000, 30000, 70_001).astype(kind)
    new = base.copy()
    hit = generator.random(len(new)) < share
    new[hit] = new[hit] + generator.choice([-1, 1, 300], int(hit.sum())).astype(kind)
    check(new.tobytes(), base.tobytes(), dtype, device)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_payloads_infinities_and_negative_zero_are_bits_like_others(device: str) -> None:
    patterns = np.array([0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001], np.uint16)
    check(patterns.tobytes(), patterns[::-1].tobytes(), "BF16", device)


def test_a_shard_is_cut_as_a_version_of_it_is() -> None:
    base = torch.arange(5000, dtype=torch.int32).view(torch.float32)
    new = base.clone()
    new[::7] += 1
    coded = encode_deltas(new, base, 4100)
    codec = get_codec("delta")
    new_bytes, base_bytes = raw(new), raw(base)
    cuts = [slice(at, at + 4096) for at in range(0, 20_000, 4096)]
    assert coded == [codec.encode(new_bytes[cut], base_bytes[cut], "F32") for cut in cuts]


def test_tensors_that_do_not_match_are_refused_and_a_broken_chunk_changes_nothing() -> None:
    base = torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(WeightError, match="match"):
        encode_delta(torch.zeros(9, dtype=torch.bfloat16), base)
    with pytest.raises(WeightError, match="contiguous"):
        encode_delta(torch.zeros(8, 2)[:, 0], torch.zeros(8))
    coded = bytearray(encode_delta(torch.ones(8, dtype=torch.bfloat16), base))
    coded[0] = 200
    with pytest.raises(WeightError):
        apply_delta(bytes(coded), base)
    assert not base.any()
