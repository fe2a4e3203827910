"""The sums and joins between tensor-parallel ranks, over gloo on this machine's loopback.

Decides nothing: a decoder says what is added up. A group of its own, so that a program which uses torch.distributed
for something else is not disturbed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import EngineError

__all__ = ["RankGroup", "RankLost"]


class RankLost(EngineError):
    """Another rank does not answer any more."""


class RankGroup:
    """`rank` of `ranks`. The constructor waits until all have come. Raises RankLost, also in every later call."""

    def __init__(self, store_path: str, rank: int, ranks: int, wait_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        try:
            store = dist.FileStore(store_path, ranks)  # type: ignore[attr-defined]
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=wait_s)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            group: Any = dist.ProcessGroupGloo(store, rank, ranks, options)
            group.barrier().wait()
        except RuntimeError as error:
            raise RankLost(f"the {ranks} ranks did not come together: {error}") from error
        self._group = group

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise RankLost(f"a sum over ranks broke off: {error}") from error
        return tensor

    def join(self, part_BV: torch.Tensor) -> torch.Tensor:
        """[B, ranks * V]: every rank's columns beside each other."""
        part_BV = part_BV.contiguous()
        parts = [torch.empty_like(part_BV) for _ in range(self.ranks)]
        try:
            self._group.allgather([parts], [part_BV]).wait()
        except RuntimeError as error:
            raise RankLost(f"a join over ranks broke off: {error}") from error
        return torch.cat(parts, dim=1)
