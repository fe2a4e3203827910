"""Quantized versions: within their bounds, defined for every bit pattern, exact on the wire, never taken unasked."""

from __future__ import annotations

import asyncio
import json
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import WeightError
from penstock.weights import StagedWeights, WeightStore, pull
from penstock.weights.choose import Rates, choose
from penstock.weights.codecs.quantize import as_dtype, as_float32, dequantize_rows, dequantized, quantize_rows
from penstock.weights.manifest import Encoding, TensorEntry
from penstock.weights.protocol import Offer
from penstock.weights.quantization import is_quantizable, quantize, scheme_of

TOKEN = "t" * 32
MATRIX = "model.layers.0.mlp.up_proj.weight"
CONFIG = '{"model_type": "llama"}'
SCHEMES = ("int8", "fp8")
FLT_MAX = float(np.finfo(np.float32).max)


def quantized(
    data: bytes, dtype: str, columns: int, scheme: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The values, code * scale in exact arithmetic and in float32, and each row's scale, in double precision."""
    elements = len(data) // (4 if dtype == "F32" else 2)
    codes, scales = np.empty(elements, np.uint8), np.empty(elements // columns, np.float32)
    quantize_rows(memoryview(data), dtype, columns, scheme, codes, scales)
    one = np.ones_like(scales)
    with np.errstate(invalid="ignore"):
        wide = scales.astype(np.float64)
        values = as_float32(memoryview(data), dtype).reshape(-1, columns).astype(np.float64)
    numbers = dequantize_rows(codes.data, scales, columns, scheme).astype(np.float64)
    return values, dequantize_rows(codes.data, one, columns, scheme) * wide[:, None], numbers, wide


def check(values: np.ndarray, decoded: np.ndarray, numbers: np.ndarray, scales: np.ndarray, scheme: str) -> None:
    """The promises of the module's docstring, row by row, in arithmetic that is exact for these numbers."""
    for x, y, number, scale in zip(values, decoded, numbers, scales, strict=True):
        if np.isfinite(x).all():
            assert np.isfinite(number).all()
            assert (np.abs(number - y) <= np.maximum(np.abs(y) * 2**-24, 2**-150)).all()
        if not np.isfinite(x).all():
            assert np.isnan(scale)
            assert np.isnan(y).all()
            assert np.isnan(number).all()
        elif not x.any():
            assert scale == 1
            assert not y.any()
        elif scheme == "int8":
            assert (np.abs(x - y) <= scale / 2).all()
        else:
            bound = np.where(np.abs(x) >= scale * 2**-6, np.abs(x) / 16, scale * (2**-10 + 2**-30))
            assert (np.abs(x - y) <= bound).all()
            assert (np.signbit(x) == np.signbit(y)).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_of_any_bits_stays_within_the_stated_bounds(scheme: str, dtype: str, data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 9))
    nbytes = columns * data.draw(st.integers(1, 5)) * (4 if dtype == "F32" else 2)
    check(*quantized(data.draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype, columns, scheme), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@given(
    rows=st.lists(
        st.lists(st.floats(-FLT_MAX, FLT_MAX, width=32), min_size=6, max_size=6),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=100, deadline=None)
def test_a_row_of_finite_numbers_stays_within_the_stated_bounds(scheme: str, rows: list[list[float]]) -> None:
    check(*quantized(np.array(rows, np.float32).tobytes(), "F32", 6, scheme), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_at_the_top_of_float32_decode_to_numbers(scheme: str) -> None:
    """Of the thousand largest float32 each one is a row's peak."""
    peaks = (np.float32(FLT_MAX).view(np.uint32) - np.arange(1000, dtype=np.uint32)).view(np.float32)
    rows = np.stack([peaks, -peaks, np.full_like(peaks, 1e38), np.ones_like(peaks)], axis=1)
    values, decoded, numbers, scales = quantized(rows.tobytes(), "F32", 4, scheme)
    check(values, decoded, numbers, scales, scheme)
    assert (np.abs(values - decoded)[:, :2] <= scales[:, None] * 2**-14).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("dtype", "relative", "least"), [("BF16", 2**-8, 0.0), ("F16", 2**-11, 2**-25)])
def test_numbers_in_the_models_own_dtype_are_off_by_its_rounding_more(
    scheme: str, dtype: str, relative: float, least: float
) -> None:
    generator = np.random.default_rng(3)
    values = generator.standard_normal((60, 700)) * np.logspace(-4, 3, 60)[:, None]
    data = bytes(as_dtype(values.astype(np.float32), dtype))
    codes, scales = np.empty(values.size, np.uint8), np.empty(60, np.float32)
    quantize_rows(memoryview(data), dtype, 700, scheme, codes, scales)
    numbers = as_float32(memoryview(b"".join(dequantized(codes.data, scales, 700, scheme, dtype))), dtype)
    exact = dequantize_rows(codes.data, np.ones_like(scales), 700, scheme) * scales.astype(np.float64)[:, None]
    off = np.abs(numbers.reshape(60, 700) - exact)
    bound = np.maximum(np.abs(exact) * relative, least) + np.abs(exact) * 2**-24
    assert (off <= bound).all()
    assert (off > bound * 0.9).any()  # The bound is no larger than it has to be.


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_floats_are_narrowed_as_pytorch_does_it(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(5).integers(0, 2**32, 100_000, np.uint32)
    bits[:6] = (0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x80000000, 1, 0x3F808000)
    values = bits.view(np.float32)
    theirs = torch.from_numpy(values).to(
        getattr(torch, {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype])
    )
    ours = torch.frombuffer(bytearray(as_dtype(values, dtype)), dtype=theirs.dtype)
    same = (ours == theirs) & (ours.signbit() == theirs.signbit()) | ours.isnan() & theirs.isnan()
    assert bool(same.all())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_float16_and_the_middles_between_codes_are_within_the_bounds(scheme: str) -> None:
    every = np.arange(65536, dtype=np.uint16).reshape(-1, 64)
    check(*quantized(every.tobytes(), "F16", 64, scheme), scheme)
    middles = (np.arange(-126, 127) + 0.5) * np.float32(0.0123)
    check(
        *quantized(np.append(middles, 127 * np.float32(0.0123)).astype(np.float32).tobytes(), "F32", 254, scheme),
        scheme,
    )
    tiny = np.arange(1, 255, dtype=np.uint32)
    check(*quantized(tiny.tobytes(), "F32", 254, scheme), scheme)


def test_fp8_codes_are_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(64, 512, generator=generator) * torch.logspace(-9, 3, 512)
    codes, scales = np.empty(values.numel(), np.uint8), np.empty(64, np.float32)
    quantize_rows(memoryview(values.numpy().tobytes()), "F32", 512, "fp8", codes, scales)
    theirs = (values / torch.from_numpy(scales)[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    assert np.array_equal(codes.reshape(64, 512), theirs.numpy())


def test_negative_zero_keeps_its_sign_where_the_format_has_one() -> None:
    data = np.array([-0.0, 1.0], np.float32).tobytes()
    assert np.signbit(quantized(data, "F32", 2, "fp8")[1][0, 0])
    assert not np.signbit(quantized(data, "F32", 2, "int8")[1][0, 0])


def weights_of(seed: int, changed: int = 0) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """A float32 model: `changed` of its weights are a step further than in that of the same seed with 0."""
    generator = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (50, 64), MATRIX: (200, 64), "model.norm.weight": (64,)}
    tensors = []
    for name, shape in shapes.items():
        values = generator.standard_normal(shape).astype(np.float32)
        values.reshape(-1)[:changed] += np.float32(0.02)
        tensors.append((name, "F32", shape, values.tobytes()))
    return tensors


def store() -> WeightStore:
    return WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=4096, threads=2)


async def fetch(address: str, version: int, codec: str, base: StagedWeights | None = None) -> StagedWeights:
    # A link so slow that bytes alone decide.
    rates = Rates(link_bytes_per_s=1e4)
    return await pull(address, version, TOKEN, codec=codec, base=base, rates=rates, deadline_s=20)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_quantized_version_comes_in_full_and_then_as_a_difference_of_its_codes(scheme: str) -> None:
    held = store()
    address = held.start()
    try:
        raw = [held.publish(0, weights_of(1), CONFIG), held.publish(1, weights_of(1, changed=40), CONFIG)]
        first = await fetch(address, 0, scheme)
        assert first.steps == (Encoding(0, scheme),)
        assert first.manifest.encoding == Encoding(0, scheme)
        assert {t.name: t.dtype for t in first.manifest.tensors}[MATRIX] == {"int8": "I8", "fp8": "F8_E4M3"}[scheme]
        second = await fetch(address, 1, scheme, first)
        assert second.steps == (Encoding(1, f"{scheme}-delta", 0),)
        assert second.bytes_fetched < first.bytes_fetched / 10
        # What came as a difference is, bit for bit, what comes in full, and what quantizing here gives.
        full = await fetch(address, 1, scheme)
        stream = b"".join(data for *_, data in weights_of(1, changed=40))
        own, bits = quantize(raw[1], memoryview(stream), scheme)
        assert bytes(second.stream) == bytes(full.stream) == bytes(bits)
        assert second.manifest.digest == full.manifest.digest == own.digest != raw[1].digest
        assert scheme_of(json.loads(second.manifest.config_json)) == scheme
    finally:
        held.close()


async def test_a_chain_of_quantized_differences_is_taken_where_the_base_is_gone() -> None:
    held = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=4096, keep_versions=2)
    address = held.start()
    try:
        held.publish(0, weights_of(1), CONFIG)
        base = first = await fetch(address, 0, "int8")
        for version in (1, 2, 3):
            held.publish(version, weights_of(1, changed=10 * version), CONFIG)
            base = await fetch(address, version, "int8", base)
        assert 0 not in held.versions()
        late = await fetch(address, 3, "int8", first)
        assert late.steps == tuple(Encoding(version, "int8-delta", version - 1) for version in (1, 2, 3))
        assert bytes(late.stream) == bytes(base.stream)
    finally:
        held.close()


async def test_auto_and_every_exact_codec_bring_the_weights_as_they_are() -> None:
    held = store()
    address = held.start()
    try:
        held.publish(0, weights_of(1), CONFIG)
        await fetch(address, 0, "fp8")
        for codec in ("auto", "raw", "lossless", "delta"):
            came = await fetch(address, 0, codec)
            assert bytes(came.stream) == b"".join(data for *_, data in weights_of(1))
    finally:
        held.close()


def test_a_quantized_offer_is_taken_by_name_alone() -> None:
    cheap = Offer(steps=(Encoding(1, "int8"),), nbytes=1)
    delta = Offer(steps=(Encoding(1, "int8-delta", 0),), nbytes=0)
    raw = Offer(steps=(Encoding(1),), nbytes=10**9)
    assert choose([cheap, delta, raw], 10**9, Rates()) == raw
    assert choose([cheap, delta, raw], 10**9, Rates(), "int8") == delta
    with pytest.raises(WeightError, match="codec=fp8"):
        choose([cheap, raw], 10**9, Rates(), "fp8")


async def test_a_scheme_that_the_store_does_not_know_is_refused() -> None:
    from penstock.weights.protocol import GetOffers, NoSuchVersion

    held = store()
    held.start()
    try:
        held.publish(0, weights_of(1), CONFIG)
        with pytest.raises(NoSuchVersion, match="int3"):
            await held.offers(GetOffers(version=0, scheme="int3"))
    finally:
        held.close()


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "x.bias"])
def test_embeddings_head_norms_and_biases_are_left_as_they_are(name: str) -> None:
    entry = TensorEntry(name=name, dtype="F32", shape=(4, 4), nbytes=64, xxh3=0)
    assert not is_quantizable(entry)
    assert is_quantizable(msgspec.structs.replace(entry, name=MATRIX))


def test_weights_that_are_quantized_already_are_refused() -> None:
    held = store()
    try:
        held.start()
        tensors = [*weights_of(1), (MATRIX + "_scale", "F32", (200, 1), bytes(800))]
        raw = held.publish(0, tensors, CONFIG)
        with pytest.raises(WeightError, match="quantized already"):
            quantize(raw, memoryview(b"".join(data for *_, data in tensors)), "int8")
    finally:
        held.close()


def test_a_quantization_of_somebody_else_is_not_taken_for_one_of_these() -> None:
    with pytest.raises(WeightError, match="awq"):
        scheme_of({"quantization_config": {"quant_method": "awq"}})
    assert scheme_of({}) == ""


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_matrix_of_another_dtype_than_before_comes_in_full(scheme: str) -> None:
    held = store()
    address = held.start()
    try:
        # The same values twice.
        bits = {name: np.frombuffer(data, np.uint32) >> 16 for name, _, _, data in weights_of(1)}
        for version, dtype in enumerate(("BF16", "F32")):
            tensors = [(name, "F32", shape, data) for name, _, shape, data in weights_of(1) if name != MATRIX]
            matrix = bits[MATRIX].astype(np.uint16) if dtype == "BF16" else bits[MATRIX] << 16
            held.publish(version, [*tensors, (MATRIX, dtype, (200, 64), matrix.tobytes())], CONFIG)
        base = await fetch(address, 0, scheme)
        after = await fetch(address, 1, scheme, base)
        assert after.steps == (Encoding(1, scheme),)
        assert bytes(after.tensors[MATRIX]) == bytes(base.tensors[MATRIX])
    finally:
        held.close()


async def test_a_base_that_goes_before_it_is_quantized_costs_the_difference_alone() -> None:
    held = store()
    address = held.start()
    try:
        held.publish(0, weights_of(1), CONFIG)
        held.publish(1, weights_of(1, changed=40), CONFIG)
        base = await fetch(address, 0, "int8")
        held._held._quantized.clear()
        go_on = threading.Event()
        held._held._encoder.submit(1 << 40, lambda: go_on.wait(60))
        asked = asyncio.create_task(fetch(address, 1, "int8", base))
        async with asyncio.timeout(60):
            while len(held._held._quantized) < 2:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(held.publish, 2, weights_of(2), CONFIG)
        go_on.set()
        weights = await asked
        assert weights.steps == (Encoding(1, "int8"),)
    finally:
        held.close()
