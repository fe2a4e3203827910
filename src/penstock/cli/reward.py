"""`penstock reward score FILE`: scores a JSONL of answers with a reward function, and can be stopped and resumed.

Each line is an object with `response` and whatever the function reads from `sample.row`; `prompt` is the text the model
saw. A line that is none is unscored, like a sample that can't be scored. Results go to another JSONL, one line as each
is known: `{"line", "score", "parts"}` or `{"line", "unscored"}`. Run again, it goes on with the lines that have no
result yet; a last line cut off by a crash is dropped and scored again. With `--retry-unscored` lines without a score
are scored again as well; the last result of a line counts.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from penstock.cli.numbers import count, positive
from penstock.cli.pool_table import PoolTable, Screen
from penstock.errors import ConfigError, DataError, RewardError, StorageError
from penstock.sample import Finish, Prompt, Sample, SampleId, Score, Unscored

if TYPE_CHECKING:
    from penstock.reward.pool import ComputePool

HELP = "score a JSONL of answers with a reward function"
MOST_CAUSES = 10
CAUSE_CHARACTERS = 200
VALUE_CHARACTERS = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["score"])
    parser.add_argument("file", type=Path, help='JSONL; each line {"response": ..., "prompt": ..., ...}')
    parser.add_argument("--function", required=True, help="package.module:function or ./file.py:function")
    parser.add_argument("--options", default="{}", help="the function's options as a JSON object (default: none)")
    parser.add_argument("--out", type=Path, help="where results go (default: FILE with .scored.jsonl)")
    parser.add_argument("--mode", choices=["inline", "process"], default="inline")
    parser.add_argument("--processes", type=count, default=2, help="in mode process (default: %(default)s)")
    parser.add_argument("--timeout-s", type=positive, default=60.0, help="for one sample (default: %(default)s)")
    parser.add_argument("--concurrency", type=count, default=256, help="samples at once (default: %(default)s)")
    parser.add_argument("--retry-unscored", action="store_true", help="score lines again that have no score so far")


def main(args: argparse.Namespace) -> int:
    args.options = read_options(args.options)
    samples = read_samples(args.file)
    out = args.out or args.file.with_suffix(".scored.jsonl")
    known = {number: result for number, result in read_results(out).items() if number in samples}
    if args.retry_unscored:
        known = {number: result for number, result in known.items() if "score" in result}
    if known:
        print(f"{len(known)} of {len(samples)} known from {out}", flush=True)
    try:
        return asyncio.run(_score(args, samples, out, known))
    except KeyboardInterrupt:
        print(f"interrupted; what is scored is in {out}, and the same command goes on from there", file=sys.stderr)
        raise


def read_options(text: str) -> dict[str, Any]:
    """Raises ConfigError for what is no JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--options {text!r}: must be a JSON object: {error}") from None


