"""The model that a run starts from: a folder that is given, or one that a recipe makes once on this machine.

Decides when a cached model may be used (everything that went into it is the same) and that two runs side by side
never make it twice or see half of it. Refuses to know what a recipe teaches.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from penstock.config.run import ModelConfig, WarmStartConfig
from penstock.errors import CheckpointError, DeadlineExceeded, StorageError
from penstock.train.recipes import Progress, Recipe
from penstock.train.registry import import_function

__all__ = ["cache_key", "ensure_model", "load_recipe"]

LOCK_DEADLINE_S = 1800.0
"""How long a run waits for another one that is making the same model."""

_INGREDIENTS = ("torch", "transformers", "tokenizers", "reasoning-gym")


def _silent(step: int, steps: int, loss: float) -> None:
    """Progress that nobody watches."""


def ensure_model(
    config: ModelConfig,
    held_out: Collection[str] = (),
    progress: Progress = _silent,
    lock_deadline_s: float = LOCK_DEADLINE_S,
) -> Path:
    """The folder of the model that the run starts from, made now where it is not there yet.

    `held_out` are questions that no demonstration may show (the evaluation's). Raises CheckpointError for a missing
    folder, ConfigError for a recipe that can't be loaded, DeadlineExceeded where another process holds the lock too
    long, StorageError where the disk refuses.
    """
    if config.path:
        folder = Path(config.path)
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"model.path={config.path!r} is not a Hugging Face model folder: no config.json in it"
            )
        return folder
    recipe = load_recipe(config.warm_start.recipe)
    cache = Path(config.warm_start.cache_dir)
    folder = cache / f"{recipe.__name__}-{cache_key(config.warm_start, recipe, held_out)}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{folder.name}.lock", lock_deadline_s):
            if not folder.is_dir():
                _make(recipe, config.warm_start, folder, held_out, progress)
    except OSError as error:
        raise StorageError(f"the model cache {cache} can't be written: {error.strerror or error}") from error
    return folder


def load_recipe(path: str) -> Recipe:
    """Imports `package.module:function`; raises ConfigError naming what is wrong."""
    return cast(Recipe, import_function("model.warm_start.recipe", path))


def cache_key(config: WarmStartConfig, recipe: Recipe, held_out: Collection[str]) -> str:
    """Hash of the configuration, the recipe's source, the packages it rests on and the questions held out."""
    source = sys.modules[recipe.__module__].__file__
    ingredients = {
        "config": config.model_dump(exclude={"cache_dir"}),
        "source": hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else recipe.__module__,
        "packages": {name: _version(name) for name in _INGREDIENTS},
        "held_out": hashlib.sha256("\0".join(sorted(set(held_out))).encode()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _make(recipe: Recipe, config: WarmStartConfig, folder: Path, held_out: Collection[str], progress: Progress) -> None:
    """Runs the recipe in a folder beside the final one, which then appears whole or not at all."""
    unfinished = folder.parent / f".making-{uuid.uuid4().hex}"
    unfinished.mkdir()
    try:
        recipe(config, unfinished, held_out, progress)
        os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path, deadline_s: float) -> Iterator[None]:
    """Holds `path` against other processes; the lock goes with its holder, however that ends."""
    end = time.monotonic() + deadline_s
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"another run has been making the same model for {deadline_s:.0f} s (lock {path})"
                    ) from None
                time.sleep(0.1)
        yield
