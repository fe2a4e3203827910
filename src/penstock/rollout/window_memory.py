"""What a window policy has learned, as journal records and back: a restarted manager goes on with what fitted.

By number of remote instances: the last plan, the correction, the window where no plan was to be had. Speeds and lengths
are learned anew within a step or two, and until then the plans hold. Pure; refuses to know files and turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict

import msgspec

from penstock.rollout.journal import WindowFitted
from penstock.rollout.offload import FixedWindow, Offload
from penstock.rollout.step_replay import Plan

__all__ = ["WindowMemory"]


class WindowMemory:
    """`rows`: what is written down, by number of remote instances."""

    def __init__(self) -> None:
        self.rows: dict[int, WindowFitted] = {}

    def news(self, policy: Offload | FixedWindow) -> Iterable[WindowFitted]:
        """What the policy has learned since the last time; now it is in `rows`."""
        if not isinstance(policy, Offload):
            return []
        found = []
        for fleet in sorted({*policy.plans, *policy.corrections, *policy.seconds}):
            plan = policy.plans.get(fleet)
            row = WindowFitted(
                fleet,
                asdict(plan) if plan is not None else None,
                policy.corrections.get(fleet),
                policy.seconds.get(fleet),
            )
            if row != self.rows.get(fleet):
                self.rows[fleet] = row
                found.append(row)
        return found

    def restore(self, rows: Mapping[int, WindowFitted]) -> Offload:
        """The policy that the rows are of."""
        self.rows = dict(rows)
        policy = Offload()
        for fleet, row in rows.items():
            if row.plan is not None and "remote" in row.plan:
                # Plans of before limits had other fields, and are made anew.
                policy.plans[fleet] = msgspec.convert(row.plan, Plan)
            if row.correction_s is not None:
                policy.corrections[fleet] = row.correction_s
            if row.window_s is not None:
                policy.seconds[fleet] = row.window_s
        return policy
