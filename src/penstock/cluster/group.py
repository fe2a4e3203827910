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
from penstock.cluster.dispatch import Arguments, Mesh, Method, Shares, Split, method_of, split_of
from penstock.cluster.errors import ClusterError, GroupPoisoned
from penstock.cluster.execute import Execute, execute_of
from penstock.cluster.pool import SubmitPool
from penstock.cluster.workers import Sent, Workers

CALL_TIMEOUT_S = 1800.0
_Plan = tuple[Method, Split, str, Execute]


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
                answers = self._workers.gather(self._sent, left)
                ranks = [call.rank for call in self._sent]
                if ranks != list(self._shares.answering):
                    by_rank = dict(zip(ranks, answers))
                    answers = [by_rank[rank] for rank in self._shares.answering if rank in by_rank]
                self._value = [self._shares.collect(answers)]
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
        self._plans: dict[str, _Plan] = {}
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
        method, split, named, mode = self._plans.get(name) or self._planned(name)
        shares = split(self.mesh, method, args, kwargs)
        every = range(self.workers.size) if shares.only is None else shares.only
        ranks = mode.ranks(every)
        if len(ranks) < len(every) and not shares.rank_zero_alone:
            raise ClusterError(
                f"{self.role}.{name}(): execute mode '{named}' leaves out ranks whose share of a "
                f"'{method.dispatch}' call nobody else has"
            )
        prepared = self._prepared(mode, ranks, shares.arguments)
        sent = self._launched(mode, ranks, name, shares, prepared)
        return Pending(self.workers, sent, shares, self._timeout_s)

    def _planned(self, name: str) -> _Plan:
        """What is the same for every call of a method."""
        method = method_of(self._worker, name)
        self._plans[name] = plan = (method, split_of(method.dispatch), *execute_of(method.execute, self.execute_mode))
        return plan

    def _prepared(self, mode: Execute, ranks: Sequence[int], arguments: Sequence[Arguments]) -> dict[int, Any]:
        """By identity of arguments: those that ranks share are made ready once. If it raises, nothing was sent."""
        different = {id(arguments[rank]): arguments[rank] for rank in ranks}
        if len(different) == 1:
            return {key: self.workers.prepare(shared) for key, shared in different.items()}
        keys = list(different)
        ready: dict[int, Any] = {}

        def prepare(k: int) -> None:
            ready[keys[k]] = self.workers.prepare(different[keys[k]])

        launch = mode.launches(list(different.values()))
        for error in launch(range(len(keys)), prepare, self._pool):
            if error is not None:
                raise error
        return ready

    def _launched(
        self, mode: Execute, ranks: Sequence[int], name: str, shares: Shares, prepared: dict[int, Any]
    ) -> list[Sent]:
        arguments, answering, workers = shares.arguments, shares.answering, self.workers
        launch = mode.launches([arguments[rank] for rank in ranks], without_batches=True)  # they were dealt with
        sent: dict[int, Sent] = {}

        def submit(rank: int) -> None:
            sent[rank] = workers.submit(rank, self.role, name, prepared[id(arguments[rank])], rank in answering)

        with workers.order:
            workers.refuse_if_lost()
            try:
                errors = launch(ranks, submit, self._pool)
            except ClusterError:
                raise  # nothing was launched
            except BaseException as error:
                workers.lost = f"the launch of {name}() was broken off: {error!r}"
                raise
            if len(sent) == len(ranks):
                return [sent[rank] for rank in ranks]
            rank, cause = next((rank, error) for rank, error in zip(ranks, errors) if error)
            if not sent:
                raise cause
            workers.lost = f"{name}() reached rank {', '.join(map(str, sorted(sent)))} and not {rank}: {cause}"
        raise GroupPoisoned(f"{workers.name}: {workers.lost}") from cause
