"""`penstock simulate`: what a run would take and cost on a spot trace, before anyone rents a machine.

Joins profile, trace and strategies, and writes what comes out. Decides nothing about the simulation.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.interrupts import interruptible
from penstock.errors import ConfigError, DataError, PenstockError

if TYPE_CHECKING:
    from penstock.simulate.outcome import Outcome
    from penstock.simulate.profiles import Prices, Profile
    from penstock.simulate.report import NoRow, Row
    from penstock.simulate.strategy import Strategy
    from penstock.simulate.traces import Trace
    from penstock.simulate.tune import Tuned

FIT_OPTIONS = ("--out", "--prices", "--json")
CEILING = 32
"""Remote instances at most, where nothing is said."""

HELP = """Simulate a run on machines that come and go: step times, throughput, cost and waiting.

  penstock simulate qwen3-14b --trace p3-trace.csv --sample 0.5 --hours 2
  penstock simulate qwen3-8b --machines 4 --steps 10 --picture run.png
  penstock simulate qwen3-14b --machines 4 --grid prices.spot=3,5.32,8 --grid lengths.median_tokens=3000,6500
  penstock simulate fit runs/mine --prices 83.79,5.32,20.95     # a profile from a run's events.jsonl

Two hours of a trace take up to ten minutes of one core, ten steps on a fixed fleet about one. What is being
simulated is told on stderr; Ctrl-C and SIGTERM end it with the rows that are done."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "profile", help="a shipped profile (qwen3-8b, qwen3-14b, qwen3-32b), a TOML file, or `fit` to make one"
    )
    parser.add_argument("run", nargs="?", type=Path, help="with fit: a run's folder, or its events.jsonl")
    parser.add_argument(
        "--out", type=Path, help="with fit: where the profile goes (default profile.toml in the folder)"
    )
    parser.add_argument(
        "--prices", metavar="A,B,C", help="with fit: dollars an hour: reserved (all), a spot machine, one on demand"
    )
    parser.add_argument("--trace", type=Path, help="a spot trace, in any of the forms that docs/simulate.md lists")
    parser.add_argument(
        "--machines",
        type=int,
        help="so many remote machines all the time, which fixes their number; on a trace, the same as --ceiling",
    )
    parser.add_argument(
        "--ceiling",
        type=int,
        help="strategies choose how many remote machines to ask for, up to so many (on a trace by default "
        f"{CEILING}); without a trace, so many can be had all the time",
    )
    parser.add_argument("--floor", type=int, help="where it chooses, penstock asks for no fewer (default 0)")
    parser.add_argument(
        "--budget-per-h",
        type=float,
        metavar="DOLLARS",
        help="where it chooses, penstock's remote machines cost no more an hour (default: no bound)",
    )
    parser.add_argument(
        "--hour-worth",
        type=float,
        metavar="DOLLARS",
        help="dollars that you would pay to be done an hour sooner: where it chooses, penstock asks for as many as "
        "pay at that (default 0)",
    )
    parser.add_argument("--sample", type=float, default=1.0, help="keep this share of the trace's machines (default 1)")
    parser.add_argument("--start-h", type=float, default=0.0, help="begin so many hours into the trace (default 0)")
    parser.add_argument("--hours", type=float, default=2.0, help="simulate so long (default 2)")
    parser.add_argument("--steps", type=int, help="simulate so many steps instead")
    parser.add_argument(
        "--strategies",
        default="colocated,disaggregated,rlboost,penstock",
        help="which to compare (default all four); package.module:Class is a balance policy of your own",
    )
    parser.add_argument("--grid", action="append", default=[], metavar="KEY=A,B", help="sweep a number of the profile")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and of the machines kept (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--picture",
        type=Path,
        help="draw the last strategy's middle step and all strategies over the trace; with --grid those of the last "
        "setting (.png, .svg or .pdf)",
    )


def main(args: argparse.Namespace) -> int:
    if args.profile == "fit":
        return _fit(args)
    if args.run is not None:
        raise ConfigError(f"{args.run}: one profile at a time; `penstock simulate fit RUN` makes one from a run")
    _check(args)
    found: list[_Compared] = []
    with interruptible():
        try:
            _compare_all(args, found)
        except (KeyboardInterrupt, PenstockError) as error:
            # What is done took minutes, and nothing of it is wrong.
            if any(compared.rows for compared in found):
                _show(args, found)
            if isinstance(error, KeyboardInterrupt):
                print("stopped; what was not simulated to its end is left out", file=sys.stderr)
            raise
        _show(args, found)
    if not any(compared.outcomes for compared in found):
        # The rows say that, and the notes why; whoever reads neither goes by the exit code.
        raise PenstockError("no strategy ended a step")
    return 0


