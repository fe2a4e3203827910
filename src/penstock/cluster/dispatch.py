"""How the arguments of one call become those of each worker, and how the workers' answers become one.

Pure: a dispatch sees the mesh, the arguments and the method's options, and says what each rank gets, whose answers
count and how they are put together. It knows nothing of processes or of who carries the batches. Ranks that share one
model (a tensor-parallel group, say) get the same shard: the very same object, so that a carrier copies it once.
"""

from __future__ import annotations

import difflib
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.cluster.batch import Batch
from penstock.cluster.column import ITEM_BYTES
from penstock.cluster.errors import ClusterError

F = TypeVar("F", bound=Callable[..., Any])
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
DATA_DIMS = frozenset({"data", "dp", "ddp", "fsdp", "dp_replicate", "dp_shard", "replicate", "shard"})
"""Dimensions of a mesh along which workers see different rows."""
_MARK = "_penstock_method"


@dataclass(frozen=True)
class Mesh:
    """How ranks are laid out: sizes of named dimensions, outermost first, and the ranks in that order."""

    dims: Mapping[str, int]
    ranks: tuple[int, ...] = ()
    """By default 0, 1, 2, ...: the last dimension varies fastest."""

    def __post_init__(self) -> None:
        size = math.prod(self.dims.values())
        ranks = self.ranks or tuple(range(size))
        if sorted(ranks) != list(range(size)):
            raise ClusterError(f"a mesh of {dict(self.dims)} has ranks 0 to {size - 1}, not {list(ranks)}")
        object.__setattr__(self, "ranks", tuple(ranks))

    @staticmethod
    def of_device_mesh(mesh: Any) -> Mesh:
        """From a `torch.distributed` DeviceMesh with named dimensions."""
        names = mesh.mesh_dim_names
        if not names:
            raise ClusterError("the device mesh has no dimension names; make it with mesh_dim_names=('dp', 'tp')")
        return Mesh(dict(zip(names, mesh.mesh.shape)), tuple(mesh.mesh.flatten().tolist()))

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def shards(self) -> int:
        """Parts that data falls into."""
        return math.prod(size for name, size in self.dims.items() if name in DATA_DIMS)

    def shard_of(self) -> list[int]:
        """The part that each rank works on, by rank."""
        found = [0] * self.size
        for place, rank in enumerate(self.ranks):
            shard, rest = 0, place
            strides = []
            for name, size in reversed(list(self.dims.items())):
                strides.append((name, size, rest % size))
                rest //= size
            for name, size, at in reversed(strides):
                if name in DATA_DIMS:
                    shard = shard * size + at
            found[rank] = shard
        return found

    def leaders(self) -> list[int]:
        """The lowest rank of each shard, by shard: the one whose answer counts."""
        shard_of = self.shard_of()
        return [shard_of.index(shard) for shard in range(self.shards)]


@dataclass(frozen=True)
class Method:
    """What `@dispatch` says of a method."""

    dispatch: str = "one_to_all"
    execute: str = ""
    """Empty: the group's, else the run's."""
    pad: bool = True
    """Rows are repeated where they don't divide, and dropped from the answer; False refuses."""
    tokens: str = ""
    """Column whose rows' lengths (or, for whole numbers, values) are balanced over shards of equally many rows."""


@dataclass(frozen=True)
class Shares:
    """One call, split: arguments by rank, the ranks whose answers count, and what those answers add up to."""

    arguments: Sequence[Arguments]
    answering: Sequence[int]
    collect: Callable[[Sequence[Any]], Any]
    rank_zero_alone: bool = False
    """Whether leaving out all other ranks loses nothing."""
    only: Sequence[int] | None = None
    """The ranks that are called at all; None for every one."""


Split = Callable[[Mesh, Method, tuple[Any, ...], dict[str, Any]], Shares]
_DISPATCHES: dict[str, Split] = {}


def register_dispatch(name: str, split: Split) -> None:
    """Adds a way to split calls, for `@dispatch(name)`. Raises ClusterError where the name is taken."""
    if name in _DISPATCHES:
        raise ClusterError(f"there is a dispatch '{name}' already")
    _DISPATCHES[name] = split


def split_of(name: str) -> Split:
    """Raises ClusterError that lists the dispatches there are."""
    if name not in _DISPATCHES:
        raise ClusterError(f"there is no dispatch '{name}'{did_you_mean(name, _DISPATCHES)}")
    return _DISPATCHES[name]


def did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean {close[0]}?" if close else ";"
    return f"{guess} there are: {', '.join(known)}"


def dispatch(name: str, *, execute: str = "", pad: bool = True, tokens: str = "") -> Callable[[F], F]:
    """Says how calls of a worker's method are split: `rank_zero`, `one_to_all`, `all_to_all`, `data_parallel`, or own.

    Options as in `Method`. Raises ClusterError for a name that isn't registered.
    """
    from penstock.cluster.execute import parse_execute

    split_of(name)
    method = Method(name, parse_execute(execute) if execute else "", pad, tokens)

    def mark(function: F) -> F:
        setattr(function, _MARK, method)
        return function

    return mark


def method_of(worker: type, name: str) -> Method:
    """What is said of a worker's method. Raises ClusterError where there is none of that name."""
    function = getattr(worker, name, None)
    if function is None or name.startswith("_") or not callable(function):
        public = [key for key in dir(worker) if not key.startswith("_") and callable(getattr(worker, key))]
        raise ClusterError(f"{worker.__name__} has no method '{name}'; it has: {', '.join(public) or 'none'}")
    found: Method = getattr(function, _MARK, Method())
    return found


