"""What an environment is: `reset` and `step` over token ids.

Decides the words that environments and the trainer share. Refuses to know tokenizers, engines and deadlines.

A conversation only ever grows. What the model drew stays as the token ids that it drew, and an environment answers
with token ids that come behind them; nothing is decoded and encoded again. Text that is tokenized a second time need
not come back as the same ids, and then log-probabilities, version spans and gradients would be those of tokens that
nobody drew.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.sample import Finish, Prompt

__all__ = ["Environment", "Observation", "Turn"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said since it was last told something."""

    number: int
    """From 0."""
    token_ids: array[int]
    """int32, the turn's own; with Finish.STOP the last one is a stop id."""
    finish: Finish
    """STOP, or LENGTH where the turn was cut short."""
    tokens_left: int
    """Of the sample's budget, for what it is told and for all turns to come."""
    last: bool
    """Nothing can follow this turn, whatever the answer."""


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer to a turn."""

    token_ids: Sequence[int] = ()
    """What the model reads before its next turn; of no account where `done`."""
    done: bool = False
    reward: float = 0.0
    """Added up over a conversation's turns."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """For people; added up by name."""


class Environment(Protocol):
    """One for a run. Its methods run on a loop of their own, many conversations at a time, each call with a deadline.

    One that blocks this loop holds up other conversations and nothing else; `asyncio.to_thread` is the way out. What a
    method raises leaves its sample unscored, with that cause. For a resumed run to find again what was generated, an
    environment's answers have to be a function of prompt, seed and turns.
    """

    async def reset(self, prompt: Prompt, seed: int) -> Any:
        """Begins a conversation; called when its first turn is there. Returns its state, for `step` and `close`.

        `seed`: 64 bits, the sample's own: the same wherever and whenever it runs.
        """
        ...

    async def step(self, state: Any, turn: Turn) -> Observation:
        """Answers a turn. Called for every turn, the last and truncated ones too."""
        ...

    async def close(self, state: Any) -> None:
        """The conversation is over, however it ended."""
        ...