@dataclass
class _Compared:
    """Strategies on one setting, as far as they are simulated."""

    profile: Profile
    trace: Trace
    rows: list[Row | NoRow] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    """Of the rows with figures."""


def _compare_all(args: argparse.Namespace, found: list[_Compared]) -> None:
    """Fills `found`, one setting after the other. What can't be simulated is said before the first is."""
    from penstock.simulate.baselines import make_strategy
    from penstock.simulate.grid import MACHINES, combinations, with_values
    from penstock.simulate.profiles import shipped

    base = shipped(args.profile)
    settings = [(values, with_values(base, values)) for values in combinations(args.grid)]
    for name in args.strategies.split(","):
        make_strategy(name.strip(), base)
    for number, (values, profile) in enumerate(settings, 1):
        machines = int(values[MACHINES]) if MACHINES in values else args.machines
        trace = _trace(args, machines)
        words = ", ".join(f"{key}={value:g}" for key, value in values.items()) or profile.name
        found.append(_Compared(profile, trace))
        _compare(args, found[-1], machines, words, f"{number} of {len(settings)}")


def _show(args: argparse.Namespace, found: list[_Compared]) -> None:
    """Prints all settings, and draws the last one of which anything is there."""
    from penstock.simulate.report import as_json, table

    rows = [row for compared in found for row in compared.rows]
    outcomes = [outcome for compared in found for outcome in compared.outcomes]
    print(json.dumps(as_json(rows, outcomes, args.seed), allow_nan=False) if args.json else table(rows))
    last = next((compared for compared in reversed(found) if compared.outcomes), None)
    if args.picture and last is not None:
        from penstock.simulate.picture import draw_run

        draw_run(args.picture, last.outcomes, last.trace)


