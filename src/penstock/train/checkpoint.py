"""Checkpoints: decides what a run needs to go on bit for bit, and that a folder is there whole or not at all.

A checkpoint is a Hugging Face model folder (`transformers` loads it) with `trainer.safetensors` (optimizer state and
random state), `trainer.json` (where the run stood) and, of a run with a critic, `critic.safetensors`. It is written
beside its final place, flushed to the disk and renamed; a full disk leaves the older ones as they were. One that is
written again is set aside under a name that is still found, and removed once its successor is in place. Refuses to
know about the loop. No pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import struct
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import CheckpointError, StorageError
from penstock.train.actor import Actor, safetensors_dtype, tensor_bytes
from penstock.train.critic import Critic
from penstock.train.sharding import assign, full

__all__ = [
    "Checkpoints",
    "Position",
    "StateTensors",
    "find_checkpoint",
    "load_checkpoint",
    "state_tensors",
    "write_safetensors",
]

FORMAT = 1
CRITIC_FILE = "critic.safetensors"
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


class StateTensors(NamedTuple):
    """A run's tensors by name, whole, by the file that they are written to."""

    weights: list[tuple[str, Tensor]]
    trainer: list[tuple[str, Tensor]]
    critic: list[tuple[str, Tensor]]
    """Empty where there is no critic."""


class Checkpoints:
    """The checkpoints of one run, in `folder`: `step-000020` and so on; the last `keep` are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, actor: Actor, position: Position, state: StateTensors | None = None) -> Saved:
        """Writes one checkpoint and removes those that are not kept. `state`: by default the actor's alone.

        Raises StorageError where the disk refuses to write; older checkpoints are then as they were.
        """
        final = self.folder / f"step-{position.step:06d}"
        unfinished = self.folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Before, since a disk that is full of them would refuse; once more behind, to tell of what stays.
            _remove(self._leftovers())
            unfinished.mkdir()
            _write(unfinished, actor, position, state or state_tensors(actor, None))
            nbytes = sum(file.stat().st_size for file in unfinished.iterdir())
            _put_in_place(unfinished, final)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = error.strerror or str(error)
            raise StorageError(f"the checkpoint {final} can't be written: {reason}; older ones are intact") from error
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

    Raises CheckpointError naming the file that is missing, broken or does not fit, and the checkpoint before it.
    """
    try:
        position = read_position(path)
        weights = _read_safetensors(path / "model.safetensors")
        state = _read_safetensors(path / "trainer.safetensors")
        described = json.loads((path / "trainer.json").read_text())
        if actor.config.lora.rank:
            _fill_adapters(path / "trainer.safetensors", actor, state)
        else:
            _fill_weights(path / "model.safetensors", dict(actor.named_weights()), weights)
        _fill_optimizer(path / "trainer.safetensors", actor, state)
        if critic is not None:
            _fill_critic(path / CRITIC_FILE, critic)
        actor.steps_skipped = int(described.get("steps_skipped", 0))
        if actor.config.kl_target:
            actor.kl_coef = float(described.get("kl_coef", actor.kl_coef))
        _set_random_state(state, described["python_random"])
    except CheckpointError as error:
        found = _by_age(path.parent)
        older = found[: found.index(path)] if path in found else []
        advice = f"; the checkpoint before it is {older[-1]}" if older else ""
        raise CheckpointError(f"{error}{advice}") from error
    return position


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


def _write(folder: Path, actor: Actor, position: Position, state: StateTensors) -> None:
    for pattern in _TOKENIZER_FILES:
        for file in sorted(actor.folder.glob(pattern)):
            if file.is_file():
                _write_bytes(folder / file.name, file.read_bytes())
    config = json.loads(actor.config_json())
    # The master weights are kept, so that a resumed run is the same run.
    config["dtype"] = "float32"
    _write_bytes(folder / "config.json", json.dumps(config, indent=2).encode())
    write_safetensors(folder / "model.safetensors", state.weights, {"format": "pt"})
    write_safetensors(folder / "trainer.safetensors", state.trainer, {})
    if state.critic:
        write_safetensors(folder / CRITIC_FILE, state.critic, {})
    described = {
        "format": FORMAT,
        **asdict(position),
        "steps_skipped": actor.steps_skipped,
        "kl_coef": actor.kl_coef,
        "python_random": random.getstate(),
    }
    _write_bytes(folder / "trainer.json", json.dumps(described).encode())
    _flush_folder(folder)


