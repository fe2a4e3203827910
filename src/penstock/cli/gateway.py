"""`penstock gateway pool.toml`: a pool of rate-limited services as one OpenAI-compatible endpoint on this machine.

Thin: reads the file, starts `reward.gateway`, draws a table now and then. SIGHUP reads the file again, all or nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from penstock.errors import ConfigError

HELP = "serve a pool of rate-limited services as one OpenAI-compatible endpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", type=Path, help="TOML file with [[endpoints]] and [pool]")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8700, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--token-env", default="", metavar="NAME", help="environment variable with the callers' token")
    parser.add_argument("--table-every", type=float, default=5.0, metavar="SECONDS", help="0 draws no table")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when the standard input is closed")


def main(args: argparse.Namespace) -> int:
    token = ""
    if args.token_env:
        token = os.environ.get(args.token_env, "")
        if not token:
            raise ConfigError(f"--token-env names {args.token_env}, which is not set")
    return asyncio.run(_serve(args, token))


async def _serve(args: argparse.Namespace, token: str) -> int:
    from penstock.reward.gateway import Gateway
    from penstock.reward.pool import ComputePool

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    async with ComputePool.from_toml(args.pool) as pool:
        pool.check_keys()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, _reload, pool, args.pool)
        if args.exit_with_stdin:
            loop.run_in_executor(None, _until_eof, loop, stop)
        async with Gateway(pool, args.host, args.port, token) as gateway:
            print(f"serving {len(pool.endpoints)} endpoints on {gateway.url}", flush=True)
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), args.table_every or None)
                if args.table_every and not stop.is_set():
                    print(table(pool.snapshot(), pool.waiting), flush=True)
    return 0


def _until_eof(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    sys.stdin.read()
    loop.call_soon_threadsafe(stop.set)


def _reload(pool: object, path: Path) -> None:
    from penstock.reward.pool import ComputePool

    assert isinstance(pool, ComputePool)
    try:
        pool.reload(path)
        print(f"read {path} again: {len(pool.endpoints)} endpoints", flush=True)
    except ConfigError as error:
        print(f"penstock: error: {error}; the pool goes on as it was", file=sys.stderr, flush=True)


def table(rows: list, waiting: int) -> str:
    """One line for each endpoint: in flight, rate against limit, refusals, latency, spend."""
    width = max((len(row.endpoint) for row in rows), default=8)
    lines = [
        f"{'endpoint':<{width}}  {'health':<9} {'flying':>6} {'cap':>5} {'limit/s':>8} {'done':>8} {'429s':>6} "
        f"{'broken':>6} {'mean s':>7} {'spent':>9}   ({waiting} waiting)"
    ]
    for row in rows:
        cap = "-" if row.cap is None else row.cap
        limit = "-" if row.rate_limit is None else f"{row.rate_limit:.1f}"
        latency = "-" if row.latency_s is None else f"{row.latency_s:.2f}"
        lines.append(
            f"{row.endpoint:<{width}}  {row.health:<9} {row.in_flight:>6} {cap:>5} {limit:>8} {row.done:>8} "
            f"{row.refused:>6} {row.broken:>6} {latency:>7} {row.spent:>9.4f}"
        )
    return "\n".join(lines)
