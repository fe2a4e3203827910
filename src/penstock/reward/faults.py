"""What a reward function raised: the cause of its sample's missing score, and the traceback that its author needs.

Decides which line of the code is named as the place, and which faults are logged: the first of each kind at each
place, up to a bound, so that a function that fails on every sample fills no disk. Refuses to know about calls,
threads and processes; `FaultLog` is the edge, a file.
"""

from __future__ import annotations

import logging
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

from penstock.reward.functions import describe_exception
from penstock.sample import Sample

__all__ = ["MOST_FAULTS", "FaultLog", "Faults", "place_of"]

MOST_FAULTS = 32
"""Distinct faults (kind and place) that are logged. A function has few lines that fail, whatever the samples are."""
TRACEBACK_CHARACTERS = 16_384
"""Of one fault; the end, where the error is, is kept."""

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_ROOM = str(Path(__file__).parent)

log = logging.getLogger("penstock.reward")


def place_of(error: BaseException) -> str:
    """`my_reward.py:12`: the innermost line of the user's own code, else of a package's; empty where there is none.

    The caller of a reward function has caught the error, so the outermost frame is the caller's and never named.
    """
    if error.__traceback__ is None:
        return ""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__.tb_next)]
    for wanted in (_is_own, _is_code):
        for frame, line in reversed(frames):
            if wanted(frame):
                return f"{Path(frame.f_code.co_filename).name}:{line}"
    return ""


def cause_of(error: BaseException) -> str:
    """Type, message and place, on one line of bounded length."""
    place = place_of(error)
    return f"{describe_exception(error)} ({place})" if place else describe_exception(error)


class Faults:
    """Tells a fault that was not seen before from one that was. Pure."""

    def __init__(self, most: int = MOST_FAULTS) -> None:
        self._most = most
        self._seen: set[str] = set()

    def is_fresh(self, fault: str) -> bool:
        """Whether `fault` (a kind and a place) should be told; so once each, and never beyond the bound."""
        if fault in self._seen or len(self._seen) >= self._most:
            return False
        self._seen.add(fault)
        return True

    def take(self, error: BaseException, sample: Sample | None) -> tuple[str, str, str]:
        """(cause, fault, text for the log, which is empty unless the fault is fresh)."""
        cause = cause_of(error)
        fault = f"{type(error).__qualname__} at {place_of(error)}"
        return cause, fault, _text(error, cause, sample) if self.is_fresh(fault) else ""


class FaultLog:
    """Appends the first traceback of each distinct fault to a file; without one, to this module's logger. Thread-safe.

    Trouble with the file is said on the logger, with the traceback; it never costs a sample its score.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._faults = Faults()
        self._lock = threading.Lock()

    def cause(self, error: BaseException, sample: Sample) -> str:
        """Logs what was raised for a sample if it is the first of its kind; returns the cause for the sample."""
        with self._lock:
            cause, _, text = self._faults.take(error, sample)
            if text:
                self._write(text)
        return cause

    def take(self, fault: str, text: str) -> None:
        """Logs a fault that another process worded, unless it was logged before."""
        with self._lock:
            if self._faults.is_fresh(fault):
                self._write(text)

    def _write(self, text: str) -> None:
        if self._path is None:
            log.warning("%s", text.rstrip())
            return
        try:
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError as error:
            log.warning("%s can't be written (%s); it misses:\n%s", self._path, error.strerror or error, text.rstrip())


def _text(error: BaseException, cause: str, sample: Sample | None) -> str:
    what = "a request has no answer" if sample is None else f"sample {sample.id} of {sample.prompt.source} has no score"
    whole = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:].rstrip()
    ending = "Further ones of this kind and place are counted and not logged."
    return f"{what}: {cause}\n{whole}\n{ending}\n\n"


def _is_code(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith("<")


def _is_own(frame: FrameType) -> bool:
    """Neither of Python, nor of an installed package, nor of this room."""
    return _is_code(frame) and not frame.f_code.co_filename.startswith((*_INSTALLED, _ROOM))
