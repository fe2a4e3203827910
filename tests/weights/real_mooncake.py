"""Mooncake's own transfer engine, from one process's registered memory into another's: `make test-mooncake`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from penstock.weights import TcpTransport, pull
from penstock.weights.ways import fetchers_of

TOKEN = "token"
NBYTES = 8 << 20
STORE = """
import random, sys
from penstock.weights import WeightStore
from penstock.weights.ways import lenders_of
store = WeightStore("run", "127.0.0.1", 0, "token", chunk_bytes=1 << 20, lenders=lenders_of(["mooncake"], "127.0.0.1"))
for version in (0, 1):
    data = random.Random(version).randbytes(int(sys.argv[1]))
    store.publish(version, [("w", "BF16", (len(data) // 2,), data)], "{}")
print(store.start(), flush=True)
sys.stdin.read()
print(store.counters().get("bytes", 0), store.counters()["chunks_by_mooncake"], flush=True)
store.close()
"""


async def _pulled(address: str) -> None:
    transport = TcpTransport(TOKEN, fetchers=fetchers_of(["mooncake"]))
    for version in (0, 1):
        weights = await pull(address, version, TOKEN, codec="raw", transport=transport, deadline_s=60)
        assert weights.way == "mooncake"
        assert weights.manifest.raw_nbytes == NBYTES
    transport.close()


def test_versions_come_out_of_another_processs_registered_memory_and_verify() -> None:
    store = subprocess.Popen(
        [sys.executable, "-c", STORE, str(NBYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    try:
        assert store.stdout is not None
        # The engine prints words of its own.
        address = next(line.strip() for line in store.stdout if line.startswith("127.0.0.1:"))
        asyncio.run(_pulled(address))
        out, _ = store.communicate(timeout=30)
        assert out.strip().endswith(f"0 {2 * NBYTES // (1 << 20)}")
    finally:
        store.kill()
        store.wait(10)
