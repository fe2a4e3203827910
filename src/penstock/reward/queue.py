"""Jobs in the order in which they are due: the one that is due first is at index 0, and any early index can be taken.

A list of short sorted lists, so that adding anywhere, taking near the front and removing a given job cost the same with
a hundred thousand jobs waiting as with ten. Knows nothing of jobs but that they have `due` and `number`, which don't
change while they are in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["DueQueue"]


class _Due(Protocol):
    due: float
    number: int


_J = TypeVar("_J", bound=_Due)


class DueQueue(Generic[_J]):
    BLOCK = 512

    __slots__ = ("_blocks", "_size")

    def __init__(self) -> None:
        self._blocks: list[list[_J]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[_J]:
        for block in self._blocks:
            yield from block

    @staticmethod
    def _key(job: _J) -> tuple[float, int]:
        return (job.due, job.number)

    def _block_of(self, key: tuple[float, int]) -> int:
        """The first block whose last job isn't before `key`."""

        def last(block: list[_J]) -> Any:
            return self._key(block[-1])

        return bisect_left(self._blocks, key, key=last)

    def add(self, job: _J) -> None:
        blocks, key = self._blocks, self._key(job)
        self._size += 1
        if not blocks:
            blocks.append([job])
            return
        if self._key(blocks[-1][-1]) < key:  # the usual case: due after everything else
            n = len(blocks) - 1
            blocks[n].append(job)
        else:
            n = self._block_of(key)
            insort(blocks[n], job, key=self._key)
        if len(blocks[n]) > 2 * self.BLOCK:
            blocks.insert(n + 1, blocks[n][self.BLOCK :])
            del blocks[n][self.BLOCK :]

    def __getitem__(self, index: int) -> _J:
        for block in self._blocks:
            if index < len(block):
                return block[index]
            index -= len(block)
        raise IndexError("queue index out of range")

    def pop(self, index: int = 0) -> _J:
        for n, block in enumerate(self._blocks):
            if index < len(block):
                job = block.pop(index)
                self._size -= 1
                if not block:
                    del self._blocks[n]
                return job
            index -= len(block)
        raise IndexError("queue index out of range")

    def remove(self, job: _J) -> bool:
        """Takes a given job out; False if it isn't in."""
        key = self._key(job)
        n = self._block_of(key)
        if n == len(self._blocks):
            return False
        block = self._blocks[n]
        index = bisect_left(block, key, key=self._key)
        if index == len(block) or block[index] is not job:
            return False
        del block[index]
        self._size -= 1
        if not block:
            del self._blocks[n]
        return True
