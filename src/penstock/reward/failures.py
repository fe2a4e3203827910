"""Why a job of the compute pool got no answer: one kind of error for each reason, each for that job alone."""

from __future__ import annotations

from penstock.errors import PoolError

__all__ = [
    "BudgetSpent",
    "DeadlinePassed",
    "JobFailed",
    "JobTooLarge",
    "NoEndpoint",
    "PoolClosed",
    "QueueFull",
]


class NoEndpoint(PoolError):
    """No endpoint of the pool serves the model that was asked for."""


class JobTooLarge(PoolError):
    """A job needs more tokens than any endpoint's limit ever lets through."""


class QueueFull(PoolError):
    """The pool's queue is at its bound; the caller has to wait or to raise the bound."""


class PoolClosed(PoolError):
    """The pool was shut down before the job could be answered."""


class DeadlinePassed(PoolError):
    """A job's deadline passed before an endpoint answered it."""


class BudgetSpent(PoolError):
    """The pool's limit in money does not cover the job, or a provider says that its account is spent."""


class JobFailed(PoolError):
    """Every attempt that the job was allowed failed, or one failed in a way that no other attempt can mend.

    `status` is the HTTP status of the last answer (0 where none came) and `body` the start of its text.
    """

    def __init__(self, message: str, status: int = 0, body: str = "", attempts: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.attempts = attempts
