"""How calls are split, launched and counted, without any worker."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster import (
    Batch,
    ClusterError,
    Execute,
    Mesh,
    Method,
    PoolFull,
    Shares,
    SubmitPool,
    dispatch,
    from_tensors,
    parse_execute,
    register_dispatch,
    register_execute,
    to_tensors,
)
from penstock.cluster.dispatch import balanced, method_of, split_of
from penstock.cluster.execute import execute_of
from penstock.errors import PenstockError

DEADLINE_S = 60.0


def split(name: str, mesh: Mesh, *args: Any, **options: Any) -> Shares:
    return split_of(name)(mesh, Method(name, **options), args, {})


def numbers(count: int) -> Batch:
    return from_tensors({"x": torch.arange(count), "ragged": [torch.ones(k % 5) for k in range(count)]})


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_rows_that_are_split_and_joined_are_the_same_rows(rows: int, data: int, tensor: int, by_tokens: bool) -> None:
    mesh = Mesh({"dp": data, "tp": tensor})
    batch = numbers(rows)
    shares = split("data_parallel", mesh, batch, tokens="ragged" if by_tokens else "")
    parts = [args[0] for args, _ in shares.arguments]
    assert len({len(part) for part in parts}) == 1
    assert shares.collect([parts[rank] for rank in shares.answering]) == batch
    lists = [to_tensors(parts[rank])["x"].tolist() for rank in shares.answering]
    assert shares.collect(lists) == list(range(rows))
    for rank, shard in enumerate(mesh.shard_of()):
        assert shares.arguments[rank] is shares.arguments[mesh.leaders()[shard]]


def test_shards_of_a_batch_that_divides_are_views_and_join_without_copying() -> None:
    x = torch.arange(8)
    shares = split("data_parallel", Mesh({"data": 4}), from_tensors({"x": x}))
    parts = [args[0] for args, _ in shares.arguments]
    assert to_tensors(parts[1])["x"].data_ptr() == x[2].data_ptr()
    assert to_tensors(shares.collect(parts))["x"].data_ptr() == x.data_ptr()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).flatmap(lambda counts: st.just(counts * 4)))
def test_balanced_shards_are_equally_many_rows_and_no_worse_than_one_row_apart(counts: list[int]) -> None:
    shards = balanced(counts, 4)
    assert sorted(row for shard in shards for row in shard) == list(range(len(counts)))
    assert {len(shard) for shard in shards} == {len(counts) // 4}
    loads = [sum(counts[row] for row in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(counts)


def test_tokens_are_counted_by_length_or_by_value() -> None:
    long_first = from_tensors({"n": torch.tensor([9, 8, 1, 2], dtype=torch.int32), "x": torch.arange(4)})
    by_rows = split("data_parallel", Mesh({"data": 2}), long_first)
    by_tokens = split("data_parallel", Mesh({"data": 2}), long_first, tokens="n")
    assert [to_tensors(args[0])["x"].tolist() for args, _ in by_rows.arguments] == [[0, 1], [2, 3]]
    assert [to_tensors(args[0])["x"].tolist() for args, _ in by_tokens.arguments] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split("data_parallel", Mesh({"dp": 2}), numbers(3), pad=False), "3 rows don't divide over 2 shards"),
        (lambda: split("data_parallel", Mesh({"dp": 2}), numbers(0)), "a batch without rows"),
        (lambda: split("data_parallel", Mesh({"dp": 2}), 3), "no argument is a Batch"),
        (lambda: split("data_parallel", Mesh({"dp": 2}), numbers(2), numbers(4)), r"numbers of rows: \[2, 4\]"),
        (lambda: split("data_parallel", Mesh({"dp": 2}), numbers(4)).collect([numbers(2), numbers(1)]), "shard 1 of 2"),
        (lambda: split("all_to_all", Mesh({"dp": 2}), [1]), "argument 0 is 1 values"),
        (lambda: split("all_to_all", Mesh({"dp": 2}), 5), "argument 0 is int"),
        (lambda: dispatch("data_paralel"), "did you mean data_parallel.*there are: rank_zero, one_to_all, all_to_all"),
        (lambda: dispatch("rank_zero", execute="everyone"), "no execute mode 'everyone'; there are: all, all_multi"),
        (
            lambda: parse_execute("all_multithreaded"),
            "did you mean all_multithread.*there are: all, all_multithread, r",
        ),
        (lambda: Mesh({"dp": 2}, (0, 2)), r"has ranks 0 to 1, not \[0, 2\]"),
        (lambda: register_dispatch("rank_zero", split_of("all_to_all")), "there is a dispatch 'rank_zero' already"),
        (lambda: register_execute("all", execute_of("all")[1]), "there is an execute mode 'all' already"),
        (lambda: SubmitPool("p", 0), "both are at least 1"),
    ],
)
def test_a_refusal_names_what_was_wrong_and_what_is_right(call: Any, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        call()


def test_a_mesh_knows_which_ranks_share_a_shard() -> None:
    mesh = Mesh({"replicate": 2, "pp": 2, "shard": 2})
    assert mesh.shards == 4
    assert mesh.shard_of() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert mesh.leaders() == [0, 1, 4, 5]
    assert Mesh({"tp": 2, "dp": 2}, (3, 1, 2, 0)).shard_of() == [1, 1, 0, 0]


class _DeviceMesh:
    """The two attributes of torch's DeviceMesh that are read; the real one needs a process group."""

    mesh_dim_names = ("dp", "tp")
    mesh = torch.tensor([[0, 1], [2, 3]])


def test_a_device_mesh_is_taken_as_it_is() -> None:
    mesh = Mesh.of_device_mesh(_DeviceMesh())
    assert mesh.dims == {"dp": 2, "tp": 2}
    assert mesh.shard_of() == [0, 0, 1, 1]


