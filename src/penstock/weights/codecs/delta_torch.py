"""The exact difference of `delta` on tensors: the same bytes, computed where the tensors lie.

On a GPU what crosses to the host is the few changed weights and not the model; of a sharded model each rank codes its
own shard. Decides nothing beyond that: the format, and how columns are entropy-coded, is that of `delta`.
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.errors import WeightError
from penstock.weights.codecs.base import Bytes, Column
from penstock.weights.codecs.delta import ESCAPE, PackedChanges, low_bits_of, packed_changes

__all__ = ["apply_delta", "encode_delta", "encode_deltas"]

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element. Bits are compared and subtracted as integers, never as floats."""
WORD_BYTES = 8
"""Chunks are cut at multiples of the widest element, as versions are."""


def encode_delta(new: torch.Tensor, base: torch.Tensor) -> bytes:
    """One chunk: `new` as the difference to `base`, both contiguous, of one dtype, shape and device.

    Equal, bit for bit, to `DeltaCodec.encode` of the same bytes. Raises WeightError for tensors that do not match.
    """
    after, before = _bits(new), _bits(base)
    if after.dtype != before.dtype or after.shape != before.shape or after.device != before.device:
        raise WeightError(
            f"a delta needs tensors that match: {list(new.shape)} {new.dtype} on {new.device} and "
            f"{list(base.shape)} {base.dtype} on {base.device}"
        )
    indices = torch.nonzero(after != before).squeeze(1)
    steps = (after[indices] - before[indices]).to(torch.int64)
    return _encoded(indices, steps, after.numel(), after.element_size())


def encode_deltas(new: torch.Tensor, base: torch.Tensor, chunk_bytes: int) -> list[bytes]:
    """`new` in chunks of at most `chunk_bytes` raw bytes, cut as a version of this one tensor is."""
    each = max(WORD_BYTES, chunk_bytes - chunk_bytes % WORD_BYTES) // new.element_size()
    after, before = _bits(new), _bits(base)
    return [encode_delta(after[at : at + each], before[at : at + each]) for at in range(0, after.numel(), each)]


def apply_delta(data: Bytes, tensor: torch.Tensor) -> None:
    """Makes `tensor`, contiguous and holding the base, the new one. Raises WeightError, and then it is unchanged."""
    values = _bits(tensor)
    indices, steps = PackedChanges(data, values.numel(), np.dtype(f"i{values.element_size()}")).unpacked()
    at = torch.from_numpy(indices).to(values.device)
    values[at] += torch.from_numpy(steps).to(values.device)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers, flat; a view."""
    if not tensor.is_contiguous():
        raise WeightError(f"a delta needs contiguous tensors, and one of shape {list(tensor.shape)} is not")
    kind = INTEGERS.get(tensor.element_size())
    if kind is None or tensor.is_complex():
        raise WeightError(f"there is no delta of {tensor.dtype}")
    return tensor.detach().reshape(-1).view(kind)


def _encoded(indices: torch.Tensor, steps: torch.Tensor, elements: int, width: int) -> bytes:
    count = indices.numel()
    low_bits = low_bits_of(count, elements)
    gaps = torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1
    folded = (steps << 1) ^ (steps >> 63)
    # Shifts of int64 keep the sign, which of the widest steps is a bit like others.
    sizes = ((folded - 1) >> 1) & 0x7FFF_FFFF_FFFF_FFFF
    wide = sizes[sizes >= ESCAPE]
    columns = [
        _tokens(gaps >> low_bits),
        (gaps & ((1 << low_bits) - 1)).to(torch.uint8),
        _packed_bits(folded & 1),
        sizes.clamp(max=ESCAPE).to(torch.uint8),
        wide.view(torch.uint8).view(-1, 8)[:, :width].reshape(-1),
    ]
    return packed_changes(count, low_bits, *_to_host(columns))


def _tokens(high: torch.Tensor) -> torch.Tensor:
    escapes = high // ESCAPE
    ends = torch.cumsum(escapes + 1, 0)
    length = int(ends[-1]) if ends.numel() else 0
    tokens = torch.full((length,), ESCAPE, dtype=torch.uint8, device=high.device)
    tokens[ends - 1] = (high % ESCAPE).to(torch.uint8)
    return tokens


def _packed_bits(bits: torch.Tensor) -> torch.Tensor:
    """As numpy.packbits: the first bit is the highest."""
    eights = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    places = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], device=bits.device)
    return (eights * places).sum(1).to(torch.uint8)


def _to_host(columns: list[torch.Tensor]) -> list[Column]:
    """In one copy, since each waits for the device."""
    lengths = [column.numel() for column in columns]
    together = torch.cat(columns).cpu().numpy()
    return np.split(together, np.cumsum(lengths)[:-1])
