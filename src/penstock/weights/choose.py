"""Which way a version is fetched: raw, without loss, as one difference or as a chain of them.

Pure: what there is and what was measured go in, the way that ends soonest comes out. Measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.weights.manifest import Encoding
from penstock.weights.protocol import Measured, NoSuchCodec, Offer

__all__ = ["CODEC_CHOICES", "QUANTIZED", "Rates", "choose", "time_s"]

QUANTIZED = ("int8", "fp8")
"""Choices that change the weights, so they are made by name alone and never by `auto`."""
CODEC_CHOICES = ("auto", "raw", "lossless", "delta", "zipnn", *QUANTIZED)
DEFAULT_DECODE = {"lossless": 1.5e9, "zipnn": 2.5e9, "delta": 6e9} | dict.fromkeys(QUANTIZED, 1.5e9)
DEFAULT_DECODE |= {f"{scheme}-delta": 6e9 for scheme in QUANTIZED}
"""Bytes of raw weights that a core decodes in a second, until it was measured."""
DEFAULT_LINK = 1e9
"""Bytes a second, until it was measured: with a fast link assumed, the first version comes as it is, which measures."""
DRAFT_PARTS = 16
"""That an encoding is told of in while it is made, at most: its first part has to be made before any of it comes."""
MIN_MEASURED_BYTES = 1 << 20
"""Smaller transfers measure the latency."""
KEEP = 0.5
"""Weight of what is known against what was measured last."""


@dataclass(slots=True)
class Rates:
    """What one agent has measured so far, and what follows for the next pull."""

    cores: int = 1
    link_bytes_per_s: float = DEFAULT_LINK
    round_trip_s: float = 0.0
    decode: dict[str, float] = field(default_factory=lambda: dict(DEFAULT_DECODE))
    _link_measured: bool = False

    def fetched(self, nbytes: int, wall_s: float) -> None:
        """Notes what came over the link. A small transfer counts only where it was faster than what is known."""
        if wall_s <= 0 or not nbytes:
            return
        found = nbytes / wall_s
        if nbytes < MIN_MEASURED_BYTES and (found <= self.link_bytes_per_s or not self._link_measured):
            return
        known = self._link_measured
        self.link_bytes_per_s = KEEP * self.link_bytes_per_s + (1 - KEEP) * found if known else found
        self._link_measured = True

    def told(self) -> Measured:
        """For the store, which plans with it."""
        return Measured(
            cores=self.cores,
            link_bytes_per_s=self.link_bytes_per_s,
            round_trip_s=self.round_trip_s,
            decode=dict(self.decode),
        )

    def decoded(self, codec: str, raw_nbytes: int, busy_s: float) -> None:
        """Notes `busy_s` core seconds of decoding."""
        if busy_s > 0 and raw_nbytes >= MIN_MEASURED_BYTES:
            found = raw_nbytes / busy_s
            self.decode[codec] = KEEP * self.decode.get(codec, found) + (1 - KEEP) * found


def time_s(offer: Offer, raw_nbytes: int, rates: Rates | Measured, draft: bool = False) -> float:
    """Seconds until the offered version is there: encoding, then the wire beside decoding, a round trip a step.

    Where a `draft` will do, what is yet to be encoded comes while it is: the slower of the two counts, a part of the
    other, and a round trip to ask for what has been made.
    """
    decoding_s = sum(_decode_s(step, raw_nbytes, rates.decode) for step in offer.steps) / max(1, rates.cores)
    wire_s = offer.nbytes / rates.link_bytes_per_s
    trips_s = 2 * rates.round_trip_s * len(offer.steps)
    coming_s = max(wire_s, decoding_s)
    if not (draft and offer.encode_s):
        return offer.encode_s + coming_s + trips_s
    longest_s = max(offer.encode_s, coming_s)
    return longest_s + (offer.encode_s + coming_s - longest_s) / DRAFT_PARTS + trips_s + rates.round_trip_s


def choose(
    offers: Sequence[Offer], raw_nbytes: int, rates: Rates | Measured, codec: str = "auto", draft: bool = False
) -> Offer:
    """The offer that ends soonest; of equals the first. With another `codec` than auto, among those of that codec.

    A fixed codec that is not to be had (no common base, say) falls back: delta to lossless, lossless to raw. int8 and
    fp8 mean a version quantized so, in full or as a difference, and nothing else: it is what the engine serves.
    Raises NoSuchCodec where nothing is offered that this build can decode.
    """
    for allowed in _allowed(codec):
        fitting = [offer for offer in offers if offer.steps and all(step.codec in allowed for step in offer.steps)]
        if fitting:
            return min(fitting, key=lambda offer: time_s(offer, raw_nbytes, rates, draft))
    raise NoSuchCodec(
        f"none of the {len(offers)} encodings offered is one that this agent takes (weights.codec={codec})"
    )


def _allowed(codec: str) -> Iterable[tuple[str, ...]]:
    if codec == "auto":
        return (("raw", "lossless", "delta"),)
    if codec in QUANTIZED:
        return ((codec, f"{codec}-delta"),)
    if codec == "zipnn":
        return (("zipnn",), ("lossless",), ("raw",))
    falls_back = ("delta", "lossless", "raw")
    if codec not in falls_back:
        raise NoSuchCodec(f"there is no codec {codec[:40]!r} here (there are {', '.join(CODEC_CHOICES)})")
    return tuple((name,) for name in falls_back[falls_back.index(codec) :])


def _decode_s(step: Encoding, raw_nbytes: int, decode: Mapping[str, float]) -> float:
    return 0.0 if step.codec == "raw" else raw_nbytes / decode.get(step.codec, DEFAULT_DECODE[step.codec])
