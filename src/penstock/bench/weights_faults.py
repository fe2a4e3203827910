"""The sender of weights is killed at a random byte, again and again; every receiver ends on a verified version."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from pathlib import Path

from penstock.bench.common import Result, at_least, at_most
from penstock.bench.weights_link import TOKEN, DelayProxy, StoreProcess
from penstock.bench.weights_pair import drawn
from penstock.errors import PenstockError
from penstock.weights import StagedWeights, TcpTransport, pull
from penstock.weights.ways import fetchers_of

DESCRIPTION = "weights: seeded kills of the sender in mid-transfer; what is verified, what is fetched twice"
SEED = 20_261_121
SIZE = 8 << 20
CHUNK_BYTES = 256 * 1024
CONNECTIONS = 2
RECEIVERS = 2
FRAMES_BYTES = 16 * 1024
"""Handshakes and replies of a connection that is opened again."""
CODECS = ("raw", "lossless", "delta", "shm")
"""shm: raw, out of the memory of the sender that is killed."""


def run(quick: bool) -> list[Result]:
    kills = 9 if quick else 200
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "v0", Path(folder) / "v1"]
        for path, data in zip(paths, drawn(SIZE, 0.05)):
            path.write_bytes(data)
        whole, killed, worst, twice = asyncio.run(_kills(paths, kills))
    by_codec = ", ".join(f"{codec} {worst[codec]:.2f}" for codec in CODECS)
    return [
        at_least("receivers that end on a verified version", 100 * whole / (kills * RECEIVERS), 100, "%"),
        at_least("kills that hit a transfer", killed, kills, ""),
        at_most(
            "bytes fetched twice, worst, in chunks a connection",
            max(worst.values()),
            1.0,
            "",
            f"{by_codec}; {kills} seeded SIGKILLs, {RECEIVERS} receivers of {CONNECTIONS} connections each; counted at "
            "a proxy before the receiver, less what an undisturbed one takes",
        ),
        Result("bytes fetched twice, all in all", twice / 1e6, "MB"),
    ]


async def _kills(paths: list[Path], kills: int) -> tuple[int, int, dict[str, float], int]:
    dice = random.Random(SEED)
    store = await asyncio.to_thread(StoreProcess, paths, CHUNK_BYTES, ways="shm")
    whole = killed = twice = 0
    worst = dict.fromkeys(CODECS, 0.0)
    try:
        base = await pull(store.address, 0, TOKEN, codec="raw", deadline_s=60)
        usual = {codec: await _undisturbed(store.address, codec, base) for codec in CODECS}
        for number in range(kills):
            codec = CODECS[number % len(CODECS)]
            proxies = [DelayProxy(store.address) for _ in range(RECEIVERS)]
            dying = asyncio.Event()
            proxies[0].at = dice.randrange(1, usual[codec])
            sender = store

            def kill(sender: StoreProcess = sender, dying: asyncio.Event = dying) -> None:
                sender.signal_kill()
                dying.set()

            proxies[0].then = kill
            async with contextlib.AsyncExitStack() as parts:
                addresses = [await parts.enter_async_context(proxy.listening()) for proxy in proxies]
                pulls = [asyncio.create_task(_one(address, codec, base)) for address in addresses]
                async with asyncio.timeout(60):
                    await dying.wait()
                killed += 1
                await asyncio.to_thread(store.kill)
                store = await asyncio.to_thread(StoreProcess, paths, CHUNK_BYTES, ways="shm")
                for proxy in proxies:
                    proxy.target = store.address
                whole += sum(await asyncio.gather(*pulls))
            for proxy in proxies:
                extra = max(0, proxy.passed - usual[codec])
                twice += extra
                chunks = max(0, extra - 2 * CONNECTIONS * FRAMES_BYTES) / (CONNECTIONS * CHUNK_BYTES)
                worst[codec] = max(worst[codec], chunks)
    finally:
        store.kill()
    return whole, killed, worst, twice


async def _one(address: str, codec: str, base: StagedWeights) -> bool:
    """Whether the version came, verified, and is the one that it should be."""
    shared = codec == "shm"
    transport = TcpTransport(TOKEN, fetchers=fetchers_of(["shm"] if shared else []))
    options = {"codec": "raw"} if shared else {"codec": codec, "base": base}
    try:
        weights = await pull(address, 1, TOKEN, connections=CONNECTIONS, deadline_s=60, transport=transport, **options)
    finally:
        transport.close()
    return weights.version == 1 and weights.manifest.digest != base.manifest.digest


async def _undisturbed(address: str, codec: str, base: StagedWeights) -> int:
    proxy = DelayProxy(address)
    async with proxy.listening() as through:
        if not await _one(through, codec, base):
            raise PenstockError("an undisturbed pull brought another version")
    return proxy.passed
