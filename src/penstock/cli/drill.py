"""A rehearsed accident: which engine is killed when, and when another one is started.

Pure: it is told the step and which engines run samples, and answers what to do. It waits for an engine in
mid-generation, since killing an idle one rehearses little; where steps are so short that none is ever seen at work, it
settles for the next best after a few of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config.run import DrillConfig

PATIENCE_STEPS = 5
"""Steps in which an engine in mid-generation is waited for."""


class Action(enum.Enum):
    KILL = "kill"
    START = "start"


@dataclass(frozen=True, slots=True)
class Order:
    action: Action
    engine: str = ""
    """Whom to kill."""


class Drill:
    """Asks for at most one kill and, after it, one start. `steps` is the run's length."""

    def __init__(self, config: DrillConfig, steps: int) -> None:
        self._kill_step = None if config.kill_at is None else int(config.kill_at * steps)
        self._start_step = None if config.restart_at is None else int(config.restart_at * steps)
        self._killed = False
        self._started = False

    @property
    def over(self) -> bool:
        if self._kill_step is None:
            return True
        return self._killed and (self._start_step is None or self._started)

    def due(self, step: int) -> bool:
        """Whether `decide` may ask for something in this step."""
        if self._kill_step is not None and not self._killed:
            return step >= self._kill_step
        return self._killed and self._start_step is not None and not self._started and step >= self._start_step

    def decide(self, step: int, running: Mapping[str, int]) -> Order | None:
        """`running`: each ready engine of this machine, and its samples in mid-generation (with tokens drawn)."""
        if self._kill_step is not None and not self._killed and step >= self._kill_step:
            busiest = max(running, key=lambda name: (running[name], name), default="")
            if busiest and (running[busiest] > 0 or step >= self._kill_step + PATIENCE_STEPS):
                self._killed = True
                return Order(Action.KILL, busiest)
        if self._start_step is not None and self._killed and not self._started and step >= self._start_step:
            self._started = True
            return Order(Action.START)
        return None
