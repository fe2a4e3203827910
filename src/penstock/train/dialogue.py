"""The conversations of one batch: each sample's further turns are generated as batches of one.

Decides how a turn reaches the manager: as a batch of its own, named after the sample and the turn, whose prompt is all
that was said so far. So a turn has everything that a sample has (another machine goes on with it, the journal keeps it,
a resumed run claims it, it can be cancelled, its seed is a function of who it is) and the manager knows nothing of
conversations. Turns are released with the batch that their sample is of: until then a run that is killed and resumed
finds them again.

Refuses to know rewards, and what is learned from a conversation.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.environments.conversation import Conversation, Limits
from penstock.environments.host import EnvironmentHost
from penstock.environments.protocol import Turn
from penstock.errors import EnvironmentFault, RolloutError
from penstock.sample import Finish, Prompt, SampleId, sample_seed, turn_batch
from penstock.train.ports import Finished, RolloutPort
from penstock.wire import BatchDone, Sampling

__all__ = ["Dialogue", "Dialogues"]


@dataclass(slots=True)
class Dialogue:
    """A conversation that is over."""

    conversation: Conversation
    unscored: str = ""
    """Why the environment has no verdict."""
    failed: str = ""
    """Why a turn of it could not be generated."""


@dataclass(frozen=True, slots=True)
class Dialogues:
    """What all conversations of a batch have in common. All calls come from the edge loop.

    `heard` is told of each turn that comes, so that a wait for the batch knows that something happens.
    """

    batch: str
    host: EnvironmentHost
    rollout: RolloutPort
    version: int
    run_seed: int
    sampling: Sampling
    deadline_s: float
    limits: Limits
    open: dict[str, _Turn] = field(default_factory=dict)
    """Turns submitted and not released."""

    @property
    def first_sampling(self) -> Sampling:
        """What first turns are drawn by."""
        return self._sampling_of(Conversation(self.limits))

    async def carry(self, prompt: Prompt, replica: int, first: Finished, heard: Callable[[], None]) -> Dialogue:
        """A whole conversation from its first turn on.

        Raises RolloutError for a turn whose batch the manager gives up, RewardError where environments are past help.
        """
        dialogue = Dialogue(Conversation(self.limits))
        sample = SampleId(self.batch, prompt.index, replica)
        try:
            state = await self.host.reset(prompt, sample_seed(self.run_seed, sample))
            try:
                await self._talk(dialogue, prompt, sample, state, first, heard)
            finally:
                await self.host.end(state)
        except EnvironmentFault as fault:
            dialogue.unscored = f"environment: {fault}"
            if not dialogue.conversation.turns:
                _said(dialogue.conversation, first)
        return dialogue

    async def release(self) -> None:
        """Lets the manager forget every turn of the batch; the last word on some may still be on its way."""
        for name, turn in list(self.open.items()):
            await turn.ended.wait()
            await self.rollout.release(name)
            del self.open[name]

    async def cancel(self, cause: str) -> None:
        """Has the manager stop generating turns."""
        for name in list(self.open):
            await self.rollout.cancel(name, cause)

    # ---- within

    async def _talk(
        self,
        dialogue: Dialogue,
        prompt: Prompt,
        sample: SampleId,
        state: object,
        first: Finished,
        heard: Callable[[], None],
    ) -> None:
        conversation, finished = dialogue.conversation, first
        while True:
            turn = _said(conversation, finished)
            if not conversation.hear(await self.host.step(state, turn)):
                return
            finished = await self._next(prompt, sample, conversation)
            heard()
            if finished.finish is Finish.FAILED or not len(finished.token_ids):
                dialogue.failed = f"turn {conversation.turns}: {finished.cause or 'no tokens'}"
                return

    async def _next(self, prompt: Prompt, sample: SampleId, conversation: Conversation) -> Finished:
        name = turn_batch(sample, conversation.turns)
        so_far = array("i", prompt.token_ids)
        so_far.extend(conversation.token_ids)
        turn = self.open[name] = _Turn(asyncio.get_running_loop().create_future())
        await self.rollout.submit(
            batch=name,
            version=self.version,
            prompts=[Prompt(prompt.index, "", so_far, {}, prompt.source)],
            samples_per_prompt=1,
            run_seed=self.run_seed,
            sampling=self._sampling_of(conversation),
            deadline_s=self.deadline_s,
            listener=turn,
        )
        # Its deadline is the manager's, and the batch's own where nothing is heard of the manager.
        return await turn.finished

    def _sampling_of(self, conversation: Conversation) -> Sampling:
        return msgspec.structs.replace(self.sampling, max_new_tokens=conversation.turn_tokens)


class _Turn:
    """Listens to a batch of one sample."""

    def __init__(self, finished: asyncio.Future[Finished]) -> None:
        self.finished = finished
        self.ended = asyncio.Event()

    def on_samples(self, samples: Sequence[Finished]) -> None:
        if not self.finished.done():
            self.finished.set_result(samples[0])

    def on_done(self, done: BatchDone) -> None:
        if not self.finished.done():
            self.finished.set_exception(RolloutError(f"the manager ended {done.batch} without its sample"))
        self.ended.set()

    def on_failed(self, error: RolloutError) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)
        self.ended.set()


def _said(conversation: Conversation, finished: Finished) -> Turn:
    return conversation.say(finished.token_ids, finished.logprobs, finished.version_spans, finished.finish)
