"""WorkerGroup: one role on many workers, called as if it were one object.

Decides how a call runs: split by the method's dispatch, made ready for the carrier before anything is sent, launched on
all ranks under the set's lock, gathered with a deadline. A launch that reached some workers and not others poisons the
set: whatever came next would be out of step. Knows nothing of processes or of Ray (`workers`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from penstock.cluster.batch import Batch
from penstock.cluster.dispatch import Arguments, Mesh, Shares, method_of, split_of
from penstock.cluster.errors import ClusterError, GroupPoisoned
from penstock.cluster.execute import Execute, Launch, execute_of
from penstock.cluster.pool import SubmitPool
from penstock.cluster.workers import Sent, Workers

CALL_TIMEOUT_S = 1800.0


class Pending:
    """A call under way."""

    def __init__(self, workers: Workers, sent: Sequence[Sent], shares: Shares, timeout_s: float) -> None:
        self._workers = workers
        self._sent = sent
        self._shares = shares
        self._end = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._value: list[Any] = []

    def result(self, timeout_s: float | None = None) -> Any:
        """What the call adds up to; waits for all workers, at most `timeout_s` or what is left of the group's limit.

        Raises WorkerFailed, CallTimeout.
        """
        with self._lock:
            if not self._value:
                left = max(0.0, self._end - time.monotonic()) if timeout_s is None else timeout_s
                answers = dict(zip((call.rank for call in self._sent), self._workers.gather(self._sent, left)))
                counted = [answers[rank] for rank in self._shares.answering if rank in answers]
                self._value = [self._shares.collect(counted)]
            return self._value[0]


class _Method:
    """`group.name`: called it waits, `submit` doesn't."""

    def __init__(self, group: WorkerGroup, name: str) -> None:
        self._group = group
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> Pending:
        return self._group.submit(self._name, *args, **kwargs)


class WorkerGroup:
    """One role of a set of workers. Methods of the role's class are methods of the group."""

    def __init__(
        self,
        workers: Workers,
        role: str,
        pool: SubmitPool,
        *,
        mesh: Mesh | None = None,
        execute_mode: str = "",
        run_execute_mode: str = "",
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """`mesh`: by default all ranks see different data. `execute_mode`: the group's, before the run's.

        Raises ClusterError.
        """
        self.workers = workers
        self.role = role
        self.mesh = mesh or Mesh({"data": workers.size})
        self.execute_mode = execute_of(execute_mode, run_execute_mode)[0]
        self._worker = workers.class_of(role)
        self._pool = pool
        self._timeout_s = timeout_s
        if self.mesh.size != workers.size:
            raise ClusterError(f"{workers.name}: a mesh of {self.mesh.size} ranks for {workers.size} workers")

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            method_of(self._worker, name)
        except ClusterError as error:
            raise AttributeError(str(error)) from None
        return _Method(self, name)

    def __len__(self) -> int:
        return self.workers.size

    def put(self, batch: Batch) -> Batch:
        """The batch where all workers reach it: written once, passed by reference, its slices too."""
        return self.workers.put(batch)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method and waits. Raises WorkerFailed, CallTimeout, GroupPoisoned, ClusterError."""
        return self.submit(name, *args, **kwargs).result()

    def submit(self, name: str, /, *args: Any, **kwargs: Any) -> Pending:
        """Launches a call; when this returns, every worker that is called has it.

        Raises WorkerFailed, GroupPoisoned and ClusterError.
        """
        self.workers.refuse_if_lost()
        method = method_of(self._worker, name)
        shares = split_of(method.dispatch)(self.mesh, method, args, kwargs)
        named, mode = execute_of(method.execute, self.execute_mode)
        every = range(self.workers.size) if shares.only is None else shares.only
        ranks = list(mode.ranks(every))
        if len(ranks) < len(every) and not shares.rank_zero_alone:
            raise ClusterError(
                f"{self.role}.{name}(): execute mode '{named}' leaves out ranks whose share of a "
                f"'{method.dispatch}' call nobody else has"
            )
        prepared = self._prepared(mode, ranks, shares.arguments)
        light = [without_batches(shares.arguments[rank]) for rank in ranks]  # batches have been dealt with
        sent = self._launched(mode.launches(light), ranks, name, prepared, set(shares.answering))
        return Pending(self.workers, sent, shares, self._timeout_s)

    def _prepared(self, mode: Execute, ranks: Sequence[int], arguments: Sequence[Arguments]) -> dict[int, Any]:
        """By rank; arguments that several ranks share are made ready once. Nothing has been sent if this raises."""
        first_with: dict[int, int] = {}
        for rank in ranks:
            first_with.setdefault(id(arguments[rank]), rank)
        ready: dict[int, Any] = {}

        def prepare(rank: int) -> None:
            ready[rank] = self.workers.prepare(arguments[rank])

        launch = mode.launches([arguments[rank] for rank in first_with.values()])
        for error in launch(list(first_with.values()), prepare, self._pool):
            if error is not None:
                raise error
        return {rank: ready[first_with[id(arguments[rank])]] for rank in ranks}

    def _launched(
        self, launch: Launch, ranks: Sequence[int], name: str, prepared: dict[int, Any], answering: set[int]
    ) -> list[Sent]:
        sent: dict[int, Sent] = {}

        def submit(rank: int) -> None:
            sent[rank] = self.workers.submit(rank, self.role, name, prepared[rank], rank in answering)

        with self.workers.order:
            self.workers.refuse_if_lost()
            errors = launch(ranks, submit, self._pool)
            failed = [(rank, error) for rank, error in zip(ranks, errors) if error is not None]
            if failed and sent:
                rank, error = failed[0]
                self.workers.lost = f"{name}() reached rank {', '.join(map(str, sorted(sent)))} and not {rank}: {error}"
        if failed:
            if sent:
                raise GroupPoisoned(f"{self.workers.name}: {self.workers.lost}") from failed[0][1]
            raise failed[0][1]
        return [sent[rank] for rank in ranks]


def without_batches(arguments: Arguments) -> Arguments:
    """What is left of a call's arguments once batches go by reference."""
    args, kwargs = arguments
    left = {name: value for name, value in kwargs.items() if not isinstance(value, Batch)}
    return tuple(value for value in args if not isinstance(value, Batch)), left
