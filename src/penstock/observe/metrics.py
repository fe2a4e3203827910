"""The run's metrics: one line a step in metrics.jsonl, and the boards that are asked for.

Names of the figures that the views, the plots and the summary read stand here; a trainer may write any others beside
them. Units are in the names: `_s` seconds, `_share` a part of one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from penstock.errors import DataError
from penstock.observe.boards import Board, TensorBoard
from penstock.observe.events import Evaluated, Event, Warned
from penstock.observe.log import JsonLines, numbered_lines

REWARD_MEAN = "reward_mean"
TRAIN_ACCURACY = "train_accuracy"
"""Of the training samples: share with a reward of at least 1."""
STEP_S = "step_s"
TRAINER_WAIT_S = "trainer_wait_s"
"""Seconds of the step in which the trainer had nothing to do but wait for rollouts."""
ROLLOUT_TOKENS = "response_tokens"
ROLLOUT_TOKENS_PER_S = "rollout_tokens_per_s"
UNSCORED = "unscored"
ENTROPY = "entropy"
CLIP_FRACTION = "clip_fraction"


class MetricsLog:
    """Writes one line a step. Thread-safe. `emit` gets a Warned event when the disk refuses.

    Raises StorageError where the file can't be opened, MissingExtra where `tensorboard` (a folder) is given and the
    package is not installed.
    """

    def __init__(
        self, path: Path, *, emit: Callable[[Event], None] | None = None, tensorboard: Path | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._emit = emit
        self._boards: list[Board] = []
        if tensorboard is not None:
            self._boards.append(TensorBoard(tensorboard, self.warn))
        self._lines = JsonLines(path, self.warn)

    @property
    def path(self) -> Path:
        return self._lines.path

    @property
    def dropped(self) -> int:
        """Steps whose line the disk refused."""
        return self._lines.dropped

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step. What is not a finite number is written as null: measured, and without a value."""
        line = msgspec.json.encode({"step": step, "ts": time.time(), **metrics})
        with self._lock:
            self._lines.append(line)
            for board in self._boards:
                board.write(step, metrics)

    def add(self, board: Board) -> None:
        """Writes to one more board, from now on; it is closed with the rest."""
        with self._lock:
            self._boards.append(board)

    def take(self, event: Event) -> None:
        """An evaluation's figures, for the boards: the event log has them itself."""
        if isinstance(event, Evaluated):
            values = evaluation_metrics(event)
            with self._lock:
                for board in self._boards:
                    board.write(event.step, values)

    def close(self) -> None:
        with self._lock:
            self._lines.close()
            for board in self._boards:
                board.close()
            self._boards.clear()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warn(self, sentence: str) -> None:
        if self._emit is None:
            print(f"penstock: warning: {sentence}", file=sys.stderr, flush=True)
        else:
            self._emit(Warned(ts=time.time(), where="metrics", message=sentence))


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """The lines of a metrics file, whose steps ascend. Raises DataError.

    Where a run goes on from an earlier checkpoint, what was written behind that is left out: it is no part of the run.
    """
    rows: list[dict[str, float | None]] = []
    steps: list[int] = []
    for number, line in numbered_lines(path):
        try:
            row = msgspec.json.decode(line, type=dict[str, float | None])
            step = row["step"]
        except (msgspec.ValidationError, msgspec.DecodeError, KeyError) as error:
            raise DataError(f"{path}:{number}: not a step's metrics: {error}") from None
        if step is None:
            raise DataError(f"{path}:{number}: not a step's metrics: step is null")
        while steps and steps[-1] >= int(step):
            steps.pop()
            rows.pop()
        steps.append(int(step))
        rows.append(row)
    return rows


def evaluation_metrics(event: Evaluated) -> dict[str, float]:
    """What an evaluation came to, as metrics: `eval/accuracy`, `eval/pass@4`, and `eval/NAME/accuracy` of a set."""
    found = {"eval/accuracy": event.accuracy, "eval/questions": float(event.questions)}
    parts = {"eval": event.whole, **{f"eval/{name}": known for name, known in event.sets.items()}}
    for prefix, known in parts.items():
        if known is not None:
            found |= {f"{prefix}/accuracy": known.accuracy, f"{prefix}/unscored": float(known.unscored)}
            found |= {f"{prefix}/pass@{k}": value for k, value in known.pass_at.items()}
    return found
