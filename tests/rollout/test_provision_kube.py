"""Machines on Kubernetes, by its official client against answers that follow the API's contract."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_chapters import POD
from kube_stand_in import Cluster, serve

from penstock.cli.provision import make_provisioner
from penstock.errors import ConfigError, ProvisionError
from penstock.rollout.provision_types import JoinOrder, Provisioner, Seen

pytest.importorskip("kubernetes")

JOB = """
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
        - name: agent
          image: "registry.example/penstock:1"
          args: ["penstock", "join", "--manager", "$(PENSTOCK_MANAGER)", "--name", "$(PENSTOCK_NAME)"]
"""


class Place:
    """A cluster and what is needed to speak to it."""

    def __init__(self, cluster: Cluster, folder: Path, url: str) -> None:
        self.cluster = cluster
        self.folder = folder
        named = {"clusters": "cluster", "users": "user", "contexts": "context"}
        held: dict[str, dict[str, Any]] = {
            "cluster": {"server": url},
            "user": {"token": "t"},
            "context": {"cluster": "c", "user": "c"},
        }
        config: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", "current-context": "c"}
        config |= {key: [{"name": "c", one: held[one]}] for key, one in named.items()}
        (folder / "kubeconfig").write_text(json.dumps(config))

    def provisioner(self, template: str = POD, run: str = "run-7", **options: Any) -> Provisioner:
        (self.folder / "template.yaml").write_text(template)
        join = JoinOrder(run, "http://trainer.example:7070", "secret", ("--engine", "vllm"))
        chosen = {"token_secret": "penstock/token", "grace_s": 1, "request_s": 3.0, "namespace": "rl", **options}
        paths = {"template": str(self.folder / "template.yaml"), "kubeconfig": str(self.folder / "kubeconfig")}
        return make_provisioner("kubernetes", join, paths | chosen)

    def asked(self, method: str) -> list[tuple[str, dict[str, list[str]], Any]]:
        return [request[1:] for request in self.cluster.requests if request[0] == method]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    cluster = Cluster()
    with serve(cluster) as url:
        yield Place(cluster, tmp_path, url)


async def test_pods_are_made_from_the_template_listed_by_their_run_and_deleted(place: Place) -> None:
    provisioner = place.provisioner()
    other = place.provisioner(run="another")
    names = list(await provisioner.add(2))
    await other.add(1)
    assert await provisioner.list() == [Seen(name) for name in names]
    made = place.cluster.objects[names[0]]
    assert made["metadata"]["labels"] == {"team": "rl", "penstock.dev/run": "run-7"}
    assert made["spec"]["restartPolicy"] == "Never"
    container = made["spec"]["containers"][0]
    words = f"penstock join --manager http://trainer.example:7070 --name {names[0]} --engine vllm"
    assert container["command"] == words.split()
    by_name = {row["name"]: row for row in container["env"]}
    assert by_name["PENSTOCK_NAME"]["value"] == names[0]
    assert by_name["PENSTOCK_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "penstock", "key": "token"}}
    assert "secret" not in [row.get("value") for row in container["env"]]
    await provisioner.release(names[0])
    assert [seen.id for seen in await provisioner.list()] == names[1:]
    assert len(await other.list()) == 1


@pytest.mark.parametrize(
    ("one", "two"),
    [("a" * 70 + "-001", "a" * 70 + "-002"), ("run-001.", "run-001"), ("run_a/b", "run_a-b"), ("-" * 70, "/" * 70)],
)
async def test_runs_whose_names_make_no_label_don_t_share_one(place: Place, one: str, two: str) -> None:
    names = await place.provisioner(run=one).add(1)
    assert await place.provisioner(run=two).list() == []
    assert await place.provisioner(run=one).list() == [Seen(names[0])]
    label = place.cluster.objects[names[0]]["metadata"]["labels"]["penstock.dev/run"]
    assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", label)


async def test_a_job_s_own_command_stays_and_it_is_deleted_with_its_pods(place: Place) -> None:
    provisioner = place.provisioner(JOB)
    (name,) = await provisioner.add(1)
    spec = place.cluster.objects[name]["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["template"]["metadata"]["labels"] == {"penstock.dev/run": "run-7"}
    container = spec["template"]["spec"]["containers"][0]
    assert container["args"][-1] == "$(PENSTOCK_NAME)"
    assert "command" not in container
    await provisioner.release(name)
    ((_, query, body),) = place.asked("DELETE")
    assert {**query, **(body or {})}["propagationPolicy"] in ("Foreground", ["Foreground"])


async def test_a_name_that_is_taken_is_not_used_409(place: Place) -> None:
    place.cluster.refuse("POST", 409, 'pods "run-7-x" already exists')
    (name,) = await place.provisioner().add(1)
    first, second = [body["metadata"]["name"] for _, _, body in place.asked("POST")]
    assert first != second == name


async def test_a_quota_is_told_in_the_cluster_s_own_words_403(place: Place) -> None:
    message = 'pods "run-7-x" is forbidden: exceeded quota: gpus, requested: 8, used: 16, limited: 16'
    place.cluster.refuse("POST", 403, message)
    with pytest.raises(ProvisionError, match=r"HTTP 403: .*exceeded quota"):
        await place.provisioner().add(2)
    assert place.cluster.objects == {}


async def test_machines_made_before_a_quota_was_reached_are_not_lost(place: Place) -> None:
    provisioner = place.provisioner()
    real, calls = place.cluster.refused, []

    def from_the_second_on(method: str) -> tuple[int, str] | None:
        calls.append(method)
        return (403, "exceeded quota") if method == "POST" and calls.count("POST") > 1 else real(method)

    place.cluster.refused = from_the_second_on  # type: ignore[method-assign]
    assert list(await provisioner.add(3)) == list(place.cluster.objects)
    assert len(place.cluster.objects) == 1


async def test_one_that_is_gone_is_released_404(place: Place) -> None:
    await place.provisioner().release("run-7-gone")


async def test_a_deletion_that_takes_time_is_watched_through_time_outs_and_410(place: Place) -> None:
    provisioner = place.provisioner()
    (name,) = await provisioner.add(1)
    place.cluster.lingers, place.cluster.watch_410 = 4, 1
    place.cluster.refuse("WATCH", 410, "too old resource version")
    await provisioner.release(name)
    assert place.cluster.objects == {}
    assert len([1 for _, query, _ in place.asked("GET") if query.get("watch")]) >= 3


async def test_one_that_somebody_else_deletes_at_the_same_time_is_waited_for_409(place: Place) -> None:
    provisioner = place.provisioner()
    (name,) = await provisioner.add(1)
    place.cluster.objects[name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    place.cluster.lingers = 2
    place.cluster.refuse("DELETE", 409, "the object has been modified")
    await provisioner.release(name)
    assert place.cluster.objects == {}


async def test_one_that_stays_after_its_deletion_is_a_failure_with_its_name(place: Place) -> None:
    provisioner = place.provisioner(grace_s=0, request_s=0.5)
    (name,) = await provisioner.add(1)
    place.cluster.lingers = 10**9
    with pytest.raises(ProvisionError, match=f"{name} is still there"):
        await provisioner.release(name)
    # It is on its way out all the same.
    assert await provisioner.list() == []


async def test_a_list_that_expires_between_two_pages_begins_anew_410(place: Place) -> None:
    provisioner = place.provisioner()
    names = list(await provisioner.add(5))
    place.cluster.page = 2
    place.cluster.refuse("CONTINUE", 410, "The provided continue parameter is too old")
    assert [seen.id for seen in await provisioner.list()] == names
    for _ in range(3):
        place.cluster.refuse("CONTINUE", 410, "The provided continue parameter is too old")
    with pytest.raises(ProvisionError, match="expired 3 times"):
        await provisioner.list()


async def test_a_refused_list_is_told_403(place: Place) -> None:
    place.cluster.refuse("GET", 403, 'pods is forbidden: User "system:x" cannot list resource "pods"')
    with pytest.raises(ProvisionError, match="machines can't be listed: HTTP 403: pods is forbidden"):
        await place.provisioner().list()


async def test_pods_that_have_ended_say_why(place: Place) -> None:
    provisioner = place.provisioner()
    evicted, killed, done = await provisioner.add(3)
    status = place.cluster.objects
    status[evicted]["status"] = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    container = {"name": "agent", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": ended}
    status[killed]["status"] = {"phase": "Failed", "containerStatuses": [container]}
    status[done]["status"] = {"phase": "Succeeded"}
    rows = {seen.id: seen for seen in await provisioner.list()}
    assert not any(seen.alive for seen in rows.values())
    assert rows[evicted].cause == "the pod has failed: Evicted: The node was low on memory."
    assert rows[killed].cause == "the pod has failed: OOMKilled, exit code 137"
    assert "succeeded" in rows[done].cause


async def test_jobs_that_are_over_say_why(place: Place) -> None:
    provisioner = place.provisioner(JOB)
    over, runs = await provisioner.add(2)
    condition = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "it failed once"}
    place.cluster.objects[over]["status"] = {"conditions": [condition]}
    place.cluster.objects[runs]["status"] = {"active": 1}
    assert await provisioner.list() == [Seen(over, False, "the job is over: Failed: it failed once"), Seen(runs)]


METHODS = ("POST", "GET", "CONTINUE", "DELETE", "LOOK", "WATCH")
"""Of all that `use` does."""


async def use(provisioner: Provisioner) -> None:
    names = await provisioner.add(2)
    assert [seen.id for seen in await provisioner.list()] == names
    await provisioner.release(names[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("asked", "waited"), [("2", 2.0), ("", 1.0), ("soon", 1.0), ("0", 0.1)])
async def test_too_many_requests_are_waited_out_as_the_cluster_asks_429(
    place: Place, method: str, asked: str, waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.cluster.page, place.cluster.lingers, place.cluster.retry_after = 1, 2, asked
    waits: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await use(place.provisioner())
    usual, waits[:] = len(place.cluster.requests), []
    place.cluster.objects.clear()
    place.cluster.requests.clear()
    place.cluster.lingers = 2
    place.cluster.refuse(method, 429, "too many requests, please try again later")
    await use(place.provisioner())
    assert waited in waits
    # It was asked once more, and not by the client itself.
    assert len(place.cluster.requests) == usual + 1


@pytest.mark.parametrize("method", METHODS)
async def test_a_cluster_that_asks_for_too_long_is_told_so_at_once_429(place: Place, method: str) -> None:
    place.cluster.page, place.cluster.lingers, place.cluster.retry_after = 1, 2, "20"
    place.cluster.refuse(method, 429, "too many requests")
    with pytest.raises(ProvisionError, match="has too many requests and wants no other for 20 s: HTTP 429: too many"):
        await use(place.provisioner())


async def test_it_is_not_asked_for_ever_429(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real(0))
    for _ in range(100):
        place.cluster.refuse("GET", 429, "too many requests")
    with pytest.raises(ProvisionError, match="wants no other for 1 s: HTTP 429"):
        await place.provisioner(request_s=3.0).list()
    assert len(place.asked("GET")) == 4


async def test_a_call_that_is_cut_off_while_it_waits_asks_no_more(place: Place) -> None:
    place.cluster.retry_after = "3"
    place.cluster.refuse("GET", 429, "too many requests")
    provisioner = place.provisioner()
    call = asyncio.create_task(provisioner.list())
    while not place.asked("GET"):
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(place.asked("GET")) == 1
    # The loop's own threads are for everybody.
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncio")] == []
    await provisioner.close()


async def test_a_cluster_that_is_not_there_is_a_failure_with_a_cause(place: Place, tmp_path: Path) -> None:
    gone = Place(Cluster(), tmp_path, "http://127.0.0.1:9")
    with pytest.raises(ProvisionError, match="the cluster can't be reached"):
        await gone.provisioner(request_s=0.3).list()


@pytest.mark.parametrize(
    ("template", "options", "words"),
    [
        ("kind: Deployment\napiVersion: apps/v1\n", {}, "kind 'Deployment'"),
        ("a: [1", {}, "is no YAML"),
        ("apiVersion: v1\nkind: Pod\nspec: {}\n", {}, "has no container"),
        (POD, {"token_secret": ""}, "no container gets a token"),
        (POD, {"token_secret": "penstock"}, "NAME/KEY"),
        (POD, {"context": "nowhere"}, "no Kubernetes cluster is configured"),
    ],
)
async def test_what_can_t_become_a_machine_is_refused_before_the_run(
    place: Place, template: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        place.provisioner(template, **options)
