"""`penstock train`: from files and overrides to a run. Decides nothing about the run itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.errors import ConfigError

HELP = """Teach a model: the run that the TOML files describe.

Files are layered, the last one wins; any key can be overridden: --train.lr=1e-5, --data.train.0.size=100."""
TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock train FILE... [--dry-run] [--resume DIR|latest] [--eval-only] [--KEY=VALUE ...]"
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="configuration in TOML")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--resume", metavar="DIR|latest", help="go on from a run's last checkpoint")
    parser.add_argument(
        "--eval-only",
        action="store_true",
        help="only evaluate, in a folder of its own: the model, or with --resume a run's checkpoint",
    )
    parser.add_argument("--help-config", action="store_true", help="list every key with its default and meaning")


def main(args: argparse.Namespace) -> int:
    from penstock.config import RunConfig, describe, dump_toml, load_config

    if args.help_config:
        print(describe(RunConfig))
        return 0
    if not args.files and not args.overrides:
        raise ConfigError("name a TOML file, e.g. penstock train configs/quickstart.toml")
    config = load_config(args.files, args.overrides)
    if config.fleet.wanted:
        from penstock.cli.provision import check_provisioner

        check_provisioner(config.fleet.provisioner, config.fleet.options)
    if args.dry_run:
        print(dump_toml(config), end="")
        return 0
    if args.resume and not args.eval_only:
        from penstock.cli.run_folder import find_run

        # What isn't there is told before the seconds that importing PyTorch takes.
        find_run(config, args.resume)
    from penstock.train.preflight import check_own_functions

    check_own_functions(config)
    from penstock.cli.run_local import run

    return run(config, args.resume, eval_only=args.eval_only)
