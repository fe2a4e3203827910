"""From the shards of FSDP2 to whole tensors in host memory, a bounded bucket at a time.

Decides what is gathered together: tensors in their order, until a bucket is full; one that is larger goes alone. So a
device holds at no time more than its shard of the model and a bucket of it whole. Uneven shards are padded to the
largest for the exchange and cut again on the host. Refuses to know what becomes of the tensors; which rank wants them
is said by the caller, and all ranks take part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from penstock.errors import WeightError
from penstock.weights.reshard import shard_rows

__all__ = ["BUCKET_BYTES", "gathered", "hf_name"]

BUCKET_BYTES = 256 * 1024 * 1024
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")
"""What torch.compile and wrappers of modules put into parameters' names. `module.` only at the beginning."""


def gathered(
    parameters: Iterable[tuple[str, torch.Tensor]], *, keep: bool = True, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields (Hugging Face name, tensor on the host) for each of `parameters`, in their order; None where not `keep`.

    A collective call: every rank iterates to the end, with the same parameters and the same `bucket_bytes`. Parameters
    are DTensors sharded along dimension 0 on one dimension of their mesh and replicated on the others, or plain tensors
    that all ranks have. A tensor is the caller's to keep. Raises WeightError for another placement.
    """
    if bucket_bytes < 1:
        raise WeightError(f"bucket_bytes={bucket_bytes} must be at least 1")
    bucket: list[_Part] = []
    filled = 0
    for name, parameter in parameters:
        part = _part(hf_name(name), parameter.detach())
        if bucket and (filled + part.padded_bytes > bucket_bytes or not part.goes_with(bucket[-1])):
            yield from _exchanged(bucket, keep)
            bucket, filled = [], 0
        bucket.append(part)
        filled += part.padded_bytes
    if bucket:
        yield from _exchanged(bucket, keep)


def hf_name(name: str) -> str:
    """A parameter's name without what wrappers have put into it."""
    name = name.removeprefix(WRAPPERS[-1])
    for wrapper in WRAPPERS[:-1]:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's share of one tensor."""

    name: str
    local: torch.Tensor
    shape: tuple[int, ...]
    group: Any
    """The ranks that have the other shards; None for a tensor that all have."""
    ranks: int

    @property
    def block_bytes(self) -> int:
        """Of the largest shard."""
        rows = -(-self.shape[0] // self.ranks) if self.shape else 1
        return rows * prod(self.shape[1:]) * self.local.element_size()

    @property
    def padded_bytes(self) -> int:
        return self.block_bytes * self.ranks

    def goes_with(self, other: _Part) -> bool:
        return self.group is other.group and self.local.device == other.local.device


def _part(name: str, parameter: torch.Tensor) -> _Part:
    if not isinstance(parameter, DTensor):
        return _Part(name, parameter, tuple(parameter.shape), None, 1)
    mesh = parameter.device_mesh
    sharded = [place for place, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    if not sharded:
        return _Part(name, parameter.to_local(), tuple(parameter.shape), None, 1)
    if len(sharded) > 1 or parameter.placements[sharded[0]] != Shard(0):
        raise WeightError(
            f"parameter {name} is placed as {list(parameter.placements)}; gathered are those that are sharded along "
            "dimension 0 on one dimension of the mesh and replicated on the others"
        )
    place = sharded[0]
    return _Part(name, parameter.to_local(), tuple(parameter.shape), mesh.get_group(place), mesh.size(place))


def _exchanged(bucket: list[_Part], keep: bool) -> Iterator[tuple[str, torch.Tensor | None]]:
    first = bucket[0]
    if first.group is None:
        for part in bucket:
            yield part.name, part.local.to("cpu", copy=True).contiguous() if keep else None
        return
    together = _gather(bucket)
    host = together.cpu() if keep else None
    # The device's copy is gone before anything is made of the host's.
    del together
    at = 0
    for part in bucket:
        yield part.name, None if host is None else _whole(part, host[:, at : at + part.block_bytes])
        at += part.block_bytes


def _gather(bucket: list[_Part]) -> torch.Tensor:
    """[ranks, bytes]: each rank's blocks one after the other."""
    first = bucket[0]
    nbytes = sum(part.block_bytes for part in bucket)
    own = torch.zeros(nbytes, dtype=torch.uint8, device=first.local.device)
    at = 0
    for part in bucket:
        if part.local.numel():
            raw = part.local.contiguous().view(-1).view(torch.uint8)
            own[at : at + raw.numel()] = raw
        at += part.block_bytes
    together = torch.empty(first.ranks * nbytes, dtype=torch.uint8, device=own.device)
    dist.all_gather_into_tensor(together, own, group=first.group)
    return together.view(first.ranks, nbytes)


def _whole(part: _Part, blocks: torch.Tensor) -> torch.Tensor:
    """The tensor out of its padded blocks [ranks, block bytes]."""
    row_bytes = prod(part.shape[1:]) * part.local.element_size()
    shards = [
        blocks[rank, : (end - begin) * row_bytes]
        for rank, (begin, end) in enumerate(shard_rows(part.shape[0], part.ranks))
    ]
    return torch.cat(shards).view(part.local.dtype).view(part.shape)
