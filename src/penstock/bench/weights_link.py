"""What the benchmarks of weights measure over: a store in a process of its own, a shaped link, a proxy that delays.

The link is a network namespace with `tc tbf` where that is permitted. Delay is added by a proxy in this process, which
also counts bytes and may cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from penstock.errors import PenstockError
from penstock.weights import WeightStore
from penstock.weights.tcp import parse_address

TOKEN = "benchmark"
NAMESPACE = "penstock-bench"
HERE, THERE = "10.231.77.1", "10.231.77.2"
PIECE_BYTES = 256 * 1024
SERVE = "from penstock.bench.weights_link import serve_files; serve_files()"


def serve_files() -> None:
    """A store in this process: `host port chunk_bytes file...`; each file is a version of one bfloat16 tensor each MiB.

    Prints its address, and for each line on standard input does what it says: `publish N` publishes file N.
    """
    host, port, chunk_bytes, *files = sys.argv[1:]
    store = WeightStore("bench", host, int(port), TOKEN, chunk_bytes=int(chunk_bytes), keep_versions=len(files))
    for version, path in enumerate(files):
        store.publish(version, tensors_of(Path(path).read_bytes()), "{}")
    print(store.start(), flush=True)
    sys.stdin.read()


def tensors_of(data: bytes) -> list[tuple[str, str, tuple[int, ...], memoryview]]:
    """`data` as tensors of 8 MiB, as a model's layers would have."""
    view, size = memoryview(data), 8 << 20
    parts = [view[at : at + size] for at in range(0, len(view), size)]
    return [(f"layer.{k}.weight", "BF16", (len(part) // 2,), part) for k, part in enumerate(parts)]


class StoreProcess:
    """A weight store in a process of its own, in the namespace where one is given."""

    def __init__(
        self, files: list[Path], chunk_bytes: int, namespace: str = "", host: str = "127.0.0.1", port: int = 0
    ) -> None:
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        self._process = subprocess.Popen(
            [*inside, sys.executable, "-c", SERVE, host, str(port), str(chunk_bytes), *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if self._process.stdout is None:
            raise PenstockError("the store's process has no standard output")
        self.address = self._process.stdout.readline().decode().strip()
        if not self.address:
            raise PenstockError("the store's process did not come up")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def signal_kill(self) -> None:
        """SIGKILL, without waiting for the end."""
        self._process.kill()


@contextlib.contextmanager
def shaped(rate: str) -> Iterator[str]:
    """A namespace whose way out is shaped to `rate` (as tc writes it). Raises PenstockError where it can't be made."""
    if not shutil.which("ip") or not shutil.which("tc"):
        raise PenstockError("ip and tc are not installed")
    inside = ["ip", "-n", NAMESPACE]
    steps = [
        ["ip", "netns", "add", NAMESPACE],
        ["ip", "link", "add", "penstock0", "type", "veth", "peer", "name", "penstock1", "netns", NAMESPACE],
        ["ip", "addr", "add", f"{HERE}/30", "dev", "penstock0"],
        ["ip", "link", "set", "penstock0", "up"],
        [*inside, "addr", "add", f"{THERE}/30", "dev", "penstock1"],
        [*inside, "link", "set", "penstock1", "up"],
        [*inside, "link", "set", "lo", "up"],
        ["tc", "-n", NAMESPACE, "qdisc", "add", "dev", "penstock1", "root"]
        + ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"],
    ]
    try:
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PenstockError(f"{' '.join(step[:4])}: {done.stderr.strip()}")
        yield NAMESPACE
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False)


class DelayProxy:
    """Passes bytes on between pullers and a store, each `delay_s` late each way; counts what the store said."""

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        self.target = target
        self.delay_s = delay_s
        self.passed = 0
        self.at: int | None = None
        """Bytes of the store after which `then` is called, once."""
        self.then: Callable[[], None] = lambda: None

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2 * PIECE_BYTES)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = parse_address(self.target)
        try:
            up_reader, up_writer = await asyncio.open_connection(host, port, limit=2 * PIECE_BYTES)
        except OSError:
            writer.close()
            return
        ways = (
            asyncio.create_task(self._pass(reader, up_writer, counts=False)),
            asyncio.create_task(self._pass(up_reader, writer, counts=True)),
        )
        try:
            with contextlib.suppress(asyncio.CancelledError):  # The benchmark is over.
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            up_writer.close()
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: bool) -> None:
        waiting: deque[tuple[float, bytes]] = deque()
        there = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def late() -> None:
            while True:
                while not waiting:
                    there.clear()
                    await there.wait()
                due, data = waiting.popleft()
                if not data:
                    return
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                writer.write(data)
                await writer.drain()

        sending = asyncio.create_task(late())
        try:
            while data := await reader.read(PIECE_BYTES):
                cut = counts and self.at is not None and self.passed + len(data) >= self.at
                if counts:
                    data = self._counted(data)
                waiting.append((loop.time() + self.delay_s, data))
                there.set()
                if cut:
                    break
                if len(waiting) > 256:
                    await asyncio.sleep(self.delay_s)
        except OSError:
            pass
        finally:
            waiting.append((0.0, b""))
            there.set()
        with contextlib.suppress(OSError):
            await sending

    def _counted(self, data: bytes) -> bytes:
        if self.at is not None and self.passed + len(data) >= self.at:
            data = data[: max(1, self.at - self.passed)]
            self.at = None
            self.then()
        self.passed += len(data)
        return data
