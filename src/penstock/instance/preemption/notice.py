"""What a preemption notice is, and what a source of them has to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.errors import PenstockError

__all__ = ["MetadataError", "Notice", "NoticeSource"]


class MetadataError(PenstockError):
    """A cloud's metadata service answered something that makes no sense."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The machine will be taken away."""

    source: str
    """Who says so: `AWS`, `GCP`, `Azure`, or the import path of a function."""
    what: str
    """What is going to happen, in the service's own words."""
    deadline: str = ""
    """When, as the service says it; empty where it does not."""

    def __str__(self) -> str:
        """The cause that the manager's events carry."""
        return f"preemption notice from {self.source}: {self.what}" + (f", at {self.deadline}" if self.deadline else "")


class NoticeSource(Protocol):
    """One cloud's way of saying that a machine will be taken away."""

    name: str

    async def present(self) -> bool:
        """Whether this machine is one of that cloud; the caller bounds the wait, and takes an error for no."""
        ...

    async def look(self) -> Notice | None:
        """Asks once; may wait at the service, within a deadline of its own.

        Raises aiohttp's or the system's errors, TimeoutError or MetadataError where there is no answer.
        """
        ...

    async def left(self, notice: Notice) -> None:
        """The agent has left for `notice`: the last chance to tell the service so. Errors as in `look`."""
        ...
