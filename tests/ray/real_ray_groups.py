"""Groups over real Ray actors: the same calls as over processes, by reference where it pays, failures named.

Run by `make test-ray`, in an environment that has Ray; `make test` doesn't collect it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "cluster"))
_SCRATCH = tempfile.TemporaryDirectory(prefix="pst-ray-")
os.environ["HOME"] = _SCRATCH.name  # Ray writes a token there
os.environ["RAY_TMPDIR"] = _SCRATCH.name
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import cluster_workers  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402

from penstock.cluster import (  # noqa: E402
    CallTimeout,
    Cluster,
    ClusterError,
    GroupPoisoned,
    Mesh,
    ResourcePool,
    WorkerFailed,
    WorkerGroup,
    from_tensors,
    to_tensors,
)


@pytest.fixture(scope="module", autouse=True)
def a_ray() -> Iterator[None]:
    path = os.pathsep.join([str(HERE.parent / "cluster"), str(HERE.parents[1] / "src")])
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(num_cpus=8, include_dashboard=False, _temp_dir=_SCRATCH.name, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def cluster(a_ray: None) -> Iterator[Cluster]:
    with Cluster(execute_threads=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> WorkerGroup:
    return cluster.group(cluster.ray(cluster_workers.Worker, 3, arguments={"greeting": "good day"}, name="three"))


@pytest.mark.parametrize("mode", ["all", "all_multithread"])
def test_calls_give_what_they_give_over_processes(cluster: Cluster, group: WorkerGroup, mode: str) -> None:
    group = cluster.group(group.workers, execute_mode=mode)
    assert group.who() == [0, "good day"]
    assert group.plain(7) == [7, 7, 7]
    assert group.plus_rank([10, 20, 30]) == [10, 21, 32]
    x = torch.arange(70_000 * 3).reshape(-1, 3)
    assert torch.equal(to_tensors(group.doubled(from_tensors({"x": x})))["x"], x * 2)
    assert to_tensors(group.doubled(from_tensors({"x": torch.arange(7)}), scale=3))["x"].tolist() == list(
        range(0, 21, 3)
    )


def test_a_large_batch_is_put_once_for_all_and_a_small_one_goes_inline(group: WorkerGroup) -> None:
    large = from_tensors({"x": torch.arange(200_000)})
    assert len(group.workers.prepare(((large, 3), {"y": large.slice(0, 10)})).references) == 1
    assert group.echo(large) == [large] * 3


def test_a_batch_that_was_put_goes_by_reference_and_so_do_its_slices(group: WorkerGroup) -> None:
    stored = group.put(from_tensors({"x": torch.arange(300_000)}))
    prepared = group.workers.prepare(((stored.slice(5, 10),), {"whole": stored}))
    assert prepared.args[0][1:] == (5, 10)
    assert prepared.references == (stored.home.store, stored.home.store)  # type: ignore[union-attr]
    assert [to_tensors(part)["x"].tolist() for part in group.echo(stored.slice(5, 10))] == [list(range(5, 10))] * 3
    assert group.summed(stored) == [[k, 100_000, sum(range(k * 100_000, (k + 1) * 100_000))] for k in range(3)]


def test_all_workers_see_one_order_whoever_launches(group: WorkerGroup) -> None:
    def launch(thread: int) -> None:
        for pending in [group.note.submit([thread, k]) for k in range(200)]:
            pending.result(60)

    threads = [threading.Thread(target=launch, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    seen = group.all_seen()
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 800


def test_workers_of_one_tensor_group_get_the_same_shard(cluster: Cluster) -> None:
    workers = cluster.ray(cluster_workers.Worker, 2)
    group = cluster.group(workers, mesh=Mesh({"dp": 1, "tp": 2}))
    assert group.summed(from_tensors({"x": torch.arange(4)})) == [[0, 4, 6]]
    workers.close()


def test_roles_share_an_actor_and_pools_are_split(cluster: Cluster) -> None:
    pool = ResourcePool(2, cpus=0.5)
    first, second = pool.split(1, 1)
    roles = {"actor": cluster_workers.Worker, "judge": cluster_workers.Other}
    workers = cluster.ray(roles, first, arguments={"judge": {"name": "ann"}})
    actor, judge = cluster.group(workers, "actor"), cluster.group(workers, "judge")
    assert actor.who() == [0, "hello"]
    pid = judge.told()[0].rpartition(" ")[2]
    assert judge.told() == [f"ann in {pid}"]
    others = cluster.group(cluster.ray(cluster_workers.Other, second, arguments={"name": "bo"}))
    assert others.told()[0].startswith("bo in ")
    assert others.told()[0].rpartition(" ")[2] != pid
    assert (first.bundles, second.bundles) == ((0,), (1,))
    with pytest.raises(ClusterError, match=r"doesn't split into \[3\]"):
        pool.split(3)
    pool.close()


def test_failures_are_named_and_a_death_poisons_the_set(cluster: Cluster) -> None:
    group = cluster.group(cluster.ray(cluster_workers.Worker, 2, name="two"))
    with pytest.raises(WorkerFailed, match=r"two: rank 1 failed in fail_on\(\): ValueError: rank 1 was") as caught:
        group.fail_on(1)
    assert "cluster_workers.py" in caught.value.traceback
    assert group.plain(3) == [3, 3]
    with pytest.raises(WorkerFailed, match=r"rank 1 failed in die_on\(\): its actor is gone"):
        group.die_on(1)
    with pytest.raises(GroupPoisoned, match=r"rank 1 is gone at die_on\(\)"):
        group.plain(1)
    with pytest.raises(WorkerFailed, match="no model here"):
        cluster.ray(cluster_workers.Broken, 1)


def test_waits_end_at_their_deadline(cluster: Cluster) -> None:
    group = cluster.group(cluster.ray(cluster_workers.Worker, 1, name="slow"))
    with pytest.raises(CallTimeout, match=r"slow: no answer to hold_the_interpreter\(\) from rank 0 in 0.2 s"):
        group.hold_the_interpreter.submit().result(0.2)
    with pytest.raises(CallTimeout, match="Ray found no room for 1 bundles"):
        ResourcePool(1, cpus=1000, timeout_s=0.2)


def test_a_failure_is_told_while_others_still_run(cluster: Cluster) -> None:
    group = cluster.group(cluster.ray(cluster_workers.Worker, 2, name="uneven"))
    with pytest.raises(WorkerFailed, match=r"uneven: rank 1 failed in hold_or_fail\(\): ValueError: rank 1 does"):
        group.hold_or_fail.submit().result(30)
    group.workers.close()
