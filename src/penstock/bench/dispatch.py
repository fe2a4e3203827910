"""Dispatch: what a call of four workers costs, beside stock verl's way on the same Ray, and locally beside Ray.

Decides what is compared; the peer is verl 0.9.1 itself: its DataProto of tensors, each worker's own argument, remote
calls one after another. Three times: until all calls are submitted, until all have answered, and between the first and
the last worker's start. Needs Ray and verl (docs/cluster.md); without them the local figures alone are measured.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any, NamedTuple

from penstock.bench.common import Result, at_most, skipped
from penstock.cluster import Batch, Cluster, WorkerGroup, dispatch, from_tensors, to_tensors
from penstock.cluster.ray_actors import RayWorkers

DESCRIPTION = "Calls on four workers beside verl's on Ray: submit, end to end, start skew; local calls beside Ray's"
WORKERS = 4
FLOATS = 64 * 2**18
"""Of 64 MB."""
SMALL_TENSORS = 5000
CALLS_IN_A_ROW = 20
SETTLE_S = 0.05
LARGE_SETTLE_S = 0.5
"""The object store, and actors that drop thousands of tensors, free what a call brought in the background."""
Submit = Callable[[], Callable[[], list[float]]]
"""Launches a call; what it returns waits, and gives the moments when workers began."""


class Timed(NamedTuple):
    """Seconds."""

    submit: float
    end: float
    skew: float


class Receiver:
    """Touches what it gets and says when it began. Has PyTorch at hand, as any worker with a model."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)

    @dispatch("all_to_all")
    def take(self, batch: Any) -> float:
        return _begun(batch)

    @dispatch("one_to_all")
    def take_same(self, batch: Any) -> float:
        return _begun(batch)

    @dispatch("one_to_all")
    def nothing(self) -> float:
        return time.monotonic()

    @dispatch("one_to_all")
    def echo(self, value: int) -> int:
        return value


def _begun(batch: Any) -> float:
    """The moment a method has its argument, on the machine's one clock."""
    begun = time.monotonic()
    if isinstance(batch, Batch):
        to_tensors(batch)  # what the peer's argument has in it as it arrives
    return begun


def run(quick: bool) -> list[Result]:
    repetitions = 3 if quick else 9
    try:
        import ray  # noqa: F401
    except ImportError:
        return [*_local_alone(repetitions), skipped("against Ray and verl", "x", "pip install ray==2.60.0 verl==0.9.1")]
    with _ray(), Cluster(execute_threads=WORKERS) as cluster:
        results = _beside_ray(cluster, repetitions * 3)
        try:
            import verl  # noqa: F401
        except ImportError:
            return [*results, skipped("against verl", "x", "pip install verl==0.9.1")]
        return [*results, *_beside_verl(cluster, repetitions)]


