"""`penstock gateway pool.toml`: a pool of rate-limited services as one OpenAI-compatible endpoint on this machine.

Thin: reads the file, starts `reward.gateway`, keeps a table of the endpoints on the terminal (elsewhere it prints one
now and then, where it has changed). SIGHUP reads the file again, all or nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

from penstock.cli.numbers import at_least_0, port
from penstock.cli.pool_table import PoolTable, Screen
from penstock.errors import ConfigError

GRACE_S = 1.0
"""For requests in flight when the gateway is told to end; then their callers are told that it has."""
HELP = "serve a pool of rate-limited services as one OpenAI-compatible endpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", type=Path, help="TOML file with [[endpoints]] and [pool]")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=8700, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--token-env", default="", metavar="NAME", help="environment variable with the callers' token")
    parser.add_argument(
        "--table-every", type=at_least_0, metavar="SECONDS", help="0 draws no table (default: 1 on a terminal, else 10)"
    )
    parser.add_argument("--single-flight", action="store_true", help="send equal requests in flight once")
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="keep answers there, and give them to equal requests"
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when the standard input is closed")


def main(args: argparse.Namespace) -> int:
    token = ""
    if args.token_env:
        token = os.environ.get(args.token_env, "")
        if not token:
            raise ConfigError(f"--token-env names {args.token_env}, which is not set")
    return asyncio.run(_serve(args, token))


async def _serve(args: argparse.Namespace, token: str) -> int:
    from penstock.reward.cache import AnswerCache
    from penstock.reward.gateway import Gateway
    from penstock.reward.pool import ComputePool

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    cache = AnswerCache(args.cache) if args.cache is not None else None
    async with ComputePool.from_toml(args.pool, single_flight=args.single_flight, cache=cache) as pool:
        pool.check_keys()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        screen, table = Screen(sys.stdout), PoolTable()
        printed: list[str] = []
        every_s = args.table_every if args.table_every is not None else 1.0 if screen.redraws else 10.0
        loop.add_signal_handler(signal.SIGHUP, _reload, pool, args.pool, screen)
        if args.exit_with_stdin:
            loop.run_in_executor(None, _until_eof, loop, stop)
        async with Gateway(pool, args.host, args.port, token) as gateway:
            screen.say(f"serving {len(pool.endpoints)} endpoints on {gateway.url}")
            _settle_down()
            while not stop.is_set():
                if every_s and screen.redraws:
                    screen.draw(table.lines(pool.snapshot(), pool.waiting, screen.width))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), every_s or None)
                if every_s and not screen.redraws and not stop.is_set():
                    lines = table.lines(pool.snapshot(), pool.waiting, screen.width)
                    if lines != printed:  # an idle night fills no log
                        screen.draw(lines)
                        printed = lines
            left = pool.waiting + pool.running
            if left:
                screen.say(f"ending; {left} requests in work have {GRACE_S:g} s")
            await gateway.shut_door()
            await pool.close(GRACE_S)
    return 0


def _settle_down() -> None:
    """What is loaded by now lives as long as the process: looking through it again and again would delay requests."""
    gc.collect()
    gc.freeze()


def _until_eof(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    sys.stdin.read()
    loop.call_soon_threadsafe(stop.set)


def _reload(pool: object, path: Path, screen: Screen) -> None:
    from penstock.reward.pool import ComputePool

    assert isinstance(pool, ComputePool)
    try:
        pool.reload(path)
        screen.say(f"read {path} again: {len(pool.endpoints)} endpoints")
    except ConfigError as error:
        print(f"penstock: error: {error}; the pool goes on as it was", file=sys.stderr, flush=True)
