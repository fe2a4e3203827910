"""Checkpoints: decides what a run needs to go on bit for bit, and that a folder is there whole or not at all.

Of each rank a checkpoint has its shards of the weights, of the optimizer with random state, and, of a run with a
critic, of that (`shards`); and `trainer.json`, which says where the run stood. One rank's is a Hugging Face model
folder as it is; several ranks' become one by `export`. It is written behind the run's back (`writing`), beside its
final place, flushed to the disk and renamed; a full disk leaves the older ones as they were. One that is written again
is set aside under a name that is still found, and removed once its successor is in place. Any number of ranks goes on
from it. Refuses to know about the loop. No pickle.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError, StorageError
from penstock.train.actor import Actor
from penstock.train.critic import Critic
from penstock.train.ranks import Ranks
from penstock.train.shards import Described, describe, fill, read_whole, shard_file, write_safetensors
from penstock.train.writing import Part, Staged, Writing, description, stage

__all__ = [
    "Checkpoints",
    "Position",
    "Saved",
    "copy_tokenizer",
    "files_of",
    "find_checkpoint",
    "load_checkpoint",
    "read_position",
    "write_safetensors",
]

FORMAT = 2
READS = (1, 2)
"""Format 1 had one rank's files alone, and one random state."""
SAVE_S = 1800.0
"""For one checkpoint that somebody waits for, where nothing else is said."""
_ASIDE = ".replaced-"
_NAME = re.compile(rf"({re.escape(_ASIDE)})?step-(\d{{6,}})")
_TEMPORARY = ".writing-"
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands between two steps."""

    step: int
    """Steps that are done; the next one has this number, and so the order of prompts goes on from it."""
    weight_version: int
    run_seed: int


@dataclass(frozen=True, slots=True)
class Saved:
    path: Path
    nbytes: int
    left: str = ""
    """What could not be removed, and why; the checkpoint itself is in place."""


class Checkpoints:
    """The checkpoints of one run, in `folder`: `step-000020` and so on; the last `keep` are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def prepare(self) -> Path:
        """A folder for every rank's part of the next checkpoint. Raises StorageError where there can't be one."""
        unfinished = self.folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Before, since a disk that is full of them would refuse; once more behind, to tell of what stays.
            _remove(self._leftovers())
            unfinished.mkdir()
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(f"no checkpoint can be written in {self.folder}: {reason}") from error
        return unfinished

    def begin(self, unfinished: Path, staged: Staged, position: Position, ranks: Ranks) -> Writing:
        """Has the leader's part written to `unfinished`, and all of it put in place once every rank's is there.

        Its result is a Saved. It raises StorageError where a disk refuses; older checkpoints are then as they were.
        """
        return Writing(staged, unfinished, ranks, functools.partial(self.finish, unfinished, staged, position))

    def save(self, actor: Actor, position: Position, critic: Critic | None = None) -> Saved:
        """Writes one checkpoint of a rank alone, and waits for it. Raises StorageError."""
        writing = self.begin(self.prepare(), stage(actor, critic), position, actor.ranks)
        saved: Saved = writing.result(SAVE_S)
        return saved

    def finish(self, unfinished: Path, staged: Staged, position: Position, parts: list[Part]) -> Saved:
        """Makes a checkpoint of what the ranks have written, and removes those that are not kept."""
        final = self.folder / f"step-{position.step:06d}"
        try:
            _raise_failed(parts)
            _write_rest(unfinished, staged, position, parts)
            nbytes = sum(file.stat().st_size for file in unfinished.iterdir())
            _put_in_place(unfinished, final)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = error.strerror or str(error)
            rest = "; older ones are intact" if _by_age(self.folder) else ""
            raise StorageError(f"the checkpoint {final} can't be written: {reason}{rest}") from error
        return Saved(final, nbytes, _remove([*self._leftovers(), *_by_age(self.folder)[: -self.keep]]))

    def _leftovers(self) -> list[Path]:
        """What a killed run was still writing, and what has its successor in place."""
        replaced = self.folder.glob(f"{_ASIDE}step-*")
        gone = [path for path in replaced if (self.folder / path.name.removeprefix(_ASIDE)).exists()]
        return [*self.folder.glob(f"{_TEMPORARY}*"), *gone]


