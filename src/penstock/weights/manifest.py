"""A weight version's manifest: immutable, published last, parsed once at the door.

A version is a manifest and its chunks. A chunk is a range of the version's byte stream: the tensors' raw
little-endian bytes one after another in manifest order, cut every `chunk_bytes`. Codecs and bases have their fields
here so that deltas need no new format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from penstock.errors import WeightError


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """The Hugging Face parameter name."""
    dtype: str
    """As in safetensors: F32, F16, BF16, ..."""
    shape: tuple[int, ...]
    nbytes: int
    xxh3: int
    """xxh3-64 of the resulting tensor's bytes."""


class ChunkEntry(msgspec.Struct, frozen=True, kw_only=True):
    offset: int
    """Of its raw bytes in the version's byte stream."""
    nbytes: int
    """On the wire, encoded."""
    raw_nbytes: int
    xxh3: int
    """xxh3-64 of the bytes on the wire."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    version: int
    codec: str
    """"raw" is the only one so far."""
    base: int | None
    """Version that the chunks are a difference to; None for a full version."""
    config_json: str
    """The model's Hugging Face config.json, so that an engine can be built from the manifest alone."""
    tensors: tuple[TensorEntry, ...]
    chunks: tuple[ChunkEntry, ...]

    @property
    def raw_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def digest(self) -> str:
        """Of the model that the version is, whatever its number, chunks and codec: equal for equal weights."""
        tensors = [(tensor.name, tensor.dtype, tensor.shape, tensor.xxh3) for tensor in self.tensors]
        return hashlib.blake2b(msgspec.msgpack.encode((self.config_json, tensors)), digest_size=16).hexdigest()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    return _encoder.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise WeightError(f"not a weight manifest ({len(data)} bytes): {error}") from error


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A whole version, verified, in host memory and not yet serving.

    `tensors` maps each name to its raw bytes; dtype and shape stand in the manifest.
    """

    manifest: Manifest
    tensors: Mapping[str, memoryview]

    @property
    def version(self) -> int:
        return self.manifest.version