def read_samples(file: Path) -> dict[int, Sample | Unscored]:
    """Line number -> sample, or why the line is none: one broken line costs no other its score.

    Raises:
        DataError: the file can't be read, or holds no line that can be scored; names the first.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{file}: can't be read: {error.strerror}") from None
    samples = {n: _sample(file, n, line) for n, line in enumerate(lines, 1) if line.strip()}
    if not samples:
        raise DataError(f"{file}: holds no samples")
    if not any(isinstance(sample, Sample) for sample in samples.values()):
        number, wrong = next(iter(samples.items()))
        assert isinstance(wrong, Unscored)
        raise DataError(f"{file}:{number}: {wrong.cause}")
    return samples


def _sample(file: Path, number: int, line: bytes) -> Sample | Unscored:
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Unscored(f"the line is not a JSON object: {error}")
    response, prompt = row.get("response"), row.get("prompt", "")
    if not isinstance(response, str):
        return Unscored(f"'response' is {_shown(response)}; it must be text")
    text = prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode()
    asked = Prompt(number, text, (), row, f"{file}:{number}")
    return Sample(SampleId(file.stem, number, 0), asked, array("i"), array("f"), (), Finish.STOP, response)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_CHARACTERS else text[: VALUE_CHARACTERS - 1] + "…"


def read_results(out: Path) -> dict[int, dict[str, Any]]:
    """What an earlier run has written; cuts off a last line that was not written to its end.

    Raises:
        DataError: the file holds something else.
    """
    if not out.exists():
        return {}
    try:
        data = out.read_bytes()
    except OSError as error:
        raise DataError(f"{out}: can't be read: {error.strerror}") from None
    whole = data.rfind(b"\n") + 1
    wrong = "not a result of an earlier run; choose another file with --out"
    known = {}
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            result = msgspec.json.decode(line, type=dict[str, Any])
            known[int(result["line"])] = result
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            raise DataError(f"{out}:{number}: {wrong}") from None
    if rest := data[whole:]:
        begins = b'{"line":'
        if not (rest.startswith(begins) or begins.startswith(rest)):
            raise DataError(f"{out}: its last line is {wrong}")
        with out.open("r+b") as file:
            file.truncate(whole)
    return known


async def _score(
    args: argparse.Namespace, samples: dict[int, Sample | Unscored], out: Path, known: dict[int, Any]
) -> int:
    from penstock.reward import Scorer

    left = [number for number in samples if number not in known]
    causes: Counter[str] = Counter(result["unscored"] for result in known.values() if "unscored" in result)
    total, scored = sum(r.get("score", 0.0) for r in known.values()), sum("score" in r for r in known.values())
    scorer = Scorer(
        args.function,
        options=args.options,
        mode=args.mode,
        processes=args.processes,
        timeout_s=args.timeout_s,
        concurrency=args.concurrency,
    )
    following = iter(left)
    done = len(samples) - len(left)
    progress = _Progress(len(samples))
    try:
        await scorer.start()
        with _opened(out) as file:

            async def work() -> None:
                nonlocal done, total, scored
                for number in following:
                    sample = samples[number]
                    result = sample if isinstance(sample, Unscored) else await scorer.score(sample)
                    _write(file, out, number, result)
                    done += 1
                    if isinstance(result, Score):
                        total, scored = total + result.value, scored + 1
                    else:
                        causes[result.cause] += 1
                    progress.show(done, scored, total)

            async with asyncio.TaskGroup() as group:
                for _ in range(min(args.concurrency, max(1, len(left)))):
                    group.create_task(work())
    except* (StorageError, DataError, RewardError) as errors:
        raise errors.exceptions[0] from None
    finally:
        progress.show(done, scored, total, last=True)
        await scorer.close()
        for pool in _open_pools():
            await pool.close()
    mean = f"mean {total / scored:.4f}" if scored else "no mean"
    print(f"{scored} of {len(samples)} scored, {mean}; written to {out}")
    for line in summary_of(causes):
        print(line)
    return 0


def summary_of(causes: Counter[str]) -> list[str]:
    """The causes that cost most samples, each on one line; the rest, such as those that name a row, is counted."""
    lines = []
    for cause, samples in causes.most_common(MOST_CAUSES):
        shown = cause if len(cause) <= CAUSE_CHARACTERS else cause[: CAUSE_CHARACTERS - 1] + "…"
        lines.append(f"  {samples} unscored: {shown}")
    if (rest := causes.total() - sum(n for _, n in causes.most_common(MOST_CAUSES))) > 0:
        lines.append(f"  {rest} unscored, of {len(causes) - MOST_CAUSES} other causes: see the results")
    return lines


def _opened(out: Path) -> IO[bytes]:
    try:
        return out.open("ab", buffering=0)
    except OSError as error:
        raise StorageError(f"{out}: can't be written: {error.strerror}") from None


def _write(file: IO[bytes], out: Path, number: int, result: Score | Unscored) -> None:
    if isinstance(result, Score):
        line: dict[str, Any] = {"line": number, "score": result.value, "parts": dict(result.parts)}
    else:
        line = {"line": number, "unscored": result.cause}
    try:
        file.write(msgspec.json.encode(line) + b"\n")
    except OSError as error:
        raise StorageError(f"{out}: can't be written: {error.strerror}") from None


class _Progress:
    """A bar on a terminal, and below it the endpoints of the function's pools; elsewhere, a line now and then."""

    EVERY_S = 0.1
    LINE_EVERY_S = 30.0
    """In a log, where what takes less needs no line."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._screen = Screen(sys.stderr)
        self._tables: dict[int, PoolTable] = {}
        self._shown_at = -math.inf if self._screen.redraws else time.monotonic()

    def show(self, done: int, scored: int, total: float, last: bool = False) -> None:
        now, drawn = time.monotonic(), self._screen.redraws
        if now < self._shown_at + (self.EVERY_S if drawn else self.LINE_EVERY_S) and not (last and drawn):
            return
        self._shown_at = now
        filled = 30 * done // self._samples
        mean = f"mean {total / scored:.3f}" if scored else ""
        if not drawn:
            self._screen.say(f"{done} of {self._samples} done, {scored} scored {mean}".rstrip())
            return
        lines = [f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{self._samples} {mean}"[: self._screen.width]]
        for pool in _open_pools():
            table = self._tables.setdefault(id(pool), PoolTable())
            lines += table.lines(pool.snapshot(), pool.waiting, self._screen.width)
        self._screen.draw(lines)


def _open_pools() -> list[ComputePool]:
    """The function's pools. Their module brings aiohttp, so it is looked at only where the function has asked
    for it."""
    known = sys.modules.get("penstock.reward.pool")
    return known.open_pools() if known is not None else []
