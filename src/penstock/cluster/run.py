"""Cluster: what one run owns of workers and threads, from its settings to its end.

Decides nothing about calls. It has the run's execute mode, one pool for submissions and another for rewards (a reward
that calls a group then never waits for its own pool), and ends all of it in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.cluster.dispatch import Mesh
from penstock.cluster.execute import DEFAULT, parse_execute
from penstock.cluster.group import CALL_TIMEOUT_S, WorkerGroup
from penstock.cluster.local import LocalWorkers
from penstock.cluster.pool import PoolStats, SubmitPool
from penstock.cluster.ray_actors import RayWorkers, ResourcePool, the_ray
from penstock.cluster.workers import Workers

EXECUTE_THREADS = 8


class Cluster:
    """The workers of a run. A context manager; leaving it ends them."""

    def __init__(
        self, execute_mode: str = DEFAULT, execute_threads: int = EXECUTE_THREADS, reward_threads: int = EXECUTE_THREADS
    ) -> None:
        """Settings as in `cluster.execute_mode` and `cluster.execute_threads`. Raises ClusterError."""
        self.execute_mode = parse_execute(execute_mode)
        self._parts = contextlib.ExitStack()
        self.submit_pool = SubmitPool("submit", execute_threads)
        self.reward_pool = SubmitPool("reward", reward_threads)
        self._parts.callback(self.submit_pool.close)
        self._parts.callback(self.reward_pool.close)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def local(
        self,
        worker: type | Mapping[str, type],
        size: int,
        *,
        arguments: Mapping[str, Any] | None = None,
        environments: Sequence[Mapping[str, str]] | None = None,
        name: str = "",
    ) -> LocalWorkers:
        """Starts processes of this machine; a mapping of roles to classes puts one object of each in every process.

        `arguments`: keyword arguments of the class; with roles, a mapping of role to those. As `LocalWorkers`.
        """
        roles, given = _roles(worker, arguments)
        workers = LocalWorkers(roles, size, arguments=given, name=name or "+".join(roles), environments=environments)
        self._parts.callback(workers.close)
        return workers

    def ray(
        self,
        worker: type | Mapping[str, type],
        pool: ResourcePool | int,
        *,
        gpus: float = 0,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        name: str = "",
    ) -> RayWorkers:
        """Starts Ray actors, one for each bundle of the pool (a number: so many of one CPU and `gpus`). As `local`.

        Joins the Ray cluster that RAY_ADDRESS names, or starts one here and ends it with this. Raises MissingExtra,
        WorkerFailed, CallTimeout.
        """
        ray = the_ray()
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
            self._parts.callback(ray.shutdown)
        roles, given = _roles(worker, arguments)
        named = name or "+".join(roles)
        workers = RayWorkers(roles, pool, gpus=gpus, arguments=given, name=named, environment=environment)
        self._parts.callback(workers.close)
        return workers

    def group(
        self,
        workers: Workers,
        role: str = "",
        *,
        mesh: Mesh | None = None,
        execute_mode: str = "",
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> WorkerGroup:
        """One role of a set of workers; by default its only one."""
        return WorkerGroup(
            workers,
            role or next(iter(workers.roles)),
            self.submit_pool,
            mesh=mesh,
            execute_mode=execute_mode,
            run_execute_mode=self.execute_mode,
            timeout_s=timeout_s,
        )

    def stats(self) -> dict[str, PoolStats]:
        """Counters of both pools, by name."""
        return {pool.name: pool.stats() for pool in (self.submit_pool, self.reward_pool)}

    def close(self) -> None:
        """Ends all workers, then the pools."""
        self._parts.close()


def _roles(
    worker: type | Mapping[str, type], arguments: Mapping[str, Any] | None
) -> tuple[dict[str, type], dict[str, Any]]:
    given = dict(arguments or {})
    return ({"worker": worker}, {"worker": given}) if isinstance(worker, type) else (dict(worker), given)
