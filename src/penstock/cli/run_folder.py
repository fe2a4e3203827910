"""A run's folder: making one, finding an earlier one, and keeping a second process out of it."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.config.run import RunConfig
from penstock.errors import CheckpointError, StorageError

_NUMBERED = re.compile(r"-(\d{3,})$")


def make_folder(config: RunConfig) -> Path:
    """Makes the next free `<output_dir>/<name>-<number>`; safe beside a second run. Raises StorageError."""
    parent = Path(config.output_dir)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [number for number, _ in _runs(config)]
        number = max(taken, default=0) + 1
        while True:
            folder = parent / f"{config.name}-{number:03d}"
            try:
                folder.mkdir()
                (folder / "logs").mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise StorageError(f"can't make a folder for the run in {parent}: {error.strerror or error}") from error


def find_run(config: RunConfig, resume: str) -> Path:
    """The folder of an earlier run; `latest` is the newest one that has a checkpoint. Raises CheckpointError."""
    if resume != "latest":
        folder = Path(resume)
        if not folder.is_dir():
            raise CheckpointError(f"--resume {resume}: there is no such folder")
        # A checkpoint of a run stands for the run.
        return folder.parent.parent if folder.parent.name == "checkpoints" else folder
    runs = sorted(_runs(config), reverse=True)
    for _, folder in runs:
        # One that failed before its first checkpoint must not hide the run that is meant.
        if any((folder / "checkpoints").glob("step-*")):
            return folder
    if not runs:
        raise CheckpointError(f"--resume latest: there is no run named {config.name} in {config.output_dir}")
    raise CheckpointError(
        f"--resume latest: no run named {config.name} in {config.output_dir} has a checkpoint to go on from "
        f"({len(runs)} there)"
    )


def how_to_go_on(words: Sequence[str], folder: Path, ranks: int = 1) -> str:
    """The command that goes on with the run in `folder`, which `penstock` was given `words` for."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--resume":
            next(rest, None)
        elif not word.startswith("--resume="):
            kept.append(word)
    program = "penstock" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m penstock"
    return f"{program} {shlex.join([*kept, f'--resume={folder}'])}"


def _runs(config: RunConfig) -> Iterator[tuple[int, Path]]:
    for path in Path(config.output_dir).glob(f"{config.name}-*"):
        found = _NUMBERED.search(path.name)
        if found and path.name == f"{config.name}-{found[1]}" and path.is_dir():
            yield int(found[1]), path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a second process out of the run's folder (two `--resume` side by side)."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(f"{folder} is in use by another process") from error
        yield
