"""`penstock bench`: lists the benchmarks, or runs one and draws its table. Decides nothing about what is measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.bench import common
from penstock.bench.common import Result

HELP = "List the benchmarks, or run one and draw a table of its figures."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="benchmark to run; without it they are listed")
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--only", metavar="A,B", help="of a benchmark with parts, these alone")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep each part's results there, and run only parts that it lacks"
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 where a target is missed")


def main(args: argparse.Namespace) -> int:
    if args.name is None:
        for name, description in common.discover().items():
            print(f"{name:<16}  {description}")
        return 0
    only = [part.strip() for part in args.only.split(",")] if args.only is not None else []
    results = common.run_parts(args.name, common.load(args.name), args.quick, only, args.keep)
    machine = common.machine()
    _draw(args.name, results, machine)
    if args.json:
        print(common.json_line(args.name, results, machine))
    return 1 if args.strict and any(result.met is False for result in results) else 0


def _draw(name: str, results: Sequence[Result], machine: dict[str, Any]) -> None:
    """With colour on a terminal that has `rich`, else plain."""
    here = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Python {machine['python']}"
    if machine["torch"]:
        here += f", PyTorch {machine['torch']}"
    plain = f"{common.table(name, results)}\n{here}"
    if not sys.stdout.isatty():
        print(plain)
        return
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(plain)
        return
    table = Table(box=None, title=name, title_justify="left", title_style="bold cyan", pad_edge=False)
    for column in common.COLUMNS:
        table.add_column(column, justify="right" if column == "value" else "left", header_style="dim")
    for result in results:
        style = {True: "green", False: "bold red", None: "default"}[result.met]
        *cells, met = common.cells(result)
        table.add_row(*(Text(cell) for cell in cells), Text(met, style=style))
    console = Console()
    console.print(table)
    for line in common.notes(results):
        console.print(Text(line, style="dim"))
    console.print(Text(here, style="dim"))
