"""A run's folder: making one, finding an earlier one, and keeping a second process out of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.config.fleet import ACCOUNT_FILE
from penstock.config.run import RunConfig
from penstock.errors import CheckpointError, StorageError

_NUMBERED = re.compile(r"-(\d{3,})$")
MARK_FILE = "fleet_mark"

log = logging.getLogger("penstock.provision")


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


def fleet_mark(folder: Path) -> str:
    """What the run's machines are marked with: its name and a random id, for other runs have such names as well.

    Kept in the folder, so that whoever goes on with the run finds them, wherever it was moved to. Beside it is where
    the folder was: one whose original is still there is a copy, and has a mark of its own. Raises StorageError.
    """
    path, account = folder / MARK_FILE, folder / ACCOUNT_FILE
    here = folder.resolve()
    name = re.sub(r"[^A-Za-z0-9._-]", "-", here.name).lstrip("._-") or "run"
    try:
        if path.exists():
            found, _, place = path.read_text().strip().partition("\n")
            if found and place and _is_copy(here, Path(place), found):
                log.warning("%s is a copy of %s: machines of that run are left to it", here, place)
                _leave_machines(account)
                found = f"{name}-{secrets.token_hex(4)}"
        elif account.exists():
            # Begun before there were marks: its machines have its name alone.
            found, place = name, ""
        else:
            found, place = f"{name}-{secrets.token_hex(4)}", ""
        if found and place != str(here):
            _replace(path, f"{found}\n{here}\n")
    except (OSError, ValueError) as error:
        raise StorageError(f"what the run's machines are marked with can't be kept in {path}: {error}") from error
    if not found:
        raise StorageError(
            f"{path} is empty, so machines of this run can't be told from others; see to those and delete it"
        )
    return found


def _is_copy(here: Path, place: Path, mark: str) -> bool:
    """Whether the folder that has this mark is still at `place`, and is another one than `here`."""
    original = place / MARK_FILE
    return original.exists() and not place.samefile(here) and original.read_text().partition("\n")[0].strip() == mark


def _leave_machines(account: Path) -> None:
    """What was spent stays, for it was spent on the steps that the copy goes on from."""
    if not account.exists():
        return
    saved = json.loads(account.read_text())
    if isinstance(saved, dict):
        _replace(account, json.dumps({**saved, "machines": [], "unbilled": {}}))


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


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
