"""The journal's edge: a folder of append-only files, its lock, and what becomes of it when the disk fails.

What the files are and how they are read is in `journal_folder`. Once a snapshot is whole, what is older than it goes;
so the folder holds about `GROWTH` + 1 times the living state, and at most `max_bytes`.

Decides when to write a snapshot, when the disk is waited for, and when to go on without a journal. Refuses to know
what records mean.

Records are gathered in memory while nobody hears of what they say, and written in one call (`flush`): it is the
operating system's work for each call, far more than encoding or checksums, that a journal costs.

What `fsync` costs and saves: a record is handed to the operating system before anybody hears of what it says, so the
death of the manager's process loses nothing under any of the three that was heard of. Power loss or a crash of the
system loses

    never      what the system had not written back by itself (Linux: up to about half a minute)
    interval   at most what was decided since the last sync, `interval_s` before; a thread waits for the disk
    always     nothing that anybody heard of; the manager waits for the disk before it answers

and in each case the state that is read is one that was there, only an earlier one.

A disk that is full or fails suspends the journal, and the manager goes on without it, with a warning. It is tried
again with a fresh snapshot every `retry_s`, then after ever longer pauses; what was on the disk stays until that
snapshot is whole, unless there is no room beside it. A state too large for `max_bytes` suspends it in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from penstock.errors import StorageError
from penstock.rollout.journal import Epoch, Record, encode_record
from penstock.rollout.journal_folder import numbered, path_of, read_folder, set_aside
from penstock.rollout.journal_replay import Recovered
from penstock.rollout.journal_segments import Disk, SegmentWriter
from penstock.rollout.journal_snapshot import Snapshot

__all__ = ["Fsync", "Journal", "JournalConfig"]

Fsync = Literal["never", "interval", "always"]

GAP = 1 << 32
"""Added to sequence numbers where records are missing, so that nothing is taken for a continuation across it."""
RETRY_MOST_S = 60.0
GROUP_BYTES = 1 << 20
"""Records are gathered up to here; more in one call saves nothing."""
GROWTH = 2
"""Records behind a snapshot grow to so many times its size before another is written: each byte of state is written
once more for every two bytes of records at most, and read again at most three times as long as the state is."""


@dataclass(frozen=True, slots=True)
class JournalConfig:
    folder: Path
    fsync: Fsync = "interval"
    interval_s: float = 1.0
    compact_bytes: int = 256 << 20
    """Of records since the last snapshot before another one is written; or `GROWTH` times that one, if it is more."""
    max_bytes: int = 16 << 30
    retry_s: float = 5.0


class Journal:
    """One manager's journal. All methods belong to one thread; two more write snapshots and wait for the disk.

    `snapshot` gives the living state when it is needed. `changed` hears of whether the journal runs, and why.
    """

    def __init__(
        self,
        config: JournalConfig,
        snapshot: Callable[[], Snapshot],
        changed: Callable[[bool, str], None],
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
        threads: Executor | None = None,
    ) -> None:
        self.config = config
        self._clock = clock
        self.trouble = ""
        """Why it does not run; empty while it does."""
        self._snapshot = snapshot
        self._changed = changed
        self._disk = disk or Disk()
        self._lock: IO[str] | None = None
        self._writer: SegmentWriter | None = None
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._number = 0
        self._sequence = 0
        self._tail_bytes = 0
        """In segments behind the last snapshot, but for the one being written."""
        self._snapshot_bytes = 0
        self._threads = threads or ThreadPoolExecutor(max_workers=2, thread_name_prefix="journal")
        self._sync: Future[None] | None = None
        self._synced_at = float("-inf")
        self._synced_bytes = 0
        self._compaction: Future[int] | None = None
        self._retry_at = float("inf")
        self._pause_s = config.retry_s
        self._stopping = False

    # ---- beginning and end

    def open(self, now: float) -> Recovered:
        """Locks the folder and reads what is there. Raises StorageError: another manager has it, or it can't be used.

        `start` must follow.
        """
        folder = self.config.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(f"the journal {folder} is in use by another manager; give each one its own") from error
        except OSError as error:
            raise StorageError(f"the journal {folder} can't be used: {error.strerror or error}") from error
        try:
            found = read_folder(folder, now)
        except OSError as error:
            raise StorageError(f"the journal {folder} can't be read: {error.strerror or error}") from error
        self._number, self._sequence = found.number, found.sequence
        self._tail_bytes, self._snapshot_bytes = found.tail_bytes, found.snapshot_bytes
        return found.recovered

    def start(self, epoch: int) -> None:
        """Begins to take records. The first says that a manager of this epoch has started, and is on the disk."""
        try:
            self._begin_segment()
            self._writing.append([encode_record(Epoch(epoch))])
            self._writing.sync()
        except OSError as error:
            self._suspend(_words(error))
        else:
            self._changed(True, "")

    def close(self) -> None:
        """Writes what is gathered, waits for the disk, and lets the folder go."""
        self.flush()
        self._stopping = True
        with contextlib.suppress(OSError):
            if self._writer is not None and self.config.fsync != "never":
                self._writer.sync()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._end_segment()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ---- while it runs

    def write(self, records: Sequence[Record]) -> None:
        """Appends records: once it returns, others may hear of what they say. As `gather` and `flush`."""
        self.gather(records)
        self.flush()

    def gather(self, records: Iterable[Record]) -> bool:
        """Takes records that nobody hears of before `flush`. True where that is to be called soon."""
        if self._writer is None:
            return False
        for record in records:
            data = encode_record(record)
            self._gathered.append(data)
            self._gathered_bytes += len(data)
        if self._gathered_bytes >= GROUP_BYTES:
            self.flush()
        return bool(self._gathered)

    def flush(self) -> None:
        """Writes what is gathered. A disk that refuses it suspends the journal; nothing is raised."""
        if self._writer is None or not self._gathered:
            return
        try:
            self._append_gathered()
            if self.config.fsync == "always":
                self._writing.sync()
        except OSError as error:
            self._suspend(_words(error))

    def tick(self, now: float) -> None:
        """To be called a few times a second: syncs, snapshots, and tries again after trouble."""
        self.flush()
        self._take_results(now)
        if self._writer is None:
            if self._compaction is None and now >= self._retry_at:
                self._take_up_again()
            return
        if self._compaction is None:
            held, limit = self._snapshot_bytes, self.config.max_bytes
            if held + self._tail > limit:
                self._suspend(f"it has grown to {(held + self._tail) >> 20} MiB, and may have {limit >> 20}")
            elif self._tail > min(max(self.config.compact_bytes, GROWTH * held), limit // 4):
                self._compact(fresh=False)
        due = self.config.fsync == "interval" and now - self._synced_at >= self.config.interval_s
        if due and self._sync is None and self._writer is not None and self._writer.nbytes > self._synced_bytes:
            self._synced_at, self._synced_bytes = now, self._writer.nbytes
            self._sync = self._threads.submit(self._writer.sync)

    # ---- within

    @property
    def _writing(self) -> SegmentWriter:
        if self._writer is None:
            raise StorageError("the journal is not open for writing")
        return self._writer

    @property
    def _tail(self) -> int:
        return self._tail_bytes + (self._writer.nbytes if self._writer is not None else 0)

    def _append_gathered(self) -> None:
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        self._writing.append(gathered)

    def _begin_segment(self) -> None:
        self._number += 1
        self._synced_bytes = 0
        path = path_of(self.config.folder, "segment", self._number)
        self._writer = SegmentWriter(path, self._number, self._sequence, self._disk)

    def _end_segment(self) -> SegmentWriter | None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._sequence = writer.sequence
            if self._sync is not None:
                # Its descriptor is in use there; it is closed behind.
                self._sync.add_done_callback(lambda _: writer.close())
            else:
                writer.close()
        return writer

    def _suspend(self, trouble: str) -> None:
        self._gathered, self._gathered_bytes = [], 0
        self._end_segment()
        self._sequence += GAP
        again = not self.trouble
        self.trouble = trouble
        self._retry_at = self._clock() + self._pause_s
        message = f"running without a journal: {trouble}; it is tried again in {self._pause_s:g} s, and then on"
        self._pause_s = min(2 * self._pause_s, max(RETRY_MOST_S, self.config.retry_s))
        self._changed(False, message if again else "")

    def _take_up_again(self) -> None:
        cut = self._snapshot()
        if 2 * cut.nbytes > self.config.max_bytes:
            limit = self.config.max_bytes >> 20
            self._suspend(f"the living state has {cut.nbytes >> 20} MiB, over half of the {limit} that it may have")
            return
        self._compact(fresh=True, cut=cut)
        if self._writer is not None:
            # Records count from here on; whether they can be read is settled when the snapshot is whole.
            self._changed(True, "")

    def _compact(self, fresh: bool, cut: Snapshot | None = None) -> None:
        """Begins a segment, and has the state that it begins with written by a thread. Nothing may be gathered."""
        cut = cut or self._snapshot()
        syncing, old = self._sync, self._writer
        if old is not None:
            self._sequence = old.sequence
        try:
            self._begin_segment()
        except OSError as error:
            self._writer = old
            self._suspend(_words(error))
            return
        self._tail_bytes = 0
        number = self._number

        def carry_out() -> int:
            if old is not None:
                if self.config.fsync != "never":
                    old.sync()
                if syncing is not None:
                    syncing.exception()
                old.close()
            return self._write_snapshot(cut, number, fresh)

        self._compaction = self._threads.submit(carry_out)

    def _write_snapshot(self, cut: Snapshot, number: int, fresh: bool) -> int:
        """In a thread. Returns the snapshot's bytes; raises OSError, and then nothing of it is left."""
        folder = self.config.folder
        if fresh:
            # What is there is out of date. It is better than nothing, but not than what there is no room for.
            room = os.statvfs(folder)
            if room.f_bavail * room.f_frsize < cut.nbytes:
                self._remove_before(number)
                for path in set_aside(folder):
                    path.unlink(missing_ok=True)
        whole = path_of(folder, "snapshot", number)
        partial = whole.with_suffix(".partial")
        writer = SegmentWriter(partial, number, 0, self._disk)
        try:
            for record in cut.records():
                if self._stopping:
                    raise OSError(errno.EINTR, "the manager ends")
                writer.append([encode_record(record)])
            if self.config.fsync != "never":
                writer.sync()
        except Exception:
            partial.unlink(missing_ok=True)
            raise
        finally:
            writer.close()
        partial.rename(whole)
        if self.config.fsync != "never":
            _sync_folder(folder, self._disk)
        self._remove_before(number)
        return writer.nbytes

    def _take_results(self, now: float) -> None:
        if self._sync is not None and self._sync.done():
            error, self._sync = self._sync.exception(), None
            if error is not None and self._writer is not None:
                self._suspend(_words(error))
        if self._compaction is not None and self._compaction.done():
            done, self._compaction = self._compaction, None
            error = done.exception()
            if error is not None:
                # Behind a snapshot that is not there, records can't be told from the state they belong to.
                self._suspend(_words(error))
                return
            self._snapshot_bytes = done.result()
            if self.trouble and self._writer is not None:
                self.trouble, self._pause_s = "", self.config.retry_s
                self._changed(True, "the journal is written again, from a fresh snapshot")

    def _remove_before(self, number: int) -> None:
        for path, (_, found) in numbered(self.config.folder).items():
            if found < number:
                path.unlink(missing_ok=True)


def _sync_folder(folder: Path, disk: Disk) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        disk.fsync(descriptor)
    finally:
        os.close(descriptor)


def _words(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
