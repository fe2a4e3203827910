"""`penstock manager`: serves the rollout manager until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

from penstock import collector
from penstock.errors import PenstockError

ROLES = ("agent", "trainer", "operator")
HELP = "serve the rollout manager that agents and the trainer connect to"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines join")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port (default)")
    parser.add_argument("--token-file", type=Path, help="file with the shared token; default: PENSTOCK_TOKEN")
    for role, others in (("agent", "agents"), ("trainer", "the trainer"), ("operator", "operators")):
        parser.add_argument(
            f"--{role}-token-file",
            type=Path,
            metavar="F",
            help=f"file with a token for {others} alone; default: PENSTOCK_{role.upper()}_TOKEN",
        )
    parser.add_argument("--tls-cert", default="", metavar="F", help="certificate (PEM, with its chain): serve over TLS")
    parser.add_argument("--tls-key", default="", metavar="F", help="its private key")
    parser.add_argument(
        "--tls-client-ca",
        default="",
        metavar="F",
        help="peers must have a certificate of this CA; one that names a role (CN agent/..., or OU) needs no token",
    )
    for word, what in (("ca", "CA that knows this manager"), ("cert", "certificate"), ("key", "its private key")):
        parser.add_argument(
            f"--agent-tls-{word}", default="", metavar="F", help=f"of agents that POST /instances starts: {what} (PEM)"
        )
    parser.add_argument(
        "--frames-per-s", type=float, default=5000.0, help="of one peer; more is not read, then dropped (default 5000)"
    )
    parser.add_argument("--mib-per-s", type=float, default=512.0, help="of one peer, likewise (default 512)")
    parser.add_argument("--max-frame-mib", type=int, default=64, help="larger frames are refused (default 64)")
    parser.add_argument(
        "--max-context", type=int, default=0, help="context in tokens for engines that join without a wish of their own"
    )
    parser.add_argument("--heartbeat-s", type=float, default=2.0, help="an instance silent for three of these is dead")
    parser.add_argument("--load-deadline-s", type=float, default=120.0, help="to load a weight version (default 120)")
    parser.add_argument(
        "--stall-s", type=float, default=300.0, help="for an instance with work to give no token of it (default 300)"
    )
    parser.add_argument(
        "--hold-off-s",
        type=float,
        default=60.0,
        help="longest wait for work of an agent that keeps being lost soon after it came; 0 for none (default 60)",
    )
    parser.add_argument("--frame-steps", type=int, default=8, help="decode steps in one token frame (default 8)")
    parser.add_argument("--max-pending", type=int, default=16, help="samples waiting at one instance (default 16)")
    parser.add_argument(
        "--max-strikes",
        type=int,
        default=3,
        help="a sample lost with its machine so often, without a new token in between, is set aside (default 3)",
    )
    parser.add_argument(
        "--journal",
        type=Path,
        metavar="DIR",
        help="keep samples here, so that the manager may die; SIGTERM is a restart then, SIGINT an end",
    )
    parser.add_argument(
        "--journal-fsync",
        choices=("never", "interval", "always"),
        default="interval",
        help="when the disk is waited for: not at all, once a second, before anybody is answered (default interval)",
    )
    parser.add_argument("--journal-max-mib", type=int, default=16384, help="most that it may have (default 16384)")
    parser.add_argument(
        "--trainer-grace-s", type=float, default=300.0, help="batches outlive a lost trainer so long (default 300)"
    )
    parser.add_argument(
        "--balance",
        default="penstock.rollout.balanced:Balanced",
        help="import path of the policy that says where samples go (default: %(default)s)",
    )
    parser.add_argument(
        "--fleet",
        type=Path,
        metavar="F",
        help="TOML with `run` and [fleet]: machines are asked for and released (docs/provisioning.md)",
    )
    parser.add_argument("--ready-file", type=Path, help="written once listening: JSON with url and pid")
    parser.add_argument("--exit-with-stdin", action="store_true", help="leave when standard input closes")


def main(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    own = own_tokens(args)
    # A shared token is needed only where a door would stay without any.
    needed = len(own) < len(ROLES) and not args.tls_client_ca
    shared = read_token(args.token_file) if needed or args.token_file else os.environ.get("PENSTOCK_TOKEN", "").strip()
    _check(args)
    return asyncio.run(_serve(args, shared, own))


def own_tokens(args: argparse.Namespace) -> dict[str, str]:
    """Tokens by the roles that have one of their own, from files or the environment."""
    from penstock.rollout.doors import OWN_VARIABLES

    own = {}
    for role, variable in OWN_VARIABLES.items():
        path = getattr(args, f"{role}_token_file")
        token = read_token(path) if path else os.environ.get(variable, "").strip()
        if token:
            own[role.value] = token
    return own


def read_token(token_file: Path | None) -> str:
    """The shared token, from a file or PENSTOCK_TOKEN. Raises PenstockError where there is none."""
    if token_file is None:
        token = os.environ.get("PENSTOCK_TOKEN", "").strip()
        where = "the environment variable PENSTOCK_TOKEN"
    else:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise PenstockError(f"can't read the token file {token_file}: {error}") from error
        where = f"the file {token_file}"
    if not token:
        raise PenstockError(f"no token: {where} is empty; set PENSTOCK_TOKEN or give --token-file")
    return token


def _check(args: argparse.Namespace) -> None:
    for name, low, high in (
        ("port", 0, 65535),
        ("max_frame_mib", 1, 1024),
        ("max_context", 0, 1 << 24),
        ("heartbeat_s", 0.01, 3600),
        ("load_deadline_s", 0.01, 1e6),
        ("stall_s", 0.01, 1e6),
        ("hold_off_s", 0, 3600),
        ("frames_per_s", 1, 1e9),
        ("mib_per_s", 0.001, 1e6),
        ("frame_steps", 1, 1 << 16),
        ("max_pending", 0, 1 << 20),
        ("max_strikes", 1, 1 << 20),
        ("journal_max_mib", 1, 1 << 24),
        ("trainer_grace_s", 0, 1e6),
    ):
        value = getattr(args, name)
        if not low <= value <= high:
            raise PenstockError(f"--{name.replace('_', '-')} is {value}; it must be between {low} and {high}")


async def _serve(args: argparse.Namespace, token: str, own_tokens: dict[str, str]) -> int:
    from penstock.cli.adopted import AdoptedAgents, AgentTls
    from penstock.cli.parent import watch_stdin
    from penstock.rollout.doors import Tokens
    from penstock.rollout.flapping import FlapConfig
    from penstock.rollout.fleet import FleetConfig
    from penstock.rollout.journal_file import JournalConfig
    from penstock.rollout.manager import ManagerConfig
    from penstock.rollout.pace import PaceConfig
    from penstock.rollout.server import ManagerServer, ServerConfig, TlsConfig

    secured = args.tls_cert or args.tls_key or args.tls_client_ca
    frame_bytes = args.max_frame_mib * 1024 * 1024
    manager = ManagerConfig(
        fleet=FleetConfig(
            heartbeat_s=args.heartbeat_s,
            load_deadline_s=args.load_deadline_s,
            flapping=FlapConfig(most_s=args.hold_off_s),
        ),
        frame_steps=args.frame_steps,
        max_pending_per_instance=args.max_pending,
        max_strikes=args.max_strikes,
        balance=args.balance,
        stall_s=args.stall_s,
        max_context_tokens=args.max_context,
        max_frame_bytes=frame_bytes,
        trainer_grace_s=args.trainer_grace_s,
    )
    journal = None
    if args.journal is not None:
        journal = JournalConfig(args.journal, args.journal_fsync, max_bytes=args.journal_max_mib << 20)
    agent_tls = AgentTls(args.agent_tls_ca, args.agent_tls_cert, args.agent_tls_key, asked_for=bool(args.tls_client_ca))
    adopted = AdoptedAgents(own_tokens.get("agent") or token, agent_tls)
    fleet = None
    if args.fleet is not None:
        from penstock.cli.provision.wiring import provide, read_fleet_file

        fleet = read_fleet_file(args.fleet)
    server = ManagerServer(
        ServerConfig(
            token=token,
            tokens=Tokens(**own_tokens),
            tls=TlsConfig(args.tls_cert, args.tls_key, args.tls_client_ca) if secured else None,
            pace=PaceConfig(args.frames_per_s, args.mib_per_s * 1024 * 1024),
            host=args.host,
            port=args.port,
            manager=manager,
            journal=journal,
            max_queued_bytes=4 * frame_bytes,
            adopt=adopted.adopt,
        )
    )
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    cause, comes_back = "the manager is shutting down", False

    def leave(why: str, restart: bool = False) -> None:
        nonlocal cause, comes_back
        cause, comes_back = why, restart
        stop.set()

    # A service manager stops what it starts again with SIGTERM. A run's own manager gets it at the run's end.
    if args.journal is not None and not args.exit_with_stdin:
        loop.add_signal_handler(signal.SIGTERM, leave, "the manager got SIGTERM and is expected to start again", True)
    else:
        loop.add_signal_handler(signal.SIGTERM, leave, "the manager got SIGTERM")
    loop.add_signal_handler(signal.SIGINT, leave, "the manager got SIGINT")
    url = adopted.manager_url = await server.start()
    collector.settle()
    try:
        if fleet is not None:
            provide(server, fleet, url, own_tokens.get("agent") or token, agent_tls.words())
        if args.exit_with_stdin:

            def orphaned() -> None:
                loop.call_soon_threadsafe(leave, "the manager's parent process ended")

            watch_stdin(orphaned)
        print(f"penstock manager listens on {url}", flush=True)
        if args.ready_file is not None:
            _write_ready(args.ready_file, url)
        stopped = asyncio.create_task(stop.wait(), name="stop")
        broken = asyncio.create_task(server.failed(), name="failure")
        done, _ = await asyncio.wait([stopped, broken], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        for task in (stopped, broken):
            task.cancel()
    finally:
        await adopted.close()
        await server.close(cause, comes_back=comes_back)
    return 0


def _write_ready(path: Path, url: str) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        partial.replace(path)
    except OSError as error:
        raise PenstockError(f"can't write the ready file {path}: {error}") from error
