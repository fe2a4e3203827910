"""What a weight store and a puller say to each other; pure: messages, their coding, and the proof of the token.

Order on a connection: Hello, Challenge, Proof, Accepted; then any number of requests, each answered in turn; a puller
may send the next before it has the answer to the last, the first together with its Proof. A message is a msgpack map
behind its length as uint32 (big-endian). Plan, ManifestReply and ChunkReply are followed by `nbytes` bytes without a
frame of their own, so that a chunk goes from the store's buffer to the puller's without being copied in between.
GetChunks is answered by ChunkReplies for its indices, in that order, one for each or for several whose bytes follow one
behind the other; a Plan is followed by the first chunks of its first step, `pushed` of them, as if they had been asked
for: one round trip brings the plan, the manifest and, of a small version, all of it. A ChunkReply with a `place` has no
bytes behind it: they are fetched from there. Who says that a draft will do (GetOffers.draft) may get the manifest of an
encoding that is being made, and then asks by GetMade for what it needs to know of its chunks; who does not say so is
answered once all are made, and neither side needs to know of drafts.

Both sides prove that they hold the run's token (HMAC-SHA256 over both nonces, RFC 2104); the token itself is never
sent. Bytes are encrypted where the run speaks TLS, and otherwise not.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated, TypeVar

import msgspec

from penstock.errors import AuthError, FrameTooLarge, ProtocolMismatch, WeightError, WireError
from penstock.weights.manifest import Encoding, Made

MAGIC = "penstock-weights"
PROTOCOL = 6
NONCE_BYTES = 32
MAX_MESSAGE_BYTES = 16 * 1024
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
LENGTH = struct.Struct(">I")


class LinkLost(WeightError):
    """The connection to a store broke or stalled; another try may succeed."""


class NotReady(LinkLost):
    """What was asked for is on its way and not there yet."""


class NoSuchVersion(WeightError):
    """The store does not hold the version asked for."""


class NotLent(WeightError):
    """The version is there, or on its way, where nobody else can map it: it is to be had in chunks."""


class GivenUp(WeightError):
    """An encoding that was begun will not be had after all."""


class NoSuchCodec(WeightError):
    """The version can't be had in an encoding that the puller takes."""


class TokenRefused(WeightError, AuthError):
    """The other side does not hold the same token."""


class OtherProtocol(WeightError, ProtocolMismatch):
    """The other side speaks another version of the weight protocol."""


class BadMessage(WeightError, WireError):
    """The other side sent something that is not a message of this protocol."""


class BadLength(WeightError, FrameTooLarge):
    """The other side announced a message over the size limit."""


class _Message(msgspec.Struct, kw_only=True, tag_field="type"):
    pass


class Hello(_Message, tag="hello"):
    magic: str
    protocol: int
    nonce: bytes
    ways: tuple[str, ...] = ()
    """How else than on this connection the puller could be brought chunks; see `transport`."""


class Challenge(_Message, tag="challenge"):
    protocol: int
    nonce: bytes


class Proof(_Message, tag="proof"):
    mac: bytes


SHARED_MEMORY = "shm"
"""The kind of way by which two processes of one machine see the same memory; what they say of it is then alike."""


class Way(msgspec.Struct, frozen=True, array_like=True):
    """How else than on the connection chunks can be had."""

    kind: str
    """shm | mooncake"""
    where: str
    proof: str = ""
    """What has to be found there."""


class Accepted(_Message, tag="accepted"):
    mac: bytes
    """The store's own proof."""
    ways: tuple[Way, ...] = ()
    """Those of the Hello that the store has, too."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A verified version that a puller has in memory."""

    version: int
    digest: str
    """`Manifest.digest`."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to a version: a full encoding, or deltas one after the other."""

    steps: tuple[Encoding, ...]
    nbytes: int
    """On the wire; an estimate from samples where something is yet to be encoded."""
    encode_s: float = 0.0
    """Until the store has encoded what it has not yet; an estimate."""


