"""One batch's way from the edge loop to the main thread: finished, talked with, decoded, scored, packed, taken.

Decides when the main thread may go on. Refuses to know about gradients, and what is said in a conversation. Samples are
scored as each one finishes, so rewards overlap with generation; what waits here is bounded by the batch's own size.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

from penstock.errors import DeadlineExceeded, RolloutError
from penstock.rollout.pack import Packer
from penstock.sample import Finish, Group, Prompt, Sample, SampleId, Score, Unscored
from penstock.train.dialogue import Dialogue, Dialogues
from penstock.train.ports import Finished, SampleScorer, TextDecoder
from penstock.wire import BatchDone

__all__ = ["Intake"]

# Ctrl-C and the caller's watch are served this often while the main thread waits.
_SLICE_S = 0.2


class Intake:
    """The listener of one batch. `on_*` are called on the edge loop, everything else on the main thread.

    `stall_s`: seconds without any sample arriving or being scored after which waiting becomes DeadlineExceeded. The
    manager has its own, shorter deadline and says more; this one is for when nothing is heard at all. `keep`: (prompt,
    replica) of samples to hold for `kept`. With `dialogues` each sample that comes is the first turn of a conversation.
    """

    def __init__(
        self,
        batch: str,
        prompts: Sequence[Prompt],
        packer: Packer,
        scorer: SampleScorer,
        decoder: TextDecoder,
        *,
        stall_s: float,
        keep: Sequence[tuple[int, int]] = (),
        dialogues: Dialogues | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch = batch
        self.dialogues = dialogues
        self.packer = packer
        self.samples_expected = packer.groups_expected * packer.samples_per_prompt
        self._prompts = {prompt.index: prompt for prompt in prompts}
        self._scorer = scorer
        self._decoder = decoder
        self._stall_s = stall_s
        self._clock = clock
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept: dict[tuple[int, int], Sample | None] = dict.fromkeys(keep)
        self._ahead: dict[tuple[int, int], Sample] = {}
        """Scored samples that were neither taken nor looked at, by prompt and replica, as they came."""
        self._cancelled = False
        self._arrived = 0
        self._ended = False
        self._rewarded = 0
        self._reward_s = 0.0
        self.lengths: list[int] = []
        """Of each sample counted, its own tokens."""
        self.tokens = 0
        """Output tokens that the model drew, of all samples that arrived."""
        self.turns = 0
        """Turns of conversations that are over."""
        self.environment_tokens = 0
        """What it was told in them."""
        self.truncated = 0
        self.failed = 0
        self.started = self._last_news = clock()
        self.last_arrival = self.started
        self.waited_s = 0.0
        """Time that the main thread was blocked here."""
        self.scoring_waited_s = 0.0
        """Of that, with nothing to wait for but scores; not told of conversations, whose turns come in between."""

    # ---- on the edge loop

    def on_samples(self, samples: Sequence[Finished]) -> None:
        if self._cancelled:
            return
        try:
            for finished in samples:
                self._take_in(finished)
        # Whatever it is, the main thread must hear of it rather than wait for the rest.
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def on_done(self, done: BatchDone) -> None:
        with self._changed:
            if self._arrived != self.samples_expected:
                self._set_failure(
                    RolloutError(
                        f"the manager ended batch {self.batch} with {self._arrived} of {self.samples_expected} samples "
                        f"sent (it counts {done.samples} finished, {done.failed} failed)"
                    )
                )
            self._ended = True
            self._changed.notify_all()

    def on_failed(self, error: RolloutError) -> None:
        self._fail(error)

    def cancel(self, cause: str) -> None:
        """Gives the batch up: stops scoring, and takes in nothing that still comes."""
        self._fail(RolloutError(f"batch {self.batch} was given up: {cause}"))
        self._cancelled = True
        for task in self._tasks:
            task.cancel()

    def _take_in(self, finished: Finished) -> None:
        prompt = self._prompts.get(finished.prompt)
        if prompt is None:
            raise RolloutError(f"batch {self.batch} got a sample of prompt {finished.prompt}, which it didn't ask for")
        with self._changed:
            self._arrived += 1
            self.last_arrival = self._last_news = self._clock()
        sample = Sample(
            id=SampleId(self.batch, finished.prompt, finished.replica),
            prompt=prompt,
            token_ids=finished.token_ids,
            logprobs=finished.logprobs,
            version_spans=tuple(finished.version_spans),
            finish=finished.finish,
        )
        if finished.finish is Finish.FAILED or not len(finished.token_ids):
            self._lose(sample, finished.cause or "no tokens")
            return
        # Conversations are counted when they are over.
        if self.dialogues is None:
            self._count(sample)
        sample.response = self._decoder.decode(finished.token_ids.tolist(), skip_special_tokens=True)
        task = asyncio.get_running_loop().create_task(self._finish(sample, finished), name=f"score {sample.id}")
        self._tasks.add(task)
        task.add_done_callback(self._scored)

    def _lose(self, sample: Sample, cause: str) -> None:
        """A sample that could not be generated."""
        sample.score = Unscored(f"generation failed: {cause}")
        with self._changed:
            self.failed += 1
            self.packer.fail(sample.id.prompt, sample.id.replica, sample.score.cause)
            self._note_ahead(sample)
            self._keep(sample)
            self._changed.notify_all()

    def _count(self, sample: Sample) -> None:
        with self._changed:
            self.tokens += sample.own_tokens
            self.lengths.append(sample.own_tokens)
            self.turns += sample.turns
            self.environment_tokens += len(sample.token_ids) - sample.own_tokens
            self.truncated += sample.truncated

    async def _finish(self, sample: Sample, first: Finished) -> None:
        if self.dialogues is None:
            await self._score(sample)
            return
        dialogue = await self.dialogues.carry(sample.prompt, sample.id.replica, first, self._heard)
        if self._cancelled:
            return
        self._take_over(sample, dialogue)
        self._count(sample)
        if dialogue.failed:
            self._lose(sample, dialogue.failed)
        else:
            await self._score(sample, dialogue.unscored)

    def _take_over(self, sample: Sample, dialogue: Dialogue) -> None:
        """Makes a sample of its whole conversation."""
        talk = dialogue.conversation
        sample.token_ids, sample.logprobs, sample.learned = talk.token_ids, talk.logprobs, talk.learned
        sample.version_spans, sample.turns = tuple(talk.spans), talk.turns
        # One that broke off has not ended.
        sample.finish = Finish.FAILED if talk.finish is Finish.RUNNING else talk.finish
        sample.outcome = talk.outcome
        sample.response = self._decoder.decode(talk.token_ids[talk.last_turn :].tolist(), skip_special_tokens=True)
        sample.transcript = self._decoder.decode(talk.token_ids.tolist(), skip_special_tokens=False)

    def _heard(self) -> None:
        """A further turn of a conversation came."""
        with self._changed:
            self.last_arrival = self._last_news = self._clock()

    async def _score(self, sample: Sample, unscored: str = "") -> None:
        """Gives a sample its score, or the cause why there can't be one, and packs it."""
        began = self._clock()
        sample.score = Unscored(unscored) if unscored else await self._scorer.score(sample)
        with self._changed:
            self._rewarded += 1
            self._reward_s += self._clock() - began
            self.packer.add(sample)
            self._note_ahead(sample)
            self._keep(sample)
            self._last_news = self._clock()
            self._changed.notify_all()

    def _keep(self, sample: Sample) -> None:
        key = (sample.id.prompt, sample.id.replica)
        if key in self._kept:
            self._kept[key] = sample

    def _scored(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._fail(RolloutError(f"scoring was cancelled ({task.get_name()})"))
        elif (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._set_failure(error)

    def _set_failure(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.notify_all()

    # ---- on the main thread

    def take(self, whole: bool = False, watch: Callable[[], None] | None = None) -> list[Group]:
        """The next list of complete groups, waiting for it; with `whole` not before all of the batch is there.

        `watch` is called several times a second while waiting and may raise. Raises the batch's RolloutError,
        whatever scoring raised, or DeadlineExceeded.
        """
        while True:
            self.wait(whole, watch)
            with self._changed:
                self._check()
                if (groups := self.packer.take()) is not None:
                    for group in groups:
                        self._forget(group.prompt.index)
                    return groups

    def wait(self, whole: bool = False, watch: Callable[[], None] | None = None, least_ahead: int = 0) -> None:
        """Until `take` returns at once or, above 0, `take_ahead` has at least so many samples. Raises as `take`."""
        began = self._begin_wait()
        try:
            while True:
                with self._changed:
                    if not self._ready(whole, least_ahead):
                        self._changed.wait(_SLICE_S)
                    self._check()
                    if self._ready(whole, least_ahead):
                        return
                if watch is not None:
                    watch()
        finally:
            now = self._clock()
            self.waited_s += now - began
            if self.dialogues is None and self._arrived == self.samples_expected:
                self.scoring_waited_s += max(0.0, now - max(began, self.last_arrival))

    def take_ahead(self, least: int, most_tokens: int) -> list[Sample]:
        """Scored samples that wait for their groups, or for a micro-batch to be there, in the order in which they came:
        of so many tokens at most, but `least` of them if there are so many. Each is given out once. For passes that
        need no whole group."""
        with self._changed:
            taken: list[Sample] = []
            for sample in self._ahead.values():
                most_tokens -= len(sample.prompt.token_ids) + len(sample.token_ids)
                if len(taken) >= least and most_tokens < 0:
                    break
                taken.append(sample)
            for sample in taken:
                del self._ahead[sample.id.prompt, sample.id.replica]
            return taken

    def wait_ended(self, watch: Callable[[], None] | None = None) -> None:
        """Waits for the manager's last word on the batch, which comes behind its last samples. Raises as `take`."""
        self._begin_wait()
        while True:
            with self._changed:
                if not self._ended:
                    self._changed.wait(_SLICE_S)
                self._check()
                if self._ended:
                    return
            if watch is not None:
                watch()

    def ready(self, whole: bool = False, least_ahead: int = 0) -> bool:
        """Whether `wait` would return, or raise, at once."""
        with self._changed:
            return self._ready(whole, least_ahead)

    def watched(self, watch: Callable[[], None] | None = None) -> Callable[[], None]:
        """To be called while the main thread waits for something else on this batch's account; raises as `take`."""
        self._begin_wait()

        def look() -> None:
            with self._changed:
                self._check()
            if watch is not None:
                watch()

        return look

    @property
    def done(self) -> bool:
        with self._changed:
            return self.packer.done

    @property
    def rollout_s(self) -> float:
        """From the batch's submission to its last sample so far."""
        return self.last_arrival - self.started

    @property
    def reward_s_mean(self) -> float:
        """From a sample's last token to its score, mean over samples."""
        return self._reward_s / max(1, self._rewarded)

    def conversation_metrics(self) -> dict[str, float]:
        """Where there is an environment: how often the model spoke, and what it was told, in samples that are over."""
        if self.dialogues is None:
            return {}
        over = max(1, self.samples_expected - self.failed)
        return {"turns_mean": self.turns / over, "environment_tokens": float(self.environment_tokens)}

    def kept(self) -> list[Sample]:
        """The samples of `keep` that came, with their scores or the causes why they have none, in its order."""
        with self._changed:
            return [sample for sample in self._kept.values() if sample is not None]

    def unscored(self) -> dict[str, int]:
        """Samples without a score, by cause."""
        with self._changed:
            return dict(self.packer.unscored_samples)

    def _ready(self, whole: bool, least_ahead: int = 0) -> bool:
        if self._failure is not None or (self.packer.all_complete if whole else self.packer.takeable):
            return True
        return 0 < least_ahead <= len(self._ahead)

    def _note_ahead(self, sample: Sample) -> None:
        """The packer has just taken it in: it can be looked at, or none of its group any more."""
        if self.packer.lost(sample.id.prompt):
            self._forget(sample.id.prompt)
        elif isinstance(sample.score, Score):
            self._ahead[sample.id.prompt, sample.id.replica] = sample

    def _forget(self, prompt: int) -> None:
        for replica in range(self.packer.samples_per_prompt):
            self._ahead.pop((prompt, replica), None)

    def _begin_wait(self) -> float:
        """Now. Silence counts from here at the earliest: while the main thread trained, nobody was kept waiting."""
        with self._changed:
            now = self._clock()
            self._last_news = max(self._last_news, now)
            return now

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        silent_s = self._clock() - self._last_news
        if silent_s > self._stall_s:
            scoring = len(self._tasks)
            raise DeadlineExceeded(
                f"batch {self.batch}: nothing heard for {silent_s:.0f} s, with {self._arrived} of "
                f"{self.samples_expected} samples arrived and {scoring} being scored"
            )