def _rank_zero(mesh: Mesh, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shares:
    return Shares([(args, kwargs)] * mesh.size, [0], lambda answers: answers[0], rank_zero_alone=True, only=[0])


def _one_to_all(mesh: Mesh, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shares:
    return Shares([(args, kwargs)] * mesh.size, range(mesh.size), list, rank_zero_alone=True)


def _all_to_all(mesh: Mesh, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shares:
    """Every argument is a list of one value a rank."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, list | tuple) or len(value) != mesh.size:
            told = f"{len(value)} values" if isinstance(value, list | tuple) else type(value).__name__
            raise ClusterError(f"all_to_all takes a list of {mesh.size} values, one a rank; argument {name} is {told}")
    arguments = [
        (tuple(value[rank] for value in args), {name: value[rank] for name, value in kwargs.items()})
        for rank in range(mesh.size)
    ]
    return Shares(arguments, range(mesh.size), list)


def _data_parallel(mesh: Mesh, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shares:
    """Batches are split over the shards; everything else goes to all."""
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Batch)]
    if not batches:
        raise ClusterError("data_parallel splits batches, and no argument is a Batch")
    if len(rows := {len(batch) for batch in batches}) > 1:
        raise ClusterError(f"data_parallel: the batches have different numbers of rows: {sorted(rows)}")
    layout = _laid_out(batches, mesh.shards, method)
    shards = [
        (
            tuple(layout.shard(value, k) for value in args),
            {name: layout.shard(value, k) for name, value in kwargs.items()},
        )
        for k in range(mesh.shards)
    ]
    return Shares([shards[k] for k in mesh.shard_of()], mesh.leaders(), layout.join)


@dataclass
class _Layout:
    """Which row goes to which shard. `rows` is None where shards are consecutive runs of `size` rows."""

    total: int
    size: int
    rows: list[list[int]] | None = None
    padded: dict[int, Batch] = field(default_factory=dict)

    def shard(self, value: Any, k: int) -> Any:
        if not isinstance(value, Batch):
            return value
        whole = self.padded.get(id(value), value)
        return whole.slice(k * self.size, (k + 1) * self.size) if self.rows is None else whole.select(self.rows[k])

    def join(self, answers: Sequence[Any]) -> Any:
        """Answers of as many rows as their shard, in the call's order, padding dropped; others as a list."""
        kinds = {type(answer) for answer in answers}
        if kinds not in ({Batch}, {list}):
            return list(answers)
        if wrong := [k for k, answer in enumerate(answers) if len(answer) != self.size]:
            if kinds == {list}:
                return list(answers)
            raise ClusterError(
                f"data_parallel: shard {wrong[0]} of {self.size} rows was answered with {len(answers[wrong[0]])} rows"
            )
        place = self._places()
        if kinds == {list}:
            flat = [row for answer in answers for row in answer]
            return [flat[k] for k in place]
        whole = Batch.concat(answers)
        return whole.slice(0, self.total) if self.rows is None else whole.select(place)

    def _places(self) -> list[int]:
        """Where each row of the call lies in the answers laid end to end."""
        if self.rows is None:
            return list(range(self.total))
        order = [row for shard in self.rows for row in shard]
        found = [0] * len(order)
        for place, row in enumerate(order):
            found[row] = place
        return found[: self.total]


def _laid_out(batches: Sequence[Batch], shards: int, method: Method) -> _Layout:
    total = len(batches[0])
    missing = -total % shards
    if total == 0:
        raise ClusterError(f"data_parallel: a batch without rows can't be split over {shards} shards")
    if missing and not method.pad:
        raise ClusterError(f"data_parallel: {total} rows don't divide over {shards} shards, and pad is False")
    layout = _Layout(total, (total + missing) // shards)
    if missing:
        extra = [k % total for k in range(missing)]
        layout.padded = {id(batch): Batch.concat([batch, batch.select(extra)]) for batch in batches}
    if method.tokens:
        counted = next((batch for batch in batches if method.tokens in batch.columns), batches[0])
        layout.rows = balanced(token_counts(layout.padded.get(id(counted), counted), method.tokens), shards)
    return layout


def token_counts(batch: Batch, name: str) -> list[int]:
    """Tokens of each row: its length in a ragged column, its value in a column of whole numbers."""
    column = batch.column(name)
    if column.shape == () and column.kind.lstrip("u").startswith("int"):
        code = {1: "b", 2: "h", 4: "i", 8: "q"}[ITEM_BYTES[column.kind]]
        return list(column.data.cast(code.upper() if column.kind.startswith("u") else code))  # type: ignore[call-overload]
    return [math.prod(column.row_shape(row)) for row in range(column.rows)]


def balanced(counts: Sequence[int], shards: int) -> list[list[int]]:
    """Rows for each shard, equally many, with their sums near each other: the longest first, to the least loaded."""
    size = len(counts) // shards
    open_shards = [(0, k) for k in range(shards)]
    found: list[list[int]] = [[] for _ in range(shards)]
    for row in sorted(range(len(counts)), key=lambda row: -counts[row]):
        load, k = heapq.heappop(open_shards)
        found[k].append(row)
        if len(found[k]) < size:
            heapq.heappush(open_shards, (load + counts[row], k))
    return [sorted(rows) for rows in found]


register_dispatch("rank_zero", _rank_zero)
register_dispatch("one_to_all", _one_to_all)
register_dispatch("all_to_all", _all_to_all)
register_dispatch("data_parallel", _data_parallel)