class GetOffers(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted, and what is there already."""

    version: int
    held: tuple[Held, ...] = ()
    wait_s: float = 0.0
    """For a version that is being published."""
    scheme: str = ""
    """By which the version is to be quantized (int8 or fp8); empty for the weights as they are."""
    draft: bool = False
    """Whether the draft of an encoding that is being made will do: the puller asks for the rest of it by GetMade. Of a
    version that is to be mapped: whether a place will do where it is being written."""


class Offers(msgspec.Struct, frozen=True, kw_only=True):
    raw_nbytes: int
    offers: tuple[Offer, ...]


Rate = Annotated[float, msgspec.Meta(gt=0)]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a puller knows of its link and its cores; what it leaves out is not known."""

    cores: int = 1
    link_bytes_per_s: Rate = 1e9
    round_trip_s: float = 0.0
    decode: dict[str, Rate] = {}
    """Bytes of raw weights a second and core, by codec."""


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The tensor-parallel ranks that a puller fetches for."""

    tensor_parallel_rank: int = 0
    """The first of them; 0 for an agent, which fetches for all ranks of its engine."""
    tensor_parallel_size: int = 1


class GetPlan(_Message, tag="get_plan"):
    """Asks for the way that ends soonest, and for its first manifest."""

    ask: GetOffers
    codec: str = "auto"
    """As in `weights.codec`."""
    measured: Measured = Measured()
    relay_port: int = 0
    """Where the puller serves what it has to others; 0 for nowhere."""
    lends: str = ""
    """What those say alike who lend versions in the same memory; empty for who lends none."""
    without: tuple[str, ...] = ()
    """Instances that it does not want to be sent to: they had nothing to pass on."""
    push_bytes: int = 0
    """So many may follow the manifest without being asked for."""
    layout: Layout = Layout()
    """Of the engine behind the puller: what it would need if it were sent its part alone."""
    by: str = ""
    """The kind of way by which the puller can map a raw version whole; empty for none."""


class Plan(_Message, tag="plan"):
    steps: tuple[Encoding, ...]
    """One after the other."""
    nbytes: int
    """Of the first step's manifest."""
    xxh3: int
    relay: str = ""
    """host:port of an instance that has, or is getting, the same encoding; empty for none."""
    only_seen: bool = False
    """It is getting the version by another encoding: to be mapped there, or had elsewhere."""
    pushed: int = 0
    """Chunks of the first step that follow, from the first on."""
    place: str = ""
    """Where the first step's bytes lie, in the words of the way asked for; empty: they are to be asked for."""
    in_parts: bool = False
    """They are yet to be written there: each tensor's can be held once they will not change any more."""


class GetManifest(_Message, tag="get_manifest"):
    encoding: Encoding
    wait_s: float = 0.0
    """For a version that is being published or encoded."""
    relay_port: int = 0
    """Where the puller serves what it has of this encoding to others; 0 for nowhere."""
    lends: str = ""
    """As in GetPlan."""


class GetMade(_Message, tag="get_made"):
    """Asks what has been made of a draft; answered once there is some more."""

    encoding: Encoding
    first: int
    """The chunks before it are known."""
    wait_s: float = 0.0


class GetChunks(_Message, tag="get_chunks"):
    encoding: Encoding
    indices: tuple[int, ...]
    by: str = ""
    """The kind of way by which the puller would rather fetch them; empty for this connection."""


class ManifestReply(_Message, tag="manifest"):
    nbytes: int
    xxh3: int
    relay: str = ""
    """host:port of an instance that has, or is getting, the same encoding; empty for none."""


class MadeReply(_Message, tag="made"):
    made: Made


class ChunkReply(_Message, tag="chunk"):
    nbytes: int
    """Of all that follow."""
    count: int = 1
    """Of the chunks that it is for: the next ones asked for."""
    place: str = ""
    """Where the bytes lie, in the words of the way asked for; empty: they follow."""
    offset: int = 0
    """Of the first byte, there."""


class Refused(_Message, tag="refused"):
    kind: str
    """protocol | token | version | codec | request | busy | given_up | not_ready | not_lent"""
    message: str


ToStore = Hello | Proof | GetPlan | GetManifest | GetMade | GetChunks
FromStore = Challenge | Accepted | Plan | ManifestReply | MadeReply | ChunkReply | Refused

_encoder = msgspec.msgpack.Encoder()
_to_store: msgspec.msgpack.Decoder[ToStore] = msgspec.msgpack.Decoder(ToStore)
_from_store: msgspec.msgpack.Decoder[FromStore] = msgspec.msgpack.Decoder(FromStore)

M = TypeVar("M")


def encode_message(message: ToStore | FromStore) -> bytes:
    """The message behind its length."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def message_length(header: bytes | bytearray | memoryview, limit_bytes: int = MAX_MESSAGE_BYTES) -> int:
    """Length of the message behind `header`. Raises BadLength before a byte of it is read."""
    (length,) = LENGTH.unpack(header)
    if length > limit_bytes:
        raise BadLength(f"a weight message announces {length} bytes; the limit is {limit_bytes}")
    return int(length)


def is_tls(header: bytes | bytearray | memoryview) -> bool:
    """Whether what should be a message's length is the beginning of a TLS record (RFC 8446, 5.1)."""
    return 0x14 <= header[0] <= 0x17 and header[1] == 3


def decode_to_store(data: bytes | memoryview) -> ToStore:
    return _decode(_to_store, data, "for a weight store")


def decode_from_store(data: bytes | memoryview) -> FromStore:
    return _decode(_from_store, data, "of a weight store")


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes | memoryview, whose: str) -> M:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadMessage(f"{len(data)} bytes are not a message {whose}: {error}") from error


def prove(token: str, side: str, puller_nonce: bytes, store_nonce: bytes, binding: bytes = b"") -> bytes:
    """Proof of `token` by `side` ("puller" or "store"); the side's name keeps a proof from being played back.

    `binding` is the fingerprint of the certificate that the connection is encrypted with, as each side knows it: who
    stands in between with a certificate of its own has no proof for either side.
    """
    message = b"\0".join((MAGIC.encode(), side.encode(), puller_nonce, store_nonce, binding))
    return hmac.digest(token.encode(), message, hashlib.sha256)


def proven(token: str, side: str, puller_nonce: bytes, store_nonce: bytes, mac: bytes, binding: bytes = b"") -> bool:
    """Whether `mac` is that proof; in constant time."""
    return hmac.compare_digest(prove(token, side, puller_nonce, store_nonce, binding), mac)


def refusal(refused: Refused, source: str) -> WeightError:
    """The error for a store's refusal."""
    text = f"the weight store at {source} refused: {refused.message}"
    kinds: dict[str, type[WeightError]] = {
        "protocol": OtherProtocol,
        "token": TokenRefused,
        "version": NoSuchVersion,
        "codec": NoSuchCodec,
        "busy": LinkLost,
        "not_ready": NotReady,
        "not_lent": NotLent,
        "given_up": GivenUp,
    }
    return kinds.get(refused.kind, WeightError)(text)
