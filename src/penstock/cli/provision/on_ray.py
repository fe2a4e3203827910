"""Machines that are actors of a Ray cluster, placed by their resources; each runs one agent as a process of its own.

Actors are detached and named after the run, so that they outlive the manager that made them and the next one finds
them. An agent leaves when its actor is gone, whose pipe it watches. Ray's own autoscaler may bring the node that an
actor waits for. Decides nothing. Ray's calls block, so each is made on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.cluster.ray_actors import the_ray
from penstock.errors import ProvisionError
from penstock.rollout.provision_types import JoinOrder, Seen

__all__ = ["RayProvisioner"]

LEAVE_S = 10.0
ANSWER_S = 2.0
"""For an actor to say how its agent is; one that has no place yet says nothing."""
TAIL_BYTES = 300
"""Of what an agent said last."""
LOST_CAUSE = "its actor died: "


class AgentHost:
    """The actor: one `penstock join` on whatever node Ray has put it."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *words, "--exit-with-stdin"],
            stdin=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def ended(self) -> str:
        """Empty while the agent runs; else how it ended."""
        code = self._process.poll()
        if code is None:
            return ""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - TAIL_BYTES))
        tail = " ".join(self._said.read().decode(errors="replace").split())
        return f"its agent ended with exit code {code}" + (f"; last words: {tail}" if tail else "")

    def stop(self, leave_s: float) -> None:
        """SIGTERM, and SIGKILL where that does not help in time."""
        self._process.terminate()
        try:
            self._process.wait(leave_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RayProvisioner:
    """`resources`: custom resources of an actor, such as `{ spot = 1 }`, besides `cpus` and `gpus`.

    `address`: of the cluster, as `ray.init` takes it. `arguments`: further words for `penstock join`. `environment`:
    variables of the agents. Raises MissingExtra.
    """

    def __init__(
        self,
        join: JoinOrder,
        *,
        address: str = "auto",
        namespace: str = "penstock",
        resources: Mapping[str, float] | None = None,
        cpus: float = 1,
        gpus: float = 0,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        leave_s: float = LEAVE_S,
    ) -> None:
        self._ray = the_ray()
        self._join = join
        self._address = address
        self._namespace = namespace
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "resources": dict(resources or {}), "max_restarts": 0}
        self._arguments = tuple(arguments)
        self._environment = dict(environment or {})
        self._leave_s = leave_s
        self._stem = f"penstock-{join.run}-"
        self._own_connection = False

    async def add(self, count: int) -> Sequence[str]:
        return await asyncio.to_thread(self._add, count)

    async def release(self, machine: str) -> None:
        await asyncio.to_thread(self._release, machine)

    async def list(self) -> Sequence[Seen]:
        return await asyncio.to_thread(self._list)

    async def close(self) -> None:
        """Actors are detached: they stay until they are released."""
        if self._own_connection:
            await asyncio.to_thread(self._ray.shutdown)

    # ---- on a thread

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        try:
            self._ray.init(
                address=self._address, namespace=self._namespace, log_to_driver=False, configure_logging=False
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ProvisionError(f"no Ray cluster at {self._address!r}: {error}") from error
        self._own_connection = True

    def _add(self, count: int) -> Sequence[str]:
        self._connect()
        return [self._start() for _ in range(count)]

    def _start(self) -> str:
        name = f"{self._stem}{secrets.token_hex(4)}"
        actor = self._ray.remote(AgentHost).options(
            name=name, namespace=self._namespace, lifetime="detached", **self._options
        )
        words = [*self._join.words(name), *self._arguments]
        # The token goes by Ray's own transport, to this actor alone.
        actor.remote(words, {"PENSTOCK_TOKEN": self._join.token, **self._environment})
        return name

    def _release(self, machine: str) -> None:
        self._connect()
        try:
            actor = self._ray.get_actor(machine, namespace=self._namespace)
        except ValueError:
            return
        errors = self._ray.exceptions
        # One that has no place yet, or is dying, has nothing to stop.
        with contextlib.suppress(errors.RayActorError, errors.GetTimeoutError):
            self._ray.get(actor.stop.remote(self._leave_s), timeout=self._leave_s + ANSWER_S)
        self._ray.kill(actor, no_restart=True)

    def _list(self) -> Sequence[Seen]:
        self._connect()
        named = self._ray.util.list_named_actors(all_namespaces=True)
        names = [row["name"] for row in named if row["namespace"] == self._namespace]
        asked: dict[str, Any] = {}
        for name in sorted(name for name in names if name.startswith(self._stem)):
            # It may have died since it was listed.
            with contextlib.suppress(ValueError):
                asked[name] = self._ray.get_actor(name, namespace=self._namespace).ended.remote()
        if asked:
            self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        return [self._seen(name, answer) for name, answer in asked.items()]

    def _seen(self, name: str, answer: Any) -> Seen:
        errors = self._ray.exceptions
        try:
            cause = self._ray.get(answer, timeout=0)
        except errors.GetTimeoutError:
            return Seen(name)
        except errors.RayActorError as error:
            return Seen(name, False, LOST_CAUSE + str(error).splitlines()[0])
        return Seen(name, not cause, cause)
