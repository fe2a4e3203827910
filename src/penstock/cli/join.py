"""`penstock join`: makes this machine an instance of a run. The manager's address and the token are all it needs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import logging
import mmap
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import collector
from penstock.cli.engine_server import (
    SERVED,
    add_server_arguments,
    build_served,
    check_server_arguments,
    take_engine_options,
    tensor_parallel,
)
from penstock.cli.numbers import count, port, positive
from penstock.cli.restarts import Restarts
from penstock.errors import AuthError, ConfigError, EngineError, MissingExtra, StorageError

if TYPE_CHECKING:
    import ssl

    from penstock.instance.agent import Agent
    from penstock.instance.engine import Engine
    from penstock.instance.preemption import Preemption

log = logging.getLogger("penstock.join")

HELP = "join this machine to a run as an engine"
take_words = take_engine_options
CLOSE_S = 2.0
"""For the engine to end after the agent has left."""
ORPHAN_S = 4.0
"""An agent whose parent died leaves in order; after so long it just ends."""
MOST_NAME = 64
"""Characters of an instance's name."""
DEFAULT_FRAME_STEPS = 8
"""Until the manager's welcome says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--manager", required=True, metavar="URL", help="the run's manager, http://host:port")
    parser.add_argument(
        "--engine",
        choices=("builtin", "vllm", "sglang", "paced"),
        default="builtin",
        help="what draws tokens (%(default)s)",
    )
    add_server_arguments(parser)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, or auto (%(default)s)")
    parser.add_argument("--max-running", type=count, default=64, metavar="N", help="sequences at once (%(default)s)")
    parser.add_argument(
        "--max-context", type=count, default=0, metavar="N", help="longest sequence in tokens (what the run wants)"
    )
    parser.add_argument("--kv-cache-mib", type=count, default=1024, metavar="N", help="KV cache bound (%(default)s)")
    parser.add_argument(
        "--threads", type=count, default=os.cpu_count() or 1, metavar="N", help="CPU threads (%(default)s)"
    )
    parser.add_argument("--name", default="", help="how the run's screens call it (host and process id)")
    parser.add_argument(
        "--reserved", action="store_true", help="one of the trainer's own devices, there for the whole run"
    )
    parser.add_argument("--token-file", metavar="F", help="file with the run's token; else PENSTOCK_TOKEN is read")
    parser.add_argument(
        "--tls-ca", default="", metavar="F", help="CA (PEM) of the manager's and the store's certificate"
    )
    parser.add_argument("--tls-cert", default="", metavar="F", help="this machine's own certificate (PEM)")
    parser.add_argument("--tls-key", default="", metavar="F", help="its private key")
    parser.add_argument("--connections", type=count, default=2, metavar="N", help="of one weight pull (%(default)s)")
    parser.add_argument(
        "--weights-codec",
        choices=("auto", "raw", "lossless", "delta", "zipnn", "int8", "fp8"),
        default="auto",
        help="how weights come: as they are, compressed, as differences, or quantized; auto measures (%(default)s)",
    )
    parser.add_argument(
        "--no-weights-base", action="store_true", help="keep no version in memory to apply differences to"
    )
    parser.add_argument(
        "--relay-port", type=port, metavar="N", help="pass weights on to other instances from here; 0 takes a free one"
    )
    parser.add_argument(
        "--weights-ways",
        type=_ways,
        default=("shm",),
        metavar="W,W",
        help="faster ways than TCP to the trainer's copy, where it has them: shm, mooncake; '' for none (shm)",
    )
    parser.add_argument("--weights-folder", metavar="D", help="keep what came of a version here, and go on from it")
    parser.add_argument(
        "--load-deadline-s", type=positive, default=120.0, metavar="S", help="for one weight pull (%(default)s)"
    )
    parser.add_argument(
        "--reconnect-s", type=positive, default=60.0, metavar="S", help="a lost manager is dialled for (%(default)s)"
    )
    parser.add_argument(
        "--stall-s", type=positive, default=60.0, metavar="S", help="leave if the engine is stuck for (%(default)s)"
    )
    parser.add_argument("--tokens-per-s", type=positive, default=1000.0, metavar="X", help="paced: rate (%(default)s)")
    parser.add_argument(
        "--mean-tokens", type=float, default=0.0, metavar="X", help="paced: mean output length; 0 runs to the limit"
    )
    parser.add_argument(
        "--preemption",
        default="auto",
        metavar="WHO",
        help="who says that this machine will be taken away: aws, gcp, azure, none, package.module:function, or auto",
    )
    parser.add_argument("--preemption-url", metavar="URL", help="the metadata service, where it is not the usual one")
    parser.add_argument(
        "--preemption-poll-s", type=positive, default=2.0, metavar="S", help="between two questions (%(default)s)"
    )
    parser.add_argument(
        "--preemption-rebalance", action="store_true", help="aws: leave on a recommendation to rebalance, too"
    )
    parser.add_argument(
        "--preemption-ack", action="store_true", help="azure: approve the event once the agent has left"
    )
    parser.add_argument("--progress-file", metavar="F", help="8 bytes: tokens drawn so far, exact even after SIGKILL")
    parser.add_argument("--exit-with-stdin", action="store_true", help="leave when standard input closes")


def main(args: argparse.Namespace) -> int:
    """0 after leaving in order. Raises PenstockError where it can't join or can't go on."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    check_server_arguments(args)
    check_name(args.name)
    # A certificate may say who this is; whether it does is the manager's to judge.
    known = bool(args.tls_cert) and not args.token_file
    token = os.environ.get("PENSTOCK_TOKEN", "").strip() if known else read_token(args.token_file)
    asyncio.run(_join(args, token))
    return 0


