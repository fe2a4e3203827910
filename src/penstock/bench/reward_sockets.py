"""The pool on real sockets beside what a user would otherwise write, against the same local provider in the same run.

The provider is a process of its own (`simulate.provider_server`), fresh for each run; so is each peer, in an
environment of its own (`benchmarks/install-peers.sh`; skipped, and said to be, where it isn't there). Requests take
0.2 s at the median, 2 % of them ten times that; 1 % get a 500 and 0.5 % are reset.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.bench.common import Result, skipped
from penstock.reward.accelerated import accelerate
from penstock.reward.limits import Endpoint
from penstock.reward.pool import ComputePool
from penstock.simulate.providers import Provider, least_makespan_s

DESCRIPTION = "compute pool on real sockets: makespan over the bound beside QReward and the OpenAI SDK, client's CPU"

ROOT = Path(__file__).resolve().parents[3]
PEERS = ("qreward defaults", "qreward told", "openai gather", "openai semaphore")
QUICK_PEERS = ("qreward told", "openai semaphore")
BAD = {"stragglers": 0.02, "errors": 0.01, "resets": 0.005, "round_trip_s": 0.001}
NOISE = 1.02


@dataclass(frozen=True)
class Setting:
    name: str
    providers: tuple[Provider, ...]
    jobs: int
    quick_jobs: int = 0
    """0: left out of a quick run."""
    at_most: float = field(default=1.15)

    def bound_s(self, jobs: int) -> float:
        """The least makespan, with the longest job's expected best as in the virtual suite."""
        rng = random.Random(0)
        services = [[p.service_s(rng) for p in self.providers if p.alive(0.0)] for _ in range(jobs)]
        return least_makespan_s([p for p in self.providers if p.alive(0.0)], services, 0.0)


def _provider(**limits: float) -> Provider:
    return Provider(**{**BAD, **limits})  # type: ignore[arg-type]


SETTINGS = (
    Setting("100/s, burst 20", (_provider(rate=100, burst=20),), 1000, 500),
    Setting("100/s, burst 100", (_provider(rate=100, burst=100),), 1000),
    Setting("25/s", (_provider(rate=25, burst=20),), 1000),
    Setting("cap of 64", (_provider(cap=64),), 1000),
    Setting("two endpoints", (_provider(rate=50, burst=20), _provider(rate=50, burst=20)), 1000, at_most=1.20),
    Setting(
        "one of two down", (_provider(rate=50, burst=20), _provider(rate=50, burst=20, dies_at_s=0)), 1000, at_most=1.20
    ),
    Setting(
        "fast and slow", (_provider(rate=50, burst=20), _provider(rate=50, burst=20, median_s=0.8)), 1000, at_most=1.20
    ),
)


def run(quick: bool) -> list[Result]:
    results: list[Result] = []
    for setting in SETTINGS:
        if quick and not setting.quick_jobs:
            continue
        results.extend(_compare(setting, setting.quick_jobs if quick else setting.jobs, 1 if quick else 3, quick))
    results.extend(_client_cost(quick))
    results.extend(_decorator_cost(quick))
    return results


@contextmanager
def _serving(providers: tuple[Provider, ...]) -> Iterator[list[str]]:
    """Fresh provider processes; yields their addresses."""
    processes, urls = [], []
    initial = {f.name for f in Provider.__dataclass_fields__.values() if f.init}
    try:
        for provider in providers:
            # Limits that aren't there (infinite) can't be written as JSON; they are the defaults anyhow.
            said = {k: v for k, v in asdict(provider).items() if k in initial and v != math.inf}
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.simulate.provider_server", json.dumps(said)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            processes.append(process)
            assert process.stdout is not None
            urls.append(f"http://127.0.0.1:{int(process.stdout.readline())}/v1")
        yield urls
    finally:
        for process in processes:
            process.communicate(timeout=30)


def _refused(urls: list[str]) -> int:
    return sum(json.load(urllib.request.urlopen(f"{url}/stats", timeout=10))["refused"] for url in urls)


def _declared(provider: Provider, url: str, told: bool) -> Endpoint:
    if not told:
        return Endpoint(url)
    limits: dict[str, Any] = {}
    if provider.rate < math.inf:
        limits |= {"requests_per_minute": provider.rate * 60, "burst": int(provider.burst)}
    if provider.cap < math.inf:
        limits["concurrency"] = int(provider.cap)
    return Endpoint(url, **limits)


