"""What `penstock gateway` adds to a request, beside asking the provider directly in the same run, and what it holds."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from penstock.bench.common import Result, skipped

DESCRIPTION = "penstock gateway: latency added at 200 requests/s, memory with 2,000 requests in flight"

RATE = 200.0
HELD = 2000
BODY = {"model": "m", "messages": [{"role": "user", "content": "Is this answer right? " * 20}], "max_tokens": 16}


def run(quick: bool) -> list[Result]:
    seconds, rounds = (3.0, 2) if quick else (10.0, 5)
    added: list[tuple[float, float]] = []
    with _provider(median_s=0.02) as direct, _gateway(direct) as (through, _):
        asyncio.run(_latencies(through, 0.5))  # connections opened, code warm
        for _ in range(rounds):
            bare, gated = asyncio.run(_latencies(direct, seconds)), asyncio.run(_latencies(through, seconds))
            added.append((_median(gated) - _median(bare), _high(gated) - _high(bare)))
    middle, high = statistics.median(a for a, _ in added) * 1e3, statistics.median(b for _, b in added) * 1e3
    note = f"{rounds} rounds of {seconds:g} s, direct and through in turn"
    return [
        Result(f"added at the median, {RATE:g} requests/s", middle, "ms", "<= 1", middle <= 1, note),
        Result(f"added at p99, {RATE:g} requests/s", high, "ms", "<= 5", high <= 5, note),
        _held(),
    ]


@contextmanager
def _provider(median_s: float) -> Iterator[str]:
    said = json.dumps({"median_s": median_s, "spread": 0.0})
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.simulate.provider_server", said], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.communicate(timeout=30)


@contextmanager
def _gateway(url: str) -> Iterator[tuple[str, int]]:
    """A gateway process over one endpoint; yields its address and process id."""
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "pool.toml"
        pool.write_text(f'[[endpoints]]\nurl = "{url}"\nconcurrency = {2 * HELD}\n')
        command = [sys.executable, "-m", "penstock", "gateway", str(pool), "--port", "0", "--table-every", "0"]
        process = subprocess.Popen(
            [*command, "--exit-with-stdin"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.communicate(timeout=30)


async def _latencies(url: str, seconds: float) -> list[float]:
    """Seconds each request took, sent evenly whether or not earlier ones have been answered."""
    loop, took = asyncio.get_running_loop(), []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            began = time.perf_counter()
            async with session.post(f"{url}/chat/completions", json=BODY) as response:
                await response.read()
                response.raise_for_status()
            took.append(time.perf_counter() - began)

        began, tasks = loop.time(), []
        for n in range(int(RATE * seconds)):
            await asyncio.sleep(max(0.0, began + n / RATE - loop.time()))
            tasks.append(loop.create_task(one()))
        await asyncio.gather(*tasks)
    return took


def _median(took: list[float]) -> float:
    return statistics.median(took)


def _high(took: list[float]) -> float:
    return sorted(took)[int(0.99 * len(took))]


def _held() -> Result:
    """Peak memory of a gateway with `HELD` requests in flight at once."""
    what = f"memory with {HELD:,} requests in flight"
    with _provider(median_s=8.0) as direct, _gateway(direct) as (through, pid):
        status = Path(f"/proc/{pid}/status")
        if not status.exists():
            return skipped(what, "MB", "no /proc on this machine", "<= 300")
        done = asyncio.run(_all_at_once(through))
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    megabytes = int(peak.split()[1]) / 1024
    return Result(what, megabytes, "MB", "<= 300", megabytes <= 300 and done == HELD, f"{done:,} of {HELD:,} answered")


async def _all_at_once(url: str) -> int:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> bool:
            async with session.post(f"{url}/chat/completions", json=BODY) as response:
                await response.read()
                return response.status == 200

        return sum(await asyncio.gather(*(one() for _ in range(HELD))))
