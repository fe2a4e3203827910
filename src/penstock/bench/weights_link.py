"""What the benchmarks of weights measure over: a store in a process of its own, a shaped link, a proxy that delays.

The link is a network namespace with `tc tbf` where that is permitted. Delay is added by a proxy in this process, which
also counts bytes and may cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from penstock.errors import PenstockError
from penstock.instance.loading import WeightLoader
from penstock.weights import WeightStore
from penstock.weights.addresses import parse_address
from penstock.weights.ways import lenders_of

TOKEN = "benchmark"
NAMESPACE = "penstock-bench"
HERE, THERE = "10.231.77.1", "10.231.77.2"
PIECE_BYTES = 256 * 1024
LATENCY_S = 0.05
CHUNK_BYTES = 4 << 20
ROUND_TRIP_S = 0.02
AHEAD_S = 60.0
"""Far less than a step takes, in which an instance copies its base ahead."""
INSTANCE = "from penstock.bench.weights_link import be_an_instance; be_an_instance()"
PROXIES = "from penstock.bench.weights_link import be_proxies; be_proxies()"
SERVE = "from penstock.bench.weights_link import serve_files; serve_files()"


def files_of(folder: Path, name: str, *versions: bytes) -> list[Path]:
    paths = [folder / f"{name}-{k}" for k in range(len(versions))]
    for path, data in zip(paths, versions):
        path.write_bytes(data)
    return paths


def serve_files() -> None:
    """A store in this process: `host port chunk_bytes ways file...`; each file is a version, a folder one of a model.

    Prints its address, and lives until standard input ends.
    """
    host, port, chunk_bytes, ways, *files = sys.argv[1:]
    lenders = lenders_of(ways.split(",") if ways else [], host)
    store = WeightStore(
        "bench", host, int(port), TOKEN, chunk_bytes=int(chunk_bytes), keep_versions=len(files), lenders=lenders
    )
    for version, name in enumerate(files):
        path = Path(name)
        if path.is_dir():
            from penstock.instance.builtin.checkpoint import stage_folder

            staged = stage_folder(path, version)
            tensors = [(t.name, t.dtype, t.shape, staged.tensors[t.name]) for t in staged.manifest.tensors]
            store.publish(version, tensors, staged.manifest.config_json)
        else:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                tensors = tensors_of(data)
                store.publish(version, tensors, "{}")
                del tensors
    print(store.start(), flush=True)
    sys.stdin.read()


def tensors_of(data: bytes | mmap.mmap) -> list[tuple[str, str, tuple[int, ...], memoryview]]:
    """`data` as tensors of 8 MiB, as a model's layers would have."""
    view, size = memoryview(data), 8 << 20
    parts = [view[at : at + size] for at in range(0, len(view), size)]
    return [(f"layer.{k}.weight", "BF16", (len(part) // 2,), part) for k, part in enumerate(parts)]


def be_proxies() -> None:
    """Proxies in this process: `target count`. Prints their addresses; then, at each line of standard input, how many
    bytes of the target's they have passed on together. A line with a number delays by so many seconds from then on."""
    asyncio.run(_be_proxies(sys.argv[1], int(sys.argv[2])))


async def _be_proxies(target: str, count: int) -> None:
    async with contextlib.AsyncExitStack() as listening:
        proxies = [DelayProxy(target) for _ in range(count)]
        print(*[await listening.enter_async_context(proxy.listening()) for proxy in proxies], flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            for proxy in proxies:
                proxy.delay_s = float(line) if line.strip() else proxy.delay_s
            print(sum(proxy.passed for proxy in proxies), flush=True)


def be_an_instance() -> None:
    """An instance in this process: `address codec ways`, and passes weights on unless `alone` is behind them.

    Gets version 0 and says "ready"; then gets each version that a line of standard input names, says when it was there
    (the machine's monotonic clock), serves it, and says "ready" once the next one can come as it would after a step.
    """
    address, codec, ways, *rest = sys.argv[1:]
    asyncio.run(_be_an_instance(address, codec, ways, None if rest == ["alone"] else 0))


async def _be_an_instance(store: str, codec: str, ways: str, relay_port: int | None) -> None:
    by = ways.split(",") if ways else []
    loader = WeightLoader(TOKEN, codec=codec, connections=4, relay_port=relay_port, ways=by)
    loader.serves(await loader.pull(store, 0, 300))
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        weights = await loader.pull(store, int(line), 300)
        print(time.monotonic(), flush=True)
        loader.serves(weights)
        del weights
        await loader.base_is_ahead(AHEAD_S)
        print("ready", flush=True)
    await loader.close()


class TalkingProcess:
    """A process of this module that is asked by lines, and answers by lines."""

    def __init__(self, being: str, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", being, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        if self._process.stdin is None:
            raise PenstockError("a process of the benchmark has no standard input")
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def said(self) -> str:
        """Its next line."""
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise PenstockError("a process of the benchmark did not live to say what it was asked")
        return line.strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class StoreProcess:
    """A weight store in a process of its own, in the namespace where one is given."""

    def __init__(
        self,
        files: list[Path],
        chunk_bytes: int,
        namespace: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        ways: str = "",
    ) -> None:
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        self._process = subprocess.Popen(
            [*inside, sys.executable, "-c", SERVE, host, str(port), str(chunk_bytes), ways, *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if self._process.stdout is None:
            raise PenstockError("the store's process has no standard output")
        self.address = self._process.stdout.readline().decode().strip()
        if not self.address:
            raise PenstockError("the store's process did not come up")

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def signal_kill(self) -> None:
        """SIGKILL, without waiting for the end."""
        self._process.kill()


class ShapedLink:
    """The way out of a namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def shape(self, rate_mbit_s: float, latency_s: float = LATENCY_S, change: bool = True) -> None:
        """`latency_s`: what may wait before something is dropped. Raises PenstockError."""
        _run(
            ["tc", "-n", self.namespace, "qdisc", "change" if change else "add", "dev", "penstock1", "root", "tbf"]
            + ["rate", f"{rate_mbit_s:g}mbit", "burst", "256kb", "latency", f"{latency_s * 1e3:g}ms"]
        )


@contextlib.contextmanager
def shaped(rate_mbit_s: float) -> Iterator[ShapedLink]:
    """A namespace whose way out is shaped, one at a time on a machine. Raises PenstockError where it can't be made."""
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
    ]
    remove = ["ip", "netns", "del", NAMESPACE]
    with (Path(tempfile.gettempdir()) / f"{NAMESPACE}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PenstockError("another benchmark on this machine has the shaped link") from error
        # One that was killed has left its own.
        subprocess.run(remove, capture_output=True, check=False)
        try:
            for step in steps:
                _run(step)
            link = ShapedLink(NAMESPACE)
            link.shape(rate_mbit_s, change=False)
            yield link
        finally:
            subprocess.run(remove, capture_output=True, check=False)


def _run(step: list[str]) -> None:
    done = subprocess.run(step, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PenstockError(f"{' '.join(step[:4])}: {done.stderr.strip()}")


def _heard(sending: asyncio.Task[None]) -> None:
    """A side that is gone is what the benchmark is about."""
    if not sending.cancelled():
        sending.exception()


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
        asking = asyncio.create_task(self._pass(reader, up_writer, counts=False))
        answering = asyncio.create_task(self._pass(up_reader, writer, counts=True))
        ways = (asking, answering)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # The benchmark is over.
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                if not asking.done() and not writer.transport.is_closing():
                    # What was counted arrives: a socket that is closed with requests unread throws away what it sends.
                    writer.write_eof()
                    await asyncio.wait((asking,))
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
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
        sending.add_done_callback(_heard)
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
