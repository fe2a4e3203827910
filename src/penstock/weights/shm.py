"""Shared memory on one host: a version lies in a file of /dev/shm, and a puller on the same machine maps it.

Nothing is copied: the puller verifies the store's own pages and hands out views of them. For as long as a view is left
the puller holds a read lock on the file. The store writes only to bytes on which it holds the write lock, which it
drops when a version is whole: memory that somebody looks at is not used for another version, and a puller that is
killed lets go of it, with the last process that it has forked off. Who passes a version on drops the lock on each
tensor once that is verified, so that others look at the first ones while the last are still written.

That both are on one machine is proved, not assumed: the puller says its kernel's boot id, and the store names a file
whose content only it can have written; a puller that finds that content sees the same memory. (Two containers on one
kernel, each with a /dev/shm of its own, have the same boot id and not the same file.) A file lives as long as the
buffer made of it, and is locked so long: what is left of a store that was killed has no lock, and the next store of
the same user removes it. Files can be read by their owner alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib.util
import logging
import mmap
import os
import secrets
import struct
import weakref
from pathlib import Path

from penstock.errors import MissingExtra
from penstock.weights.mapped import MappedFile
from penstock.weights.memory import NoMemory, check_room
from penstock.weights.protocol import SHARED_MEMORY, LinkLost, Way
from penstock.weights.transport import Seen, WayClosed

__all__ = ["SHM_FOLDER", "SharedFetcher", "SharedLender", "SharedMapper"]

SHM_FOLDER = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PREFIX = "penstock-version-"
PROOF_BYTES = 32
FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length (0 for all), pid."""

log = logging.getLogger(__name__)


def _boot_id() -> str:
    """Raises WayClosed where the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError as error:
        raise WayClosed(f"this system says no boot id: {error}") from error


class SharedLender:
    """The store's side. Raises WayClosed where `folder` can't be written to."""

    kind = SHARED_MEMORY
    makes_memory = True

    def __init__(self, folder: Path = SHM_FOLDER) -> None:
        self._folder = folder
        self._boot_id = _boot_id()
        self._files: dict[int, tuple[str, int]] = {}
        """Path and descriptor, by the buffer's identity, for as long as it lives."""
        self._full = False
        self._sweep()
        self._nonce = secrets.token_hex(PROOF_BYTES)
        try:
            self._proof, file = self._new()
            os.write(file, self._nonce.encode())
            # Two containers on one kernel, each with a folder of its own, have two devices.
            seen_by = self._boot_id, os.fstat(file).st_dev, os.getuid(), folder
        except OSError as error:
            raise WayClosed(f"no shared memory in {folder}: {error}") from error
        self.memory = ":".join(map(str, (self.kind, *seen_by)))
        self._finalizer = weakref.finalize(self, _remove, self._proof, file, os.getpid())

    def way(self, said: str) -> Way | None:
        if said != f"{self.kind}:{self._boot_id}":
            return None
        return Way(self.kind, str(self._proof), self._nonce)

    def buffer(self, nbytes: int) -> memoryview | None:
        if not nbytes:
            return None
        try:
            check_room(nbytes)
            path, file = self._new()
            try:
                # Reserved, since a page that can't be had when it is written to would kill the process.
                os.posix_fallocate(file, 0, nbytes)
                _lock(file, fcntl.F_WRLCK)
                mapped = mmap.mmap(file, nbytes)
            except BaseException:
                _remove(path, file, os.getpid())
                raise
        except (OSError, NoMemory) as error:
            full = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
            if isinstance(error, OSError) and error.errno not in full:
                raise
            if not self._full:
                self._full = True
                # An error that a log keeps would keep all that those hold who asked for memory.
                log.warning(
                    "weights are not in shared memory, %d bytes of it are not to be had: %s", nbytes, str(error)
                )
            return None
        self._files[id(mapped)] = str(path), file
        weakref.finalize(mapped, self._forget, id(mapped), path, file, os.getpid())
        return memoryview(mapped)

    def lend(self, stream: memoryview) -> None:
        if id(stream.obj) in self._files:
            _lock(self._files[id(stream.obj)][1], fcntl.F_UNLCK)

    def lend_part(self, stream: memoryview, start: int, nbytes: int) -> None:
        if nbytes and id(stream.obj) in self._files:
            try:
                _lock(self._files[id(stream.obj)][1], fcntl.F_UNLCK, start, nbytes)
            except OSError as error:
                # The system has no more locks: those who wait for this tensor see it with the last one.
                log.debug("a tensor in shared memory is not lent before the others: %s", str(error))

    def claim(self, stream: memoryview) -> bool:
        return id(stream.obj) not in self._files or _lock(self._files[id(stream.obj)][1], fcntl.F_WRLCK)

    def place(self, stream: memoryview) -> str:
        return self._files.get(id(stream.obj), ("", -1))[0]

    def close(self) -> None:
        """Nobody finds the memory any more; who has it open keeps it."""
        self._finalizer()
        for name, _ in list(self._files.values()):
            Path(name).unlink(missing_ok=True)

    def _forget(self, key: int, path: Path, file: int, owner: int) -> None:
        self._files.pop(key, None)
        _remove(path, file, owner)

    def _new(self) -> tuple[Path, int]:
        while True:
            path = self._folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                return path, file
            os.close(file)  # Another store that starts found it without a lock, and took it for a dead one's.

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


