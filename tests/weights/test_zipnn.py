"""Weights by the zipnn package where it is installed, and by what there is where it is not."""

from __future__ import annotations

import sys
import types
import zlib

import numpy as np
import pytest

from penstock.errors import WeightError
from penstock.instance.loading import WeightLoader
from penstock.weights import WeightStore, pull
from penstock.weights.codecs import get_codec
from penstock.weights.codecs import zipnn as module
from penstock.weights.encodings import can_zipnn

TOKEN = "t" * 32
DATA = (np.random.default_rng(1).standard_normal(40_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


class StandIn:
    """What the package does, by another coder."""

    def __init__(self, method: str, bytearray_dtype: str, threads: int) -> None:
        assert (method, threads) == ("HUFFMAN", 1)
        self.dtype = bytearray_dtype.encode()

    def compress(self, data: bytearray) -> bytearray:
        return bytearray(self.dtype + zlib.compress(data, 1))

    def decompress(self, data: bytes) -> bytearray:
        assert data.startswith(self.dtype)
        return bytearray(zlib.decompress(data[len(self.dtype) :]))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("zipnn")
    package.ZipNN = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zipnn", package)
    monkeypatch.setattr(module, "find_spec", lambda _: object())
    module._package.cache_clear()


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zipnn", None)
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    module._package.cache_clear()


def through(data: bytes, dtype: str) -> bytes:
    codec = get_codec("zipnn")
    into = bytearray(len(data))
    codec.decode(codec.encode(data, None, dtype), None, memoryview(into), dtype)
    return bytes(into)


async def came_by(codec: str) -> tuple[str, bytes]:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN)
    address = store.start()
    try:
        store.publish(0, [("w.weight", "BF16", (200, 200), DATA.tobytes())], "{}")
        weights = await pull(address, 0, TOKEN, codec=codec, deadline_s=20)
    finally:
        store.close()
    assert weights.steps[0].version == 0
    return weights.steps[0].codec, bytes(weights.stream)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "I8", "F64"])
def test_every_dtype_is_exact(dtype: str) -> None:
    assert through(DATA.tobytes(), dtype) == DATA.tobytes()
    assert through(b"", dtype) == b""


@pytest.mark.skipif(not can_zipnn(), reason="the zipnn package is not installed")
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_dtype_is_exact_by_the_package_itself(dtype: str) -> None:
    module._package.cache_clear()
    assert through(DATA.tobytes(), dtype) == DATA.tobytes()


@pytest.mark.usefixtures("installed")
async def test_a_version_comes_by_it_when_it_is_asked_for_by_name() -> None:
    assert await came_by("zipnn") == ("zipnn", DATA.tobytes())
    for codec in ("auto", "lossless", "raw"):
        assert (await came_by(codec))[0] != "zipnn"


@pytest.mark.usefixtures("absent")
async def test_a_store_without_it_sends_weights_without_loss_by_its_own_codec() -> None:
    assert await came_by("zipnn") == ("lossless", DATA.tobytes())


@pytest.mark.usefixtures("absent")
def test_a_machine_without_it_says_so_before_the_first_version() -> None:
    with pytest.raises(WeightError, match="pip install zipnn"):
        WeightLoader("token", codec="zipnn")
    with pytest.raises(WeightError, match="pip install zipnn"):
        get_codec("zipnn").encode(DATA.tobytes(), None, "BF16")


@pytest.mark.usefixtures("installed")
def test_a_chunk_of_another_kind_or_length_is_refused() -> None:
    codec = get_codec("zipnn")
    coded = codec.encode(DATA.tobytes(), None, "BF16")
    for data, size in ((b"", 4), (b"\x07" + coded[1:], DATA.nbytes), (coded, DATA.nbytes - 2)):
        with pytest.raises(WeightError):
            codec.decode(data, None, memoryview(bytearray(size)), "BF16")
