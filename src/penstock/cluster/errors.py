"""What goes wrong between a controller and its workers. Every message names the group, the rank or the column."""

from __future__ import annotations

from penstock.errors import PenstockError


class ClusterError(PenstockError):
    """A worker group can't do what it was asked."""


class BatchError(ClusterError):
    """Columns that don't fit together, or a value that no column can hold."""


class WorkerFailed(ClusterError):
    """A method raised on a worker, or the worker ended: names the rank, the method, and the remote traceback."""

    def __init__(self, group: str, rank: int, method: str, cause: str, traceback: str = "") -> None:
        super().__init__(
            f"{group}: rank {rank} failed in {method}(): {cause}" + (f"\n{traceback}" if traceback else "")
        )
        self.group = group
        self.rank = rank
        self.method = method
        self.cause = cause
        self.traceback = traceback


class GroupPoisoned(ClusterError):
    """Some workers of a set got a call and others did not, so that no later call can be in step."""


class CallTimeout(ClusterError):
    """A worker didn't answer in time; names who and what was waited for."""


class PoolFull(ClusterError):
    """A bounded pool took no task within the time allowed."""
