"""Local workers: processes of this machine, with sockets for calls and shared memory for what is large.

The edge: starts processes, sends frames, and one thread reads all answers. A worker that ends is named with how it
ended and what it was at. Nothing outlives its controller (`local_worker`), and shared memory has no name (`segment`).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from itertools import count
from typing import Any

from penstock.cluster import frames
from penstock.cluster.batch import Batch
from penstock.cluster.dispatch import Arguments
from penstock.cluster.errors import CallTimeout, ClusterError, WorkerFailed
from penstock.cluster.payload import Packed, pack, put, unpack
from penstock.cluster.segment import SegmentPool
from penstock.cluster.workers import Sent, Workers

START_TIMEOUT_S = 120.0
SEND_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 2.0
"""How long a process whose socket closed may take to be gone, before it is killed."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from penstock.cluster.local_worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


class _Process:
    """One worker's process, socket, and calls that it has not answered."""

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(SEND_TIMEOUT_S)
        life, self._life = os.pipe()
        self.sending = threading.Lock()
        self.pending: dict[int, tuple[str, Future[Any]]] = {}
        self.ended = ""
        try:
            path = [os.path.abspath(entry) for entry in sys.path]
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(life), json.dumps(path)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), life),
                process_group=0,
                env={**os.environ, **environment},
            )
        except BaseException:
            self.socket.close()
            os.close(self._life)
            raise
        finally:
            theirs.close()
            os.close(life)

    def exit_words(self) -> str:
        """How the process ended, for a person; kills it where its socket closed and it goes on."""
        try:
            code = self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return "it closed its connection"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process exited with code {code}"

    def hang_up(self) -> None:
        """The worker leaves once it has ended what it is at."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """Ends the process and what it started, at once. Only the first time: its number may be another's by then."""
        if self._life < 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_TIMEOUT_S)
        self.socket.close()
        os.close(self._life)
        self._life = -1