def test_own_dispatches_and_modes_are_used_by_their_names() -> None:
    def even_ranks(mesh: Mesh, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shares:
        chosen = range(0, mesh.size, 2)
        return Shares([(args, kwargs)] * mesh.size, chosen, sum, only=chosen)

    register_dispatch("even_ranks", even_ranks)
    launched: list[Sequence[int]] = []

    def backwards(ranks: Sequence[int], submit: Any, pool: SubmitPool) -> list[BaseException | None]:
        launched.append(list(reversed(ranks)))
        return [submit(rank) for rank in ranks]

    register_execute("backwards", Execute(lambda ranks: ranks, backwards))

    class Worker:
        @dispatch("even_ranks", execute="BACKWARDS")
        def f(self) -> None: ...

    method = method_of(Worker, "f")
    assert (method.dispatch, method.execute) == ("even_ranks", "backwards")
    assert split("even_ranks", Mesh({"data": 5})).collect([1, 2, 3]) == 6
    execute_of(method.execute)[1].launch([0, 2, 4], lambda rank: None, SubmitPool("unused", 1))
    assert launched == [[4, 2, 0]]


def test_a_threaded_launch_has_ended_everywhere_before_it_returns_and_tells_every_failure() -> None:
    reached: list[int] = []
    together = threading.Barrier(3, timeout=DEADLINE_S)

    def submit(rank: int) -> None:
        together.wait()
        if rank == 1:
            raise ClusterError("rank 1 is full")
        reached.append(rank)

    with SubmitPool("launch", 2) as pool:
        errors = execute_of("all_multithread")[1].launch([0, 1, 2], submit, pool)
    assert sorted(reached) == [0, 2]
    assert [str(error) for error in errors] == ["None", "rank 1 is full", "None"]


def test_a_pool_that_takes_some_submissions_and_not_others_is_told_of_for_each_rank() -> None:
    """Else the group would not know that it is out of step."""
    reached: list[int] = []
    go_on = threading.Event()

    def submit(rank: int) -> None:
        assert go_on.wait(DEADLINE_S)
        reached.append(rank)

    pool = SubmitPool("tight", 1, max_queued=1, submit_timeout_s=0.05)
    begun = threading.Event()
    pool.submit(lambda: (begun.set(), go_on.wait(DEADLINE_S)))
    assert begun.wait(DEADLINE_S)
    launched: list[Any] = []
    launch = execute_of("all_multithread")[1].launch
    launching = threading.Thread(target=lambda: launched.extend(launch([0, 1, 2, 3], submit, pool)))
    launching.start()
    launching.join(1.0)  # by then two ranks of four have been refused; the launch waits for the one that was not
    assert launching.is_alive()
    go_on.set()
    launching.join(DEADLINE_S)
    assert reached == [1]
    assert [type(error) for error in launched] == [PoolFull, type(None), PoolFull, PoolFull]
    pool.close()
    with pytest.raises(ClusterError, match="pool tight is closed"):
        launch([0, 1], submit, pool)
    assert reached == [1], "where none could be submitted, none was"


def test_counters_of_a_thousand_tasks_are_exact() -> None:
    def task(k: int) -> int:
        if k % 10 == 0:
            raise ValueError(k)
        return k

    with SubmitPool("count", 4, max_queued=2000) as pool:
        futures = [pool.submit(task, k) for k in range(1000)]
        failed = [future for future in futures if future.exception(DEADLINE_S) is not None]
        stats = pool.stats()
        assert len(failed) == 100
        assert (stats.queued, stats.running, stats.done, stats.failed) == (0, 0, 900, 100)
        assert stats.wait_s >= 0
        assert stats.run_s > 0


def test_waiting_and_running_tasks_are_counted_as_they_go() -> None:
    now = [0.0]
    begun, go_on = threading.Event(), threading.Event()

    def task() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)

    with SubmitPool("one", 1, clock=lambda: now[0]) as pool:
        first = pool.submit(task)
        assert begun.wait(DEADLINE_S)
        second = pool.submit(lambda: None)
        assert (pool.stats().running, pool.stats().queued) == (1, 1)
        now[0] = 5.0
        go_on.set()
        first.result(DEADLINE_S)
        second.result(DEADLINE_S)
        assert pool.stats().run_s == 5
        assert pool.stats().wait_s == 5


def test_a_full_pool_refuses_in_time_and_a_closed_one_at_once() -> None:
    go_on = threading.Event()
    pool = SubmitPool("tight", 1, max_queued=1, submit_timeout_s=0.05)
    running = threading.Event()
    pool.submit(lambda: (running.set(), go_on.wait(DEADLINE_S)))
    assert running.wait(DEADLINE_S)
    waiting = pool.submit(lambda: None)
    with pytest.raises(PoolFull, match="tight: 1 tasks wait"):
        pool.submit(lambda: None)
    closing = threading.Thread(target=pool.close, args=(DEADLINE_S,))
    closing.start()
    with pytest.raises(ClusterError, match="closed before the task began"):
        waiting.result(DEADLINE_S)
    go_on.set()
    closing.join(DEADLINE_S)
    with pytest.raises(ClusterError, match="pool tight is closed"):
        pool.submit(lambda: None)
    assert pool.stats().failed == 1


def test_a_task_that_would_wait_for_its_own_pool_is_refused() -> None:
    with SubmitPool("nested", 1) as pool, SubmitPool("reward", 1) as other:
        with pytest.raises(ClusterError, match="submits to its own pool"):
            pool.submit(lambda: pool.submit(int).result()).result(DEADLINE_S)
        assert other.submit(lambda: pool.submit(int).result(DEADLINE_S)).result(DEADLINE_S) == 0
