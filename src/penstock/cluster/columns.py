"""The columns of one batch by name; thousands of one form are one run, and become columns only where asked for.

Decides nothing about values. A run is what lets a batch of 5,000 small tensors be sent, and taken as tensors, at the
price of a few columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.cluster.column import Column


@dataclass(slots=True, frozen=True)
class Run:
    """Regular columns of the same kind, rows and shape, one right after another in `data`."""

    names: Sequence[str]
    kind: str
    rows: int
    shape: tuple[int, ...]
    data: memoryview

    def column(self, k: int) -> Column:
        size = self.data.nbytes // len(self.names)
        return Column(self.kind, self.data[k * size : (k + 1) * size], self.rows, self.shape)


Part = Run | tuple[str, Column]


class Columns(Mapping[str, Column]):
    """Parts in order, each a run or one column with its name. No name comes twice."""

    __slots__ = ("_found", "_places", "parts")

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._found: dict[str, Column] = {}
        self._places: dict[str, tuple[Run, int]] | None = None

    def __getitem__(self, name: str) -> Column:
        if self._places is None:
            self._found = {part[0]: part[1] for part in self.parts if not isinstance(part, Run)}
            runs = [part for part in self.parts if isinstance(part, Run)]
            self._places = {name: (run, k) for run in runs for k, name in enumerate(run.names)}
        if name not in self._found:
            run, k = self._places[name]
            self._found[name] = run.column(k)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        for part in self.parts:
            if isinstance(part, Run):
                yield from part.names
            else:
                yield part[0]

    def __len__(self) -> int:
        return sum(len(part.names) if isinstance(part, Run) else 1 for part in self.parts)

    def row_counts(self) -> set[int]:
        """Those that columns have; one, in a batch."""
        return {part.rows if isinstance(part, Run) else part[1].rows for part in self.parts}

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes if isinstance(part, Run) else part[1].nbytes for part in self.parts)

    @staticmethod
    def of(columns: Mapping[str, Column]) -> Columns:
        return columns if isinstance(columns, Columns) else Columns(list(columns.items()))
