"""Makes the calls that provisioning decides on: a user's provisioner, deadlines, and the file that keeps the account.

Decides nothing about machines. A call that raises, or that doesn't come back by its deadline, is answered for with its
cause, whatever it raised: provisioners are other people's code, and no run ends because of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.rollout.provision_types import Add, Call, Provisioner, Release, Seen

__all__ = ["Account", "ProvisionEdge", "words_of"]

log = logging.getLogger("penstock.provision")

CAUSE_CHARS = 500


class ProvisionEdge:
    """`answer` is called with what came of each call, on the loop: (call, ids | None | rows | error)."""

    def __init__(
        self, provisioner: Provisioner, call_s: float, answer: Callable[[Call, Sequence[Any] | None, str], None]
    ) -> None:
        self._provisioner = provisioner
        self._call_s = call_s
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()

    def carry_out(self, calls: Sequence[Call]) -> None:
        for call in calls:
            task = asyncio.create_task(self._make(call), name=f"provisioner: {type(call).__name__}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cuts off what is in flight, and closes the provisioner within a call's deadline."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(self._call_s):
                await self._provisioner.close()
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("the provisioner could not be closed: %s", words_of(error))

    async def _make(self, call: Call) -> None:
        result: Sequence[Any] | None = None
        cause = ""
        try:
            async with asyncio.timeout(self._call_s):
                result = await self._ask(call)
        except TimeoutError as error:
            cause = str(error) or f"it did not come back within {self._call_s:g} s"
        except Exception as error:  # noqa: BLE001 - see above
            cause = words_of(error)
        self._answer(call, result, cause[:CAUSE_CHARS])

    async def _ask(self, call: Call) -> Sequence[Any] | None:
        if isinstance(call, Add):
            return _checked(await self._provisioner.add(call.count), str, "add")
        if isinstance(call, Release):
            await self._provisioner.release(call.machine)
            return None
        return _checked(await self._provisioner.list(), Seen, "list")


class Account:
    """The file that keeps what was spent, and on which machines, from one manager of a run to the next."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written = ""
        self.trouble = ""

    def read(self) -> dict[str, Any] | None:
        """None where there is none yet, or what is there can't be read, which `trouble` says."""
        if self._path is None or not self._path.exists():
            return None
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError) as error:
            self.trouble = f"{self._path} can't be read, so what was spent before is not known: {error}"
            return None
        return found if isinstance(found, dict) else None

    def write(self, saved: dict[str, Any]) -> None:
        """Whole or not at all. What the disk refuses is told once and costs nothing else."""
        if self._path is None:
            return
        text = json.dumps(saved)
        partial = self._path.with_name(self._path.name + ".part")
        try:
            partial.write_text(text)
            partial.replace(self._path)
        except OSError as error:
            if not self.trouble:
                log.warning("what machines cost can't be written to %s: %s", self._path, error)
            self.trouble = f"{self._path} can't be written: {error.strerror}"
        else:
            self.trouble = ""


def _checked(found: Any, kind: type, call: str) -> Sequence[Any]:
    if not isinstance(found, (list, tuple)) or not all(isinstance(entry, kind) for entry in found):
        raise PenstockError(f"the provisioner's {call} returned {found!r:.200}; a list of {kind.__name__} is needed")
    return found


def words_of(error: BaseException) -> str:
    """An error of ours says all; of others the kind says more than the words alone."""
    text = str(error)
    return text if isinstance(error, PenstockError) and text else f"{type(error).__name__}: {text}"
