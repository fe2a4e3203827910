"""Random numbers that depend on a sample's seed and an output position, and on nothing else.

A counter-based generator has no state: number n of a sample is a function of (seed, n), so a sample draws the same
numbers alone, in a batch, or resumed elsewhere. Decides nothing about how a number becomes a token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10

Words = NDArray[np.uint64]


def philox4x32(counter_4N: Words, key_2N: Words) -> Words:
    """Philox4x32-10: four 32-bit words for each of N counters (four words each) and keys (two words each).

    Words are held in uint64 so that 32 x 32-bit products fit. Source: Salmon, Moraes, Dror and Shaw, "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
    """
    word0, word1, word2, word3 = counter_4N
    key0, key1 = key_2N
    for _ in range(_ROUNDS):
        product0 = word0 * _MULTIPLIERS[0]
        product1 = word2 * _MULTIPLIERS[1]
        word0 = (product1 >> _HALF) ^ word1 ^ key0
        word2 = (product0 >> _HALF) ^ word3 ^ key1
        word1, word3 = product1 & _LOW, product0 & _LOW
        key0 = (key0 + _WEYL[0]) & _LOW
        key1 = (key1 + _WEYL[1]) & _LOW
    return np.stack((word0, word1, word2, word3))


def uniforms(seed: int, start: int, count: int) -> list[float]:
    """Numbers in [0, 1) of output positions `start` to `start + count` of the sample with this 64-bit `seed`.

    They carry 52 bits, not 53, so that u times a float64 total rounds to less than the total: inverse-CDF sampling
    then never runs past the last token.
    """
    counter = np.zeros((4, count), dtype=np.uint64)
    positions = np.arange(start, start + count, dtype=np.uint64)
    counter[0] = positions & _LOW
    counter[1] = positions >> _HALF
    key = np.array([[seed & 0xFFFFFFFF], [(seed >> 32) & 0xFFFFFFFF]], dtype=np.uint64)
    words = philox4x32(counter, key)
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    return (bits.astype(np.float64) * 2.0**-52).tolist()
