"""What benchmarks share: one result type, how a table is drawn, the JSON line, and how benchmarks are found.

A benchmark is a module of `penstock.bench` with `DESCRIPTION: str` and `run(quick: bool) -> list[Result]`. One that
takes long has `PARTS` and `run_part(part, quick)` too: parts can be run alone, and are kept when a run is broken off.
This module decides nothing about what is measured; it never imports a benchmark to list it (the description is read
from its source), so that listing stays light.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from penstock.errors import ConfigError, PenstockError

COLUMNS = ("", "value", "unit", "target", "met")


@dataclass(frozen=True)
class Result:
    """One figure of a benchmark. `value` None: it was skipped, and `note` says why."""

    what: str
    value: float | None
    unit: str
    target: str = ""
    """As a person reads it, e.g. ">= 1.5"; empty for a figure that is only reported."""
    met: bool | None = None
    """None where there is no target or nothing was measured."""
    note: str = ""

    def __post_init__(self) -> None:
        if self.value is None and not self.note:
            raise ValueError(f"result {self.what!r} has no value and no note that says why")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(
                f"result {self.what!r} is {self.value}; a figure that can't be measured is None, with a note"
            )


class Benchmark(Protocol):
    """What a module of `penstock.bench` looks like."""

    DESCRIPTION: str

    def run(self, quick: bool) -> list[Result]: ...


class Parted(Benchmark, Protocol):
    """One with parts."""

    PARTS: tuple[str, ...]

    def run_part(self, part: str, quick: bool) -> list[Result]: ...


def at_least(what: str, value: float, bound: float, unit: str, note: str = "") -> Result:
    """A figure that meets its target from `bound` upward."""
    return Result(what, value, unit, target=f">= {_number(bound)}", met=value >= bound, note=note)


def at_most(what: str, value: float, bound: float, unit: str, note: str = "") -> Result:
    """A figure that meets its target from `bound` downward."""
    return Result(what, value, unit, target=f"<= {_number(bound)}", met=value <= bound, note=note)


def skipped(what: str, unit: str, why: str, target: str = "") -> Result:
    """A figure that can't be measured here."""
    return Result(what, None, unit, target=target, note=f"skipped: {why}")


def median(values: Sequence[float]) -> float:
    """Middle of several repetitions; raises ValueError when there are none."""
    if not values:
        raise ValueError("no repetitions to take the median of")
    return statistics.median(values)


def progress(what: str) -> None:
    """A line on standard error, for whoever waits."""
    print(f"{time.strftime('%H:%M:%S')}  {what}", file=sys.stderr, flush=True)


def run_parts(
    name: str, benchmark: Benchmark, quick: bool, only: Sequence[str] = (), kept: Path | None = None
) -> list[Result]:
    """Runs a benchmark, or some of its parts. `kept`: a file that gets each part's results as soon as they are there;
    parts that it has already are not run again.

    Raises ConfigError for a part that there is not, and for a file that is none of these.
    """
    parts: tuple[str, ...] = getattr(benchmark, "PARTS", ())
    if not parts:
        if only or kept:
            raise ConfigError(f"the benchmark {name!r} has no parts: --only and --keep are for those that have")
        return benchmark.run(quick=quick)
    for part in only:
        if part not in parts:
            raise ConfigError(f"{name!r} has no part {part!r}; there are: {', '.join(parts)}")
    found: dict[str, list[Result]] = _read_kept(kept, name, quick) if kept is not None and kept.exists() else {}
    wanted = [part for part in parts if not only or part in only]
    for part in wanted:
        if part in found:
            progress(f"{part}: kept in {kept}")
            continue
        progress(part)
        found[part] = cast(Parted, benchmark).run_part(part, quick)
        for result in found[part]:
            # Whoever ends a long run has seen what was there.
            progress(f"{result.what}: {'-' if result.value is None else f'{result.value:.4g} {result.unit}'}")
        if kept is not None:
            row = {"bench": name, "quick": quick, "part": part, "results": [asdict(row) for row in found[part]]}
            try:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, allow_nan=False) + "\n")
            except OSError as error:
                raise ConfigError(f"--keep {kept}: can't be written: {error.strerror}") from None
    return [result for part in wanted for result in found[part]]


def discover() -> dict[str, str]:
    """Name to description of every benchmark, by name; read from the sources, nothing is imported."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        description = _description(path)
        if description is not None:
            found[path.stem.replace("_", "-")] = description
    return found


def load(name: str) -> Benchmark:
    """Imports one benchmark, named with dashes or as its module; raises ConfigError with the names there are."""
    known = discover()
    if name.replace("_", "-") not in known:
        raise ConfigError(f"there is no benchmark {name!r}; there are: {', '.join(known) or 'none'}")
    return cast(Benchmark, importlib.import_module(f"penstock.bench.{name.replace('-', '_')}"))


def machine() -> dict[str, Any]:
    """What the figures were measured on: processor, cores of this process, memory, Python and PyTorch."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "penstock": _version("penstock"),
    }


def json_line(name: str, results: Sequence[Result], machine: dict[str, Any]) -> str:
    """The last line of `penstock bench NAME --json`."""
    return json.dumps(
        {"bench": name, "machine": machine, "results": [asdict(result) for result in results]}, allow_nan=False
    )


def table(name: str, results: Sequence[Result]) -> str:
    """A plain table, one figure a row, notes below it; no colour, fit for a log."""
    rows = [COLUMNS, *map(cells, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if k == 1 else cell.ljust(width) for k, (cell, width) in enumerate(zip(row, widths))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([name, *map(line, rows), *notes(results)])


def cells(result: Result) -> tuple[str, ...]:
    """One row of the table, as text, in the order of `COLUMNS`."""
    met = {True: "yes", False: "NO", None: "-"}[result.met]
    return (result.what, _number(result.value), result.unit, result.target, met)


def notes(results: Sequence[Result]) -> list[str]:
    """What stands below the table."""
    return [f"  {result.what}: {result.note}" for result in results if result.note]


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory, or 0 where the system doesn't say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _read_kept(path: Path, name: str, quick: bool) -> dict[str, list[Result]]:
    """Parts of this benchmark in a file; those of a quick run are not those of a whole one."""
    found = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if (row["bench"], row["quick"]) == (name, quick):
                found[row["part"]] = [Result(**result) for result in row["results"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--keep {path}: not a file of kept results: {error!r}") from None
    return found


def _number(value: float | None) -> str:
    """Four significant digits, thousands marked; whole numbers from 1,000 on."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _description(path: Path) -> str | None:
    """The literal `DESCRIPTION = "..."` of a module, or None for a module that is not a benchmark."""
    for target, value in _assignments(ast.parse(path.read_text(encoding="utf-8"))):
        if target == "DESCRIPTION":
            try:
                return str(ast.literal_eval(value))
            except ValueError:
                raise PenstockError(f"{path.name}: DESCRIPTION must be a plain string") from None
    return None


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def random_llama(seed: int, **shape: Any) -> Any:
    """A Llama in float32 with weights drawn with `seed`, which knows no special tokens. `shape`: of LlamaConfig."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(bos_token_id=None, eos_token_id=None, **shape)).eval()
