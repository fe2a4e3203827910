"""How the calls of one method are launched on the workers: one registry, and the one place where a mode is parsed.

A mode says which ranks are called and how the submissions run. Every submission has ended before a launch returns, so
that whoever launches next finds all workers with the same calls. Knows nothing of arguments or of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from penstock.cluster.batch import Batch
from penstock.cluster.dispatch import Arguments, did_you_mean
from penstock.cluster.errors import ClusterError
from penstock.cluster.pool import SubmitPool

__all__ = ["Execute", "execute_of", "parse_execute", "register_execute"]

Submit = Callable[[int], Any]
Launch = Callable[[Sequence[int], Submit, SubmitPool], list[BaseException | None]]
THREADED_BYTES = 1 << 20
"""Batches smaller than this, in all, are made ready sooner by one thread than by several."""
DEFAULT = "all"


@dataclass(frozen=True)
class Execute:
    """A mode: the ranks out of those that a dispatch names, and what launches them."""

    ranks: Callable[[Sequence[int]], Sequence[int]]
    launch: Launch
    """Submits to every rank given; what each submission raised, in that order."""
    worth_it: Callable[[Sequence[Arguments]], bool] | None = None
    """Whether calls with these arguments are launched so; else one after another. None: always."""

    def launches(self, arguments: Sequence[Arguments], without_batches: bool = False) -> Launch:
        """What launches calls with these arguments, or with what is left of them once batches go by reference."""
        if self.worth_it is None:
            return self.launch
        if without_batches:
            arguments = [_without_batches(given) for given in arguments]
        return self.launch if self.worth_it(arguments) else _serial


_MODES: dict[str, Execute] = {}


def register_execute(name: str, mode: Execute) -> None:
    """Adds a mode. Raises ClusterError where the name is taken."""
    if name in _MODES:
        raise ClusterError(f"there is an execute mode '{name}' already")
    _MODES[name] = mode


def parse_execute(name: str) -> str:
    """A mode's name, in any case of letters. Raises ClusterError that lists the modes there are."""
    found = name.lower()
    if found not in _MODES:
        raise ClusterError(f"there is no execute mode '{name}'{did_you_mean(found, _MODES)}")
    return found


def execute_of(*names: str) -> tuple[str, Execute]:
    """The first mode that is named: a method's before a group's before the run's."""
    name = parse_execute(next((name for name in names if name), DEFAULT))
    return name, _MODES[name]


def _tried(submit: Submit, rank: int) -> BaseException | None:
    try:
        submit(rank)
    except Exception as error:  # noqa: BLE001  # handed to the group, which says what became of the others
        return error
    return None


def _serial(ranks: Sequence[int], submit: Submit, pool: SubmitPool) -> list[BaseException | None]:
    return [_tried(submit, rank) for rank in ranks]


def _threaded(ranks: Sequence[int], submit: Submit, pool: SubmitPool) -> list[BaseException | None]:
    if len(ranks) == 1:
        return _serial(ranks, submit, pool)
    futures: list[Future[BaseException | None]] = []
    refused: BaseException | None = None
    for rank in ranks[1:]:
        try:
            futures.append(pool.submit(_tried, submit, rank))
        except ClusterError as error:
            if not futures:
                raise
            refused = error  # the pool is full, or was closed: the others are out already, and must be told of
            break
    first = refused or _tried(submit, ranks[0])
    told = [future.exception() or future.result() for future in futures]
    return [first, *told, *[refused] * (len(ranks) - 1 - len(told))]


def _is_heavy(arguments: Sequence[Arguments]) -> bool:
    """Large batches, or values whose size isn't known: the carrier may take long over them."""
    values = [value for args, kwargs in arguments for value in (*args, *kwargs.values())]
    small = (Batch, str, int, float, bool, type(None))
    return sum(value.nbytes for value in values if isinstance(value, Batch)) >= THREADED_BYTES or not all(
        isinstance(value, small) for value in values
    )


def _without_batches(arguments: Arguments) -> Arguments:
    args, kwargs = arguments
    left = {name: value for name, value in kwargs.items() if not isinstance(value, Batch)}
    return tuple(value for value in args if not isinstance(value, Batch)), left


register_execute("all", Execute(lambda ranks: ranks, _serial))
register_execute("all_multithread", Execute(lambda ranks: ranks, _threaded, _is_heavy))
register_execute("rank_zero", Execute(lambda ranks: [rank for rank in ranks if rank == 0], _serial))