def find_checkpoint(folder: Path) -> Path:
    """`folder` itself if it is a checkpoint, else the latest in it or in its `checkpoints` folder.

    Raises CheckpointError where there is none.
    """
    if (folder / "trainer.json").is_file():
        return folder
    for place in (folder, folder / "checkpoints"):
        found = _by_age(place)
        if found:
            return found[-1]
    raise CheckpointError(f"{folder} is no checkpoint and holds none (folders named step-000000 with a trainer.json)")


def load_checkpoint(path: Path, actor: Actor, critic: Critic | None = None) -> Position:
    """Puts a checkpoint's weights, optimizers and random state in place and says where the run stood.

    Each rank reads its own part of what any number of ranks wrote. Raises CheckpointError naming the file that is
    missing, broken or does not fit, and the checkpoint before it.
    """
    try:
        position = read_position(path)
        described = json.loads((path / "trainer.json").read_text())
        model, trainer = files_of(path, "model"), files_of(path, "trainer")
        if actor.config.lora.rank:
            # The base weights are those of the run's model; a checkpoint's are merged, and not gone on from.
            describe(model)
            learned = {name: param.detach() for name, param in actor.model.named_parameters() if param.requires_grad}
            _fill_weights(trainer, learned, "adapter/")
        else:
            _fill_weights(model, dict(actor.named_weights()))
        _fill_optimizer(trainer, actor)
        if critic is not None:
            _fill_critic(path, critic)
        actor.steps_skipped = int(described.get("steps_skipped", 0))
        if actor.config.kl_target:
            actor.kl_coef = float(described.get("kl_coef", actor.kl_coef))
        _set_random_state(trainer, described, actor.ranks)
    except CheckpointError as error:
        found = _by_age(path.parent)
        older = found[: found.index(path)] if path in found else []
        advice = f"; the checkpoint before it is {older[-1]}" if older else ""
        raise CheckpointError(f"{error}{advice}") from error
    return position


def files_of(path: Path, kind: str) -> list[Path]:
    """The files with all ranks' parts of `model`, `trainer` or `critic`. Raises CheckpointError."""
    try:
        ranks = int(json.loads((path / "trainer.json").read_text()).get("ranks", 1))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path / 'trainer.json'} is missing or broken: {error}") from error
    return [path / shard_file(kind, rank, ranks) for rank in range(ranks)]


# ---- writing


def _put_in_place(unfinished: Path, final: Path) -> None:
    """Renames a whole checkpoint to its name; one that has it is set aside, and comes back if that fails.

    A rename can't replace a folder with files in it. Whoever looks between the two renames, or after a crash there,
    finds the one that was set aside.
    """
    aside = final.with_name(_ASIDE + final.name)
    if final.exists():
        if aside.exists():
            shutil.rmtree(aside)
        os.replace(final, aside)
    try:
        os.replace(unfinished, final)
    except OSError:
        if aside.exists():
            os.replace(aside, final)
        raise
    _flush_folder(final.parent)


def _remove(folders: Iterable[Path]) -> str:
    """Removes folders as far as that goes; returns what is left and why, or nothing."""
    left = []
    for folder in folders:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            left.append(f"{folder} ({error.strerror or error})")
    return f"can't be removed: {', '.join(left)}" if left else ""


def _raise_failed(parts: Sequence[Part]) -> None:
    failed = [(rank, part.error) for rank, part in enumerate(parts) if part.error]
    if failed:
        raise OSError("; ".join(f"rank {rank}: {error}" if len(parts) > 1 else error for rank, error in failed))


def _write_rest(folder: Path, staged: Staged, position: Position, parts: list[Part]) -> None:
    copy_tokenizer(staged.folder, folder)
    config = json.loads(staged.config_json)
    # The master weights are kept, so that a resumed run is the same run.
    config["dtype"] = "float32"
    _write_bytes(folder / "config.json", json.dumps(config, indent=2).encode())
    _write_bytes(folder / "trainer.json", description(staged, parts, asdict(position), FORMAT))
    _flush_folder(folder)


def copy_tokenizer(model: Path, folder: Path) -> None:
    """Copies what belongs to a model folder besides weights and configuration. Raises OSError."""
    for pattern in _TOKENIZER_FILES:
        for file in sorted(model.glob(pattern)):
            if file.is_file():
                _write_bytes(folder / file.name, file.read_bytes())


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- reading


