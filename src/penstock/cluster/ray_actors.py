"""Ray workers: the same groups over Ray actors, on as many machines as Ray has.

The edge to Ray, which places actors and moves bytes. Decides what goes by reference: a large batch
is put once for all workers that get it, a stored one is named with its rows; small arguments go inline. Ray is imported
where used; its own transport inside its cluster is the one place where objects are pickled.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.cluster.batch import Batch
from penstock.cluster.dispatch import Arguments
from penstock.cluster.errors import CallTimeout, ClusterError, WorkerFailed
from penstock.cluster.workers import Sent, Workers, keep_what_is_there
from penstock.errors import MissingExtra

PUT_BYTES = 100 * 1024
"""Batches from this size are put, smaller ones go inline. Ray stores larger arguments itself, each call anew. A call
of four actors on two cores takes 4.4 ms inline and 6.3 ms put with 64 KB, 7.6 and 6.7 ms with 128 KB, 7.7 and 5.9 ms
with 1 MB."""
START_TIMEOUT_S = 300.0
SOON_S = 1.0
"""How long answers are waited for together, before failures are looked for among those that are there."""


def the_ray() -> Any:
    """The package. Raises MissingExtra."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray", "workers on Ray") from None
    return ray


class ResourcePool:
    """Places for workers: `size` bundles of CPUs and GPUs in one placement group, which may be split between groups."""

    def __init__(
        self, size: int, *, cpus: float = 1, gpus: float = 0, strategy: str = "PACK", timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """Waits until Ray has the room. `strategy`: Ray's own. Raises CallTimeout where it has not, in time."""
        ray = the_ray()
        from ray.util.placement_group import placement_group, remove_placement_group

        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        self.cpus, self.gpus = cpus, gpus
        self.placement_group = placement_group([bundle] * size, strategy=strategy)
        self.bundles = tuple(range(size))
        try:
            ray.get(self.placement_group.ready(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            remove_placement_group(self.placement_group)
            raise CallTimeout(
                f"Ray found no room for {size} bundles of {bundle} in {timeout_s:g} s; "
                f"it has {ray.available_resources()}"
            ) from None

    def split(self, *sizes: int) -> list[ResourcePool]:
        """Parts of these sizes, in the same placement group. Raises ClusterError where they don't add up."""
        if sum(sizes) != len(self.bundles) or min(sizes, default=0) < 1:
            raise ClusterError(f"a pool of {len(self.bundles)} bundles doesn't split into {list(sizes)}")
        parts, at = [], 0
        for size in sizes:
            part = object.__new__(ResourcePool)
            part.cpus, part.gpus, part.placement_group = self.cpus, self.gpus, self.placement_group
            part.bundles = self.bundles[at : at + size]
            parts.append(part)
            at += size
        return parts

    def close(self) -> None:
        """Gives the places back; workers there end."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.placement_group)


class _Reference(NamedTuple):
    """Stands for a batch among inline arguments: rows of the `number`-th object that goes along."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Prepared:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    references: tuple[Any, ...]


_NOTHING = _Prepared((), {}, ())
_Given = tuple[tuple[Any, ...], dict[str, Any], bool]
"""Arguments, and whether the answer is wanted."""


class _Failure(NamedTuple):
    """What a method raised, as text: an exception's own class may not be importable where it is read."""

    cause: str
    traceback: str


class _Actor:
    """One worker: an object of each role's class. Ray runs its calls in the order in which they were submitted."""

    def __init__(self, environment: dict[str, str], roles: dict[str, type], arguments: dict[str, dict[str, Any]]):
        os.environ.update(environment)
        self._objects = {role: worker(**arguments.get(role, {})) for role, worker in roles.items()}
        keep_what_is_there()

    def ready(self) -> bool:
        return True

    def _call_empty(self, role: str, method: str) -> Any:
        try:
            return getattr(self._objects[role], method)()
        except Exception as error:  # noqa: BLE001  # the controller names it
            return _failure(error)

    def _call(self, role: str, method: str, given: _Given, held: Sequence[Batch]) -> Any:
        def opened(value: Any) -> Any:
            return held[value.number].slice(value.start, value.stop) if isinstance(value, _Reference) else value

        args, kwargs, answer = given
        try:
            function = getattr(self._objects[role], method)
            value = function(*map(opened, args), **{name: opened(value) for name, value in kwargs.items()})
        except Exception as error:  # noqa: BLE001  # the controller names it
            return _failure(error)
        return value if answer else None


def _failure(error: Exception) -> _Failure:
    return _Failure(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


def _entry(role: str, method: str, empty: bool) -> str:
    return f"{role}__{method}" + ("__without_arguments" if empty else "")


def _actor_class(roles: Mapping[str, type]) -> type:
    """`_Actor` with methods of its own for each of the roles': to name it as an argument costs a sixth of a call.

    There are two for each: Ray binds arguments to a method's signature at every call, unless it has no parameters.
    """

    def with_arguments(role: str, method: str) -> Any:
        def call(self: _Actor, given: _Given, *held: Batch) -> Any:
            return self._call(role, method, given, held)

        return call

    def without(role: str, method: str) -> Any:
        def call(self: _Actor) -> Any:
            return self._call_empty(role, method)

        return call

    named = [(role, name) for role, worker in roles.items() for name in dir(worker)]
    public = [(role, name) for role, name in named if not name.startswith("_") and callable(getattr(roles[role], name))]
    entries = {_entry(*key, False): with_arguments(*key) for key in public}
    return type("Worker", (_Actor,), entries | {_entry(*key, True): without(*key) for key in public})


class RayWorkers(Workers):
    """Actors, one for each bundle of a pool."""

    def __init__(
        self,
        roles: Mapping[str, type],
        pool: ResourcePool | int,
        *,
        gpus: float = 0,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
        name: str = "workers",
        environment: Mapping[str, str] | None = None,
        put_bytes: int = PUT_BYTES,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Starts the actors and returns when all have made their objects. `put_bytes`: batches from this size are put.

        `pool`: a number means so many bundles of one CPU and `gpus`, given back by `close`.

        `environment`: variables of the actors, set before the classes are made, besides RANK and WORLD_SIZE. Raises
        WorkerFailed, CallTimeout.
        """
        self._own_pool: ResourcePool | None = None
        if isinstance(pool, int):
            pool = self._own_pool = ResourcePool(pool, gpus=gpus, timeout_s=start_timeout_s)
        super().__init__(name, len(pool.bundles), dict(roles))
        self._ray = the_ray()
        self._put_bytes = put_bytes
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = self._ray.remote(_actor_class(roles))
        given = {role: dict(values) for role, values in (arguments or {}).items()}
        self._actors: list[Any] = []
        self._entries: dict[tuple[str, str, bool], list[Any]] = {}
        for rank, bundle in enumerate(pool.bundles):
            own = {**(environment or {}), "RANK": str(rank), "WORLD_SIZE": str(self.size)}
            strategy = PlacementGroupSchedulingStrategy(pool.placement_group, bundle)
            options = {
                "num_cpus": pool.cpus,
                "num_gpus": pool.gpus,
                "scheduling_strategy": strategy,
                "enable_task_events": False,  # an entry of each call in Ray's list of tasks takes 5 % of a small one
            }
            self._actors.append(remote.options(**options).remote(own, dict(roles), given))
        ready = [Sent(rank, "__init__", actor.ready.remote()) for rank, actor in enumerate(self._actors)]
        try:
            self.gather(ready, start_timeout_s)
        except BaseException:
            self.close()
            raise

    def prepare(self, arguments: Arguments) -> _Prepared:
        args, kwargs = arguments
        if not args and not kwargs:
            return _NOTHING
        references: list[Any] = []

        def prepared(value: Any) -> Any:
            if not isinstance(value, Batch):
                return value
            if value.home is not None and isinstance(value.home.store, self._ray.ObjectRef):
                references.append(value.home.store)
                return _Reference(len(references) - 1, value.home.start, value.home.start + len(value))
            if value.nbytes < self._put_bytes:
                return value
            references.append(self._ray.put(value))
            return _Reference(len(references) - 1, 0, len(value))

        return _Prepared(
            tuple(map(prepared, args)), {name: prepared(value) for name, value in kwargs.items()}, tuple(references)
        )

    def submit(self, rank: int, role: str, method: str, prepared: _Prepared, answer: bool) -> Sent:
        empty = answer and prepared is _NOTHING
        calls = self._entries.get((role, method, empty))
        if calls is None:  # Ray makes them anew each time they are asked for
            name = _entry(role, method, empty)
            calls = self._entries[role, method, empty] = [getattr(actor, name).remote for actor in self._actors]
        if empty:
            return Sent(rank, method, calls[rank]())
        return Sent(rank, method, calls[rank]((prepared.args, prepared.kwargs, answer), *prepared.references))

    def gather(self, sent: Sequence[Sent], timeout_s: float) -> list[Any]:
        """As `Workers.gather`: one that failed or died is told while others still run."""
        end = time.monotonic() + timeout_s
        # Most calls end soon, and one request for all answers is the cheapest. Else it is told below what went wrong.
        try:
            values = self._ray.get([call.ticket for call in sent], timeout=min(timeout_s, SOON_S))
        except self._ray.exceptions.RayError:
            pass
        else:
            return self._checked(sent, values)
        waiting = [call.ticket for call in sent]
        late = waiting
        while late and (left := end - time.monotonic()) >= 0:
            ready, late = self._ray.wait(waiting, num_returns=len(waiting), timeout=min(left, 1.0))
            if late and ready:
                self._values([call for call in sent if call.ticket in ready])
        if late:
            ranks = ", ".join(str(call.rank) for call in sent if call.ticket in late)
            raise CallTimeout(f"{self.name}: no answer to {sent[0].method}() from rank {ranks} in {timeout_s:g} s")
        return self._values(sent)

    def put(self, batch: Batch) -> Batch:
        reference = self._ray.put(batch)
        held: Batch = self._ray.get(reference)
        return held.stored(reference)

    def close(self) -> None:
        self.lost = self.lost or "it was closed"
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        if self._own_pool is not None:
            self._own_pool.close()
            self._own_pool = None

    def _values(self, sent: Sequence[Sent]) -> list[Any]:
        try:
            values = self._ray.get([call.ticket for call in sent])
        except self._ray.exceptions.RayError:
            values = [self._value(call) for call in sent]
        return self._checked(sent, values)

    def _checked(self, sent: Sequence[Sent], values: list[Any]) -> list[Any]:
        """Raises WorkerFailed for the first that says that it failed."""
        if _Failure in map(type, values):
            call, failure = next((call, value) for call, value in zip(sent, values) if isinstance(value, _Failure))
            raise WorkerFailed(self.name, call.rank, call.method, failure.cause, failure.traceback)
        return values

    def _value(self, call: Sent) -> Any:
        try:
            return self._ray.get(call.ticket)
        except self._ray.exceptions.RayActorError as error:
            cause = f"its actor is gone: {error}"
            self.lost = self.lost or f"rank {call.rank} is gone at {call.method}()"
        except self._ray.exceptions.RayError as error:
            cause = f"{type(error).__name__}: {error}"
        raise WorkerFailed(self.name, call.rank, call.method, cause)