async def _pool(setting: Setting, urls: list[str], jobs: int, told: bool) -> tuple[float, int]:
    endpoints = [_declared(provider, url, told) for provider, url in zip(setting.providers, urls, strict=True)]

    async def one(n: int) -> bool:
        answer = await pool.chat(model="m", messages=[{"role": "user", "content": f"question {n}"}])
        return answer["choices"][0]["message"]["content"] == f"echo: question {n}"

    async with ComputePool(endpoints) as pool:
        began = time.monotonic()
        results = await asyncio.gather(*(one(n) for n in range(jobs)), return_exceptions=True)
        return time.monotonic() - began, sum(result is True for result in results)


def _peer_python() -> str | None:
    path = Path(os.environ.get("PENSTOCK_PEERS", ROOT / ".cache" / "peers")) / "bin" / "python"
    return str(path) if path.exists() and (ROOT / "benchmarks" / "reward_peer.py").exists() else None


def _peer(python: str, name: str, setting: Setting, urls: list[str], jobs: int) -> tuple[float, int]:
    limits = [
        {"rate": p.rate if p.rate < math.inf else None, "concurrency": p.cap if p.cap < math.inf else None}
        for p in setting.providers
    ]
    task = {"peer": name, "urls": urls, "jobs": jobs, "limits": limits}
    done = subprocess.run(
        [python, str(ROOT / "benchmarks" / "reward_peer.py")],
        input=json.dumps(task) + "\n",
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    answer = json.loads(done.stdout)
    return answer["wall_s"], answer["done"]


def _compare(setting: Setting, jobs: int, repetitions: int, quick: bool) -> list[Result]:
    bound_s = setting.bound_s(jobs)
    results = []
    ours: dict[str, float] = {}
    for name, told, at_most, refused_at_most in (
        ("told the limits", True, setting.at_most, 0.05),
        ("told nothing", False, 1.30, 0.15),
    ):
        runs = []
        for _ in range(repetitions):
            with _serving(setting.providers) as urls:
                wall_s, done = asyncio.run(_pool(setting, urls, jobs, told))
                runs.append((wall_s / bound_s, jobs - done, _refused(urls) / jobs))
        ratio, refused = statistics.median(r[0] for r in runs), statistics.median(r[2] for r in runs)
        lost = sum(r[1] for r in runs)
        ours[name] = ratio
        met = ratio <= at_most and lost == 0 and refused <= refused_at_most
        note = f"{lost} lost, {refused:.3f} 429s a job (<= {refused_at_most}), bound {bound_s:.2f} s"
        results.append(Result(f"{setting.name}: pool, {name}", ratio, "x bound", f"<= {at_most}", met, note))
    python = _peer_python()
    for peer in QUICK_PEERS if quick else PEERS:
        what = f"{setting.name}: {peer}"
        if python is None:
            results.append(skipped(what, "x bound", "no environment; make it with benchmarks/install-peers.sh"))
            continue
        with _serving(setting.providers) as urls:
            try:
                wall_s, done = _peer(python, peer, setting, urls, jobs)
            except subprocess.TimeoutExpired:
                results.append(skipped(what, "x bound", "had not ended after 600 s"))
                continue
            refused = _refused(urls) / jobs
        ratio = wall_s / bound_s
        mine = ours[
            "told nothing" if peer in ("qreward defaults", "openai gather", "openai semaphore") else "told the limits"
        ]
        # Ending sooner by giving up on jobs is not being faster.
        met = mine <= ratio * NOISE or done < jobs
        note = f"{jobs - done} lost, {refused:.3f} 429s a job; the pool takes {mine / ratio:.2f} of its time"
        results.append(Result(what, ratio, "x bound", f"pool <= {NOISE} x this", met, note))
    return results


_BODY = {"model": "m", "messages": [{"role": "user", "content": "Is this answer right? " * 20}], "max_tokens": 16}


async def _each_us(one: Callable[[], Coroutine[Any, Any, object]], requests: int, in_flight: int) -> float:
    """Processor time of a request, microseconds, once every connection is open."""

    async def together(count: int) -> None:
        turns = iter(range(count))

        async def work() -> None:
            for _ in turns:
                await one()

        await asyncio.gather(*(work() for _ in range(in_flight)))

    await together(in_flight)
    began = time.process_time()
    await together(requests)
    return (time.process_time() - began) / requests * 1e6


async def _bare_us(url: str, requests: int, in_flight: int) -> float:
    """With aiohttp alone."""
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            async with session.post(f"{url}/chat/completions", json=_BODY) as response:
                await response.json()

        return await _each_us(one, requests, in_flight)


async def _pool_us(url: str, requests: int, in_flight: int) -> float:
    async with ComputePool([Endpoint(url, concurrency=in_flight)]) as pool:
        return await _each_us(lambda: pool.chat(**_BODY), requests, in_flight)  # type: ignore[arg-type]


def _client_cost(quick: bool) -> list[Result]:
    results = []
    for in_flight in (64, 256, 1000):
        requests = max(500, 2 * in_flight)
        pairs = []
        with _serving((Provider(median_s=0.05, round_trip_s=0.0),)) as (url,):
            for _ in range(8 if quick else 20):
                bare = asyncio.run(_bare_us(url, requests, in_flight))
                pairs.append((asyncio.run(_pool_us(url, requests, in_flight)), bare))
        # Other work on the machine can only add to either side (caches, clock): the least of many short turns is the
        # code's own.
        ours, bare = min(p[0] for p in pairs), min(p[1] for p in pairs)
        ratio, middle = ours / bare, statistics.median(p[0] / p[1] for p in pairs)
        note = f"{ours:.0f} us against {bare:.0f} us, least of {len(pairs)} in turn; median of pairs {middle:.2f}"
        results.append(
            Result(f"processor time a request, {in_flight} in flight", ratio, "x aiohttp", "<= 1.3", ratio <= 1.3, note)
        )
    return results


def _per_call_us(call: Callable[[int], float]) -> float:
    return min(call(5000) for _ in range(5)) * 1e6


def _decorator_cost(quick: bool) -> list[Result]:
    options: dict[str, Any] = {"timeout_s": 30, "attempts": 4, "concurrency": 64, "default": None}

    async def nothing(x: int) -> int:
        return x

    def nothing_sync(x: int) -> int:
        return x

    wrapped, wrapped_sync = accelerate(**options)(nothing), accelerate(**options)(nothing_sync)

    def time_async(calls: int) -> float:
        async def loop() -> float:
            began = time.perf_counter()
            for _ in range(calls):
                await wrapped(1)
            return (time.perf_counter() - began) / calls

        return asyncio.run(loop())

    def time_sync(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            wrapped_sync(1)
        return (time.perf_counter() - began) / calls

    results = []
    peers = _peer_decorator_us()
    for kind, measured, at_most in (("async", _per_call_us(time_async), 10.0), ("sync", _per_call_us(time_sync), 20.0)):
        peer = peers.get(kind) if peers else None
        met = measured <= at_most and (peer is None or measured < peer)
        note = f"QReward's in the same run: {peer:.1f} us" if peer else "QReward's skipped: no environment"
        results.append(
            Result(f"accelerate on a no-op, {kind}, all options", measured, "us", f"<= {at_most:g}", met, note)
        )
    return results


_PEER_NOOP = """
import asyncio, json, logging, time
logging.disable(logging.CRITICAL)
from qreward.utils import schedule
@schedule(timeout=30, retry_times=4, default_result=None)
async def work(x): return x
@schedule(timeout=30, retry_times=4, default_result=None)
def work_sync(x): return x
async def loop(n):
    began = time.perf_counter()
    for _ in range(n): await work(1)
    return (time.perf_counter() - began) / n * 1e6
def sync(n):
    began = time.perf_counter()
    for _ in range(n): work_sync(1)
    return (time.perf_counter() - began) / n * 1e6
print(json.dumps({"async": min(asyncio.run(loop(2000)) for _ in range(5)), "sync": min(sync(1000) for _ in range(5))}))
"""


def _peer_decorator_us() -> dict[str, float] | None:
    python = _peer_python()
    if python is None:
        return None
    done = subprocess.run([python, "-c", _PEER_NOOP], capture_output=True, text=True, timeout=120, check=True)
    return dict(json.loads(done.stdout))
