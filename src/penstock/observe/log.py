"""The run's event log: one JSON line an event, in the order they were noticed, and its reader.

Decides what a full disk means: the run goes on, one warning is given, what can't be written is counted, and writing
is tried again with each event. The file holds whole lines only, whatever happens to the disk or the process.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from penstock.errors import DataError, StorageError
from penstock.observe.events import Event, Warned

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


class JsonLines:
    """Appends whole lines to one file. Not thread-safe: its owner holds the lock.

    `trouble` gets one sentence when writing begins to fail and one when it works again. Raises StorageError where the
    file can't even be opened.
    """

    def __init__(self, path: Path, trouble: Callable[[str], None]) -> None:
        self.path = path
        self.dropped = 0
        """Lines that could not be written."""
        self._trouble = trouble
        self._failing_since = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(f"{path} can't be opened for writing: {error.strerror}") from error
        self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        self._size = os.fstat(self._file).st_size
        self._drop_torn_tail()

    def append(self, line: bytes) -> None:
        """Writes one line (without its end) or counts it as dropped."""
        try:
            self._write(line + b"\n")
        except OSError as error:
            self.dropped += 1
            self._failing_since += 1
            if self._failing_since == 1:
                self._trouble(f"{self.path.name} can't be written ({error.strerror}); the run goes on without it")
            return
        if self._failing_since:
            lost, self._failing_since = self._failing_since, 0
            self._trouble(f"{self.path.name} is written again; {lost} lines are missing from it")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        """All of it or nothing: a disk that fills up in mid-line is cut back to the line before."""
        if self._file < 0:
            raise ValueError(f"{self.path} is closed")
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError:
            if written and self._regular:
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _drop_torn_tail(self) -> None:
        """A process killed in mid-write leaves half a line; going on after it would spoil the next one too."""
        if not self._regular or self._size == 0 or os.pread(self._file, 1, self._size - 1) == b"\n":
            return
        whole = self.path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._file, whole)
        self._size = whole
        self._trouble(f"{self.path.name} ended in half a line, which was dropped")


class EventLog:
    """Writes events and hands each to the listeners, in one order. Thread-safe.

    A listener runs under the log's lock, so it has to be quick; it may itself emit. Warnings about the log go the same
    way, or to stderr where nobody listens.
    """

    def __init__(self, path: Path, *listeners: Callable[[Event], None]) -> None:
        self._lock = threading.RLock()
        self._listeners = list(listeners)
        self._lines = JsonLines(path, self._warn)

    @property
    def path(self) -> Path:
        return self._lines.path

    @property
    def dropped(self) -> int:
        """Events that the disk refused."""
        return self._lines.dropped

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Hands every event from now on to `listener` as well."""
        with self._lock:
            self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        """Writes and hands on one event. Never raises for the disk's sake."""
        with self._lock:
            self._lines.append(_encode(event))
            self._hand_on(event)

    def close(self) -> None:
        with self._lock:
            self._lines.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warn(self, sentence: str) -> None:
        # Not written to the file: it's the file that is in trouble.
        self._hand_on(Warned(ts=time.time(), where="event log", message=sentence))
        if not self._listeners:
            print(f"penstock: warning: {sentence}", file=sys.stderr, flush=True)

    def _hand_on(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log, in order; half a line at its very end (a killed process) is left out.

    Raises DataError with file and line for anything else that is not an event.
    """
    for number, line in numbered_lines(path):
        try:
            yield _decode(line)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise DataError(f"{path}:{number}: not an event: {error}") from None


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) of every whole line of a file. Raises DataError where it can't be read."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}") from None
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line
