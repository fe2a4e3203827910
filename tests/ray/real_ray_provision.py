"""Machines that are actors of a real Ray: placed by a resource, found by another manager, released with theirs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from penstock.cli.provision import make_provisioner
from penstock.rollout.provision_types import JoinOrder, ProvisionConfig, Provisioner
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
