"""`penstock`: one command, its subcommands each in a module that is imported only when chosen.

A subcommand's module has `HELP: str`, `add_arguments(parser)` and `main(args) -> int`; with `TAKES_OVERRIDES = True`
its words of the form `--a.b=c` are taken out first and handed over as `args.overrides`. One with a function
`take_words(words, parser)` takes out what it has a grammar of its own for, and returns the rest. This module decides
what is listed and what the exit codes mean, and imports nothing heavy, so that `--help` answers at once.

Exit codes: 0 done; 1 the run, or what it stands on, failed; 2 the command line or the configuration is wrong, and
nothing was started; 130 interrupted by Ctrl-C; 141 whoever read the output went away.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from penstock import __version__, collector
from penstock.errors import ConfigError, PenstockError

COMMANDS: Mapping[str, str] = {
    "train": "teach a model: a run from TOML files",
    "export": "make a Hugging Face model folder of a checkpoint",
    "join": "lend this machine's engine to a run",
    "manager": "serve rollouts to a trainer (train starts one by itself)",
    "reward": "score a JSONL of answers with a reward function",
    "gateway": "serve a pool of rate-limited services as one endpoint",
    "simulate": "say what a run would take and cost on machines that come and go",
    "bench": "list the benchmarks, or run one",
    "doctor": "say what is installed and what will work here",
}
"""Name to the line of `penstock --help`, in the order listed."""

EXIT_FAILED = 1
EXIT_MISUSED = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (by default this process's) and returns its exit code."""
    if argv is None:
        collector.spare()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except PenstockError as error:
        _explain(error)
        return EXIT_MISUSED if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except SystemExit as stop:
        # argparse ends this way, after it has printed help (0) or a usage error (2).
        return stop.code if isinstance(stop.code, int) else EXIT_MISUSED


def _run(words: list[str]) -> int:
    chosen = words[0] if words else ""
    if chosen not in COMMANDS:
        return _without_command(words)
    module: Any = importlib.import_module(f"penstock.cli.{chosen}")
    parser = argparse.ArgumentParser(
        prog=f"penstock {chosen}",
        description=module.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    rest = words[1:]
    if hasattr(module, "take_words"):
        rest = module.take_words(rest, parser)
    if getattr(module, "TAKES_OVERRIDES", False):
        from penstock.config import split_overrides

        rest, overrides = split_overrides(rest)
        parser.set_defaults(overrides=overrides)
    args = parser.parse_args(rest)
    return int(module.main(args))


def _without_command(words: list[str]) -> int:
    """No subcommand in front: help, the version, or an error that names what there is."""
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Reinforcement learning for language models on machines you don't fully control.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
        + "\n\n`penstock COMMAND --help` says more. PENSTOCK_TRACEBACK=1 adds a traceback to errors.",
        usage="penstock COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    if not words:
        parser.print_help(sys.stderr)
        return EXIT_MISUSED
    if not words[0].startswith("-"):
        parser.error(f"there is no command {words[0]!r}; there are: {', '.join(COMMANDS)}")
    parser.parse_args(words)
    return EXIT_MISUSED


def _explain(error: PenstockError) -> None:
    if os.environ.get("PENSTOCK_TRACEBACK") == "1":
        traceback.print_exception(error)
    print(f"penstock: error: {error}", file=sys.stderr)


def _discard_output() -> None:
    """Nobody reads any more; without this the interpreter complains once again when it flushes at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
