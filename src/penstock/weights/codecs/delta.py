"""An exact difference to a base version, as small as the few weights that one optimizer step changes.

Of a chunk's changed elements it sends where they are and by how much their bits moved. Places are gaps between
changed elements, whose length is geometric, so their low bits are noise and their high bits skewed: each goes in a
column of its own. A change is the difference of both bit patterns as integers, nearly always one step up or down: its
sign is a bit, its size a byte that is nearly always the same. Columns are entropy-coded. The result comes within a few
per cent of the entropy of positions and steps. Exact for every bit pattern and dtype, NaN
payloads and -0.0 included, since no float is ever computed with.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from penstock.errors import WeightError
from penstock.weights.codecs.base import Bytes, Column, Columns, pack
from penstock.weights.codecs.fused import Apply, applier

__all__ = ["DeltaCodec", "changed_elements", "entropy_bound_bytes"]

HEADER = struct.Struct("<IIB")
"""Changed elements, bytes in the column of high gaps, low bits of a gap."""
WIDTHS = {"BF16": 2, "F16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8}
ESCAPE = 255
"""In the column of high gaps: as much, and the gap goes on in the next byte. In that of sizes: see the wide ones."""
HIGH_BITS = 6
"""Bits of the mean gap that its high part keeps; what is below them is noise, and stored so."""
Indices = npt.NDArray[np.int64]


class DeltaCodec:
    name = "delta"
    needs_base = True
    quantizes = ""

    def encode(self, new: Bytes, base: Bytes | None, dtype: str) -> bytes:
        if base is None or len(base) != len(new):
            raise WeightError("a delta needs as many bytes of its base version")
        indices, steps = changed_elements(new, base, dtype)
        return encode_changes(indices, zigzag(steps), len(new) // WIDTHS.get(dtype, 1))

    def decode(self, data: Bytes, base: Bytes | None, into: memoryview, dtype: str) -> None:
        if base is not None and len(base) != len(into):
            raise WeightError("a delta needs as many bytes of its base version")
        kind = np.dtype(f"i{WIDTHS.get(dtype, 1)}")
        values = np.frombuffer(into, kind)
        packed = PackedChanges(data, len(values), kind)
        if base is not None:
            values[:] = np.frombuffer(base, kind)
        apply = applier(kind.itemsize) if values.flags.aligned else None
        if apply is not None:
            if not packed.apply(apply, values):
                packed.unpacked()  # Says what is wrong with it.
                raise WeightError("a delta chunk's columns do not fit together")
            return
        indices, steps = packed.unpacked()
        # Each of these lets other threads run; `np.add.at`, which is one pass, does not.
        changed = values.take(indices, mode="clip")
        changed += steps
        values[indices] = changed


def changed_elements(new: Bytes, base: Bytes, dtype: str) -> tuple[Indices, npt.NDArray[np.signedinteger]]:
    """Indices of the elements whose bits differ, ascending, and the difference of their bit patterns (it wraps).

    Words of eight bytes are compared first: where one weight in a hundred has changed, that leaves a tenth to look at.
    """
    kind = np.dtype(f"i{WIDTHS.get(dtype, 1)}")
    after, before = np.frombuffer(new, kind), np.frombuffer(base, kind)
    each = 8 // kind.itemsize
    bits = each.bit_length() - 1
    whole = len(after) - len(after) % each
    after_words, before_words = after[:whole].view(np.int64), before[:whole].view(np.int64)
    words = places_of(after_words != before_words)
    differences = after_words[words].view(kind) - before_words[words].view(kind)
    # A search for non-zero bytes is several times as fast as one for non-zero integers.
    places = np.flatnonzero(differences != 0)
    indices = (words[places >> bits] << bits) + (places & (each - 1))
    steps = differences[places]
    if whole < len(after):
        rest = after[whole:] - before[whole:]
        places = np.flatnonzero(rest)
        indices = np.concatenate((indices, places + whole))
        steps = np.concatenate((steps, rest[places]))
    return indices, steps


def places_of(mask: npt.NDArray[np.bool_]) -> Indices:
    """`flatnonzero` of a mask of which little is true, by eights first: two to four times as fast.

    NumPy's own search begins anew behind each place that it finds, as long as fewer than a tenth are there.
    """
    whole = len(mask) - len(mask) % 8
    eights = mask[:whole].view(np.uint64)
    some = np.flatnonzero(eights != 0)
    found = np.flatnonzero(eights[some].view(np.bool_))
    places = (some[found >> 3] << 3) + (found & 7)
    return places if whole == len(mask) else np.concatenate((places, whole + np.flatnonzero(mask[whole:])))


def zigzag(steps: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.unsignedinteger]:
    """0, -1, 1, -2, 2 ... as 0, 1, 2, 3, 4 ..."""
    unsigned = np.dtype(f"u{steps.itemsize}")
    return ((steps << 1) ^ (steps >> (8 * steps.itemsize - 1))).view(unsigned)


def encode_changes(indices: Indices, folded: npt.NDArray[np.unsignedinteger], elements: int) -> bytes:
    """Columns of changed places and of steps behind their header. A folded step is at least 1: nothing else changed."""
    low_bits = low_bits_of(len(indices), elements)
    gaps = np.diff(indices, prepend=-1) - 1
    high = gaps >> low_bits
    tokens = gap_tokens(high)
    sizes = (folded - folded.dtype.type(1)) >> folded.dtype.type(1)
    narrow = np.minimum(sizes, ESCAPE).astype(np.uint8)
    wide = sizes[sizes >= ESCAPE]
    low = (gaps & ((1 << low_bits) - 1)).astype(np.uint8)
    signs = np.packbits((folded & folded.dtype.type(1)).astype(np.uint8))
    return packed_changes(len(indices), low_bits, tokens, low, signs, narrow, wide.view(np.uint8))


def low_bits_of(count: int, elements: int) -> int:
    """How many bits of a gap are noise where `count` of `elements` have changed."""
    return max(0, min(8, (elements // max(1, count)).bit_length() - 1 - HIGH_BITS))


def packed_changes(
    count: int, low_bits: int, tokens: Column, low: Column, signs: Column, narrow: Column, wide: Column
) -> bytes:
    """The columns as they travel. That of low bits is left out where there are none."""
    pieces: list[Bytes] = [HEADER.pack(count, len(tokens), low_bits)]
    for column in (tokens, low, signs, narrow, wide) if low_bits else (tokens, signs, narrow, wide):
        pieces += pack(column)
    return b"".join(pieces)


def gap_tokens(high: Indices) -> npt.NDArray[np.uint8]:
    """The high parts of gaps as bytes: 255 for so much and the rest to come."""
    tokens = high.astype(np.uint8)
    # Few are long: only those are divided.
    long = np.flatnonzero(high >= ESCAPE)
    if not len(long):
        return tokens
    tokens[long] = high[long] % ESCAPE
    return np.insert(tokens, np.repeat(long, high[long] // ESCAPE), ESCAPE)


class PackedChanges:
    """The columns of one chunk, for `elements` whose bits are of `kind`. Raises WeightError."""

    def __init__(self, data: Bytes, elements: int, kind: np.dtype[np.signedinteger]) -> None:
        if len(data) < HEADER.size:
            raise WeightError(f"a delta chunk has {len(data)} bytes, less than its header")
        count, tokens_count, low_bits = HEADER.unpack(memoryview(data)[: HEADER.size])
        if count > elements or low_bits > 8 or tokens_count > count + elements // ESCAPE:
            raise WeightError(
                f"a delta chunk of {elements} elements claims {count} changes, which does not fit together"
            )
        columns = Columns(data, HEADER.size)
        self._elements = elements
        self._kind = kind
        self._count = count
        self._low_bits = low_bits
        self._tokens = columns.take(tokens_count, exactly=True)
        self._low = columns.take(count, exactly=True) if low_bits else self._tokens[:0]
        self._signs = columns.take((count + 7) // 8, exactly=True)
        self._narrow = columns.take(count, exactly=True)
        wide = columns.take(count * kind.itemsize)
        columns.end()
        if len(wide) % kind.itemsize:
            raise WeightError(f"a delta chunk has {len(wide)} bytes of wide steps of {kind.itemsize}")
        # Where it is stored as it is, it lies anywhere.
        self._wide = np.array(wide).view(kind)

    def unpacked(self) -> tuple[Indices, npt.NDArray[np.signedinteger]]:
        """Indices and steps of the changed elements, as `changed_elements` says them.

        Indices ascend, and every one is within the elements. Raises WeightError.
        """
        indices = _indices(self._tokens, self._low, self._low_bits, self._count, self._elements)
        steps = self._narrow.astype(self._kind)
        at = places_of(self._narrow == ESCAPE)
        if len(at) != len(self._wide):
            raise WeightError(f"a delta chunk has {len(self._wide)} wide steps, and {len(at)} steps that are wide")
        steps[at] = self._wide
        steps += self._kind.type(1)
        # -x is ~x + 1, and a mask of ones is -1.
        minus = np.unpackbits(self._signs, count=self._count).astype(self._kind)
        np.negative(minus, out=minus)
        steps ^= minus
        steps -= minus
        return indices, steps

    def apply(self, apply: Apply, values: npt.NDArray[np.signedinteger]) -> bool:
        """Changes `values`, aligned, in one call. False where columns do not fit together."""
        bits = np.dtype(f"u{self._kind.itemsize}")
        return apply(
            self._tokens, self._low, self._low_bits, self._signs, self._narrow, self._wide.view(bits), values.view(bits)
        )


def _indices(tokens: Column, low: Column, low_bits: int, count: int, elements: int) -> Indices:
    ends = tokens != ESCAPE
    if np.count_nonzero(ends) != count or (len(ends) and not ends[-1]):
        raise WeightError("a delta chunk's gaps are not those of its changes")
    # Sums of gaps are sums of their parts; behind each gap is the changed element itself.
    sums = tokens.astype(np.int64)
    if not low_bits:
        sums += ends
        indices = _sums(sums)[ends]
    else:
        indices = _sums(sums)[ends]
        indices <<= low_bits
        rest = low.astype(np.int64)
        rest += 1
        indices += _sums(rest)
    indices -= 1
    if count and indices[-1] >= elements:
        raise WeightError(f"a delta chunk changes element {int(indices[-1])} of {elements}")
    return indices


def _sums(numbers: Indices) -> Indices:
    """Of each with those before it, in place: from bytes at once it takes as long, and no other thread runs."""
    return np.add.accumulate(numbers, out=numbers)


def entropy_bound_bytes(new: Bytes, base: Bytes, dtype: str) -> float:
    """What no code of independent positions and steps can beat: elements times H(density), and the steps' entropy.

    H is the binary entropy of the share of changed elements; the steps' is that of their own frequencies.
    """
    _, steps = changed_elements(new, base, dtype)
    elements, count = len(new) // WIDTHS.get(dtype, 1), len(steps)
    if not count:
        return 0.0
    share = count / elements
    bits = 0.0 if share >= 1 else -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) * elements
    frequencies = np.unique(steps, return_counts=True)[1] / count
    return float(bits - count * (frequencies * np.log2(frequencies)).sum()) / 8