def read_token(token_file: str | None) -> str:
    """From the file, else from PENSTOCK_TOKEN; never from the command line, which every user of a machine can read."""
    if token_file:
        try:
            token = Path(token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise AuthError(f"the token file {token_file} can't be read: {why}") from error
    else:
        token = os.environ.get("PENSTOCK_TOKEN", "").strip()
    if not token:
        raise AuthError("no token: set the environment variable PENSTOCK_TOKEN or give --token-file")
    return token


def check_name(name: str) -> None:
    """Raises ConfigError for one that no manager takes; said here, since an agent that is cut off dials again."""
    from penstock.rollout.fleet import INSTANCE_NAME

    if name and not INSTANCE_NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name[:80]!r} is no name of an instance; use 1 to 64 letters, digits and any of ._:@-"
        )


def own_name(host: str, pid: int) -> str:
    """What an instance is called that was given no name: host and process, within what managers take as a name."""
    plain = re.sub(r"[^A-Za-z0-9._:@-]", "-", host).lstrip("._:@-") or "host"
    most = MOST_NAME - len(f"-{pid}")
    if len(plain) > most:
        # What tells such hosts apart may be at either end.
        plain = f"{plain[: most - 9]}-{hashlib.sha256(host.encode()).hexdigest()[:8]}"
    return f"{plain}-{pid}"


def _ways(text: str) -> tuple[str, ...]:
    """Names with commas between them. Raises ArgumentTypeError for an unknown one."""
    from penstock.weights.ways import WAYS

    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in WAYS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(WAYS)}")
    return names


def build_engine(args: argparse.Namespace, progress: memoryview | None) -> Engine:
    """The engine that was asked for, made in the event loop that will call it.

    Thread counts go into the environment before PyTorch is imported, which reads them once.
    """
    if args.engine in SERVED:
        return build_served(args, progress)
    if args.engine == "paced":
        from penstock.instance.paced import PacedEngine

        if args.mean_tokens < 0:
            raise ConfigError(f"--mean-tokens={args.mean_tokens:g} is impossible; give 0 or more")
        return PacedEngine(
            tokens_per_s=args.tokens_per_s,
            max_running=args.max_running,
            max_context_tokens=args.max_context,
            frame_steps=DEFAULT_FRAME_STEPS,
            mean_tokens=args.mean_tokens,
            progress=progress,
        )
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(args.threads)
    try:
        from penstock.instance.builtin.engine import BuiltinEngine
    except ImportError as error:
        if error.name in ("torch", "numpy", "safetensors"):
            raise MissingExtra(error.name, "engine", "the built-in engine") from error
        raise
    return BuiltinEngine(
        device=args.device,
        max_running=args.max_running,
        max_context_tokens=args.max_context,
        kv_cache_mib=args.kv_cache_mib,
        frame_steps=DEFAULT_FRAME_STEPS,
        threads=args.threads,
        progress=progress,
        tensor_parallel=tensor_parallel(args),
    )


