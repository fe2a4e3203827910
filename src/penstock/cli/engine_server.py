"""The options of `penstock join` for an engine behind a server: vLLM's or SGLang's, started here or adopted.

And `--engine.tensor_parallel=N`, the one that the built-in engine has: a server has its own word for it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.numbers import count
from penstock.errors import ConfigError
from penstock.weights.choose import QUANTIZED

if TYPE_CHECKING:
    from penstock.instance.engine import Engine

SERVED = ("vllm", "sglang")
START_S = 600.0
TENSOR_PARALLEL = "tensor_parallel"
SERVER_TENSOR_PARALLEL = ("tensor-parallel-size", "tp-size", "tp")
"""The servers' words for it."""
_OPTION = re.compile(r"--engine\.([A-Za-z0-9][A-Za-z0-9_.-]*)(?:=(.*))?", re.DOTALL)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "engine servers",
        "--engine vllm or sglang starts the server with the run's first weights, watches it and ends it. "
        "--engine.NAME=VALUE and --engine.NAME hand --NAME=VALUE and --NAME over to it. "
        "The built-in engine takes --engine.tensor_parallel=N: so many processes share each model.",
    )
    group.add_argument("--engine-url", default="", metavar="URL", help="take a server that runs on this machine")
    group.add_argument(
        "--engine-command", default="", metavar="C", help="command line that starts it, with {model}, {host} and {port}"
    )
    group.add_argument("--engine-log", default="", metavar="F", help="file for what it prints (a temporary one)")
    group.add_argument(
        "--engine-log-mib",
        type=count,
        default=64,
        metavar="N",
        help="a log of this size becomes FILE.1, in the place of the one before (%(default)s)",
    )
    group.add_argument(
        "--engine-start-s", type=float, default=START_S, metavar="S", help="for it to answer (%(default)s)"
    )
    group.add_argument(
        "--engine-restarts", type=int, default=3, metavar="N", help="times it is started again (%(default)s)"
    )
    group.add_argument(
        "--engine-folder", default="", metavar="D", help="where weights are put for it (memory, else temporary folder)"
    )
    group.add_argument(
        "--engine-codes",
        action="store_true",
        help="quantized weights: it computes with their codes; else with the numbers that these stand for",
    )
    parser.set_defaults(engine_options={})


def take_engine_options(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Takes `--engine.NAME[=VALUE]` out of a command line; they become `args.engine_options`."""
    options: dict[str, str] = {}
    rest = []
    for word in words:
        if (match := _OPTION.fullmatch(word)) is not None:
            options[match.group(1)] = match.group(2) or ""
        else:
            rest.append(word)
    parser.set_defaults(engine_options=options)
    return rest


def tensor_parallel(args: argparse.Namespace) -> int:
    """Ranks of the built-in engine. Raises ConfigError for what is no count."""
    given = args.engine_options.get(TENSOR_PARALLEL, "1")
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"--engine.{TENSOR_PARALLEL}={given} is no number of processes; give 1 or more")
    return int(given)


def server_ranks(args: argparse.Namespace) -> int:
    """Ranks that a server is told to have; what is no count is the server's to refuse."""
    given = {name.replace("_", "-"): value for name, value in args.engine_options.items()}
    said = next((given[name] for name in SERVER_TENSOR_PARALLEL if name in given), "")
    return max(1, int(said)) if said.isdecimal() else 1


def check_server_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that make no sense together."""
    builtin = args.engine == "builtin" and tensor_parallel(args)
    given = {
        "--engine-url": args.engine_url,
        "--engine-command": args.engine_command,
        "--engine.NAME": [name for name in args.engine_options if not (builtin and name == TENSOR_PARALLEL)],
    }
    names = [name for name, value in given.items() if value]
    if args.engine not in SERVED and names:
        raise ConfigError(f"{names[0]} is for an engine server; give --engine {' or --engine '.join(SERVED)} too")
    if args.engine_codes and (args.engine not in SERVED or args.weights_codec not in QUANTIZED):
        raise ConfigError(
            f"--engine-codes is for an engine server with quantized weights; give --engine {' or '.join(SERVED)} and "
            f"--weights-codec {' or '.join(QUANTIZED)} too"
        )
    if args.engine_url and len(names) > 1:
        raise ConfigError(f"{names[1]} is for a server that is started here, and --engine-url takes one that runs")
    if args.engine_restarts < 0 or not args.engine_start_s > 0:
        raise ConfigError("--engine-restarts must be 0 or more and --engine-start-s above 0")


def build_served(args: argparse.Namespace, progress: memoryview | None) -> Engine:
    """The engine over the server that was asked for. Raises ConfigError where there is none to be started."""
    from penstock.instance.dialects import PROGRAMS, dialect_of
    from penstock.instance.served import ServedEngine
    from penstock.instance.supervise import AdoptedServer, ManagedServer, Server
    from penstock.instance.weight_folder import WeightFolders

    dialect = dialect_of(args.engine)
    server: Server
    if args.engine_url:
        server = AdoptedServer(dialect, args.engine_url)
    else:
        program = PROGRAMS[args.engine]
        if not args.engine_command and shutil.which(program) is None:
            raise ConfigError(
                f"{program} is not on PATH; install it as its own documentation says, give its command line with "
                "--engine-command, or take a server that runs with --engine-url"
            )
        log = args.engine_log or Path(tempfile.gettempdir()) / f"penstock-{args.engine}-{os.getpid()}.log"
        server = ManagedServer(
            dialect,
            Path(log),
            template=args.engine_command,
            options=args.engine_options,
            start_s=args.engine_start_s,
            environment=_environment(args),
            log_bytes=args.engine_log_mib * 2**20,
        )
    parents = [Path(args.engine_folder)] if args.engine_folder else []
    return ServedEngine(
        dialect,
        server,
        max_running=args.max_running,
        max_context_tokens=args.max_context,
        folders=WeightFolders(parents, untie=dialect.unties_embeddings, codes=args.engine_codes),
        progress=progress,
        tensor_parallel=server_ranks(args),
    )


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """The bounds of this machine, in the words of a server that computes on CPU; on a GPU they say nothing."""
    gibibytes = max(1, round(args.kv_cache_mib / 1024))
    limits = {"VLLM_CPU_KVCACHE_SPACE": str(gibibytes), "OMP_NUM_THREADS": str(args.threads)}
    if args.threads < (os.cpu_count() or 1):
        limits["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # Bound threads of two servers would share the first core.
    return {name: value for name, value in limits.items() if name not in os.environ}