def _by_age(folder: Path) -> list[Path]:
    """The checkpoints of a folder, one for each step; one that was set aside only where its successor isn't there."""
    if not folder.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        # A name with the mark sorts before the one without it.
        if (name := _NAME.fullmatch(path.name)) and (path / "trainer.json").exists():
            found[int(name[2])] = path
    return [found[step] for step in sorted(found)]


def read_position(checkpoint: Path) -> Position:
    """Where the run of a checkpoint stood. Raises CheckpointError."""
    path = checkpoint / "trainer.json"
    try:
        described = json.loads(path.read_text())
        if described["format"] not in READS:
            raise CheckpointError(f"{path} is of format {described['format']}; this version reads 1 and 2")
        return Position(int(described["step"]), int(described["weight_version"]), int(described["run_seed"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is missing or broken: {type(error).__name__}: {error}") from error


def _fill_critic(path: Path, critic: Critic) -> None:
    files = files_of(path, "critic")
    if not files[0].exists():
        raise CheckpointError(f"{files[0]} is missing: the checkpoint is of a run without a critic")
    _fill_weights(files, dict(critic.named_weights()), "weight/")
    _fill_optimizer(files, critic)


def _fill_weights(files: Sequence[Path], wanted: Mapping[str, Tensor], prefix: str = "") -> None:
    """Fills all of `wanted` from what has its name behind `prefix`; there has to be neither less nor more."""
    known = {name.removeprefix(prefix): of for name, of in describe(files).items() if name.startswith(prefix)}
    place = files[0] if len(files) == 1 else files[0].parent
    _same_names(place, set(wanted), set(known))
    for name, tensor in wanted.items():
        if known[name] != Described(tensor.dtype, tuple(tensor.shape)):
            raise CheckpointError(
                f"{place}: {name} is {known[name].dtype} {known[name].shape}; the model needs "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
    fill(files, {f"{prefix}{name}": tensor for name, tensor in wanted.items()})


def _fill_optimizer(files: Sequence[Path], learner: Actor | Critic) -> None:
    parameters = dict(learner.model.named_parameters())
    targets: dict[str, Tensor] = {}
    for full_name, known in describe(files).items():
        kind, _, rest = full_name.partition("/")
        if kind != "optimizer":
            continue
        key, _, name = rest.partition("/")
        parameter = parameters.get(name)
        if parameter is None or (known.shape and known.shape != tuple(parameter.shape)):
            raise CheckpointError(f"{files[0]}: optimizer state '{full_name}' does not fit the model")
        # `step` counts live where the fused optimizer wants them: beside the parameter.
        kept = torch.zeros_like(parameter, dtype=known.dtype, requires_grad=False)
        if not known.shape:
            kept = torch.zeros((), dtype=known.dtype, device=parameter.device)
        targets[full_name] = learner.optimizer.state[parameter][key] = kept
    fill(files, targets)


def _same_names(path: Path, wanted: set[str], found: set[str]) -> None:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing or extra:
        parts = [f"{word} {', '.join(names[:3])}" for word, names in (("lacks", missing), ("has", extra)) if names]
        raise CheckpointError(f"{path} does not fit the model: it {' and '.join(parts)}")


def _set_random_state(files: Sequence[Path], described: dict[str, Any], ranks: Ranks) -> None:
    """This rank's own; one that there was not before gets a state that follows from the leader's and its number."""
    states = described["python_random"] if described["format"] > 1 else [described["python_random"]]
    rank = ranks.rank if ranks.rank < len(states) else 0
    suffix = f"/{rank}" if rank else ""
    version, internal, gauss_next = states[rank]
    random.setstate((version, tuple(internal), gauss_next))
    kept = read_whole(
        files, [name for name in describe(files) if name in (f"random/cpu{suffix}", f"random/cuda{suffix}")]
    )
    torch.set_rng_state(kept[f"random/cpu{suffix}"])
    with contextlib.suppress(KeyError, RuntimeError):
        # A run may go on without its GPU.
        torch.cuda.set_rng_state(kept[f"random/cuda{suffix}"])
    if rank != ranks.rank:
        torch.manual_seed(int(torch.randint(2**48, ())) + ranks.rank)
        random.seed(random.getrandbits(48) + ranks.rank)
