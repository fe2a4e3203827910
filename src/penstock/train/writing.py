"""A rank's part of a checkpoint on its way to the disk: copied at once, written by a thread of its own.

Decides what a rank keeps, and that a checkpoint is over once every rank has said how its writing went. Refuses to
know where checkpoints lie and when one is due.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from penstock.errors import StorageError
from penstock.train.actor import Actor
from penstock.train.critic import Critic
from penstock.train.ranks import Ranks
from penstock.train.shards import Shard, own_shards, shard_file, write_shards

__all__ = ["Part", "Staged", "Writing", "stage"]

_SLICE_S = 0.2
"""How often a wait looks after the rest of the run."""


class Part(msgspec.Struct, frozen=True):
    """How one rank's writing went."""

    nbytes: int
    python_random: Any
    error: str = ""
    """Why it failed, or nothing."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What one rank keeps of a run, as it was at one moment; nothing of it changes any more."""

    files: dict[str, list[Shard]]
    """By kind: `model`, `trainer` (adapters, optimizer, random state) and, with a critic, `critic`."""
    python_random: Any
    config_json: str
    folder: Path
    """Of the run's model, for its tokenizer."""
    steps_skipped: int
    kl_coef: float

    def write(self, folder: Path, ranks: Ranks) -> int:
        """Writes this rank's files; returns their bytes. Raises OSError."""
        nbytes = 0
        for kind, shards in self.files.items():
            path = folder / shard_file(kind, ranks.rank, ranks.size)
            write_shards(path, shards, whole=ranks.size == 1)
            nbytes += path.stat().st_size
        return nbytes


def stage(actor: Actor, critic: Critic | None) -> Staged:
    """Copies what a checkpoint keeps of this rank to host memory. Of several ranks each has to at the same time."""
    ranks = actor.ranks

    def own(tensors: Iterator[tuple[str, Tensor]]) -> list[Shard]:
        return list(own_shards(tensors, leads=ranks.leads))

    # What is sent is what is kept: with adapters merged, and then whole, for the leader to write.
    weights = actor.whole_weights() if actor.config.lora.rank else actor.named_weights()
    files = {
        "model": own(weights),
        "trainer": [*own(_adapters(actor)), *own(_optimizer_tensors(actor)), *_random_state(actor)],
    }
    if critic is not None:
        named = ((f"weight/{name}", tensor) for name, tensor in critic.named_weights())
        files["critic"] = [*own(named), *own(_optimizer_tensors(critic))]
    return Staged(files, random.getstate(), actor.config_json(), actor.folder, actor.steps_skipped, actor.kl_coef)


class Writing:
    """`staged` on its way into `folder`, which is there. `finish`, the leader's, makes a checkpoint of all parts."""

    def __init__(
        self, staged: Staged, folder: Path, ranks: Ranks, finish: Callable[[list[Part]], Any] = lambda parts: None
    ) -> None:
        self.began = time.monotonic()
        self.wall_s = 0.0
        """Until it was done."""
        self.folder = folder
        self._failure: BaseException | None = None
        self._result: Any = None
        # A daemon, so that a disk that hangs can't keep the process; whoever ends the run in order waits.
        self._thread = threading.Thread(
            target=self._run, args=(staged, ranks, finish), name=f"writing {folder.name}", daemon=True
        )
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, deadline_s: float, watch: Callable[[], None] = lambda: None) -> Any:
        """What `finish` returned; waits until `deadline_s` after the beginning. Raises what it failed with.

        StorageError for a disk, a rank that is gone, and for a deadline that passes; it is not done then.
        """
        while not self.done:
            left_s = self.began + deadline_s - time.monotonic()
            if left_s <= 0:
                raise StorageError(f"a checkpoint is still being written to {self.folder} after {deadline_s:g} s")
            self._thread.join(min(_SLICE_S, left_s))
            watch()
        if self._failure is not None:
            raise self._failure
        return self._result

    def _run(self, staged: Staged, ranks: Ranks, finish: Callable[[list[Part]], Any]) -> None:
        try:
            parts = self._collect(staged, ranks)
            if ranks.leads:
                self._result = finish(parts)
        # Whatever it is, it is told where the result is asked for.
        except BaseException as error:  # noqa: BLE001
            self._failure = error
        self.wall_s = time.monotonic() - self.began

    def _collect(self, staged: Staged, ranks: Ranks) -> list[Part]:
        try:
            own = Part(staged.write(self.folder, ranks), staged.python_random)
        except OSError as error:
            own = Part(0, None, error.strerror or str(error))
        try:
            return [msgspec.json.decode(data, type=Part) for data in ranks.collect_behind(msgspec.json.encode(own))]
        except RuntimeError as error:
            raise StorageError(f"a checkpoint can't be written: another rank is gone ({error})") from error


# ---- what is kept


def _adapters(actor: Actor) -> Iterator[tuple[str, Tensor]]:
    """What is learned where that is not the weights themselves, which are then sent and kept merged."""
    if actor.config.lora.rank:
        for name, parameter in actor.model.named_parameters():
            if parameter.requires_grad:
                yield f"adapter/{name}", parameter.detach()


def _optimizer_tensors(learner: Actor | Critic) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in learner.model.named_parameters():
        for key, value in sorted(learner.optimizer.state.get(parameter, {}).items()):
            yield f"optimizer/{key}/{name}", value


def _random_state(actor: Actor) -> Iterator[Shard]:
    """Each rank's own, the leader's under the names that one rank alone has."""
    suffix = "" if actor.ranks.leads else f"/{actor.ranks.rank}"
    yield Shard(f"random/cpu{suffix}", torch.get_rng_state(), (0,))
    if actor.device.type == "cuda":
        yield Shard(f"random/cuda{suffix}", torch.cuda.get_rng_state(actor.device), (0,))


def description(staged: Staged, parts: list[Part], position: dict[str, int], format_number: int) -> bytes:
    """What `trainer.json` says of a checkpoint."""
    described = {
        "format": format_number,
        **position,
        "ranks": len(parts),
        "steps_skipped": staged.steps_skipped,
        "kl_coef": staged.kl_coef,
        "python_random": [part.python_random for part in parts],
    }
    return json.dumps(described).encode()