def tls_context(args: argparse.Namespace) -> ssl.SSLContext | None:
    """None where the manager is spoken to in the clear."""
    if not (args.tls_ca or args.tls_cert or args.tls_key or args.manager.startswith(("https:", "wss:"))):
        return None
    from penstock.tls import client_context

    return client_context(args.tls_ca, args.tls_cert, args.tls_key)


def build_preemption(args: argparse.Namespace) -> Preemption:
    from penstock.instance.preemption import Preemption, PreemptionConfig
    from penstock.instance.preemption.metadata import LINK_LOCAL

    return Preemption(
        PreemptionConfig(
            source=args.preemption,
            base_url=args.preemption_url or LINK_LOCAL,
            poll_s=args.preemption_poll_s,
            rebalance=args.preemption_rebalance,
            acknowledge=args.preemption_ack,
        )
    )


def progress_buffer(path: str | None) -> memoryview | None:
    """8 bytes of a mapped file: what is written there outlives the process, however it ends."""
    if path is None:
        return None
    try:
        Path(path).write_bytes(bytes(8))
        with open(path, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), 8))
    except OSError as error:
        raise StorageError(f"the progress file {path} can't be written: {error.strerror}") from error


class _Machine:
    """This machine as an instance: one engine and its agent at a time, until it is told to leave or can't go on."""

    def __init__(self, args: argparse.Namespace, token: str) -> None:
        self._args = args
        self._token = token
        self._progress = progress_buffer(args.progress_file)
        # Only a server that this agent starts can be started again.
        self._restarts = Restarts(args.engine_restarts if args.engine in SERVED and not args.engine_url else 0)
        self._engine: Engine | None = None
        self._agent: Agent | None = None
        self._told_to_leave = asyncio.Event()

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    def drain(self, cause: str) -> None:
        self._told_to_leave.set()
        if self._agent is not None:
            self._agent.drain(cause)

    async def run(self) -> None:
        while not self._told_to_leave.is_set():
            try:
                await self._session()
                return
            except EngineError as error:
                wait_s = self._restarts.died(time.monotonic())
                if wait_s is None:
                    raise
                log.error("%s; the engine is started again in %g s", error, wait_s)
            await self.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._told_to_leave.wait()

    async def close(self) -> None:
        engine, self._engine, self._agent = self._engine, None, None
        if engine is not None:
            await engine.close()

    async def _session(self) -> None:
        from penstock.instance.agent import Agent

        args = self._args
        tls = tls_context(args)
        self._engine = build_engine(args, self._progress)
        self._agent = Agent(
            self._engine,
            args.manager,
            self._token,
            args.name or own_name(socket.gethostname(), os.getpid()),
            connections=args.connections,
            codec=args.weights_codec,
            keep_base=not args.no_weights_base,
            relay_port=args.relay_port,
            ways=args.weights_ways,
            partial_folder=Path(args.weights_folder) if args.weights_folder else None,
            load_deadline_s=args.load_deadline_s,
            reconnect_s=args.reconnect_s,
            stall_s=args.stall_s,
            tls=tls,
            reserved=args.reserved,
            # A server that is started here begins with the first weights.
            start_s=args.engine_start_s if args.engine in SERVED and not args.engine_url else 0.0,
        )
        collector.settle()
        await self._agent.run()


async def _join(args: argparse.Namespace, token: str) -> None:
    from penstock.weights.plan import digest

    digest(b"")  # Without xxhash no weights could ever be verified; better said now than at the first version.
    preemption = build_preemption(args)
    machine = _Machine(args, token)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, machine.drain, f"got {number.name}")
    if args.exit_with_stdin:
        from penstock.cli.parent import watch_stdin

        def orphaned() -> None:
            loop.call_soon_threadsafe(machine.drain, "the process that started it is gone")
            time.sleep(ORPHAN_S)
            os._exit(1)

        watch_stdin(orphaned)
    watching = asyncio.create_task(preemption.watch(machine.drain), name="preemption")
    code = 1
    try:
        await machine.run()
        await preemption.left()
        code = 0
    finally:
        watching.cancel()
        if machine.has_engine:
            end_within(CLOSE_S, code)
        await machine.close()


def end_within(seconds: float, code: int) -> None:
    """Ends the process if it is still there by then: an engine in a long step can't be interrupted, and all is said."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
