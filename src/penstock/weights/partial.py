"""What came of an encoding, on disk, so that a pull goes on where it was cut, even by the death of its process.

A file has the chunks as they are on the wire, each at its place, and beside it is one byte a chunk that says whether it
is there. Neither is believed: a chunk is taken only if its checksum is that of the manifest. Best effort: a disk that
is full costs the resumption and nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
from itertools import accumulate
from pathlib import Path

from penstock.weights.encodings import chunk_verifies
from penstock.weights.manifest import Manifest
from penstock.weights.plan import Bytes, digest

__all__ = ["Partial", "holds_something"]

DATA, HAVE = ".part", ".have"

log = logging.getLogger(__name__)


def holds_something(folder: Path) -> bool:
    """Whether a pull was cut and may go on from there."""
    return any(folder.glob("*" + HAVE))


class Partial:
    """The chunks of one encoding in `folder`, which holds no other one's: what is left of others is deleted."""

    def __init__(self, folder: Path, manifest: Manifest, signed: bytes) -> None:
        self._manifest = manifest
        self._places = list(accumulate((chunk.nbytes for chunk in manifest.chunks), initial=0))
        # Of the manifest's very bytes: other weights under the same number are another file.
        self._path = folder / f"{manifest.version}-{manifest.codec}-{digest(signed):016x}"
        self._files: tuple[int, int] | None = None
        self._lock = threading.RLock()
        self.trouble = ""
        """Why nothing is kept any more."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if path.suffix in (DATA, HAVE) and path.stem != self._path.name:
                    path.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            data = os.open(self._named(DATA), flags, 0o600)
            try:
                self._files = data, os.open(self._named(HAVE), flags, 0o600)
            except OSError:
                os.close(data)
                raise
        except OSError as error:
            self._give_up(error)

    def indices(self) -> list[int]:
        """Chunks that should be there."""
        if self._files is None:
            return []
        try:
            have = os.pread(self._files[1], len(self._manifest.chunks), 0)
        except OSError as error:
            self._give_up(error)
            return []
        return [index for index, there in enumerate(have) if there == 1]

    def get(self, index: int) -> bytes | None:
        """The chunk as it is on the wire, or None where it does not verify."""
        if self._files is None:
            return None
        chunk = self._manifest.chunks[index]
        try:
            data = os.pread(self._files[0], chunk.nbytes, self._places[index])
        except OSError as error:
            self._give_up(error)
            return None
        return data if chunk_verifies(chunk, data) else None

    def put(self, index: int, data: Bytes) -> None:
        """Keeps a verified chunk. The kernel's cache outlives the process; a machine that dies may lose some.

        From any thread: one that gives up closes files that no other may write to any more, since their numbers may by
        then be another file's.
        """
        with self._lock:
            if self._files is None:
                return
            try:
                written = 0
                view = memoryview(data)
                while written < len(view):
                    written += os.pwrite(self._files[0], view[written:], self._places[index] + written)
                os.pwrite(self._files[1], b"\1", index)
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        with self._lock:
            files, self._files = self._files, None
            for file in files or ():
                os.close(file)

    def delete(self) -> None:
        """Once the version is whole and verified."""
        self.close()
        for suffix in (DATA, HAVE):
            try:
                self._named(suffix).unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s is left over: %s", self._named(suffix), error)

    def _named(self, suffix: str) -> Path:
        return self._path.with_name(self._path.name + suffix)

    def _give_up(self, error: OSError) -> None:
        self.close()
        self.trouble = f"what came is not kept on disk ({error}); a pull that is cut begins again"
        log.warning("%s: %s", self._path, self.trouble)