def _remove(path: Path, file: int, owner: int) -> None:
    """`owner`: the process that made it; one that was forked off has a copy of this, and ends before it."""
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
    os.close(file)


class SharedFetcher:
    """The puller's side. What is mapped by one of its links is mapped for all: neighbours lend on what they see."""

    kind = SHARED_MEMORY

    def __init__(self) -> None:
        self._mapped: weakref.WeakValueDictionary[Path, MappedFile] = weakref.WeakValueDictionary()

    def says(self) -> str:
        if importlib.util.find_spec("numpy") is None:
            raise WayClosed(str(MissingExtra("numpy", "engine", "seeing model weights in shared memory")))
        return f"{self.kind}:{_boot_id()}"

    def open(self, way: Way) -> SharedMapper:
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
        return SharedMapper(proof.parent, self._mapped)


class SharedMapper:
    """Maps files of one folder, each locked against the store's writing for as long as a view of it is left.

    They stay mapped until `close`: the store writes its next versions to the same files. What has no name any more the
    store has given up; that is let go of with the next version.
    """

    def __init__(self, folder: Path, mapped: weakref.WeakValueDictionary[Path, MappedFile] | None = None) -> None:
        """`mapped`: files that are mapped already, here or by others."""
        self._folder = folder
        self._mapped = weakref.WeakValueDictionary() if mapped is None else mapped
        self._kept: dict[Path, MappedFile] = {}

    def map(self, place: str, nbytes: int, in_parts: bool = False) -> Seen:
        path = Path(place)
        if path.parent != self._folder or not path.name.startswith(PREFIX):
            raise WayClosed(f"{place!r} is no shared memory of a weight store")
        self._kept = {kept: mapped for kept, mapped in self._kept.items() if kept.exists()}
        try:
            # Each view has an open file of its own, to which its lock belongs.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise WayClosed(f"shared memory {place} can't be opened: {error}") from error
        try:
            if (size := os.fstat(file).st_size) < nbytes:
                raise WayClosed(f"shared memory {place} ends at {size}, before the version does at {nbytes}")
            if not in_parts and not _lock(file, fcntl.F_RDLCK):
                raise LinkLost(f"the store has taken {place} for another version")
            mapped = self._mapped.get(path)
            if mapped is None or len(mapped) != nbytes or not mapped.is_of(file):
                mapped = self._mapped[path] = MappedFile(file, nbytes)
            self._kept[path] = mapped
            return mapped.seen(functools.partial(_hold, file), functools.partial(_leave, file, os.getpid()))
        except BaseException as error:
            _leave(file, os.getpid())
            if isinstance(error, OSError | ValueError):
                raise WayClosed(f"shared memory {place} can't be mapped: {error}") from error
            raise

    def close(self) -> None:
        self._kept = {}


def _hold(file: int, start: int, nbytes: int) -> bool:
    """Raises LinkLost where the system has no lock for it."""
    try:
        return not nbytes or _lock(file, fcntl.F_RDLCK, start, nbytes)
    except OSError as error:
        raise LinkLost(f"shared memory can't be held: {error}") from error


def _leave(file: int, owner: int) -> None:
    """`owner`: the process that opened it, whose lock it is; one that was forked off shares the open file."""
    # A mapping refers to the open file that it was made of, and would keep its lock.
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            _lock(file, fcntl.F_UNLCK)
    os.close(file)


def _lock(file: int, kind: int, start: int = 0, nbytes: int = 0) -> bool:
    """Takes (F_RDLCK, F_WRLCK) or drops (F_UNLCK) the open file's lock on so many bytes, or, with 0, on all from
    `start` on; False where another's is in the way.

    A lock of an open file description (Linux): held until the last descriptor made of it is gone, however that came,
    and any mapping; also between two users within one process. Independent of flock's, which says that the store lives.
    """
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, FLOCK.pack(kind, os.SEEK_SET, start, nbytes, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