class LocalWorkers(Workers):
    """`size` processes, each with one object of every role's class."""

    def __init__(
        self,
        roles: Mapping[str, type],
        size: int,
        *,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
        name: str = "workers",
        environments: Sequence[Mapping[str, str]] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Starts the processes and returns when all have made their objects.

        `arguments`: keyword arguments of each role's class. `environments`: variables for each rank, besides RANK,
        LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torch.distributed reads. Raises ClusterError where a
        class can't be imported, WorkerFailed where one can't be made.
        """
        super().__init__(name, size, dict(roles))
        paths = {role: import_path(worker) for role, worker in roles.items()}
        self._segments = SegmentPool()
        packed = pack({role: dict(given) for role, given in (arguments or {}).items()}, self._segments)
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._closing = False
        self._processes: list[_Process] = []
        self._selector = selectors.DefaultSelector()
        self._reader = threading.Thread(target=self._read, name=f"{name}-answers", daemon=True)
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(size)}
        ready: list[Sent] = []
        try:
            for rank in range(size):
                own = dict(environments[rank]) if environments else {}
                process = _Process(rank, {**master, "RANK": str(rank), "LOCAL_RANK": str(rank), **own})
                self._processes.append(process)
                started: Future[Any] = Future()
                process.pending[0] = ("__init__", started)
                ready.append(Sent(rank, "__init__", started))
                self._selector.register(process.socket, selectors.EVENT_READ, process)
                hello = frames.Hello(name, rank, size, paths)
                with contextlib.suppress(OSError):  # a process that is gone already is named by the reader
                    frames.send(process.socket, frames.encode(hello))
                    call = frames.Call(0, "", "__init__", False, packed.body)
                    frames.send(process.socket, frames.encode(call), packed.fds)
            self._reader.start()
            self.gather(ready, start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.process.pid for process in self._processes]

    def prepare(self, arguments: Arguments) -> Packed:
        return pack(arguments, self._segments)

    def submit(self, rank: int, role: str, method: str, prepared: Packed, answer: bool) -> Sent:
        process = self._processes[rank]
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if process.ended:
                raise WorkerFailed(self.name, rank, method, process.ended)
            process.pending[number] = (method, future)
        call = frames.encode(frames.Call(number, role, method, answer, prepared.body))
        try:
            with process.sending:
                frames.send(process.socket, call, prepared.fds)
        except TimeoutError:
            self._mark_ended(process, f"it took no call for {SEND_TIMEOUT_S:g} s")
            raise WorkerFailed(self.name, rank, method, process.ended) from None
        except OSError as error:
            raise WorkerFailed(self.name, rank, method, f"it can't be reached: {error}") from None
        return Sent(rank, method, future)

    def gather(self, sent: Sequence[Sent], timeout_s: float) -> list[Any]:
        futures = [call.ticket for call in sent]
        wait(futures, timeout_s, FIRST_EXCEPTION)
        for call in sent:
            if call.ticket.done() and (error := call.ticket.exception()) is not None:
                raise error
        if late := [call for call in sent if not call.ticket.done()]:
            ranks = ", ".join(str(call.rank) for call in late)
            raise CallTimeout(f"{self.name}: no answer to {late[0].method}() from rank {ranks} in {timeout_s:g} s")
        return [None if call.ticket.result() is None else _opened(call.ticket.result()) for call in sent]

    def put(self, batch: Batch) -> Batch:
        return put(batch, self._segments)

    def close(self) -> None:
        self._closing = True
        self.lost = self.lost or "it was closed"
        for process in self._processes:
            process.hang_up()
        end = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.process.wait(max(0.0, end - time.monotonic()))
        if self._reader.ident is not None:
            self._reader.join(CLOSE_TIMEOUT_S)
        for process in self._processes:
            self._mark_ended(process, "the group was closed")
            process.kill()
        self._selector.close()
        self._segments.close()

    def _read(self) -> None:
        """Takes answers until every worker is gone."""
        while self._selector.get_map():
            for key, _ in self._selector.select():
                process: _Process = key.data
                try:
                    body, fds = frames.receive(process.socket)
                    self._take(process, frames.decode_from_worker(body), fds)
                except (EOFError, OSError, ClusterError) as error:
                    self._selector.unregister(process.socket)
                    told = "the group was closed" if self._closing else process.exit_words()
                    self._mark_ended(process, f"{error}; {told}" if isinstance(error, ClusterError) else told)

    def _take(self, process: _Process, message: frames.FromWorker, fds: list[int]) -> None:
        number = 0 if isinstance(message, frames.Ready) else message.number
        with self._lock:
            method, future = process.pending.pop(number, ("", None))
        if future is None:
            _close_all(fds)
        elif isinstance(message, frames.Fault):
            _close_all(fds)
            future.set_exception(WorkerFailed(self.name, process.rank, method, message.cause, message.traceback))
        elif isinstance(message, frames.Answer):
            future.set_result(_Raw(message.body, fds))
        else:
            future.set_result(None)

    def _mark_ended(self, process: _Process, how: str) -> None:
        with self._lock:
            process.ended = process.ended or how
            pending, process.pending = process.pending, {}
        if not self._closing:
            at = f" at {next(iter(pending.values()))[0]}()" if pending else ""
            self.lost = self.lost or f"rank {process.rank} is gone{at}: {how}"
        for method, future in pending.values():
            future.set_exception(WorkerFailed(self.name, process.rank, method, how))


class _Raw:
    """An answer as it came; opened by whoever asked, in their own thread."""

    def __init__(self, body: bytes, fds: list[int]) -> None:
        self._body = body
        self._fds = fds

    def value(self) -> Any:
        return unpack(self._body, self._fds)

    def __del__(self) -> None:
        _close_all(self._fds)


def _opened(raw: _Raw) -> Any:
    return raw.value()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def import_path(worker: type) -> str:
    """Where another process finds a class. Raises ClusterError where it can't."""
    path = f"{worker.__module__}:{worker.__qualname__}"
    if worker.__module__ == "__main__" or "<locals>" in path:
        raise ClusterError(f"workers are processes of their own and can't import {path}; put the class in a module")
    return path


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