def _fit(args: argparse.Namespace) -> int:
    """A profile from a run's event log."""
    from penstock.observe.log import read_events
    from penstock.simulate.fit import fit_profile
    from penstock.simulate.fit_report import as_json, as_text, as_toml
    from penstock.simulate.observed import gather
    from penstock.simulate.own_run import own_run

    if args.run is None:
        raise ConfigError("penstock simulate fit RUN: which run? give its folder or its events.jsonl")
    foreign = [name for name in _given(args) if name not in FIT_OPTIONS]
    if foreign:
        raise ConfigError(
            f"{', '.join(foreign)}: of no use with `penstock simulate fit RUN`; simulate the profile that it makes"
        )
    prices = _prices(args.prices)
    log = args.run / "events.jsonl" if args.run.is_dir() else args.run
    try:
        seen = gather(read_events(log))
    except DataError as error:
        # As with a log that has too little: the run that was given is not one to fit.
        raise ConfigError(str(error)) from None
    fitted = fit_profile(seen, prices)
    own = own_run(seen, fitted)
    fitted.notes.append(own.words if own is not None else "the log does not say which instances were there when")
    path = args.out or log.parent / "profile.toml"
    try:
        path.write_text(as_toml(fitted, f"{args.run}"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: can't be written: {error.strerror}") from None
    print(json.dumps(as_json(fitted), allow_nan=False) if args.json else f"{as_text(fitted)}\n{path}")
    return 0


def _given(args: argparse.Namespace) -> list[str]:
    """Options that have another value than by default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([args.profile]))
    names = {name: f"--{name.replace('_', '-')}" for name in defaults if name not in ("profile", "run")}
    return [option for name, option in names.items() if getattr(args, name) != defaults[name]]


def _prices(words: str | None) -> Prices | None:
    from pydantic import ValidationError

    from penstock.simulate.profiles import Prices

    if words is None:
        return None
    try:
        reserved, spot, on_demand = (float(word) for word in words.split(","))
        return Prices(reserved=reserved, spot=spot, on_demand=on_demand)
    except (ValueError, ValidationError):
        raise ConfigError(f"--prices {words!r}: write three numbers of 0 or more, e.g. 83.79,5.32,20.95") from None


def _check(args: argparse.Namespace) -> None:
    is_swept = any(word.startswith("machines=") for word in args.grid)
    is_machines = args.machines is not None or is_swept
    if args.trace is None and not is_machines and args.ceiling is None:
        raise ConfigError(
            "which machines are there? give --trace FILE, or --machines N for N all the time, or --ceiling N for as "
            "many of N as each strategy asks for"
        )
    if args.machines is not None and is_swept:
        raise ConfigError("--machines and --grid machines=... both say how many machines there are; give one")
    if is_machines and args.ceiling is not None:
        raise ConfigError("--machines and --ceiling both say how many machines there are at most; give one")
    if is_machines and args.trace is None:
        for name, value in (
            ("--floor", args.floor),
            ("--budget-per-h", args.budget_per_h),
            ("--hour-worth", args.hour_worth),
        ):
            if value is not None:
                raise ConfigError(
                    f"{name} bounds the number that is asked for, and --machines fixes it; give --ceiling instead"
                )
    for name in _given(args):
        if name in ("--prices", "--out"):
            raise ConfigError(f"{name} is for `penstock simulate fit RUN`; prices of a profile are in its file")
    if args.trace is None and (args.sample != 1.0 or args.start_h != 0.0):
        raise ConfigError("--sample and --start-h are of a trace, and there is none; give --trace FILE")
    for name, value, low, high in (
        ("--sample", args.sample, 0.0, 1.0),
        ("--hours", args.hours, 0.01, 10_000.0),
        ("--start-h", args.start_h, 0.0, 100_000.0),
        ("--steps", args.steps if args.steps is not None else 1, 1, 100_000),
        ("--machines", args.machines if args.machines is not None else 0, 0, 100_000),
        ("--ceiling", args.ceiling if args.ceiling is not None else 0, 0, 100_000),
        ("--floor", args.floor or 0, 0, _ceiling(args, args.machines)),
        ("--budget-per-h", args.budget_per_h if args.budget_per_h is not None else 1, 0.01, 1e9),
        ("--hour-worth", args.hour_worth or 0, 0, 1e9),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}; it must be between {low:g} and {high:g}")
    if args.picture is not None:
        from penstock.simulate.picture import check_picture

        check_picture(args.picture)


def _ceiling(args: argparse.Namespace, machines: int | None) -> int:
    """Remote instances at most."""
    return next((most for most in (machines, args.ceiling) if most is not None), CEILING)


def _trace(args: argparse.Namespace, machines: int | None) -> Trace:
    from penstock.simulate.traces import read_trace, static_trace

    if args.trace is None:
        return static_trace(_ceiling(args, machines), float("inf"))
    trace = read_trace(args.trace, args.seed).sampled(args.sample, args.seed)
    start_s = 3600 * args.start_h
    if start_s > trace.duration_s:
        raise ConfigError(f"--start-h {args.start_h:g}: the trace ends after {trace.duration_s / 3600:.1f} hours")
    if not args.steps and start_s + 3600 * args.hours > 1.01 * trace.duration_s:
        print(_ends((trace.duration_s - start_s) / 3600), file=sys.stderr)
    return trace.window(start_s, trace.duration_s if args.steps else 3600 * args.hours)


def _ends(hours: float) -> str:
    return f"note: the trace ends after {hours:.2g} hours; its last machines then stay"


def _compare(args: argparse.Namespace, found: _Compared, machines: int | None, setting: str, count: str) -> None:
    from penstock.simulate.baselines import Bounds, make_strategy
    from penstock.simulate.report import NoRow, row_of
    from penstock.simulate.stillness import StuckError
    from penstock.simulate.tune import tune
    from penstock.simulate.world import simulate

    profile, trace = found.profile, found.trace
    fixed = machines if args.trace is None else None
    ceiling = _ceiling(args, machines)
    budget_per_h = float("inf") if args.budget_per_h is None else args.budget_per_h
    bounds = Bounds(min(args.floor or 0, ceiling), budget_per_h, args.hour_worth or 0.0)

    def made(name: str, tuned: Tuned) -> Strategy:
        return make_strategy(
            name, profile, machines=tuned.machines, ceiling=ceiling, bounds=bounds, tuning=tuned.tuning
        )

    limit = {"steps": args.steps} if args.steps else {"duration_s": 3600 * args.hours}
    for name in args.strategies.split(","):
        name = name.strip()
        # It may take minutes.
        print(f"{count}, {setting}: {name}", file=sys.stderr)
        tuned = tune(name, profile, trace, machines=fixed, ceiling=ceiling, seed=args.seed, **limit)
        strategy = made(name, tuned)
        try:
            outcome = simulate(profile, trace, strategy, seed=args.seed, **limit)
        except StuckError as error:
            outcome = error.outcome
        who, why = f"{strategy.name} on {setting}", outcome.stuck
        if args.steps and args.trace is not None and outcome.end_s > 1.01 * trace.duration_s:
            # With hours it was clear before.
            print(f"{_ends(trace.duration_s / 3600)}: {who} took {outcome.end_s / 3600:.2g}", file=sys.stderr)
        if outcome.steps:
            found.rows.append(row_of(outcome, setting, tuned.words))
            found.outcomes.append(outcome)
        else:
            why = why or (
                f"no step ended within --hours {args.hours:g}; its first one had {outcome.left_over} by then; give "
                "more hours, or --steps 1"
            )
            found.rows.append(NoRow(setting, strategy.name, why))
        if why:
            print(f"note: {who}: {why}", file=sys.stderr)