@contextmanager
def _ray() -> Iterator[None]:
    import ray

    with tempfile.TemporaryDirectory(prefix="pst-ray-") as folder:
        home, os.environ["HOME"] = os.environ.get("HOME"), folder  # Ray writes a token file there
        try:
            ray.init(num_cpus=4 * WORKERS, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            if home is not None:
                os.environ["HOME"] = home


def _timed(ways: Mapping[str, Submit], repetitions: int, settle_s: float = SETTLE_S) -> dict[str, list[Timed]]:
    """Repetitions in which all ways take turns; the first, which warms them up, is left out."""
    rows: dict[str, list[Timed]] = {name: [] for name in ways}
    for k in range(repetitions + 1):
        for name, submit in list(ways.items())[:: 1 if k % 2 else -1]:  # none is always the one after a large call
            start = time.monotonic()
            result = submit()
            submitted = time.monotonic()
            begun = result()
            rows[name].append(Timed(submitted - start, time.monotonic() - start, max(begun) - min(begun)))
            del result
            time.sleep(settle_s)
    return {name: seen[1:] for name, seen in rows.items()}


def _medians(seen: Sequence[Timed]) -> Timed:
    return Timed(*(median(column) for column in zip(*seen)))


def _group_call(method: Any, *args: Any) -> Submit:
    def submit() -> Callable[[], list[float]]:
        pending = method.submit(*args)
        return lambda: list(pending.result(120))

    return submit


def _beside_verl(cluster: Cluster, repetitions: int) -> list[Result]:
    import torch

    ours = cluster.ray(Receiver, WORKERS, name="columns")
    peers = _verl_actors()
    tensors = [torch.rand(64, FLOATS // 64) for _ in range(WORKERS)]
    many = {f"t{k}": torch.rand(1, 256) for k in range(SMALL_TENSORS)}
    cases: list[tuple[str, str, Any, Any, tuple[float | None, float | None, float | None]]] = [
        ("64 MB each", "take", [_proto({"x": t}) for t in tensors], [{"x": t} for t in tensors], (0.10, 0.15, 0.10)),
        ("64 MB to all", "take_same", [_proto({"x": tensors[0]})] * WORKERS, {"x": tensors[0]}, (None, 0.40, None)),
        ("5,000 tensors of 1 KB", "take_same", [_proto(many)] * WORKERS, many, (None, 0.15, None)),
    ]
    results = []
    groups = {mode: cluster.group(ours, execute_mode=mode) for mode in ("all", "all_multithread")}
    for what, method, theirs, mine, bounds in cases:
        ways = {mode: _our_call(group, method, mine) for mode, group in groups.items()}
        peer = _verl_call(peers, method, theirs)
        timed = _timed({"verl": peer, "all": ways["all"]}, repetitions, LARGE_SETTLE_S)
        results += _ratios(what, _medians(timed["verl"]), _medians(timed["all"]), bounds)
        # The two modes by themselves, since their difference is far smaller than that from the peer.
        results += _modes(what, _timed(ways, repetitions * 4, LARGE_SETTLE_S))
    return [*results, *_empty_call(cluster, ours, peers, repetitions * 40)]


def _empty_call(cluster: Cluster, ours: RayWorkers, peers: list[Any], repetitions: int) -> list[Result]:
    """Two sets of actors on each side, started in the order ours, verl's, verl's, ours.

    The same code in a set that was started earlier or later takes up to 4 % more or less for so short a call.
    """
    theirs = [peers, _verl_actors()]
    groups = [cluster.group(workers) for workers in (ours, cluster.ray(Receiver, WORKERS, name="again"))]
    ways = {f"verl {k}": _verl_call(actors, "nothing", None) for k, actors in enumerate(theirs)}
    ways |= {f"all {k}": _our_call(group, "nothing", None) for k, group in enumerate(groups)}
    timed = _timed(ways, repetitions)
    peer, mine = (_medians(timed[f"{side} 0"] + timed[f"{side} 1"]) for side in ("verl", "all"))
    modes = {mode: cluster.group(ours, execute_mode=mode) for mode in ("all", "all_multithread")}
    alone = _timed({mode: _our_call(group, "nothing", None) for mode, group in modes.items()}, repetitions)
    return [*_ratios("empty call", peer, mine, (None, 1.0, None)), *_modes("empty call", alone)]


def _our_call(group: WorkerGroup, method: str, value: Any) -> Submit:
    """From tensors to answers: making the batch is part of the call, as serializing is of the peer's."""

    def submit() -> Callable[[], list[float]]:
        args: tuple[Any, ...] = ()
        if isinstance(value, dict):
            args = (from_tensors(value),)
        elif value is not None:
            args = ([from_tensors(entry) for entry in value],)
        pending = group.submit(method, *args)
        return lambda: list(pending.result(120))

    return submit


def _verl_actors() -> list[Any]:
    import ray

    remote = ray.remote(Receiver)
    actors = [remote.options(num_cpus=1).remote() for _ in range(WORKERS)]
    ray.get([actor.nothing.remote() for actor in actors])
    return actors


def _proto(tensors: dict[str, Any]) -> Any:
    from verl import DataProto

    return DataProto.from_dict(tensors=tensors)


def _verl_call(actors: list[Any], method: str, protos: Any) -> Submit:
    """What `RayWorkerGroup.execute_all_async` does: `remote` for each worker in turn, with its own argument."""
    import ray

    def submit() -> Callable[[], list[float]]:
        arguments = [()] * len(actors) if protos is None else [(proto,) for proto in protos]
        references = [getattr(actor, method).remote(*args) for actor, args in zip(actors, arguments)]
        return lambda: list(ray.get(references))

    return submit


def _ratios(
    what: str, peer: Timed, mine: Timed, bounds: tuple[float | None, float | None, float | None]
) -> list[Result]:
    results = []
    for name, theirs, ours, bound in zip(("submit", "end to end", "start skew"), peer, mine, bounds):
        note = f"{ours * 1e3:.1f} against {theirs * 1e3:.1f} ms"
        label = f"{what}, {name} / verl's"
        if bound is None:
            results.append(Result(label, ours / theirs, "x", note=note))
        else:
            results.append(at_most(label, ours / theirs, bound, "x", note=note))
    return results


def _modes(what: str, timed: Mapping[str, list[Timed]]) -> list[Result]:
    """Medians of the two modes. Slower is a ratio above 1 that chance does not explain.

    Most calls are launched in the same way in both modes, so that their ratio is 1 and what is measured is on either
    side of it. The interval is the middle 95 % of what rounds drawn again, with replacement, give.
    """
    serial, threaded = _medians(timed["all"]), _medians(timed["all_multithread"])
    rounds = [(a.end, b.end) for a, b in zip(timed["all"], timed["all_multithread"])]
    low, high = _interval(rounds)
    note = (
        f"{threaded.end * 1e3:.2f} against {serial.end * 1e3:.2f} ms in {len(rounds)} rounds; "
        f"95 % interval {low:.3f} to {high:.3f}"
    )
    skew = f"{threaded.skew * 1e3:.1f} against {serial.skew * 1e3:.1f} ms"
    label = f"{what}, all_multithread / all"
    return [
        Result(f"{label}, end to end", threaded.end / serial.end, "x", target="<= 1", met=low <= 1.0, note=note),
        Result(f"{label}, start skew", threaded.skew / serial.skew, "x", note=skew),
    ]


def _interval(rounds: Sequence[tuple[float, float]], draws: int = 2000) -> tuple[float, float]:
    """Of median(second) / median(first), by the bootstrap over rounds (Efron 1979, percentiles)."""
    chance = random.Random(0)
    ratios = []
    for _ in range(draws):
        first, second = zip(*chance.choices(rounds, k=len(rounds)))
        ratios.append(median(second) / median(first))
    cut = quantiles(ratios, n=40)
    return cut[0], cut[-1]


def _beside_ray(cluster: Cluster, repetitions: int) -> list[Result]:
    """A call of four workers by processes and by Ray actors through the same group, and by Ray alone."""
    import ray

    local = cluster.group(cluster.local(Receiver, WORKERS, name="local"))
    workers: RayWorkers = cluster.ray(Receiver, WORKERS, name="ray")
    ours = cluster.group(workers)
    bare = _verl_actors()
    seconds: dict[str, list[float]] = {"local": [], "ray": [], "bare": []}
    for _ in range(repetitions):
        for name, call in (
            ("local", lambda: local.echo(1)),
            ("ray", lambda: ours.echo(1)),
            ("bare", lambda: ray.get([actor.echo.remote(1) for actor in bare])),
        ):
            time.sleep(SETTLE_S)  # what Ray still does behind a call is none of the next one's cost
            call()
            for _ in range(CALLS_IN_A_ROW):
                start = time.monotonic()
                call()
                seconds[name].append(time.monotonic() - start)
    mine, through, alone = (median(seconds[name]) for name in ("local", "ray", "bare"))
    large = _large(local, ours)
    for actor in bare:
        ray.kill(actor)
    workers.close()
    local.workers.close()
    return [
        at_most("local call / Ray call", mine / alone, 0.2, "x", note=f"{mine * 1e3:.2f} against {alone * 1e3:.2f} ms"),
        Result("group call on Ray / Ray call", through / alone, "x", note=f"{through * 1e3:.2f} ms"),
        *large,
    ]


def _large(local: WorkerGroup, ours: WorkerGroup) -> list[Result]:
    """The same 64 MB to each worker, by shared memory of processes and by Ray's object store."""
    import torch

    batches: list[Batch] = [from_tensors({"x": torch.rand(64, FLOATS // 64)}) for _ in range(WORKERS)]
    timed = _timed({"local": _group_call(local.take, batches), "ray": _group_call(ours.take, batches)}, 3)
    mine, theirs = _medians(timed["local"]), _medians(timed["ray"])
    note = f"{mine.end * 1e3:.1f} against {theirs.end * 1e3:.1f} ms"
    return [Result("64 MB each, local / Ray, end to end", mine.end / theirs.end, "x", note=note)]


def _local_alone(repetitions: int) -> list[Result]:
    with Cluster(execute_threads=WORKERS) as cluster:
        local = cluster.group(cluster.local(Receiver, WORKERS))
        timed = _timed({"local": _group_call(local.nothing)}, repetitions * 20)["local"]
    return [Result("local call of four workers", _medians(timed).end * 1e3, "ms")]
