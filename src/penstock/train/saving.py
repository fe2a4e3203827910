"""The checkpoint that is on its way to the disk: at most one, while the run goes on.

Decides when the trainer waits for it (before the next one begins, and at the run's end) and what its failure costs: a
warning that names it, or for the last one the run. Refuses to know how checkpoints are written.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.config.run import RunConfig
from penstock.errors import StorageError
from penstock.observe import events
from penstock.train.checkpoint import Position, Saved
from penstock.train.learner import Learner
from penstock.train.ports import TrainerPorts
from penstock.train.writing import Writing

__all__ = ["Saving"]


class Saving:
    """All calls come from the main thread."""

    def __init__(self, config: RunConfig, learner: Learner, ports: TrainerPorts, start_step: int) -> None:
        self._learner = learner
        self._ports = ports
        self._deadline_s = config.train.checkpoint_timeout_s
        self._under_way: tuple[Position, Writing] | None = None
        self.saved_step = start_step
        """Of the newest checkpoint that is whole on the disk."""

    def begin(self, position: Position) -> None:
        """Copies what a checkpoint keeps, and returns; the one before ends first. What fails is a warning."""
        self._or_warn(lambda: self._begin(position))

    def poll(self) -> None:
        """Tells of a checkpoint that has come to its end; waits for nothing."""
        if self._under_way is not None and self._under_way[1].done:
            self.settle()

    def settle(self) -> None:
        """Waits for the one that is under way, and for nothing else of the run. What fails is a warning."""
        self._or_warn(self._settle)

    def last(self, position: Position) -> None:
        """The run's last one, waited for. Raises StorageError where it can't be written: nothing else keeps the run."""
        self._begin(position)
        self._settle(self._ports.watch)

    def _begin(self, position: Position) -> None:
        self._or_warn(lambda: self._settle(self._ports.watch))
        if self._under_way is not None:
            raise StorageError(
                f"no checkpoint after step {position.step}: the one after step {self._under_way[0].step} is still "
                "being written"
            )
        self._under_way = position, self._learner.begin_save(self._ports.checkpoints, position)

    def _settle(self, watch: Callable[[], None] = lambda: None) -> None:
        if self._under_way is None:
            return
        position, writing = self._under_way
        try:
            saved: Saved = writing.result(self._deadline_s, watch)
        finally:
            if writing.done:
                self._under_way = None
        self.saved_step = position.step
        if saved.left:
            self._warn(f"{saved.path} is written; older ones {saved.left}")
        self._ports.emit(
            events.CheckpointSaved(
                ts=time.time(),
                step=position.step,
                path=str(saved.path),
                nbytes=saved.nbytes,
                wall_s=writing.wall_s,
            )
        )

    def _or_warn(self, do: Callable[[], None]) -> None:
        try:
            do()
        except StorageError as error:
            # The run is worth more than one of its checkpoints.
            self._warn(str(error))

    def _warn(self, message: str) -> None:
        self._ports.emit(events.Warned(ts=time.time(), where="checkpoint", message=message))
