"""One sample's way through its turns: what was said and heard, and whether another turn follows.

Decides how a conversation's columns are put together and when it is over: the environment said so, a turn was cut
short, the turns are used up, or what follows would not fit the sample's budget. Refuses to know who generates and who
answers; it has no clock.

    generate --say--> answer --hear--> generate | over

The budget `max_new_tokens` counts the model's own tokens and those of the environment alike, so that a conversation
needs no more context than any other sample of the run.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.environments.protocol import Observation, Turn
from penstock.errors import EnvironmentFault
from penstock.sample import Finish, Score, VersionSpan

__all__ = ["Conversation", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one conversation."""

    max_new_tokens: int
    """Of all its output tokens, the environment's included."""
    max_turns: int = 8
    max_turn_tokens: int = 0
    """Of one turn; 0: what is left of the budget."""


class Conversation:
    """Output columns of one sample, T tokens: `token_ids` int32, `logprobs` float32, `learned` int8."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.token_ids = array("i")
        self.logprobs = array("f")
        self.learned = array("b")
        self.spans: list[VersionSpan] = []
        """Of the model's own tokens; there is none over those of the environment."""
        self.turns = 0
        self.finish = Finish.RUNNING
        """How it ended; RUNNING until it has."""
        self.last_turn = 0
        """Where the latest turn begins."""
        self._cut = False
        self._reward = 0.0
        self._parts: Counter[str] = Counter()

    @property
    def tokens_left(self) -> int:
        return self._limits.max_new_tokens - len(self.token_ids)

    @property
    def turn_tokens(self) -> int:
        """What the next turn may have, at least 1 while the conversation runs."""
        return min(self.tokens_left, self._limits.max_turn_tokens or self.tokens_left)

    @property
    def outcome(self) -> Score:
        """What the environment gave so far."""
        return Score(self._reward, dict(self._parts))

    def say(self, token_ids: array[int], logprobs: array[float], spans: Sequence[VersionSpan], finish: Finish) -> Turn:
        """The model's next turn, of at least one and at most `turn_tokens` tokens."""
        start = self.last_turn = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.learned.extend(array("b", b"\1" * len(token_ids)))
        self._add_spans(VersionSpan(span.version, start + span.start, start + span.end) for span in spans)
        number, self.turns = self.turns, self.turns + 1
        self._cut = finish is not Finish.STOP
        last = self._cut or self.turns == self._limits.max_turns or self.tokens_left < 2
        return Turn(number, token_ids, finish, self.tokens_left, last)

    def hear(self, observation: Observation) -> bool:
        """The answer to the latest turn. Whether another turn follows; else `finish` says how it ended.

        Raises EnvironmentFault for an answer that neither ends the conversation nor says anything.
        """
        self._reward += observation.reward
        self._parts.update(observation.parts)
        if observation.done or self._cut:
            self.finish = Finish.LENGTH if self._cut else Finish.STOP
            return False
        told = observation.token_ids
        if not len(told):
            raise EnvironmentFault(
                "it answered without a token, and the conversation is not done; to a model that has ended its turn "
                "something has to be said"
            )
        if self.turns == self._limits.max_turns or len(told) >= self.tokens_left:
            # The model would have gone on, and there is no room for it.
            self.finish = Finish.LENGTH
            return False
        self.token_ids.extend(told)
        self.logprobs.extend(array("f", bytes(4 * len(told))))
        self.learned.extend(array("b", bytes(len(told))))
        return True

    def _add_spans(self, spans: Iterable[VersionSpan]) -> None:
        for span in spans:
            before = self.spans[-1] if self.spans else None
            if before is not None and before.version == span.version and before.end == span.start:
                self.spans[-1] = VersionSpan(before.version, before.start, span.end)
            else:
                self.spans.append(span)
