"""Which faults a chaos run meets, and when: pure, from a seed. What a fault does is not decided here."""

from __future__ import annotations

import random
from dataclasses import dataclass

SPOILT = ("abort", "nan", "vocabulary", "twice", "gap", "ends lost")
HERE = ("crash", "out of memory", *SPOILT, "slow", "stuck", "swap fails")
PROCESS = ("SIGKILL", "SIGSTOP", "preemption notice")
NETWORK = ("cut", "cut in mid-frame", "blackhole", "delay")
NO_SLOT = ("weight pull cut", "clock jump", "joins and leaves", "manager SIGKILL", "manager SIGSTOP")
KINDS = (*HERE, *PROCESS, *NETWORK, *NO_SLOT)
WEIGHTS = {"manager SIGKILL": 0.3, "manager SIGSTOP": 0.3, "SIGKILL": 2.0, "preemption notice": 2.0, "cut": 2.0}
"""How often a kind is drawn, where it is not 1."""
TOGETHER = 0.2
"""Share of faults that come at the same moment as the one before."""


@dataclass(frozen=True, slots=True)
class Fault:
    at_tokens: int
    kind: str
    pick: float
    """Which slot, of those that can have it; 0 to 1."""
    size: float
    """How much, where that means something; 0 to 1."""


def plan(seed: int, faults: int, tokens: int) -> list[Fault]:
    """All kinds come before any comes again by chance alone."""
    source = random.Random(seed)
    kinds = list(KINDS)
    source.shuffle(kinds)
    kinds += source.choices(KINDS, [WEIGHTS.get(kind, 1.0) for kind in KINDS], k=max(0, faults - len(kinds)))
    spacing = 0.9 * tokens / faults
    planned: list[Fault] = []
    for number, kind in enumerate(kinds[:faults]):
        at = int(spacing * (number + source.random()))
        if planned and source.random() < TOGETHER:
            at = planned[-1].at_tokens
        planned.append(Fault(at, kind, source.random(), source.random()))
    return sorted(planned, key=lambda fault: fault.at_tokens)
