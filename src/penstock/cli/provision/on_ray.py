"""Machines that are actors of a Ray cluster, placed by their resources; each runs one agent as a process of its own.

Actors are detached and named after the run, so that they outlive the manager that made them and the next one finds
them. An agent leaves when its actor is gone, whose pipe it watches. Ray's own autoscaler may bring the node that an
actor waits for. Decides nothing. Ray's library is in a child process (`ray_child`), which it may end.
"""

from __future__ import annotations

import importlib.util
import secrets
import sys
from collections.abc import Mapping, Sequence

import msgspec

from penstock.cli.provision.line_child import LineChild
from penstock.cli.provision.ray_lines import AddActors, Begin, ListActors, ReleaseActor
from penstock.errors import ConfigError, MissingExtra
from penstock.rollout.provision_types import JoinOrder, Seen

__all__ = ["RayProvisioner"]

LEAVE_S = 10.0
# Ray puts the folder of a script on its workers' path, which `-m` would make one of our packages.
CHILD = (sys.executable, "-c", "from penstock.cli.provision.ray_child import main; main()")


class RayProvisioner:
    """`resources`: custom resources of an actor, such as `{ spot = 1 }`, besides `cpus` and `gpus`.

    `address`: of the cluster, as `ray.init` takes it. `arguments`: further words for `penstock join`. `environment`:
    variables of the agents. Raises ConfigError, ValueError, MissingExtra.
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
        if importlib.util.find_spec("ray") is None:
            raise MissingExtra("ray", "ray", "machines on Ray")
        if isinstance(arguments, str) or not all(isinstance(word, str) for word in arguments):
            raise ConfigError("fleet.options.arguments: a list of words for penstock join is needed")
        self._join = join
        self._arguments = tuple(arguments)
        self._stem = f"penstock-{join.run}-"
        begin = {
            "address": address,
            "namespace": namespace,
            "stem": self._stem,
            "placement": {"num_cpus": cpus, "num_gpus": gpus, "resources": dict(resources or {})},
            "environment": {"PENSTOCK_TOKEN": join.token, **(environment or {})},
            "leave_s": leave_s,
        }
        # Refused now rather than by the child, which takes nothing else.
        checked = msgspec.convert(begin, Begin)
        self._child = LineChild(CHILD, checked, "the process that speaks to Ray")

    async def add(self, count: int) -> Sequence[str]:
        names = [f"{self._stem}{secrets.token_hex(4)}" for _ in range(count)]
        machines = {name: [*self._join.words(name), *self._arguments] for name in names}
        await self._child.ask(AddActors(machines))
        return names

    async def release(self, machine: str) -> None:
        await self._child.ask(ReleaseActor(machine))

    async def list(self) -> Sequence[Seen]:
        answer = await self._child.ask(ListActors())
        return [Seen(row.name, not row.cause, row.cause) for row in answer.rows]

    async def close(self) -> None:
        """Actors are detached: they stay until they are released."""
        await self._child.close()
