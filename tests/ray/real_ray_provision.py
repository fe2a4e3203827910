"""Machines that are actors of a real Ray: placed by a resource, found by another manager, released with theirs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from penstock.cli.provision import make_provisioner
from penstock.errors import ProvisionError
from penstock.rollout.provision_types import JoinOrder, ProvisionConfig, Provisioner, Seen
from penstock.rollout.server import ManagerServer, ServerConfig

WAIT_S = 90.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two places for spot machines."""
    ray.init(num_cpus=4, resources={"spot": 2}, include_dashboard=False, log_to_driver=False, namespace="penstock")
    yield
    ray.shutdown()


def provisioner_for(url: str, run: str, **options: Any) -> Provisioner:
    words = ["--engine", "paced", "--preemption", "none", "--reconnect-s", "5"]
    source = str(Path(__file__).parents[2] / "src")
    given = {"resources": {"spot": 1}, "arguments": words, "cpus": 0.1, "environment": {"PYTHONPATH": source}}
    return make_provisioner("ray", JoinOrder(run, url, "secret"), given | options)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s for {what}"
        await asyncio.sleep(0.05)


@pytest.fixture
async def server() -> AsyncIterator[ManagerServer]:
    made = ManagerServer(ServerConfig(token="secret"))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def lives(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


async def test_a_manager_grows_on_ray_and_leaves_nothing_there(server: ManagerServer) -> None:
    config = ProvisionConfig(first=2, ceiling=2, call_s=60.0, list_s=1.0)
    server.provide(config, provisioner_for(server.url, "grows"), release_s=60.0)
    await until(lambda: len([i for i in server.manager.fleet if i.name]) == 2, "two instances")
    pids = [instance.pid for instance in server.manager.fleet]
    assert all(map(lives, pids))
    assert all(instance.name.startswith("penstock-grows-") for instance in server.manager.fleet)
    assert ray.available_resources().get("spot", 0) == 0
    await server.close("the test is over")
    await until(lambda: not any(map(lives, pids)), "the agents' end")
    assert [row for row in ray.util.list_named_actors() if "grows" in str(row)] == []


async def test_actors_outlive_their_manager_and_the_next_one_finds_them(server: ManagerServer) -> None:
    first = provisioner_for(server.url, "outlives")
    (name,) = await first.add(1)
    await until(lambda: [i.name for i in server.manager.fleet] == [name], "the instance")
    await first.close()
    second, other = provisioner_for(server.url, "outlives"), provisioner_for(server.url, "another")
    assert [(seen.id, seen.alive) for seen in await second.list()] == [(name, True)]
    assert await other.list() == []
    pid = next(iter(server.manager.fleet)).pid
    await second.release(name)
    await until(lambda: not lives(pid), "the agent's end")
    assert await second.list() == []
    await second.release(name)


async def test_one_that_finds_no_place_waits_and_is_released_all_the_same(server: ManagerServer) -> None:
    provisioner = provisioner_for(server.url, "waits", resources={"spot": 3})
    (name,) = await provisioner.add(1)
    assert [(seen.id, seen.alive) for seen in await provisioner.list()] == [(name, True)]
    await provisioner.release(name)
    deadline = time.monotonic() + WAIT_S
    while await provisioner.list():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_an_agent_that_ended_says_so_and_one_whose_actor_is_killed_ends(server: ManagerServer) -> None:
    provisioner = provisioner_for(server.url, "ends")
    (name,) = await provisioner.add(1)
    await until(lambda: [i.name for i in server.manager.fleet] == [name], "the instance")
    pid = next(iter(server.manager.fleet)).pid
    os.kill(pid, 9)
    deadline = time.monotonic() + WAIT_S
    while (await provisioner.list())[0].alive:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    (seen,) = await provisioner.list()
    assert "exit code -9" in seen.cause
    await provisioner.release(name)

    (other,) = await provisioner.add(1)
    await until(lambda: [i.name for i in server.manager.fleet] == [other], "another instance")
    pid = next(iter(server.manager.fleet)).pid
    ray.kill(ray.get_actor(other, namespace="penstock"), no_restart=True)
    await until(lambda: not lives(pid), "the orphan's end")


class Head:
    """A cluster of its own, on whose nodes there is no penstock."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        words = [f"--port={self.port}", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats"]
        script = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, "start", "--head", "--block", f"--temp-dir={self.folder}", *words],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)


@pytest.fixture
def head() -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="pst-ray-", ignore_cleanup_errors=True) as folder:
        made = Head(folder)
        yield made
        made.stop()


async def listed(provisioner: Provisioner) -> Sequence[Seen]:
    """The first list that there is; what fails before it is told in words."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(ProvisionError):
            return await provisioner.list()
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)


async def test_nodes_without_penstock_are_told_as_that(head: Head) -> None:
    provisioner = provisioner_for("http://127.0.0.1:9", "bare", address=head.address, resources={})
    (name,) = await provisioner.add(1)
    deadline = time.monotonic() + WAIT_S
    while (found := await listed(provisioner))[0].alive:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert [(seen.id, "No module named 'penstock'; penstock must be installed" in seen.cause) for seen in found] == [
        (name, True)
    ]
    await provisioner.release(name)
    assert await provisioner.list() == []
    await provisioner.close()


async def test_a_head_that_dies_ends_no_manager_and_its_return_is_met(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray's library ends its process so long after the head has gone.
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "3")
    provisioner = provisioner_for("http://127.0.0.1:9", "headless", address=head.address, resources={})
    assert await listed(provisioner) == []
    head.stop()
    with pytest.raises(ProvisionError, match=r"the process that speaks to Ray has ended: .*Failed to connect to GCS"):
        await provisioner.list()
    with pytest.raises(ProvisionError, match=r"no Ray cluster|has ended: .*GCS"):
        await provisioner.list()
    head.start()
    assert await listed(provisioner) == []
    await provisioner.close()
