"""A weight version's manifest: immutable, published last, parsed once at the door.

A version is a manifest and its chunks. A chunk is a range of the version's byte stream: the tensors' raw
little-endian bytes one after another in manifest order, cut every `chunk_bytes` and wherever the dtype changes. One
version travels in several encodings, each with a manifest of its own: what the tensors are is the same in all of them,
what the chunks have on the wire is not. A manifest is signed with the run's token, so that what another instance
passes on is the trainer's word. While an encoding is being made its manifest is a draft: all but the chunks' length and
checksum on the wire, which come behind, chunk by chunk in their order, signed too (`Made`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

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


class Encoding(msgspec.Struct, frozen=True, array_like=True):
    """One way that a version travels."""

    version: int
    codec: str = "raw"
    base: int | None = None

    def __str__(self) -> str:
        to = "" if self.base is None else f" to version {self.base}"
        return f"weight version {self.version} ({self.codec}{to})"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    version: int
    codec: str
    """raw, lossless or delta; for a quantized version its scheme, or that and -delta: int8, fp8-delta."""
    base: int | None
    """Version that the chunks are a difference to; None for a full version."""
    base_digest: str = ""
    """`digest` of that version: a number alone does not say which weights they are."""
    config_json: str
    """The model's Hugging Face config.json, so that an engine can be built from the manifest alone."""
    tensors: tuple[TensorEntry, ...]
    chunks: tuple[ChunkEntry, ...]
    mac: bytes = b""
    """HMAC-SHA256 of all the rest by the run's token."""

    @property
    def encoding(self) -> Encoding:
        return Encoding(self.version, self.codec, self.base)

    @property
    def nbytes(self) -> int:
        """On the wire."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def raw_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_draft(self) -> bool:
        """Whether chunks are not made yet; their length and checksum on the wire are 0."""
        return any(not chunk.nbytes for chunk in self.chunks)

    @property
    def digest(self) -> str:
        """Of the model that the version is, whatever its number, chunks and codec: equal for equal weights."""
        tensors = [(tensor.name, tensor.dtype, tensor.shape, tensor.xxh3) for tensor in self.tensors]
        return hashlib.blake2b(msgspec.msgpack.encode((self.config_json, tensors)), digest_size=16).hexdigest()


class Made(msgspec.Struct, frozen=True, array_like=True):
    """Chunks of a draft that have been made, one behind the other."""

    first: int
    nbytes: tuple[int, ...]
    """On the wire, of `first` and those behind it."""
    xxh3: tuple[int, ...]
    mac: bytes = b""
    """HMAC-SHA256 of the rest by the run's token, for this draft and no other."""
    final: bytes = b""
    """With the last chunk: `mac` of the manifest that the draft has become."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    return _encoder.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise WeightError(f"not a weight manifest ({len(data)} bytes): {error}") from error


def sign_manifest(manifest: Manifest, token: str) -> Manifest:
    return msgspec.structs.replace(manifest, mac=_mac(manifest, token))


def is_authentic(manifest: Manifest, token: str) -> bool:
    """Whether somebody who holds the run's token wrote it; in constant time."""
    return hmac.compare_digest(manifest.mac, _mac(manifest, token))


def completed(draft: Manifest, made: Made) -> Manifest:
    """The draft with these chunks, and with the final signature where they have it. They must be of its chunks."""
    chunks = list(draft.chunks)
    for index, (nbytes, xxh3) in enumerate(zip(made.nbytes, made.xxh3), made.first):
        chunks[index] = msgspec.structs.replace(chunks[index], nbytes=nbytes, xxh3=xxh3)
    return msgspec.structs.replace(draft, chunks=tuple(chunks), mac=made.final or draft.mac)


def sign_made(draft: Manifest, made: Made, token: str) -> Made:
    return msgspec.structs.replace(made, mac=_made_mac(draft, made, token))


def is_made(draft: Manifest, made: Made, token: str) -> bool:
    """Whether somebody who holds the run's token said so of this (signed) draft; in constant time."""
    return hmac.compare_digest(made.mac, _made_mac(draft, made, token))


def _made_mac(draft: Manifest, made: Made, token: str) -> bytes:
    unsigned = _encoder.encode((draft.mac, msgspec.structs.replace(made, mac=b"")))
    return hmac.digest(token.encode(), b"penstock-weight-chunks\0" + unsigned, hashlib.sha256)


def _mac(manifest: Manifest, token: str) -> bytes:
    unsigned = _encoder.encode(msgspec.structs.replace(manifest, mac=b""))
    return hmac.digest(token.encode(), b"penstock-weight-manifest\0" + unsigned, hashlib.sha256)


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A whole version, verified, in host memory and not yet serving.

    `tensors` maps each name to its raw bytes; dtype and shape stand in the manifest.
    """

    manifest: Manifest
    tensors: Mapping[str, memoryview]
    stream: memoryview = field(default_factory=lambda: memoryview(b""))
    """All tensors as one, where they lie so: what makes it a base for differences."""
    steps: tuple[Encoding, ...] = ()
    """The way it came."""
    bytes_fetched: int = 0
    """Over the wire, what came twice included."""
    way: str = ""
    """How chunks moved: tcp, tls, shm, mooncake; with the cause where a faster one was wanted and is not had."""

    @property
    def version(self) -> int:
        return self.manifest.version
