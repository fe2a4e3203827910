"""A sandbox for programs that nobody has read: run, bounded in everything, and nothing left behind.

Decides how a run is started, watched, bounded and ended; `sandbox_launcher` shuts it in. Knows nothing of tests or
rewards. Three kinds of isolation, the first one that the kernel lets it: `namespaces` (own processes, own network with
no way out, own file system where one folder can be written), `landlock` (a filter refuses sockets, signals to others
and leaving the process group, and the kernel all files but the interpreter's and that folder) and `seccomp` (the filter
alone; files, and what `/proc` shows, are shielded by their owner). Where there is none it refuses, unless
`network="allow"` says that this is accepted.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import math
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from penstock.errors import RewardError

__all__ = ["Abort", "End", "Limits", "Run", "Sandbox", "SandboxError", "available_isolation"]

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
START_TIMEOUT_S = 60.0
"""For the launcher to get ready, which is not the program's time."""
CHECK_S = 30
"""For an empty program, on whatever machine; what is looked for is a limit that it can never keep."""
END_TIMEOUT_S = 30.0
"""For the kernel to end what was killed."""
SHOWN = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime",
)  # fmt: skip
SHOWN_WITH_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates")
Isolation = Literal["namespaces", "landlock", "seccomp", "none"]


class SandboxError(RewardError):
    """A program could not be run as declared; says nothing about the program."""


class End(enum.Enum):
    """How a run ended."""

    EXITED = "exited"
    TIME_OUT = "time-out"
    MEMORY = "memory"
    OUTPUT = "output limit"
    CRASHED = "crashed"
    """A signal, or an exit code other than 0."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use."""

    wall_s: float = 10.0
    """From the program's start."""
    cpu_s: int = 10
    """Of each process."""
    memory_mb: int = 512
    """Address space of each process."""
    disk_mb: int = 16
    """All files together in namespaces; each file elsewhere."""
    processes: int = 32
    """And threads, at the same time."""
    open_files: int = 64
    output_bytes: int = 1_000_000
    """Of standard output and standard error together; a run is ended when it goes beyond."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise SandboxError(f"the sandbox's limit {name} is {value}; it must be above 0")


@dataclass(frozen=True, slots=True)
class Run:
    """One program's run. `code` is its exit code, negative for a signal, None where it was killed at a limit."""

    end: End
    code: int | None
    stdout: str
    stderr: str
    cpu_s: float
    wall_s: float


class Abort:
    """Ends a run from another thread. Holds two descriptors; to be closed when the run is over."""

    def __init__(self) -> None:
        self.fd, self._setter = os.pipe()

    def set(self) -> None:
        os.write(self._setter, b"x")

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._setter)


