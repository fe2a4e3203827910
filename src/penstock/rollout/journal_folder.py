"""The files of a journal's folder, and how they are read back.

    segment-<n>    records, in the order in which they were decided
    snapshot-<n>   the state that segment n begins with; written beside (`.partial`), renamed when it is whole
    *.damaged      files that could not be read the last time that there were any

A journal is read from its newest whole snapshot (or from the empty state and segment 1) through the segments behind
it, as far as they continue each other. What follows the last whole record of a segment is cut off: it is what its
writer did not come to write. Whole files that should be read and can't be, and those behind them, are set aside for
people to look at, since nothing here tells a bad disk from a bad program; those of an earlier time then go.

Decides which files count. Refuses to know what records mean, and who writes them.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import MissingExtra, StorageError
from penstock.rollout.journal import decode_record
from penstock.rollout.journal_replay import Recovered, Replay
from penstock.rollout.journal_segments import SegmentReader

__all__ = ["Found", "numbered", "path_of", "read_folder", "set_aside"]

_NAME = re.compile(r"(segment|snapshot)-(\d{8})")


@dataclass(slots=True)
class Found:
    """What a folder stands for, and where its records go on."""

    recovered: Recovered
    number: int = 0
    """Of the last segment that counts."""
    sequence: int = 0
    """Of the next record."""
    tail_bytes: int = 0
    """In segments behind the snapshot."""
    snapshot_bytes: int = 0


def path_of(folder: Path, kind: str, number: int) -> Path:
    return folder / f"{kind}-{number:08d}"


def numbered(folder: Path) -> dict[Path, tuple[str, int]]:
    """Segments and snapshots, with kind and number."""
    named = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    return {path: (match[1], int(match[2])) for path, match in named if match}


def set_aside(folder: Path) -> list[Path]:
    """Files that could not be read."""
    return sorted(folder.glob("*.damaged"))


def read_folder(folder: Path, now: float) -> Found:
    """Reads a journal that nobody writes, and leaves in place what counts. Raises OSError and MissingExtra."""
    for path in folder.glob("*.partial"):
        path.unlink()
    files = numbered(folder)
    segments = {number: path for path, (kind, number) in files.items() if kind == "segment"}
    snapshots = {number: path for path, (kind, number) in files.items() if kind == "snapshot"}
    replay, first, damaged = Replay(now), 1, []
    found = Found(Recovered())
    whole: Path | None = None
    for number in sorted(snapshots, reverse=True):
        taken_in = _whole_snapshot(snapshots[number], now)
        if taken_in is not None:
            replay, first, whole = taken_in, number, snapshots[number]
            found.snapshot_bytes = whole.stat().st_size
            break
        damaged.append(snapshots[number])
    cut_bytes = _read_segments(found, replay, segments, first)
    found.recovered = replay.finish()
    # What lies behind the last segment that counts belongs to no state; what lies before the snapshot is in it.
    damaged += [path for number, path in segments.items() if number > found.number and number >= first]
    found.recovered.cut_bytes = cut_bytes + sum(path.stat().st_size for path in damaged)
    _set_aside(folder, damaged)
    for path, (_, number) in files.items():
        if whole is not None and number < first:
            path.unlink(missing_ok=True)
    found.recovered.set_aside = [path.name for path in damaged]
    return found


def _read_segments(found: Found, replay: Replay, segments: dict[int, Path], number: int) -> int:
    """Takes segments in, from `number` on. Returns the bytes cut off the last one that counts."""
    found.number = number - 1
    while number in segments:
        path = segments[number]
        try:
            reader = SegmentReader(path)
        except StorageError:
            return 0
        if found.tail_bytes and reader.first_sequence != found.sequence:
            return 0
        with contextlib.suppress(StorageError):
            for payload in reader:
                replay.take(decode_record(payload))
        found.number, found.sequence = number, reader.sequence
        found.tail_bytes += reader.end
        if reader.end < reader.nbytes:
            os.truncate(path, reader.end)
            return reader.nbytes - reader.end
        number += 1
    return 0


def _set_aside(folder: Path, damaged: list[Path]) -> None:
    if damaged:
        for path in set_aside(folder):
            path.unlink()
    for path in damaged:
        path.rename(path.with_name(path.name + ".damaged"))


def _whole_snapshot(path: Path, now: float) -> Replay | None:
    """None where it is damaged; an older one may do."""
    replay = Replay(now)
    try:
        for payload in SegmentReader(path):
            replay.take(decode_record(payload))
    except MissingExtra:
        raise
    except StorageError:
        return None
    return replay if replay.whole else None
