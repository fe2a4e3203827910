"""The run's metrics: one line a step in metrics.jsonl, and TensorBoard where it is asked for.

Names of the figures that the views, the plots and the summary read stand here; a trainer may write any others beside
them. Units are in the names: `_s` seconds, `_share` a part of one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import DataError, MissingExtra
from penstock.observe.events import Event, Warned
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
        self._board = _open_tensorboard(tensorboard) if tensorboard is not None else None
        self._lines = JsonLines(path, self._warn)

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
            if self._board is not None:
                self._write_board(self._board, step, metrics)

    def close(self) -> None:
        with self._lock:
            self._lines.close()
            if self._board is not None:
                self._board.close()
                self._board = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_board(self, board: Any, step: int, metrics: Mapping[str, float]) -> None:
        try:
            for name, value in metrics.items():
                board.add_scalar(name, value, step)
            board.flush()
        except OSError as error:
            self._board = None
            self._warn(f"TensorBoard's files can't be written ({error.strerror or error}); it is switched off")

    def _warn(self, sentence: str) -> None:
        if self._emit is None:
            print(f"penstock: warning: {sentence}", file=sys.stderr, flush=True)
        else:
            self._emit(Warned(ts=time.time(), where="metrics", message=sentence))


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """The lines of a metrics file by step; of a step written twice (a resumed run) the last. Raises DataError."""
    by_step: dict[int, dict[str, float | None]] = {}
    for number, line in numbered_lines(path):
        try:
            row = msgspec.json.decode(line, type=dict[str, float | None])
            step = row["step"]
        except (msgspec.ValidationError, msgspec.DecodeError, KeyError) as error:
            raise DataError(f"{path}:{number}: not a step's metrics: {error}") from None
        if step is None:
            raise DataError(f"{path}:{number}: not a step's metrics: step is null")
        by_step[int(step)] = row
    return [by_step[step] for step in sorted(by_step)]


def _open_tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard", "observe.tensorboard = true") from error
    return SummaryWriter(log_dir=str(folder))
