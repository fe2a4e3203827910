"""What is asked of a Kubernetes cluster, chapter by chapter, each in a namespace of its own.

Played to a real API server when its answers are recorded (`record_kube.py`), and to the recorded answers in the tests.
What happens in a cluster beside the requests, a `Cluster` does: for real while recording, not at all afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from unittest import mock

import pytest

from penstock.cli.provision import kube, make_provisioner
from penstock.errors import ProvisionError
from penstock.rollout.provision_types import JoinOrder, Provisioner, Seen

POD = """
apiVersion: v1
kind: Pod
metadata: {labels: {team: rl}}
spec:
  containers:
    - {name: agent, image: "registry.example/penstock:1"}
"""
JOB = """
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
        - {name: agent, image: "registry.example/penstock:1"}
"""


class Cluster(Protocol):
    """What happens in it beside the requests."""

    def runs_on_a_node(self, name: str) -> None: ...

    def node_ends_it_after(self, name: str, seconds: float) -> None: ...

    def pod_ends(self, name: str, status: dict[str, object]) -> None: ...

    def pod_of_job_fails(self, name: str) -> None: ...

    def quota_of_pods(self, pods: int) -> None: ...

    def old_versions_go_before_the_next_page(self) -> None: ...


class Scene:
    """`kubeconfig` names the context `admin`, and `guest`, who may do nothing."""

    def __init__(self, folder: Path, kubeconfig: Path, cluster: Cluster) -> None:
        self.folder = folder
        self.kubeconfig = kubeconfig
        self.cluster = cluster
        self.names: Iterator[str] = iter(())

    def provisioner(self, run: str, template: str = POD, context: str = "admin", **options: object) -> Provisioner:
        path = self.folder / "template.yaml"
        path.write_text(template)
        join = JoinOrder(run, "http://trainer.example:7070", "secret", ())
        chosen: dict[str, object] = {"token_secret": "penstock/token", "grace_s": 5, "request_s": 20.0}
        chosen |= {"namespace": run, "template": str(path), "kubeconfig": str(self.kubeconfig)}
        return make_provisioner("kubernetes", join, chosen | {"context": context} | options)

    @contextmanager
    def drawn(self, *names: str) -> Iterator[None]:
        """The ends of names are these, and then the numbers; pages are of two, watches end after a second."""
        ends = itertools.chain(names, (f"{number:08x}" for number in itertools.count(1)))
        with (
            mock.patch.object(kube.secrets, "token_hex", side_effect=ends),
            mock.patch.object(kube, "PAGE", 2),
            mock.patch.object(kube, "WATCH_S", 1),
        ):
            yield


async def pods(scene: Scene) -> None:
    """Made, listed in pages, released before a node has them."""
    provisioner = scene.provisioner("pods")
    with scene.drawn():
        names = list(await provisioner.add(3))
        assert await provisioner.list() == [Seen(name) for name in names]
        await provisioner.release(names[0])
        assert await provisioner.list() == [Seen(name) for name in names[1:]]
        await provisioner.release(names[0])


async def taken(scene: Scene) -> None:
    """A name that is there already is not used: 409."""
    provisioner = scene.provisioner("taken")
    with scene.drawn("0000000a", "0000000a", "0000000b"):
        assert await provisioner.add(2) == ["taken-0000000a", "taken-0000000b"]


async def lingers(scene: Scene) -> None:
    """One that runs on a node is there until the node has ended it; meanwhile it is not listed."""
    provisioner = scene.provisioner("lingers")
    with scene.drawn():
        (name,) = await provisioner.add(1)
        scene.cluster.runs_on_a_node(name)
        scene.cluster.node_ends_it_after(name, 1.5)
        await provisioner.release(name)
        assert await provisioner.list() == []


async def ends(scene: Scene) -> None:
    """Pods that have ended say why."""
    provisioner = scene.provisioner("ends")
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    container = {"name": "agent", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": ended}
    with scene.drawn():
        evicted, killed, done = await provisioner.add(3)
        evicted_status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
        scene.cluster.pod_ends(evicted, dict(evicted_status))
        scene.cluster.pod_ends(killed, {"phase": "Failed", "containerStatuses": [container]})
        scene.cluster.pod_ends(done, {"phase": "Succeeded"})
        assert await provisioner.list() == [
            Seen(evicted, False, "the pod has failed: Evicted: The node was low on memory."),
            Seen(killed, False, "the pod has failed: OOMKilled, exit code 137"),
            Seen(done, False, "the pod has succeeded: it does not say why"),
        ]


async def jobs(scene: Scene) -> None:
    """One fails and says so; both are released with their pods."""
    provisioner = scene.provisioner("jobs", JOB)
    with scene.drawn():
        over, runs = await provisioner.add(2)
        scene.cluster.pod_of_job_fails(over)
        cause = "the job is over: Failed: Job has reached the specified backoff limit"
        assert await provisioner.list() == [Seen(over, False, cause), Seen(runs)]
        await provisioner.release(over)
        await provisioner.release(runs)
        assert await provisioner.list() == []


async def quota(scene: Scene) -> None:
    """What a quota allows is made; beyond it the cluster's own words are told: 403."""
    provisioner = scene.provisioner("quota")
    with scene.drawn():
        scene.cluster.quota_of_pods(2)
        assert len(await provisioner.add(3)) == 2
        with pytest.raises(ProvisionError, match=r"HTTP 403: .*exceeded quota: few, requested: pods=1"):
            await provisioner.add(1)


async def expires(scene: Scene) -> None:
    """A list that grows too old between two pages begins anew: 410."""
    provisioner = scene.provisioner("expires")
    with scene.drawn():
        names = list(await provisioner.add(5))
        scene.cluster.old_versions_go_before_the_next_page()
        assert await provisioner.list() == [Seen(name) for name in names]


async def forbidden(scene: Scene) -> None:
    """Who may not, is told so: 403."""
    provisioner = scene.provisioner("forbidden", context="guest")
    with scene.drawn():
        with pytest.raises(ProvisionError, match=r'HTTP 403: pods is forbidden: User "guest" cannot list'):
            await provisioner.list()
        with pytest.raises(ProvisionError, match=r'HTTP 403: pods is forbidden: User "guest" cannot create'):
            await provisioner.add(1)
        with pytest.raises(ProvisionError, match=r'HTTP 403: pods "forbidden-x" is forbidden: User "guest" cannot'):
            await provisioner.release("forbidden-x")


async def unknown(scene: Scene) -> None:
    """Nobody's token: 401. A template that no cluster takes: 422."""
    with scene.drawn():
        with pytest.raises(ProvisionError, match="HTTP 401: Unauthorized"):
            await scene.provisioner("unknown", context="nobody").list()
        bad = POD.replace("name: agent", "name: Agent_1")
        with pytest.raises(ProvisionError, match=r"HTTP 422: .*a lowercase RFC 1123 label"):
            await scene.provisioner("unknown", bad).add(1)


CHAPTERS: dict[str, Callable[[Scene], Awaitable[None]]] = {
    chapter.__name__: chapter for chapter in (pods, taken, lingers, ends, jobs, quota, expires, forbidden, unknown)
}
