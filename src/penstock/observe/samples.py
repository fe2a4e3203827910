"""The run's record of what the model said: a few samples every few steps, one JSON line each in samples.jsonl.

Decides how a sample is written down for a person. Refuses to know which samples are chosen, and how often. Four
samples every ten steps, the default, are some kilobytes for each hundred steps.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.errors import DataError
from penstock.observe.events import Event, Warned
from penstock.observe.log import JsonLines, numbered_lines
from penstock.sample import Sample, Score, Unscored

__all__ = ["SampleRecord", "SamplesLog", "read_samples"]


class SampleRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One finished or failed sample, and what became of it."""

    step: int
    batch: str
    """`train-<step>` or `eval-<step>`."""
    prompt: int
    """The prompt's index in its data set."""
    replica: int
    source: str
    """The row that the question came from."""
    text: str
    """The prompt as the model saw it."""
    response: str
    finish: str
    """`stop`, `length` or `failed`."""
    tokens: int
    """Output tokens."""
    score: float | None = None
    parts: dict[str, float] = {}
    unscored: str = ""
    """Why there is no score."""
    turns: int = 1
    """How often the model spoke; between its turns an environment did."""
    transcript: str = ""
    """All that was said in a conversation, special tokens included. `response` is the model's last turn."""


class SamplesLog:
    """Writes the records. Thread-safe. `emit` gets a Warned event when the disk refuses; the run goes on.

    Raises StorageError where the file can't be opened.
    """

    def __init__(self, path: Path, *, emit: Callable[[Event], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._emit = emit
        self._lines = JsonLines(path, self._warn)

    @property
    def path(self) -> Path:
        return self._lines.path

    @property
    def dropped(self) -> int:
        """Records that the disk refused."""
        return self._lines.dropped

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Records samples of step `step`."""
        lines = [msgspec.json.encode(_record(step, sample)) for sample in samples]
        with self._lock:
            for line in lines:
                self._lines.append(line)

    def close(self) -> None:
        with self._lock:
            self._lines.close()

    def __enter__(self) -> SamplesLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warn(self, sentence: str) -> None:
        if self._emit is None:
            print(f"penstock: warning: {sentence}", file=sys.stderr, flush=True)
        else:
            self._emit(Warned(ts=time.time(), where="samples", message=sentence))


def read_samples(path: Path) -> Iterator[SampleRecord]:
    """The records of a file, in order; a step that was done again by a resumed run is there twice. Raises DataError."""
    for number, line in numbered_lines(path):
        try:
            yield msgspec.json.decode(line, type=SampleRecord)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise DataError(f"{path}:{number}: not a sample's record: {error}") from None


def _record(step: int, sample: Sample) -> SampleRecord:
    score = sample.score
    return SampleRecord(
        step=step,
        batch=sample.id.batch,
        prompt=sample.id.prompt,
        replica=sample.id.replica,
        source=_writable(sample.prompt.source),
        text=_writable(sample.prompt.text),
        response=_writable(sample.response),
        finish=sample.finish.name.lower(),
        tokens=len(sample.token_ids),
        score=score.value if isinstance(score, Score) else None,
        parts={_writable(name): value for name, value in score.parts.items()} if isinstance(score, Score) else {},
        unscored=_writable(score.cause) if isinstance(score, Unscored) else "",
        turns=sample.turns,
        transcript=_writable(sample.transcript),
    )


def _writable(text: str) -> str:
    """Text that UTF-8 can hold: half of a surrogate pair, which JSON lets a row have, becomes a question mark."""
    return text.encode("utf-8", "replace").decode()
