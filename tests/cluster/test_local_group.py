"""Groups of real processes: calls, order, failures, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster_workers
import pytest
import torch

from penstock.cluster import (
    Batch,
    CallTimeout,
    Cluster,
    ClusterError,
    GroupPoisoned,
    Mesh,
    WorkerFailed,
    WorkerGroup,
    from_tensors,
    to_tensors,
)
from penstock.cluster.payload import INLINE_BYTES

DEADLINE_S = 60.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(execute_threads=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> WorkerGroup:
    """Three workers that no test harms."""
    return cluster.group(cluster.local(cluster_workers.Worker, 3, arguments={"greeting": "good day"}, name="three"))


@pytest.fixture
def two() -> Iterator[WorkerGroup]:
    """Two workers to be harmed."""
    with Cluster() as cluster:
        yield cluster.group(cluster.local(cluster_workers.Worker, 2, name="two"), timeout_s=DEADLINE_S)


def test_arguments_of_the_class_reach_it_and_rank_zero_answers_alone(group: WorkerGroup) -> None:
    assert group.who() == [0, "good day"]


def test_a_dispatch_of_ones_own_says_who_is_called_and_what_the_answers_add_up_to(group: WorkerGroup) -> None:
    assert group.times_rank(10) == 20, "of ranks 0 and 2"


@pytest.mark.parametrize("mode", ["all", "all_multithread"])
def test_each_dispatch_gives_the_same_under_each_mode(cluster: Cluster, group: WorkerGroup, mode: str) -> None:
    group = cluster.group(group.workers, execute_mode=mode)
    assert group.plain(7) == [7, 7, 7]
    assert group.plus_rank([10, 20, 30]) == [10, 21, 32]
    x = torch.arange(70_000 * 3, dtype=torch.int64).reshape(-1, 3)
    assert torch.equal(to_tensors(group.doubled(from_tensors({"x": x})))["x"], x * 2)
    odd = from_tensors({"x": torch.arange(7)})
    assert to_tensors(group.doubled(odd, scale=3))["x"].tolist() == [0, 3, 6, 9, 12, 15, 18]


def test_values_of_every_kind_cross_and_come_back(group: WorkerGroup) -> None:
    import numpy as np

    batch = from_tensors({"x": torch.rand(3), "words": ["a", "b", "c"], "things": [{"k": 1}, None, [2.5]]})
    for value in (None, True, 3, 2.5, "text", b"bytes", [1, [2]], {"a": {"b": None}}):
        assert group.echo(value) == [value] * 3
    assert group.echo(batch) == [batch] * 3
    tensor = torch.rand(300, 300)
    nested = group.echo({"t": tensor, "n": tensor.numpy(), "i": np.int64(3)})[2]
    assert torch.equal(nested["t"], tensor)
    assert isinstance(nested["n"], np.ndarray)
    assert nested["n"].tolist() == tensor.tolist()
    assert nested["i"] == 3


def test_a_batch_that_was_put_goes_by_reference_and_so_do_its_slices(group: WorkerGroup) -> None:
    x = torch.arange(300_000)
    stored = group.put(from_tensors({"x": x}))
    x.zero_()  # a put batch is a snapshot
    prepared = group.workers.prepare(((stored.slice(5, 10), 3, stored), {}))
    assert len(prepared.body) < 1000
    assert len(prepared.fds) == 1
    assert [to_tensors(part)["x"].tolist() for part in group.echo(stored.slice(5, 10))] == [list(range(5, 10))] * 3
    assert group.summed(stored) == [[k, 100_000, sum(range(k * 100_000, (k + 1) * 100_000))] for k in range(3)]
    mixed = group.echo([stored.slice(0, 2), from_tensors({"x": torch.ones(200_000)}), stored.slice(2, 3)])[1]
    assert [len(part) for part in mixed] == [2, 200_000, 1]
    assert to_tensors(mixed[2])["x"].tolist() == [2]
    assert to_tensors(mixed[1])["x"].sum() == 200_000


def test_arguments_below_the_measured_size_go_inline_and_larger_ones_by_shared_memory(group: WorkerGroup) -> None:
    def prepared(nbytes: int) -> Any:
        return group.workers.prepare(((from_tensors({"x": torch.zeros(nbytes, dtype=torch.uint8)}),), {}))

    small, large = prepared(INLINE_BYTES - 1024), prepared(INLINE_BYTES)
    assert (len(small.fds), len(large.fds)) == (0, 1)
    assert (len(prepared(1 << 10).fds), len(prepared(1 << 20).fds)) == (0, 1), "as measured: INLINE_BYTES"
    assert len(small.body) > INLINE_BYTES - 1024
    assert len(large.body) < 1024


def test_what_one_worker_writes_nobody_else_sees(group: WorkerGroup) -> None:
    stored = group.put(from_tensors({"x": torch.ones(200_000)}))
    assert group.spoil(stored) == [0, 0, 0]
    assert group.spoil(from_tensors({"x": torch.ones(200_000)})) == [0, 0, 0]
    assert [to_tensors(part)["x"].sum() for part in group.echo(stored)] == [200_000] * 3


def test_workers_of_one_tensor_group_get_the_same_shard_and_one_of_them_answers() -> None:
    with Cluster() as cluster:
        workers = cluster.local(cluster_workers.Worker, 4)
        group = cluster.group(workers, mesh=Mesh({"dp": 2, "tp": 2}))
        assert group.summed(from_tensors({"x": torch.arange(4)})) == [[0, 2, 1], [2, 2, 5]]


def test_roles_share_a_process_and_one_order() -> None:
    with Cluster() as cluster:
        roles = {"actor": cluster_workers.Worker, "judge": cluster_workers.Other}
        workers = cluster.local(roles, 2, arguments={"judge": {"name": "ann"}})
        actor, judge = cluster.group(workers, "actor"), cluster.group(workers, "judge")
        assert actor.workers.order is judge.workers.order
        assert actor.who() == [0, "hello"]
        assert judge.told() == [f"ann in {pid}" for pid in workers.pids]
        with pytest.raises(ClusterError, match=r"has no role 'critic'; it has: actor, judge"):
            cluster.group(workers, "critic")


def test_the_runs_mode_holds_unless_a_group_or_a_method_says_otherwise() -> None:
    with Cluster(execute_mode="rank_zero") as cluster:
        workers = cluster.local(cluster_workers.Worker, 2)
        assert cluster.group(workers).plain(1) == [1]
        assert cluster.group(workers, execute_mode="all").plain(1) == [1, 1]
        assert cluster.group(workers).echo(1) == [1, 1]  # the method says all_multithread
        with pytest.raises(ClusterError, match="leaves out ranks whose share of a 'data_parallel' call"):
            cluster.group(workers).doubled(from_tensors({"x": torch.zeros(2)}))


def test_threads_of_the_pool_are_used_by_one_mode_alone() -> None:
    with Cluster(execute_threads=2) as cluster:
        group = cluster.group(cluster.local(cluster_workers.Worker, 3))
        group.plain([1])
        assert cluster.stats()["submit"].done == 0
        group.echo(1)
        assert cluster.stats()["submit"].done == 0, "threads would make so small a call slower"
        group.echo([1])
        assert cluster.stats()["submit"].done == 2


@pytest.mark.parametrize("mode", ["all", "all_multithread"])
def test_all_workers_see_one_order_whoever_launches(cluster: Cluster, group: WorkerGroup, mode: str) -> None:
    group = cluster.group(group.workers, execute_mode=mode)
    before = group.all_seen()[0]

    def launch(thread: int) -> None:
        for pending in [group.note.submit([thread, k]) for k in range(200)]:
            pending.result(DEADLINE_S)

    threads = [threading.Thread(target=launch, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    seen = group.all_seen()
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) - len(before) == 800


def test_a_method_that_raises_is_named_with_rank_method_and_traceback(two: WorkerGroup) -> None:
    with pytest.raises(
        WorkerFailed, match=r"two: rank 1 failed in fail_on\(\): ValueError: rank 1 was asked"
    ) as caught:
        two.fail_on(1)
    assert caught.value.rank == 1
    assert "cluster_workers.py" in caught.value.traceback
    assert two.plain(3) == [3, 3], "the others had the call too, so all are in step"
    with pytest.raises(WorkerFailed, match=r"unanswerable\(\): ClusterError: .* function is neither plain data"):
        two.unanswerable()


def test_a_worker_that_dies_is_named_and_no_call_follows(two: WorkerGroup) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 failed in die_on\(\): its process was ended by SIGKILL"):
        two.die_on(1)
    with pytest.raises(GroupPoisoned, match=r"rank 1 is gone at die_on\(\): its process was ended by SIGKILL"):
        two.plain(1)


def test_a_launch_that_reaches_some_workers_only_poisons_the_set(two: WorkerGroup) -> None:
    real = two.workers.submit

    def refusing(rank: int, *rest: Any) -> Any:
        if rank == 1:
            raise ClusterError("no way to rank 1")
        return real(rank, *rest)

    two.workers.submit = refusing  # type: ignore[method-assign]
    with pytest.raises(GroupPoisoned, match=r"plain\(\) reached rank 0 and not 1: no way to rank 1"):
        two.plain(1)
    with pytest.raises(GroupPoisoned, match="takes no more calls"):
        two.plain(1)


def test_a_launch_that_is_broken_off_poisons_the_set(two: WorkerGroup) -> None:
    """Ctrl-C may come between two ranks, or in the middle of what one is sent."""
    real = two.workers.submit

    def interrupted(rank: int, *rest: Any) -> Any:
        if rank == 1:
            raise KeyboardInterrupt
        return real(rank, *rest)

    two.workers.submit = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        two.plain(1)
    two.workers.submit = real  # type: ignore[method-assign]
    with pytest.raises(GroupPoisoned, match=r"the launch of plain\(\) was broken off: KeyboardInterrupt"):
        two.plain(1)


def test_an_argument_that_cannot_cross_harms_nobody(two: WorkerGroup) -> None:
    with pytest.raises(ClusterError, match="can't cross to another process: function is neither plain data"):
        two.plain(lambda: None)
    with pytest.raises(ClusterError, match="can't cross"):
        two.plus_rank([1, object()])
    assert two.plain(1) == [1, 1]


def test_a_wait_ends_at_its_deadline_and_names_who_is_late(two: WorkerGroup) -> None:
    stopped = two.workers.pids[1]  # type: ignore[attr-defined]
    os.kill(stopped, signal.SIGSTOP)
    pending = two.plain.submit(1)
    pending._sent[0].ticket.result(DEADLINE_S)  # rank 0 has answered, however slow the machine is
    with pytest.raises(CallTimeout, match=r"two: no answer to plain\(\) from rank 1 in 0.3 s"):
        pending.result(0.3)
    os.kill(stopped, signal.SIGCONT)
    assert two.plain(2) == [2, 2]


def test_a_class_that_cannot_be_made_leaves_no_process() -> None:
    with Cluster() as cluster:
        with pytest.raises(WorkerFailed, match=r"failed in __init__\(\): RuntimeError: no model here"):
            cluster.local(cluster_workers.Broken, 2)

        class Local:
            pass

        with pytest.raises(ClusterError, match="put the class in a module"):
            cluster.local(Local, 1)


def test_names_that_are_wrong_are_told_the_right_ones(group: WorkerGroup, cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match=r"Worker has no method 'plane'; it has: .*plain"):
        group.call("plane")
    with pytest.raises(AttributeError, match="no method 'plane'"):
        group.plane()
    with pytest.raises(ClusterError, match="a mesh of 4 ranks for 3 workers"):
        cluster.group(group.workers, mesh=Mesh({"dp": 4}))


def test_closing_ends_workers_and_what_they_started_and_frees_what_was_shared() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with Cluster() as cluster:
        workers = cluster.local(cluster_workers.Worker, 2)
        group = cluster.group(workers)
        children = group.start_child()
        stored = group.put(from_tensors({"x": torch.zeros(100_000)}))
        answer = group.echo(stored)
        pids = workers.pids
    for pid in [*pids, *children]:
        wait_for(lambda pid=pid: gone(pid), f"the end of process {pid}")
    del stored, answer
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with pytest.raises(GroupPoisoned, match="it was closed"):
        group.plain(1)


DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
import cluster_workers, torch
from penstock.cluster import Cluster, from_tensors
cluster = Cluster()
workers = cluster.local(cluster_workers.Worker, 2)
group = cluster.group(workers)
stored = group.put(from_tensors({"x": torch.zeros(1_000_000)}))
group.echo(stored)
print(*workers.pids, *group.start_child(), flush=True)
group.hold_the_interpreter()
"""


def test_a_controller_that_is_killed_leaves_no_process_even_one_that_holds_its_interpreter() -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 4
    for _ in range(2):
        assert driver.stdout.readline() == "holding\n"
    driver.kill()
    driver.wait(DEADLINE_S)
    for pid in pids:
        wait_for(lambda pid=pid: gone(pid), f"the end of process {pid}")
    driver.stdout.close()


def test_batches_are_batches(group: WorkerGroup) -> None:
    assert isinstance(group.doubled(from_tensors({"x": torch.zeros(3)})), Batch)
