"""What a store offers to a puller: pure; from what is encoded, what could be, and what the puller holds."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.weights.encodings import Estimate
from penstock.weights.manifest import Encoding, Manifest
from penstock.weights.protocol import GetOffers, Held, Offer, Offers

__all__ = ["codecs_of", "offers_of"]

MAX_STEPS = 32


def offers_of(
    ask: GetOffers, raw_nbytes: int, ready: Mapping[Encoding, Manifest], estimates: Mapping[Encoding, Estimate]
) -> Offers:
    """Raw, lossless, a direct difference to each base, and the lightest chain from each version that is held.

    Where the version is wanted quantized: the same of the quantized versions, and nothing of the others.

    `ready` has the encodings that are there; `estimates` what those would weigh that can be made.
    """
    target = ask.version
    weights = {key: (float(manifest.nbytes), 0.0) for key, manifest in ready.items()}
    for key, guess in estimates.items():
        weights.setdefault(key, (float(guess.nbytes), guess.encode_s))
    offers = [] if ask.scheme else [Offer(steps=(Encoding(target, "raw"),), nbytes=raw_nbytes)]
    full_codec, delta_codec = codecs_of(ask.scheme)
    for codec in (full_codec,) if ask.scheme else (full_codec, "zipnn"):
        full = Encoding(target, codec)
        if full in weights:
            offers.append(_offer((full,), weights))
    for held in ask.held:
        direct = Encoding(target, delta_codec, held.version)
        if direct in estimates or _is_base(ready.get(direct), held.digest):
            offers.append(_offer((direct,), weights))
        chain = _chain(held, target, delta_codec, ready, weights)
        if len(chain) > 1:
            offers.append(_offer(chain, weights))
    return Offers(raw_nbytes=raw_nbytes, offers=tuple(offers))


def codecs_of(scheme: str) -> tuple[str, str]:
    """Of a full version and of a difference, where versions are quantized by `scheme`, or not (empty)."""
    return (scheme, f"{scheme}-delta") if scheme else ("lossless", "delta")


def _chain(
    begin: Held,
    target: int,
    codec: str,
    ready: Mapping[Encoding, Manifest],
    weights: Mapping[Encoding, tuple[float, float]],
) -> tuple[Encoding, ...]:
    """The lightest way over encoded differences. A version's number is not enough: each must be to the same weights."""
    best: dict[int, tuple[float, str, tuple[Encoding, ...]]] = {begin.version: (0.0, begin.digest, ())}
    for key in sorted(ready, key=lambda key: (key.version, -1 if key.base is None else key.base)):
        came = None if key.base is None else best.get(key.base)
        if came is None or key.codec != codec or key.version > target or len(came[2]) >= MAX_STEPS:
            continue
        manifest = ready[key]
        if manifest.base_digest != came[1]:
            continue
        nbytes = came[0] + weights[key][0]
        if key.version not in best or nbytes < best[key.version][0]:
            best[key.version] = (nbytes, manifest.digest, (*came[2], key))
    return best[target][2] if target in best else ()


def _offer(steps: tuple[Encoding, ...], weights: Mapping[Encoding, tuple[float, float]]) -> Offer:
    return Offer(
        steps=steps,
        nbytes=int(sum(weights[step][0] for step in steps)),
        encode_s=sum(weights[step][1] for step in steps),
    )


def _is_base(manifest: Manifest | None, digest: str) -> bool:
    return manifest is not None and manifest.base_digest == digest
