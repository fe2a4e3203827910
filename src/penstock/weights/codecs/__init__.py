"""Codecs: how the bytes of one chunk of a weight version travel.

A chunk is a range of the version's byte stream that lies in tensors of one dtype. A codec turns it into bytes for the
wire and back, exactly, by itself: chunks are encoded and decoded in any order and on any number of cores. What a chunk
is, and which codec a version goes in, is decided elsewhere.
"""

from __future__ import annotations

from penstock.errors import WeightError
from penstock.weights.codecs.base import Bytes, Codec
from penstock.weights.codecs.delta import DeltaCodec
from penstock.weights.codecs.lossless import LosslessCodec
from penstock.weights.codecs.quantized import QuantizedCodec
from penstock.weights.codecs.raw import RawCodec
from penstock.weights.codecs.zipnn import ZipnnCodec

__all__ = [
    "CODECS",
    "Bytes",
    "Codec",
    "DeltaCodec",
    "LosslessCodec",
    "QuantizedCodec",
    "RawCodec",
    "ZipnnCodec",
    "get_codec",
]

_CODECS: tuple[Codec, ...] = (
    RawCodec(),
    LosslessCodec(),
    DeltaCodec(),
    ZipnnCodec(),
    *(QuantizedCodec(scheme, scheme, LosslessCodec()) for scheme in ("int8", "fp8")),
    *(QuantizedCodec(f"{scheme}-delta", scheme, DeltaCodec()) for scheme in ("int8", "fp8")),
)
CODECS: dict[str, Codec] = {codec.name: codec for codec in _CODECS}
"""Every codec of this build, by the name that manifests use."""


def get_codec(name: str) -> Codec:
    """Raises WeightError for a name that this build does not know."""
    codec = CODECS.get(name)
    if codec is None:
        raise WeightError(
            f"weights are coded as {name!r}, which this build of Penstock does not know "
            f"(known: {', '.join(CODECS)}); use the same version of Penstock on both sides"
        )
    return codec
