"""Money: what is spent, what attempts in flight may still cost, and whether one more is within the limit. Pure."""

from __future__ import annotations

from penstock.reward.jobs import Attempt, Job, Place
from penstock.reward.retry import CANCELLED, DONE, Outcome

__all__ = ["Ledger"]


class Ledger:
    """The pool's account, in the endpoints' currency. `max_spend` None: no limit."""

    __slots__ = ("max_spend", "reserved", "spent")

    def __init__(self, max_spend: float | None) -> None:
        self.max_spend = max_spend
        self.spent = 0.0
        self.reserved = 0.0
        """What the attempts in flight cost if their token counts were guessed rightly."""

    def affords(self, place: Place, job: Job) -> bool:
        """Whether an attempt is within the limit, all others in flight counted."""
        limit = self.max_spend
        return limit is None or self.spent + self.reserved + place.money(job.tokens) <= limit * (1 + 1e-9)

    def settle(self, attempt: Attempt, outcome: Outcome) -> None:
        """An attempt has ended: its reservation becomes what it really cost."""
        kind, place = outcome.kind, attempt.place
        if not place.priced:
            return
        self.reserved -= attempt.money
        if kind is DONE:
            money = place.money(attempt.job.tokens if outcome.tokens is None else outcome.tokens)
        elif kind is CANCELLED and not place.endpoint.refunds_cancelled:
            money = attempt.money
        else:
            return
        self.spent += money
        place.spent += money

    def nothing_out(self) -> None:
        """No attempt is in flight: what rounding has left of the reservations goes."""
        self.reserved = 0.0