def write_safetensors(path: Path, tensors: Iterable[tuple[str, Tensor]], metadata: dict[str, str]) -> None:
    """Writes the safetensors format tensor by tensor, flushed to the disk.

    Through plain file writes, because a full disk then comes back as an OSError with its number.
    """
    named = list(tensors)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in named:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": safetensors_dtype(tensor), "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for _, tensor in named:
            file.write(tensor_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def state_tensors(actor: Actor, critic: Critic | None) -> StateTensors:
    """What a checkpoint keeps. Of several ranks each has to ask at the same time; the leader writes."""
    weights = list(actor.whole_weights())
    trainer = [*_adapter_tensors(actor), *_optimizer_tensors(actor), *_random_tensors(actor.device)]
    if critic is None:
        return StateTensors(weights, trainer, [])
    values = [(f"weight/{name}", full(tensor)) for name, tensor in critic.named_weights()]
    return StateTensors(weights, trainer, [*values, *_optimizer_tensors(critic)])


def _adapter_tensors(actor: Actor) -> Iterator[tuple[str, Tensor]]:
    """What is learned where that is not the weights themselves, which are then sent and kept merged."""
    if actor.config.lora.rank:
        for name, parameter in actor.model.named_parameters():
            if parameter.requires_grad:
                yield f"adapter/{name}", full(parameter.detach())


def _optimizer_tensors(learner: Actor | Critic) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in learner.model.named_parameters():
        for key, value in sorted(learner.optimizer.state.get(parameter, {}).items()):
            yield f"optimizer/{key}/{name}", full(value)


def _random_tensors(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    yield "random/cpu", torch.get_rng_state()
    if device.type == "cuda":
        yield "random/cuda", torch.cuda.get_rng_state(device)


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
        if described["format"] != FORMAT:
            raise CheckpointError(f"{path} is of format {described['format']}; this version reads {FORMAT}")
        return Position(int(described["step"]), int(described["weight_version"]), int(described["run_seed"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is missing or broken: {type(error).__name__}: {error}") from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is missing or broken: {error}") from error


def _fill_critic(path: Path, critic: Critic) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} is missing: the checkpoint is of a run without a critic")
    state = _read_safetensors(path)
    weights = {name.removeprefix("weight/"): state.pop(name) for name in list(state) if name.startswith("weight/")}
    _fill_weights(path, dict(critic.named_weights()), weights)
    _fill_optimizer(path, critic, state)


def _fill_adapters(path: Path, actor: Actor, state: dict[str, Tensor]) -> None:
    """The base weights are those of the run's model; a checkpoint's are merged, and not gone on from."""
    prefix = "adapter/"
    learned = {name: param.detach() for name, param in actor.model.named_parameters() if param.requires_grad}
    _fill_weights(path, learned, {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})


def _fill_weights(path: Path, wanted: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    _same_names(path, set(wanted), set(weights))
    for name, tensor in wanted.items():
        if tensor.shape != weights[name].shape or tensor.dtype != weights[name].dtype:
            raise CheckpointError(
                f"{path}: {name} is {weights[name].dtype} {tuple(weights[name].shape)}; the model needs "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
    for name, tensor in wanted.items():
        assign(tensor, weights[name])


def _fill_optimizer(path: Path, actor: Actor | Critic, state: dict[str, Tensor]) -> None:
    parameters = dict(actor.model.named_parameters())
    for full_name, value in state.items():
        kind, _, rest = full_name.partition("/")
        if kind != "optimizer":
            continue
        key, _, name = rest.partition("/")
        parameter = parameters.get(name)
        if parameter is None or (value.dim() and value.shape != parameter.shape):
            raise CheckpointError(f"{path}: optimizer state '{full_name}' does not fit the model")
        # `step` counts live where the fused optimizer wants them: beside the parameter.
        if value.dim():
            kept = torch.zeros_like(parameter, requires_grad=False)
            assign(kept, value)
            value = kept
        actor.optimizer.state[parameter][key] = value.to(parameter.device)


def _same_names(path: Path, wanted: set[str], found: set[str]) -> None:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing or extra:
        parts = [f"{word} {', '.join(names[:3])}" for word, names in (("lacks", missing), ("has", extra)) if names]
        raise CheckpointError(f"{path} does not fit the model: it {' and '.join(parts)}")


def _set_random_state(state: dict[str, Tensor], python_state: Any) -> None:
    version, internal, gauss_next = python_state
    random.setstate((version, tuple(internal), gauss_next))
    torch.set_rng_state(state["random/cpu"])
    with contextlib.suppress(KeyError):
        torch.cuda.set_rng_state(state["random/cuda"])