@dataclass(frozen=True)
class Sandbox:
    """Runs programs one at a time for each caller; safe to share between threads."""

    limits: Limits = field(default_factory=Limits)
    network: Literal["deny", "allow"] = "deny"
    python: str = ""
    """Interpreter; the one that Penstock runs on, without its environment's packages, where none is given."""
    read_only: Sequence[str] = ()
    """Further folders that programs may read (with `namespaces` and `landlock`, where they see nothing else)."""
    isolation: Isolation | None = None
    """What to use; by default the strongest there is."""

    def __post_init__(self) -> None:
        if self.network not in ("deny", "allow"):
            raise SandboxError(f"the sandbox's network is {self.network!r}; it must be deny or allow")
        for path in self.read_only:
            if not os.path.lexists(path):
                raise SandboxError(f"the sandbox's read_only names {path}, which is not here")
        if self.isolation is None:
            object.__setattr__(self, "isolation", available_isolation()[0])
        if self.isolation == "none" and self.network == "deny":
            raise SandboxError(
                "nothing here keeps a program from the network: "
                + "; ".join(available_isolation()[1].values())
                + "; allow user namespaces, or accept it with network = 'allow'"
            )

    def check(self) -> None:
        """Runs an empty program: where the interpreter itself doesn't start, every answer would count as wrong.

        Raises:
            SandboxError: with how the program ended.
        """
        patient = replace(self.limits, wall_s=max(self.limits.wall_s, CHECK_S), cpu_s=max(self.limits.cpu_s, CHECK_S))
        run = replace(self, limits=patient).run("")
        if run.end is not End.EXITED:
            last = run.stderr.strip().splitlines()[-1:]
            raise SandboxError(
                f"an empty program fails in the sandbox ({'; '.join([run.end.value, *last])}): look at python, "
                f"read_only and the limits, such as memory_mb = {self.limits.memory_mb}"
            )

    def run(self, code: str, stdin: str = "", abort: Abort | None = None) -> Run:
        """Runs a Python program, waits for its end and leaves nothing of it: no process, no file.

        Raises:
            SandboxError: it could not be run here, or `abort` was set.
        """
        folder = tempfile.mkdtemp(prefix="penstock-sandbox-")
        try:
            with _Running(self, folder, code, stdin, abort) as running:
                return running.result()
        finally:
            _remove(folder)

    def spec(self, folder: str, code: str, stdin: str, status_fd: int) -> dict[str, Any]:
        limits = self.limits
        python = os.path.realpath(self.python or getattr(sys, "_base_executable", sys.executable))
        shown = [*SHOWN, *(SHOWN_WITH_NETWORK if self.network == "allow" else ())]
        prefix = os.path.realpath(sys.base_prefix) if not self.python else os.path.dirname(os.path.dirname(python))
        shown += [path for path in (prefix, *self.read_only) if not path.startswith(("/usr/", "/nix/store/"))]
        return {
            "command": [python, "-I", "{folder}/main.py"],
            "files": {"main.py": _encodable(code)},
            "stdin": _encodable(stdin),
            "folder": folder,
            "status_fd": status_fd,
            "isolation": self.isolation,
            "filter": self.isolation in ("landlock", "seccomp"),
            "network": self.network,
            "read_only": [path for path in dict.fromkeys(shown) if os.path.lexists(path) and path != "/usr"] + ["/usr"],
            "limits": {
                "cpu_s": max(1, math.ceil(limits.cpu_s)),
                "memory_bytes": limits.memory_mb << 20,
                "disk_bytes": limits.disk_mb << 20,
                "processes": limits.processes,
                "open_files": limits.open_files,
            },
        }


