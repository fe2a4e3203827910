"""Weight versions as Hugging Face folders, for engine servers that read their weights from one.

Decides where a folder stands (memory-backed storage where it has room) and that it appears whole or not at all. The
bytes are written as they are staged; what a server makes of them is its dialect's business.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import shutil
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import EngineError, WeightError
from penstock.weights.manifest import StagedWeights, TensorEntry
from penstock.weights.memory import lies_in_memory, memory_left
from penstock.weights.quantization import SCALE_SUFFIX, is_quantized, tensors_in_full

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "penstock-weights-"
SPARE = 1.1
"""A place must have room for so many times a version's bytes."""
INPUT_EMBEDDING = "model.embed_tokens.weight"
OUTPUT_EMBEDDING = "lm_head.weight"
TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

Tensors = Mapping[str, tuple[TensorEntry, Iterable[memoryview]]]
"""By name: what a tensor is, and its bytes in parts."""

_log = logging.getLogger(__name__)


class WeightFolders:
    """The folders of one engine; those of engines that were killed are removed when another one begins.

    `parents` are tried in turn. `untie`: a model whose output embedding is its input embedding is written as one that
    has two. A quantized version is written as the floats that its codes stand for, which every server takes; with
    `codes`, as codes and scales. One call at a time, but for `close`, which may come while a version is written: that
    then ends with an EngineError, and nothing of it is left.
    """

    def __init__(self, parents: Sequence[Path] = (), untie: bool = False, codes: bool = False) -> None:
        self._parents = list(parents) or [SHARED_MEMORY, Path(tempfile.gettempdir())]
        self._untie = untie
        self._codes = codes
        self._homes: dict[Path, tuple[Path, int]] = {}
        """By parent: this engine's folder there, and its lock, which the system drops when the engine is killed."""
        self._written = itertools.count()
        self._lock = threading.Lock()
        """Over `_homes`, and whether it is closed."""
        self._closed = False
        for parent in self._parents:
            remove_orphans(parent)

    def write(self, weights: StagedWeights) -> Path:
        """The version as a folder of its own, also where another of the same number is there.

        Raises EngineError, and then nothing of it is left, where no place takes it.
        """
        config = config_of(weights)
        in_full = not self._codes and is_quantized(config)
        tensors = tensors_of(weights, in_full)
        if in_full:
            del config["quantization_config"]
        if self._untie and config.get("tie_word_embeddings") and INPUT_EMBEDDING in tensors:
            config["tie_word_embeddings"] = False
            tensors.setdefault(OUTPUT_EMBEDDING, tensors[INPUT_EMBEDDING])
        total = sum(entry.nbytes for entry, _ in tensors.values())
        needed = int(total * SPARE)
        refusals = []
        for parent in self._parents:
            try:
                if (room := _room(parent)) < needed:
                    refusals.append(f"{parent} has {room >> 20} MiB left")
                    continue
                return self._write(parent, weights.version, config, tensors)
            except OSError as error:
                self._check_open()
                refusals.append(f"{parent}: {error.strerror or error}")
        raise EngineError(
            f"weight version {weights.version} ({total >> 20} MiB) can't be written for the "
            f"engine's server: {'; '.join(refusals)}"
        )

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            homes = list(self._homes.values())
            self._homes.clear()
        for home, lock in homes:
            shutil.rmtree(home, ignore_errors=True)
            os.close(lock)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed while a weight version was written for its server")

    def _while_open(self, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        for part in parts:
            self._check_open()
            yield part

    def _write(self, parent: Path, version: int, config: Mapping[str, Any], tensors: Tensors) -> Path:
        home = self._home(parent)
        partial, whole = home / "partial", home / f"{next(self._written)}-version-{version}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            (partial / "config.json").write_text(json.dumps(config))
            going_on = {name: (entry, self._while_open(parts)) for name, (entry, parts) in tensors.items()}
            write_safetensors(partial / "model.safetensors", going_on)
            partial.replace(whole)
        finally:
            # Who closes it may have been before what was made here last.
            shutil.rmtree(home if self._closed else partial, ignore_errors=True)
        self._check_open()
        return whole

    def _home(self, parent: Path) -> Path:
        with self._lock:
            self._check_open()
            while parent not in self._homes:
                home = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
                lock = os.open(home / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.fstat(lock).st_nlink:
                    self._homes[parent] = (home, lock)
                else:
                    os.close(lock)  # Another engine that begins found it without a lock, and took it for an orphan.
            return self._homes[parent][0]


def remove_orphans(parent: Path) -> None:
    """Removes the folders below `parent` whose engine no longer holds its lock."""
    for home in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            lock = os.open(home / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # Another user's, or one that is being made just now.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def config_of(weights: StagedWeights) -> dict[str, Any]:
    """The manifest's config.json with the dtype that the tensors have. Raises EngineError where it is no object.

    Of a quantized version it is the dtype of what was left as it is.
    """
    config = parse_config(weights.manifest.config_json)
    entries = weights.manifest.tensors
    if config.get("quantization_config"):
        entries = tuple(
            entry for entry in entries if entry.dtype in TORCH_DTYPES and not entry.name.endswith(SCALE_SUFFIX)
        )
    counted = Counter(entry.dtype for entry in entries)
    dtype = TORCH_DTYPES.get(counted.most_common(1)[0][0]) if counted else None
    if dtype is not None:
        config["dtype"] = config["torch_dtype"] = dtype
    return config


def tensors_of(weights: StagedWeights, in_full: bool) -> dict[str, tuple[TensorEntry, Iterable[memoryview]]]:
    """By name, with their bytes in parts; as they are, or `in_full` with floats for the codes of a quantized version.

    Raises EngineError for one whose bytes are not there, or whose codes have no scales.
    """
    for entry in weights.manifest.tensors:
        raw = weights.tensors.get(entry.name)
        if raw is None or raw.nbytes != entry.nbytes:
            raise EngineError(f"weight version {weights.version} lacks the bytes of tensor {entry.name}")
    if not in_full:
        return {entry.name: (entry, (weights.tensors[entry.name],)) for entry in weights.manifest.tensors}
    try:
        return {entry.name: (entry, parts) for entry, parts in tensors_in_full(weights)}
    except WeightError as error:
        raise EngineError(str(error)) from error


def parse_config(config_json: str) -> dict[str, Any]:
    """Raises EngineError for what is no JSON object."""
    try:
        config = json.loads(config_json)
    except ValueError as error:
        raise EngineError(f"the model's config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise EngineError(f"the model's config.json holds a {type(config).__name__}; expected an object")
    return config


def identity(weights: StagedWeights, config: Mapping[str, Any]) -> dict[str, Any]:
    """What two versions of one model have in common."""
    return {
        "model_type": config.get("model_type"),
        "vocab_size": config.get("vocab_size"),
        **{f"tensor {entry.name}": (entry.dtype, list(entry.shape)) for entry in weights.manifest.tensors},
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The first thing in which two identities differ; empty where they are alike."""
    for key in (*old, *new):
        if old.get(key) != new.get(key):
            return f"{key} was {old.get(key)} and is {new.get(key)}"
    return ""


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """One safetensors file: the length of its header (8 bytes), the header as JSON, the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (entry, _) in tensors.items():
        offsets = [at, at + entry.nbytes]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, parts in tensors.values():
            file.writelines(parts)


def _room(parent: Path) -> int:
    """Bytes that may be written below `parent`; of storage in memory half of what this machine, or container, has."""
    stat = os.statvfs(parent)
    free = stat.f_bavail * stat.f_frsize
    if lies_in_memory(parent):
        return int(min(free, memory_left() / 2))
    return free
