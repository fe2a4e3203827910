"""`penstock export`: a run's checkpoint as a Hugging Face model folder. Decides nothing but where it is looked for."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.errors import ConfigError

HELP = """Make a Hugging Face model folder of a run's last checkpoint, or of one that is named.

Weights of several ranks are put together, adapters are merged, the tokenizer comes along."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN|CHECKPOINT", help="a run's folder, or a checkpoint's")
    parser.add_argument("out", type=Path, metavar="OUT", help="the model folder to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the weights")


def main(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise ConfigError(f"{args.out} is there already; name a folder that is not")
    if not args.source.is_dir():
        raise ConfigError(f"{args.source}: there is no such folder; name a run's or a checkpoint's")
    from penstock.train.checkpoint import find_checkpoint
    from penstock.train.export import export_model

    checkpoint = find_checkpoint(args.source)
    print(f"{checkpoint} is now a model in {export_model(checkpoint, args.out, args.dtype)}")
    return 0