class _Running:
    """One launcher and its pipes, from its start to its end."""

    def __init__(self, sandbox: Sandbox, folder: str, code: str, stdin: str, abort: Abort | None) -> None:
        self._limits = sandbox.limits
        self._abort = abort
        self._output: dict[int, bytearray] = {}
        self._told = bytearray()
        self._end: End | None = None
        self._started_at: float | None = None
        status, status_in = os.pipe()
        self._status = status
        try:
            command = [getattr(sys, "_base_executable", sys.executable), "-I", "-S", str(LAUNCHER)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(status_in,),
                start_new_session=True,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                cwd="/",
            )
        except OSError as error:
            os.close(status)
            raise SandboxError(f"the sandbox's launcher can't be started: {error}") from error
        finally:
            os.close(status_in)
        self._ended = os.pidfd_open(self._process.pid)
        spec = sandbox.spec(folder, code, stdin, status_in)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed below, with its words
            self._process.stdin.write(json.dumps(spec).encode() + b"\n")
            self._process.stdin.flush()

    def __enter__(self) -> _Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()
        process = self._process
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        os.close(self._status)
        os.close(self._ended)

    def _finish(self) -> None:
        """Closes the launcher's line: it kills everything, collects it and ends. Raises SandboxError where it hangs."""
        process = self._process
        if process.returncode is not None:
            return
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise SandboxError(f"the sandbox did not end within {END_TIMEOUT_S:g} s of its kill") from None

    def result(self) -> Run:
        begun = time.monotonic()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        out, err = self._process.stdout.fileno(), self._process.stderr.fileno()
        self._output = {out: bytearray(), err: bytearray()}
        with selectors.DefaultSelector() as selector:
            for fd in (out, err, self._status, self._ended):
                selector.register(fd, selectors.EVENT_READ)
            if self._abort is not None:
                selector.register(self._abort.fd, selectors.EVENT_READ)
            deadline = begun + START_TIMEOUT_S
            while not self._over(selector, deadline):
                if self._started_at is None and b"\n" in self._told:
                    self._started_at = time.monotonic()
                    deadline = self._started_at + self._limits.wall_s
            self._finish()
            self._drain(selector, out, err)
        return self._verdict(bytes(self._output[out]), bytes(self._output[err]))

    def _over(self, selector: selectors.BaseSelector, deadline: float) -> bool:
        left = deadline - time.monotonic()
        if left <= 0:
            if self._started_at is None:
                raise SandboxError(f"the sandbox was not ready within {START_TIMEOUT_S:g} s")
            self._end = End.TIME_OUT
            return True
        for key, _ in selector.select(left):
            if key.fd == self._ended:
                return True
            if self._abort is not None and key.fd == self._abort.fd:
                raise SandboxError("the run was aborted")
            self._read(selector, key.fd)
        return self._end is not None

    def _read(self, selector: selectors.BaseSelector, fd: int) -> None:
        data = os.read(fd, 65536)
        if not data:
            selector.unregister(fd)
        elif fd == self._status:
            self._told += data
        else:
            room = self._limits.output_bytes - sum(map(len, self._output.values()))
            self._output[fd] += data[:room]
            if len(data) > room:
                self._end = End.OUTPUT

    def _drain(self, selector: selectors.BaseSelector, out: int, err: int) -> None:
        """What is in the pipes when everybody is dead, and no wait for whoever may hold them open all the same."""
        for fd in (out, err, self._status):
            os.set_blocking(fd, False)
            with contextlib.suppress(BlockingIOError, KeyError):
                while self._end is not End.OUTPUT and fd in selector.get_map():
                    self._read(selector, fd)

    def _verdict(self, out: bytes, err: bytes) -> Run:
        told: dict[str, Any] = {}
        for line in self._told.splitlines():
            told |= json.loads(line)
        if "error" in told:
            raise SandboxError(f"the sandbox could not run the program: {told['error']}")
        now = time.monotonic()
        if self._started_at is None:
            self._started_at = now if "started" in told else None
        code = told.get("code")
        if self._end is None and (code is None or self._started_at is None):
            words = err.decode(errors="replace").strip().splitlines()
            raise SandboxError(f"the sandbox's launcher died: {words[-1][:300] if words else 'without a word'}")
        stderr = err.decode(errors="replace")
        end = self._end or _end_of(code, stderr, told.get("peak_kb", 0), self._limits)
        wall_s = now - (self._started_at or now)
        return Run(end, code, out.decode(errors="replace"), stderr, told.get("cpu_s", 0.0), wall_s)


def _end_of(code: int | None, stderr: str, peak_kb: int, limits: Limits) -> End:
    if code == 0:
        return End.EXITED
    if code is not None and -code in (signal.SIGXCPU, signal.SIGKILL):
        return End.TIME_OUT  # the kernel's answer to the processor's limit, soft and hard
    lines = stderr.strip().splitlines()
    if (lines and lines[-1].startswith("MemoryError")) or peak_kb > 0.9 * limits.memory_mb * 1024:
        return End.MEMORY
    return End.CRASHED


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _remove(folder: str) -> None:
    """Also where the program took its own folders' rights away. Raises OSError where something stays."""
    for path, folders, _ in os.walk(folder):
        for name in folders:  # before the walk goes there
            inner = os.path.join(path, name)
            if not os.path.islink(inner):
                os.chmod(inner, stat.S_IRWXU)
    shutil.rmtree(folder)


@functools.lru_cache(maxsize=1)
def available_isolation() -> tuple[Isolation, Mapping[str, str]]:
    """The strongest isolation that works here, tried for real, and why each stronger one doesn't."""
    refused: dict[str, str] = {}
    if sys.platform != "linux":
        return "none", {"namespaces": f"{sys.platform} has no sandbox that Penstock knows"}
    kinds: tuple[Isolation, ...] = ("namespaces", "landlock", "seccomp")
    for kind in kinds:
        try:
            run = Sandbox(isolation=kind).run("print(1)")
        except (SandboxError, OSError) as error:
            refused[kind] = f"{kind}: {error}"
            continue
        if run.stdout == "1\n":
            return kind, refused
        refused[kind] = f"{kind}: a trial run ended with {run.end.value}: {run.stderr.strip()[-200:]}"
    return "none", refused
