"""Shared memory on one host: a version lies in a file of /dev/shm, and a puller on the same machine reads it there.

That both are on one machine is proved, not assumed: the puller says its kernel's boot id, and the store names a file
whose content only it can have written; a puller that finds that content sees the same memory. (Two containers on one
kernel, each with a /dev/shm of its own, have the same boot id and not the same file.) A file lives as long as the
buffer made of it, and is locked so long: what is left of a store that was killed has no lock, and the next store of
the same user removes it. Files can be read by their owner alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import weakref
from pathlib import Path

from penstock.weights.protocol import Way
from penstock.weights.transport import WayClosed

__all__ = ["SHM_FOLDER", "SharedFetcher", "SharedLender"]

SHM_FOLDER = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PREFIX = "penstock-version-"
PROOF_BYTES = 32

log = logging.getLogger(__name__)


def _boot_id() -> str:
    """Raises WayClosed where the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError as error:
        raise WayClosed(f"this system says no boot id: {error}") from error


class SharedLender:
    """The store's side. Raises WayClosed where `folder` can't be written to."""

    kind = "shm"

    def __init__(self, folder: Path = SHM_FOLDER) -> None:
        self._folder = folder
        self._boot_id = _boot_id()
        self._names: dict[int, str] = {}
        """By the buffer's identity, for as long as it lives."""
        self._full = False
        self._sweep()
        self._nonce = secrets.token_hex(PROOF_BYTES)
        try:
            self._proof, file = self._new()
            os.write(file, self._nonce.encode())
        except OSError as error:
            raise WayClosed(f"no shared memory in {folder}: {error}") from error
        self._finalizer = weakref.finalize(self, _remove, self._proof, file)

    def way(self, said: str) -> Way | None:
        if said != f"{self.kind}:{self._boot_id}":
            return None
        return Way(self.kind, str(self._proof), self._nonce)

    def buffer(self, nbytes: int) -> memoryview | None:
        if not nbytes:
            return None
        try:
            path, file = self._new()
            try:
                # Reserved, since a page that can't be had when it is written to would kill the process.
                os.posix_fallocate(file, 0, nbytes)
                mapped = mmap.mmap(file, nbytes)
            except BaseException:
                _remove(path, file)
                raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
                raise
            if not self._full:
                self._full = True
                log.warning("weights are not in shared memory, %d bytes of it are not to be had: %s", nbytes, error)
            return None
        self._names[id(mapped)] = str(path)
        weakref.finalize(mapped, self._forget, id(mapped), path, file)
        return memoryview(mapped)

    def lend(self, stream: memoryview) -> None:
        pass

    def place(self, stream: memoryview) -> str:
        return self._names.get(id(stream.obj), "")

    def close(self) -> None:
        """Nobody finds the memory any more; who has it open keeps it."""
        self._finalizer()
        for name in list(self._names.values()):
            Path(name).unlink(missing_ok=True)

    def _forget(self, key: int, path: Path, file: int) -> None:
        self._names.pop(key, None)
        _remove(path, file)

    def _new(self) -> tuple[Path, int]:
        path = self._folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        return path, file

    def _sweep(self) -> None:
        """Removes what stores of this user left that were killed."""
        for path in self._folder.glob(PREFIX + "*"):
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if os.fstat(file).st_uid == os.getuid():
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink(missing_ok=True)
                        log.info("removed %s, which a store that was killed had left", path)
                finally:
                    os.close(file)


def _remove(path: Path, file: int) -> None:
    path.unlink(missing_ok=True)
    os.close(file)


class SharedFetcher:
    """The puller's side."""

    kind = "shm"

    def says(self) -> str:
        return f"{self.kind}:{_boot_id()}"

    def open(self, way: Way) -> SharedReader:
        proof = Path(way.where)
        try:
            file = os.open(proof, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                found = os.read(file, 2 * PROOF_BYTES + 1)
            finally:
                os.close(file)
        except OSError as error:
            raise WayClosed(f"the store's shared memory is not to be seen from here: {error}") from error
        if not way.proof or found != way.proof.encode():
            raise WayClosed(f"{proof} is not what this store has written: it is on another machine")
        return SharedReader(proof.parent)


class SharedReader:
    """Reads files of one folder into buffers, on threads: the kernel copies, with the interpreter's lock free."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = ""
        self._file = -1

    async def read_into(self, place: str, offset: int, into: memoryview) -> None:
        if place != self._name:
            self._open(place)
        try:
            await asyncio.to_thread(_read_all, self._file, offset, into)
        except OSError as error:
            raise WayClosed(f"shared memory {place} can't be read: {error}") from error

    def close(self) -> None:
        file, self._file, self._name = self._file, -1, ""
        if file >= 0:
            os.close(file)

    def _open(self, place: str) -> None:
        path = Path(place)
        if path.parent != self._folder or not path.name.startswith(PREFIX):
            raise WayClosed(f"{place!r} is no shared memory of a weight store")
        self.close()
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise WayClosed(f"shared memory {place} can't be opened: {error}") from error
        self._name = place


def _read_all(file: int, offset: int, into: memoryview) -> None:
    filled = 0
    while filled < len(into):
        got = os.preadv(file, [into[filled:]], offset + filled)
        if not got:
            raise OSError(errno.ENODATA, "it ends before the chunk does")
        filled += got
