"""Weights on one machine: TCP over loopback, shared memory, Mooncake, and what publishing costs the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from penstock.bench.common import Result, at_least, at_most, skipped
from penstock.bench.weights_link import TOKEN, StoreProcess
from penstock.bench.weights_pair import drawn
from penstock.errors import PenstockError
from penstock.train.shards import writer_of
from penstock.weights import TcpTransport, WeightStore, pull
from penstock.weights.choose import Rates
from penstock.weights.memory import Recycled, host_buffer, usable_cores
from penstock.weights.ways import fetchers_of

__all__ = ["on_one_machine", "stalls"]

CHUNK_BYTES = 4 << 20
STREAMS = 2
ROW, LAYERS = 4096, 48
"""Columns and number of the tensors of which the trainer's stall is measured."""
MOONCAKE_PYTHON = "PENSTOCK_MOONCAKE_PYTHON"
"""An interpreter that has Mooncake's transfer engine: it links against libraries that few machines have."""
COPY = """
import socket, sys
from penstock.weights.memory import host_buffer
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
data = host_buffer(int(sys.argv[1])); data[:] = bytes(len(data))
for _ in range(int(sys.argv[2])):
    peers = [listener.accept()[0] for _ in range(int(sys.argv[3]))]
    import threading
    share = len(data) // len(peers)
    sends = [threading.Thread(target=p.sendall, args=(data[k*share:(k+1)*share],)) for k, p in enumerate(peers)]
    [s.start() for s in sends]; [s.join() for s in sends]; [p.close() for p in peers]
"""
LEND = """
import ctypes, mmap, sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
size = int(sys.argv[1]); data = mmap.mmap(-1, size); data[:] = bytes(size)
address = ctypes.addressof(ctypes.c_char.from_buffer(data))
assert engine.register_memory(address, size) == 0
print("AT", f"127.0.0.1:{engine.get_rpc_port()}", address, flush=True)
sys.stdin.read()
"""
READ = """
import ctypes, mmap, sys, time
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
size = int(sys.argv[1]); data = mmap.mmap(-1, size); data[:] = bytes(size)
address = ctypes.addressof(ctypes.c_char.from_buffer(data))
assert engine.register_memory(address, size) == 0
took = []
for _ in range(int(sys.argv[4])):
    began = time.perf_counter()
    assert engine.transfer_sync_read(sys.argv[2], address, int(sys.argv[3]), size) == 0
    took.append(time.perf_counter() - began)
print("TOOK", took, flush=True)
"""


def on_one_machine(size: int, times: int) -> list[Result]:
    """Pulls of raw weights against bare copies of as many bytes, turn by turn; the first of each is thrown away."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        path = Path(folder) / "v0"
        data = drawn(size, 0.0)[0]
        path.write_bytes(data)
        store = StoreProcess([path], CHUNK_BYTES, ways="shm")
        ends.callback(store.kill)
        command = [sys.executable, "-c", COPY, str(size), str(2 * times + 2), str(STREAMS)]
        sender = subprocess.Popen(command, stdout=subprocess.PIPE)
        ends.callback(_end, sender)
        port = int(sender.stdout.readline()) if sender.stdout else 0
        fresh, shm_fresh, copied_fresh, moved_fresh = asyncio.run(_fresh(store.address, port, data, times))
        tcp, shm, copied, moved = asyncio.run(_turns(store.address, port, data, times))
    one, other, lent, memcpy = tcp.median(), statistics.median(copied[1:]), shm.median(), statistics.median(moved[1:])
    first, bare = fresh.median(), statistics.median(copied_fresh[1:])
    seen, moved_to = shm_fresh.median(), statistics.median(moved_fresh[1:])
    note = f"{size / one / 1e9:.2f} GB/s verified, against {size / other / 1e9:.2f}; {STREAMS} streams"
    note_fresh = f"{size / first / 1e9:.2f} GB/s verified, against {size / bare / 1e9:.2f}; as an agent's first version"
    shared = f"{size / lent / 1e9:.2f} GB/s verified, against {size / memcpy / 1e9:.2f}; warm memory on both sides"
    shared_fresh = f"{size / seen / 1e9:.2f} GB/s verified, against {size / moved_to / 1e9:.2f}; nothing mapped before"
    return [
        at_least("raw over loopback / bare socket copy, fresh memory", bare / first, 0.9, "x", note_fresh),
        at_least("raw over loopback / bare socket copy, warm memory", other / one, 0.9, "x", note),
        Result("processor time of a raw pull", tcp.cpu_s_per_gb(size), "s/GB", note="the puller's"),
        at_least("raw by shared memory / memcpy, fresh memory", moved_to / seen, 0.8, "x", shared_fresh),
        at_least("raw by shared memory / memcpy", memcpy / lent, 0.8, "x", shared),
        Result("processor time of a pull by shared memory", shm.cpu_s_per_gb(size), "s/GB", note="the puller's"),
        _mooncake(size, times, one),
    ]


class _Timed:
    """Pulls of one kind; `warm`: into memory that is used again, as that of an agent's later versions is."""

    def __init__(self, way: str, warm: bool = True) -> None:
        self._way = way
        self._transport = TcpTransport(TOKEN, fetchers=fetchers_of([way] if way != "tcp" else []))
        self._memory = Recycled().buffer if warm else host_buffer
        self._rates = Rates(cores=usable_cores())
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    async def pull(self, address: str) -> None:
        began, used = time.perf_counter(), time.process_time()
        weights = await pull(
            address,
            0,
            TOKEN,
            codec="raw",
            connections=STREAMS,
            transport=self._transport,
            memory=lambda nbytes, base: (self._memory(nbytes), 0),
            rates=self._rates,
        )
        self.wall_s.append(time.perf_counter() - began)
        self.cpu_s.append(time.process_time() - used)
        if weights.way != self._way:
            raise PenstockError(f"weights came by {weights.way}, and {self._way} is measured")

    def close(self) -> None:
        self._transport.close()

    def median(self) -> float:
        return statistics.median(self.wall_s[1:])

    def cpu_s_per_gb(self, size: int) -> float:
        return statistics.median(self.cpu_s[1:]) / size * 1e9


