"""Equal requests are sent once: those in flight share one answer, finished ones can be kept on disk by their content.

Decides what "equal" means (path and JSON, in any order of keys) and how answers are stored: one file each, written
whole or not at all, named by a hash. A file that can't be read back is as good as none. Only answers are kept, never
failures.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import StorageError

__all__ = ["AnswerCache", "SingleFlight", "content_key"]

_LOG = logging.getLogger(__name__)


def content_key(path: str, body: dict[str, Any]) -> str:
    """The same for requests that ask the same."""
    said = msgspec.json.encode([path, body], order="deterministic")
    return hashlib.blake2b(said, digest_size=20).hexdigest()


class AnswerCache:
    """Answers on disk. `at_most` files are kept; beyond it the oldest are dropped."""

    def __init__(self, folder: str | os.PathLike[str], at_most: int = 100_000) -> None:
        self._folder = Path(folder)
        self._at_most = at_most
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._count = sum(1 for _ in self._folder.glob("*.json"))
        except OSError as error:
            raise StorageError(f"answer cache {self._folder}: {error.strerror}") from None
        self.hits = 0
        self.misses = 0
        self.refused = 0
        """Answers that the disk didn't take."""

    def get(self, key: str) -> bytes | None:
        """The answer's bytes, or None."""
        try:
            body = (self._folder / f"{key}.json").read_bytes()
            msgspec.json.decode(body)
        except (OSError, msgspec.DecodeError):
            self.misses += 1
            return None
        self.hits += 1
        return body

    def put(self, key: str, body: bytes) -> None:
        """Keeps an answer.

        Raises:
            StorageError: the disk refused it.
        """
        name = ""
        try:
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
            with os.fdopen(handle, "wb") as file:
                file.write(body)
            os.replace(name, self._folder / f"{key}.json")
        except OSError as error:
            if name:
                Path(name).unlink(missing_ok=True)
            raise StorageError(f"answer cache {self._folder}: {error.strerror}") from None
        self._count += 1
        if self._count > self._at_most:
            self._drop_oldest()

    def keep(self, key: str, body: bytes) -> None:
        """`put`, for an answer that somebody waits for: a disk that refuses it is told once, and counted."""
        try:
            self.put(key, body)
        except StorageError as error:
            self.refused += 1
            if self.refused == 1:
                _LOG.warning(
                    "%s; answers are given all the same, and those that aren't kept are asked for again", error
                )

    def _drop_oldest(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[: max(1, len(files) - self._at_most + self._at_most // 10)]:
            file.unlink(missing_ok=True)
        self._count = sum(1 for _ in self._folder.glob("*.json"))


class SingleFlight:
    """Runs equal work once for all that ask for it while it runs. It is cancelled when the last of them leaves."""

    def __init__(self) -> None:
        self._flying: dict[str, tuple[asyncio.Task[Any], list[int]]] = {}
        self.shared = 0

    def __contains__(self, key: str) -> bool:
        """Whether somebody who asks now shares the work of another."""
        entry = self._flying.get(key)
        return entry is not None and not entry[0].cancelling()

    async def run(self, key: str, work: Callable[[], Awaitable[Any]]) -> Any:
        entry = self._flying.get(key)
        if entry is None or key not in self:
            task = asyncio.ensure_future(_as_coroutine(work))
            entry = self._flying[key] = (task, [0])
            task.add_done_callback(lambda task: self._landed(key, task))
        else:
            self.shared += 1
        task, callers = entry
        callers[0] += 1
        try:
            return await asyncio.shield(task)
        finally:
            callers[0] -= 1
            if not callers[0] and not task.done():
                task.cancel()

    def _landed(self, key: str, task: asyncio.Task[Any]) -> None:
        if (entry := self._flying.get(key)) is not None and entry[0] is task:
            del self._flying[key]
        if not task.cancelled():
            task.exception()  # those who waited have it; those who left don't want it


async def _as_coroutine(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()
