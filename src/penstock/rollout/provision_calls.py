"""Calls of a provisioner that are in flight, and when the next of each kind may be made.

Decides how long a failed call waits: twice as long each time, up to a bound, until one succeeds. Pure; who makes the
calls is `provision_edge`, and what they are for is `provision`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.observe.events import Event, ProvisionerFailed
from penstock.rollout.provision_types import Add, Call, ListAll, Orders, ProvisionConfig, Release

__all__ = ["Calls", "Sent"]

CALL_GRACE_S = 5.0
"""Beyond a call's own deadline, for its answer to come."""
FIRST_LIST_S = 5.0
"""So long a first list is waited for."""
KINDS: dict[type, str] = {Add: "add", Release: "release", ListAll: "list"}


@dataclass(frozen=True, slots=True)
class Sent:
    call: Call
    at: float


class Calls:
    """`counts` gets `add_failed`, `release_failed` and `list_failed`."""

    def __init__(
        self, config: ProvisionConfig, emit: Callable[[Event], None], counts: Counter[str], wall_offset_s: float
    ) -> None:
        self._config = config
        self._emit = emit
        self._counts = counts
        self._wall_offset_s = wall_offset_s
        self._sent: dict[int, Sent] = {}
        self._next = 1
        self.trouble = ""
        """What failed last, while nothing of its kind has succeeded since."""
        self.unsure = True
        """Machines may be there that nobody knows of: a list comes before anything is asked for."""
        self.grow_at = self.list_at = float("-inf")
        """Before these times no machine is asked for, and none listed."""
        self._add_streak = self._list_streak = 0
        self._unsure_since = float("-inf")
        self._first_list = True
        """It has neither come nor failed."""

    def __bool__(self) -> bool:
        """Whether any is in flight."""
        return bool(self._sent)

    @property
    def add_failed_at(self) -> float | None:
        """When asking for machines failed last, where no list has shown yet what became of it."""
        return self._unsure_since if self.unsure and self._unsure_since > float("-inf") else None

    def number(self) -> int:
        """A new one; no two calls or machines share one."""
        self._next += 1
        return self._next - 1

    def send(self, call: Call, orders: Orders, now: float) -> None:
        self._sent[call.call] = Sent(call, now)
        orders.calls.append(call)

    def pending(self, kind: type) -> bool:
        return any(isinstance(sent.call, kind) for sent in self._sent.values())

    def answered(self, call: int) -> Sent | None:
        """None for one that is not waited for any more."""
        return self._sent.pop(call, None)

    def overdue(self, now: float) -> list[int]:
        limit_s = self._config.call_s + CALL_GRACE_S
        return [number for number, sent in self._sent.items() if now >= sent.at + limit_s]

    def list_soon(self, now: float) -> None:
        """Unless lists are failing, which waits."""
        if not self._list_streak:
            self.list_at = min(self.list_at, now)

    def unlisted(self, since: float, now: float) -> bool:
        """The first list has neither come nor failed, and may yet: it may as well hang."""
        return self._first_list and now - since < FIRST_LIST_S

    def joined(self) -> None:
        """A machine works: asking for more may go on at once."""
        self._add_streak, self.grow_at = 0, float("-inf")
        if not self._list_streak:
            self.trouble = ""

    def listed(self, asked_at: float) -> None:
        self._list_streak, self._first_list = 0, False
        # One from before an add failed doesn't show what came of that.
        self.unsure = self.unsure and asked_at < self._unsure_since
        if not self._add_streak:
            self.trouble = ""

    def wasted(self, now: float) -> float:
        """What was asked for was of no use: the next waits. Returns for how long."""
        self._add_streak += 1
        wait_s = self._wait_s(self._add_streak)
        self.grow_at = max(self.grow_at, now + wait_s)
        return wait_s

    def failed(self, call: Call, cause: str, now: float, tries: int = 0) -> float:
        """`tries`: how often a release has failed before. Returns how long the next one waits."""
        kind = KINDS[type(call)]
        if isinstance(call, Add):
            self.unsure, self._unsure_since = True, now
            wait_s = self.wasted(now)
            self.list_soon(now)
        elif isinstance(call, ListAll):
            self._list_streak, self._first_list = self._list_streak + 1, False
            wait_s = self._wait_s(self._list_streak)
            self.list_at = now + wait_s
        else:
            wait_s = self._wait_s(tries + 1)
        self._counts[f"{kind}_failed"] += 1
        self.trouble = f"{kind}: {cause}"
        machine = call.machine if isinstance(call, Release) else ""
        ts = now + self._wall_offset_s
        self._emit(ProvisionerFailed(ts=ts, call=kind, machine=machine, cause=cause, retry_s=wait_s))
        return wait_s

    def _wait_s(self, streak: int) -> float:
        config = self._config
        return min(config.retry_most_s, config.retry_first_s * 2.0 ** min(streak - 1, 30))