async def _fresh(address: str, port: int, data: bytes, times: int) -> tuple[_Timed, _Timed, list[float], list[float]]:
    tcp, shm = _Timed("tcp", warm=False), _Timed("shm")
    copied, moved = [], []
    for _ in range(times + 1):
        await tcp.pull(address)
        began = time.perf_counter()
        await asyncio.to_thread(_copy_from, port, host_buffer(len(data)))
        copied.append(time.perf_counter() - began)
        await shm.pull(address)
        shm.close()  # With the link goes what is kept mapped.
        began = time.perf_counter()
        host_buffer(len(data))[:] = data
        moved.append(time.perf_counter() - began)
    tcp.close()
    return tcp, shm, copied, moved


async def _turns(address: str, port: int, data: bytes, times: int) -> tuple[_Timed, _Timed, list[float], list[float]]:
    tcp, shm = _Timed("tcp"), _Timed("shm")
    copied, moved = [], []
    into = host_buffer(len(data))
    for _ in range(times + 1):
        await tcp.pull(address)
        began = time.perf_counter()
        await asyncio.to_thread(_copy_from, port, into)
        copied.append(time.perf_counter() - began)
        await shm.pull(address)
        began = time.perf_counter()
        into[:] = data
        moved.append(time.perf_counter() - began)
    for kind in (tcp, shm):
        kind.close()
    return tcp, shm, copied, moved


def _copy_from(port: int, into: memoryview) -> None:
    share = len(into) // STREAMS

    def receive(part: memoryview) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            filled = 0
            while filled < len(part):
                got = sock.recv_into(part[filled:])
                if not got:
                    raise PenstockError("the bare copy broke off")
                filled += got

    threads = [threading.Thread(target=receive, args=(into[k * share : (k + 1) * share],)) for k in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _mooncake(size: int, times: int, ours_s: float) -> Result:
    """Mooncake's own read of as many bytes over TCP, from one process to another."""
    what = "raw over loopback / Mooncake over TCP"
    python = os.environ.get(MOONCAKE_PYTHON)
    if not python:
        return skipped(what, "x", f"no interpreter with Mooncake's transfer engine is named in {MOONCAKE_PYTHON}")
    lender = subprocess.Popen(
        [python, "-c", LEND, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        lines = (line.decode().split() for line in lender.stdout or ())
        place = next((line[1:] for line in lines if line[:1] == ["AT"]), None)
        if place is None:
            return skipped(what, "x", "Mooncake's transfer engine does not start here")
        reader = subprocess.run(
            [python, "-c", READ, str(size), *place, str(times + 1)], capture_output=True, text=True, timeout=300
        )
    finally:
        _end(lender)
    said = next((line for line in reader.stdout.splitlines() if line.startswith("TOOK")), None)
    if said is None:
        return skipped(what, "x", f"Mooncake's transfer engine reads nothing here: {reader.stderr[-200:]}")
    theirs_s = statistics.median(json.loads(said.removeprefix("TOOK"))[1:])
    note = f"Mooncake {size / theirs_s / 1e9:.2f} GB/s, not verified; in the minutes after ours"
    return at_least(what, theirs_s / ours_s, 1.0, "x", note)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def stalls(size: int, times: int) -> list[Result]:
    """How long `publish_behind` keeps the trainer, against the bare copy; hashing goes on behind it.

    By the trainer's own way (`writer_of`), with weights that are sent as they are kept and with ones that are cast.
    """
    kept = torch.frombuffer(bytearray(drawn(size, 0.0)[0]), dtype=torch.bfloat16).view(-1, ROW)
    exact = kept[: len(kept) // 2].float()
    return [
        at_most("trainer's stall / bare copy in memory", *_stall(kept, size, times)),
        at_most("trainer's stall / bare cast from float32 to bfloat16", *_stall(exact, size // 2, times)),
    ]


def _stall(weights: torch.Tensor, size: int, times: int) -> tuple[float, float, str, str]:
    """The ratio with its target, unit and note. `size`: bytes that are sent."""
    rows = weights.split(max(1, len(weights) // LAYERS))
    shapes = [(f"w{k}", "BF16", tuple(row.shape)) for k, row in enumerate(rows)]
    into = torch.frombuffer(host_buffer(size), dtype=torch.bfloat16)
    store = WeightStore("bench", "127.0.0.1", 0, TOKEN, keep_versions=1)
    store.start()
    stalled, copied = [], []
    try:
        for version in range(times + 2):
            began = time.perf_counter()
            named = ((*shape, writer_of(row, torch.bfloat16)) for shape, row in zip(shapes, rows))
            publication = store.publish_behind(version, named, "{}", shapes)
            stalled.append(time.perf_counter() - began)
            publication.manifest()
            began = time.perf_counter()
            for place, row in zip(into.split([row.numel() for row in rows]), rows):
                place.copy_(row.view(-1))
            copied.append(time.perf_counter() - began)
    finally:
        store.close()
    # The first two find no buffer of an older version to use again.
    one, other = statistics.median(stalled[2:]), statistics.median(copied[2:])
    note = f"{one * 1e9 / size:.3f} s/GB; the first two versions, on fresh memory, {max(stalled[:2]) * 1e9 / size:.3f}"
    return one / other, 1.1, "x", note
