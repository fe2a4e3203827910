"""What a set of workers is to whoever calls it, the same for local processes and for Ray actors.

A set has one order of calls: `order` is held while a call is launched on all of its workers, by every group that shares
them. A set that fell out of step says so in `lost` and takes no further call.
"""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.cluster.batch import Batch
from penstock.cluster.dispatch import Arguments
from penstock.cluster.errors import ClusterError, GroupPoisoned


def keep_what_is_there() -> None:
    """In a worker, once its objects are made: the garbage collector passes them over from now on.

    Modules and models are never garbage, and to go through all that PyTorch brings takes 0.1 s in the middle of a call.
    """
    gc.collect()
    gc.freeze()


class Sent(NamedTuple):
    """A call that a worker has."""

    rank: int
    method: str
    ticket: Any


class Workers(ABC):
    """`size` workers, each with one object for each role."""

    def __init__(self, name: str, size: int, roles: dict[str, type]) -> None:
        self.name = name
        self.size = size
        self.roles = roles
        self.order = threading.Lock()
        self.lost = ""
        """Why no call can be in step any more; empty while all is well."""

    def refuse_if_lost(self) -> None:
        """Raises GroupPoisoned."""
        if self.lost:
            raise GroupPoisoned(f"{self.name} takes no more calls: {self.lost}; end it and start another")

    def class_of(self, role: str) -> type:
        """Raises ClusterError that lists the roles there are."""
        if role not in self.roles:
            raise ClusterError(f"{self.name} has no role '{role}'; it has: {', '.join(self.roles)}")
        return self.roles[role]

    @abstractmethod
    def prepare(self, arguments: Arguments) -> Any:
        """Arguments in the form that `submit` sends, any number of times. Raises ClusterError."""

    @abstractmethod
    def submit(self, rank: int, role: str, method: str, prepared: Any, answer: bool) -> Sent:
        """Sends a call; `answer` False: what the method returns is not wanted. Raises ClusterError."""

    @abstractmethod
    def gather(self, sent: Sequence[Sent], timeout_s: float) -> list[Any]:
        """What the calls returned, in their order.

        Raises WorkerFailed for the first that failed, CallTimeout naming those that didn't answer in time.
        """

    @abstractmethod
    def put(self, batch: Batch) -> Batch:
        """The batch, held where the workers reach it; it and its slices go by reference from then on."""

    @abstractmethod
    def close(self) -> None:
        """Ends all workers and what they started."""
