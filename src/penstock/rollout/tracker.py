"""The only owner of every sample's state: queued, placed, running, moving, finished, failed.

Decides which rows of a token frame count, when a sample is finished, and what becomes of the samples of an instance
that is gone: they wait again, with their tokens as prefix. Refuses to know which instance should get a sample, what
time it is and who listens.

A lease stands for one placement of one sample on one instance and is never used twice, by this manager or by one
before it: its upper bits are the manager's epoch, one more at each start. Rows are taken only for a
lease that is in force, on the instance that holds it, and only where they continue the sample's last token. So
duplicates, gaps and late frames of a machine given up for dead change nothing.

Frames are untrusted, and checked in two ranks:

- A frame whose columns disagree, or that carries a weight version which its instance does not hold, is refused as a
  whole with WireError, and changes nothing.
- A row that is impossible in itself (token outside the vocabulary, log-probability not finite or above 0, more tokens
  than allowed, a stop without a stop id, a finish by length before max_new_tokens) is refused alone, and changes
  nothing. Its sample can't be continued by that engine, which is at another place than the tracker, so it is taken
  away from it: see `Applied.stop`.

A sample is given only to instances whose context holds its prompt and max_new_tokens. So an engine that ends one by
length before that has run out of something that it had promised, and to believe it would pass a machine's limit off
as the model's own verbosity: a sample's length must not depend on where it ran.

What is taken away without a new token gets a strike, and at `max_strikes` in a row it is set aside as failed: what it
is given to, it breaks. Who dies beside such a sample is innocent, so strikes are made to find the one that is not:

- A struck sample is a suspect, and is tried: an instance has one suspect at a time, until that one has a new token. So
  what kills its engine does it with the same companions once and not three times.
- Strikes are taken back (`forgive`) when their instance turns out to have lived, or not to have been to be trusted.
- A sample's token ends its row; long samples on machines that vanish often are so not struck out.
- More are asked for (`strikes_needed`) while machines die with nobody to blame.

Forgiven or not, `LOSSES_A_STRIKE` times as many losses in a row end the same way: nothing is passed on for ever. An
engine may also hand a sample back as ABORTED; that is no fault of the sample's, so only a long row of it without a
token ends so.

Finished samples stay with their batch until it is released, since a trainer that comes back may have lost them.
Tokens and log-probabilities are kept in one bytearray each, 8 bytes a token and the bytearray's spare room; spans of
weight versions are run-length coded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from penstock.errors import RolloutError
from penstock.rollout.batch import Batch, TrackedSample
from penstock.rollout.open_batches import OpenBatches
from penstock.rollout.rows import bad_rows, checked_columns, row_fault
from penstock.sample import Finish, conversation_of
from penstock.wire import MAX_FRAME_BYTES, SubmitBatch, TokenFrame

__all__ = ["EPOCH_SHIFT", "Applied", "Claimed", "Evicted", "Tracker"]

MAX_ABORTS = 16
LOSSES_A_STRIKE = 4
STRIKES_KNOWN = 256
"""Instances whose strikes can still be taken back; those of earlier ones stay."""
EPOCH_SHIFT = 40
"""A lease's lower bits count; 2^40 placements are more than a manager's life has."""

_ABORTED = int(Finish.ABORTED)
_FAILED = int(Finish.FAILED)


@dataclass(slots=True)
class Applied:
    """What a token frame changed."""

    tokens: int = 0
    """Output tokens accepted."""
    finished: list[TrackedSample] = field(default_factory=list)
    """Finished and failed samples; their batch holds them until it is released."""
    refused: Counter[str] = field(default_factory=Counter)
    """Rows refused, by cause."""
    refused_rows: list[int] = field(default_factory=list)
    """Their positions in the frame; none of their tokens was taken."""
    stop: list[int] = field(default_factory=list)
    """Leases taken away from the instance, which still believes in them."""
    moved: int = 0
    """Samples that wait again, with their tokens as prefix."""
    moved_tokens: int = 0
    struck: list[TrackedSample] = field(default_factory=list)
    """Moved samples that got a strike, or from whom one was taken back."""
    senseless: list[tuple[TrackedSample, str]] = field(default_factory=list)
    """Samples to be taken away from the instance, with the cause."""
    distrusted: bool = False
    """The rows are the engine's fault and none of its samples': it is to be refused."""


@dataclass(slots=True)
class Evicted:
    """What became of the samples of an instance."""

    moved: int = 0
    tokens_kept: int = 0
    """Output tokens of the moved samples, none of which is generated again."""
    struck: list[TrackedSample] = field(default_factory=list)
    """Moved samples that got a strike."""
    finished: list[TrackedSample] = field(default_factory=list)
    """Samples that turned out to be finished or were set aside as failed."""


@dataclass(slots=True)
class Claimed:
    """What a trainer that comes back is owed of a batch."""

    send: list[TrackedSample] = field(default_factory=list)
    """Finished and failed samples that it lacks."""
    stop: dict[str, list[int]] = field(default_factory=dict)
    """Leases, by instance, of samples that it has and nobody need go on with."""


class Tracker:
    """All samples of all open batches. `max_strikes`: see the module's text."""

    def __init__(self, max_strikes: int = 3) -> None:
        self._max_strikes = max_strikes
        self.strikes_needed = max_strikes
        """More than `max_strikes` while machines die by themselves, so that chance is not taken for guilt."""
        self._open = OpenBatches()
        self._placed: dict[str, dict[int, TrackedSample]] = {}
        self._trials: dict[str, TrackedSample] = {}
        """The suspect of each instance that has one."""
        self._strikes_of: dict[str, list[TrackedSample]] = {}
        """Who was struck for what an instance did, the last instance last."""
        self._last_lease = 0
        self.open_turns: Counter[str] = Counter()
        """Open batches that are further turns of conversations, by the batch that those are of."""
        self.tokens_accepted = 0
        self.samples_finished = 0
        self.samples_failed = 0

    # ---- batches

    def add_batch(self, frame: SubmitBatch, now: float, max_frame_bytes: int = MAX_FRAME_BYTES) -> Batch:
        """Raises RolloutError for a name in use, WireError where the frame's columns make no sense."""
        if frame.batch in self._open:
            raise RolloutError(f"batch {frame.batch!r} is already open; give each batch a name of its own")
        batch = Batch.parse(frame, now, max_frame_bytes)
        self.take_up(batch)
        return batch

    def batch(self, name: str) -> Batch | None:
        return self._open.get(name)

    def batches(self) -> Iterator[Batch]:
        """Open batches, oldest first."""
        return iter(self._open)

    def waiting(self, version: int | None = None) -> Iterator[Batch]:
        """Those of the open batches, or of one weight version's, that have samples waiting, oldest first."""
        return self._open.waiting(version)

    def since(self, age: int) -> Iterator[Batch]:
        """Open batches that were taken up after one of such an age, newest first."""
        return self._open.since(age)

    @property
    def newest_age(self) -> int:
        """Of the batch that was taken up last."""
        return self._open.newest_age

    def progress_at(self, batch: Batch) -> float:
        """When an open batch, or one before it that it had to wait for, got a token or ended a sample last."""
        return self._open.progress_at(batch)

    def remove_batch(self, name: str) -> dict[str, list[int]]:
        """Forgets a batch with all its samples. Returns the leases that were in force, by instance."""
        removed = self._open.remove(name)
        if (talk := conversation_of(name)) is not None:
            self.open_turns[talk.batch] -= 1
            if not self.open_turns[talk.batch]:
                del self.open_turns[talk.batch]
        stopped: dict[str, list[int]] = {}
        for sample in list(self._placed_of(removed)):
            del self._placed[sample.instance][sample.lease]
            stopped.setdefault(sample.instance, []).append(sample.lease)
        for struck in self._strikes_of.values() if removed.struck else ():
            struck[:] = [sample for sample in struck if sample.batch is not removed]
        return stopped

    def begin_epoch(self, epoch: int) -> None:
        """Leases are of `epoch` from now on; to be called before the first is given."""
        self._last_lease = epoch << EPOCH_SHIFT

    def take_up(self, batch: Batch) -> None:
        """An open batch: a new one, of a manager that is no more, or ended and wanted again; nothing is placed."""
        self._open.add(batch)
        if (talk := conversation_of(batch.name)) is not None:
            self.open_turns[talk.batch] += 1

    def unfinished_of(self, batch: Batch) -> Iterator[TrackedSample]:
        """Samples of a batch that were placed at some time and have not ended."""
        yield from self._placed_of(batch)
        yield from batch.moved
        yield from batch.suspects
        yield from batch.elsewhere.values()

    def claim(self, batch: Batch, taken: Collection[int]) -> Claimed:
        """Settles what of a batch the trainer has (`taken`, by index) with what is known here.

        What it has and this side lacks counts as finished; what it has lost again waits, from its last token.
        """
        claimed = Claimed()
        for index in [index for index in batch.elsewhere if index not in taken]:
            sample = batch.elsewhere.pop(index)
            batch.finished -= 1
            (batch.suspects if sample.strikes else batch.moved).append(sample)
            self._open.may_wait(batch)
        beyond = {index for index in taken if index not in batch.held and index not in batch.elsewhere}
        if beyond:
            self._settle(batch, beyond, claimed)
        claimed.send = [sample for index, sample in batch.held.items() if index not in taken]
        return claimed

    def _settle(self, batch: Batch, beyond: set[int], claimed: Claimed) -> None:
        for sample in [sample for sample in self._placed_of(batch) if sample.index in beyond]:
            del self._placed[sample.instance][sample.lease]
            claimed.stop.setdefault(sample.instance, []).append(sample.lease)
            sample.lease, sample.instance = 0, ""
            batch.placed -= 1
            batch.elsewhere[sample.index] = sample
        for waiting in (batch.moved, batch.suspects):
            for sample in [s for s in waiting if s.index in beyond]:
                waiting.remove(sample)
                batch.elsewhere[sample.index] = sample
        for index in sorted(beyond - batch.elsewhere.keys()):
            batch.elsewhere[index] = batch.sample(index)
            batch.settled.add(index)
        batch.finished += len(beyond)
        self.samples_finished += len(beyond)

    # ---- placing

    def place(self, batch: Batch, instance: str) -> TrackedSample | None:
        """Gives the batch's next waiting sample to `instance` under a new lease: moved ones first, prompts in order.

        A suspect goes before all others, where none is on trial. None where nothing of the batch waits that may go.
        """
        sample = batch.suspects.popleft() if batch.suspects and self.may_try(instance) else batch.next_waiting()
        if sample is None:
            return None
        batch.placed += 1
        return self._lease(sample, instance)

    def may_try(self, instance: str) -> bool:
        """No suspect is with it that has no new token yet."""
        sample = self._trials.get(instance)
        if sample is None:
            return True
        if self._placed[instance].get(sample.lease) is sample and sample.length == sample.placed_length:
            return False
        del self._trials[instance]
        return True

    def trial_ended(self, instance: str) -> bool:
        """Whether a suspect has just turned out well, or is gone: true once."""
        return instance in self._trials and self.may_try(instance)

    def forgive(self, instance: str) -> list[TrackedSample]:
        """Takes back the strikes for what an instance did, of those that have had no token since; returns them."""
        forgiven = []
        for sample in self._strikes_of.pop(instance, ()):
            if sample.strikes and sample.finish is Finish.RUNNING and sample.length == sample.placed_length:
                sample.strikes -= 1
                forgiven.append(sample)
                if not sample.strikes and sample in sample.batch.suspects:
                    sample.batch.suspects.remove(sample)
                    sample.batch.moved.append(sample)
        return forgiven

    def hand_on(self, source: str, lease: int, target: str) -> TrackedSample | None:
        """Moves a placed sample to another instance, with its tokens, under a new lease; that is no strike.

        None where the lease is no longer in force, or the sample has all its tokens and only its end is to come, or
        is on trial where it is.
        """
        sample = self._let_go(source, lease)
        return None if sample is None else self._lease(sample, target)

    def put_back(self, source: str, lease: int) -> TrackedSample | None:
        """Takes a placed sample from an instance to wait again, with its tokens. None where `hand_on` has it."""
        sample = self._let_go(source, lease)
        if sample is not None:
            sample.batch.placed -= 1
            sample.lease, sample.instance = 0, ""
            sample.batch.moved.append(sample)
            self._open.may_wait(sample.batch)
        return sample

    def leases_of(self, instance: str) -> int:
        """Samples that are with an instance now."""
        placed = self._placed.get(instance)
        return len(placed) if placed else 0

    def versions_wanted_of(self, instance: str) -> set[int]:
        """Weight versions of the batches whose samples are with an instance now."""
        return {sample.batch.version for sample in self._placed.get(instance, {}).values()}

    def samples_of(self, instance: str) -> Iterator[TrackedSample]:
        return iter(self._placed.get(instance, {}).values())

    # ---- tokens

    def apply(
        self,
        instance: str,
        frame: TokenFrame,
        versions: Collection[int],
        vocab_size: int,
        now: float,
        distrusts: Callable[[int, int], bool] = lambda senseless, sound: False,
    ) -> Applied:
        """Takes the rows of a frame that are in order.

        `versions`: weight versions that the instance may have drawn with. `vocab_size` 0: unknown. `distrusts` is told
        how many rows made no sense and how many did, and says whether the engine is to be refused for them. Raises
        WireError for a frame that is wrong as a whole; then nothing has changed.
        """
        leases, starts, counts = checked_columns(frame, versions)
        finishes, token_ids, logprobs, version = frame.finishes, frame.token_ids, frame.logprobs, frame.version
        bad_values = bad_rows(token_ids, logprobs, counts, vocab_size)
        applied = Applied()
        placed = self._placed.get(instance, {})
        find = placed.get
        touched: set[Batch] = set()
        begin = 0
        for row, lease, start, count, finish in zip(range(len(leases)), leases, starts, counts, finishes, strict=True):
            end = begin + 4 * count
            sample = find(lease)
            if sample is None:
                applied.refused["no such lease is in force"] += 1
                applied.refused_rows.append(row)
            elif start != sample.length or start + count > sample.limit or finish or (bad_values and row in bad_values):
                cause = row_fault(sample, start, count, finish, token_ids[end - 4 : end], bad_values.get(row, ""))
                if cause:
                    applied.refused[cause] += 1
                    applied.refused_rows.append(row)
                    # A repetition of what is known is harmless, and what comes next may be in order again.
                    if finish or start + count > sample.length or start == sample.length:
                        del placed[lease]
                        applied.stop.append(lease)
                        applied.senseless.append((sample, f"{instance}: {cause}"))
                else:
                    if count:
                        sample.append(token_ids[begin:end], logprobs[begin:end], count, version)
                        sample.batch.tokens += count
                        applied.tokens += count
                        touched.add(sample.batch)
                    if finish:
                        self._end(placed, sample, finish, frame.causes.get(row, ""), applied)
            elif count:
                # The common row: more tokens of a sample that goes on. `sample.append` written out, for speed.
                sample.tokens += token_ids[begin:end]
                sample.logprobs += logprobs[begin:end]
                sample.length = start + count
                if sample.version != version:
                    sample.begin_span(version, start)
                sample.batch.tokens += count
                applied.tokens += count
                touched.add(sample.batch)
            begin = end
        for batch in touched:
            batch.progress_at = now
        self.tokens_accepted += applied.tokens
        applied.distrusted = distrusts(len(applied.senseless), len(leases) - applied.refused.total())
        for sample, cause in applied.senseless:
            self._requeue(sample, cause, applied, strike=not applied.distrusted, lost=True)
        if applied.distrusted:
            applied.struck += self.forgive(instance)
        return applied

    def evict(self, instance: str, cause: str, suspects: int = 0) -> Evicted:
        """Takes every sample away from an instance that is gone; they wait again, before the batch's fresh ones.

        The first `suspects` of them (as many as the instance ran at once) get a strike unless they made progress:
        one of them may be what broke it. 0 where the instance left in good order.
        """
        evicted = Evicted()
        placed = self._placed.pop(instance, {})
        self._trials.pop(instance, None)
        # Last first, since each goes to the front of its batch's waiting samples.
        for position, sample in reversed(list(enumerate(placed.values()))):
            length = sample.length
            suspect = position < suspects
            if self._take_away(sample, cause, strike=suspect, lost=suspect, told=evicted):
                evicted.moved += 1
                evicted.tokens_kept += length
        evicted.finished.reverse()
        return evicted

    # ---- counts

    def state_counts(self, batch: Batch) -> dict[str, int]:
        """Samples of an open batch by state. Walks the placed samples: for people, not for every frame."""
        running = sum(sample.length > sample.placed_length for sample in self._placed_of(batch))
        return {
            "queued": batch.fresh,
            "placed": batch.placed - running,
            "running": running,
            "moving": len(batch.moved) + len(batch.suspects),
            "finished": batch.finished,
            "failed": batch.failed,
        }

    @property
    def queued(self) -> int:
        """Samples of all open batches that wait for an instance."""
        return sum(batch.waiting for batch in self._open)

    @property
    def placed(self) -> int:
        """Samples of all open batches that are with an instance."""
        return sum(batch.placed for batch in self._open)

    # ---- within

    def _placed_of(self, batch: Batch) -> Iterator[TrackedSample]:
        """Those of its samples that are with an instance. Walks all that are, if any of its own is."""
        for placed in self._placed.values() if batch.placed else ():
            for sample in placed.values():
                if sample.batch is batch:
                    yield sample

    def _let_go(self, source: str, lease: int) -> TrackedSample | None:
        placed = self._placed.get(source, {})
        sample = placed.get(lease)
        if sample is None or sample.complete is not None:
            return None
        if sample.length > sample.placed_length:
            sample.strikes = sample.losses = 0
        elif sample.strikes:
            return None
        del placed[lease]
        return sample

    def _lease(self, sample: TrackedSample, instance: str) -> TrackedSample:
        self._last_lease += 1
        sample.lease = self._last_lease
        sample.instance = instance
        sample.placed_length = sample.length
        self._placed.setdefault(instance, {})[sample.lease] = sample
        if sample.strikes:
            self._trials[instance] = sample
        return sample

    def _requeue(self, sample: TrackedSample, cause: str, applied: Applied, strike: bool, lost: bool) -> None:
        if self._take_away(sample, cause, strike, lost, applied):
            applied.moved += 1
            applied.moved_tokens += sample.length

    def _end(
        self, placed: dict[int, TrackedSample], sample: TrackedSample, finish: int, cause: str, applied: Applied
    ) -> None:
        del placed[sample.lease]
        if finish == _ABORTED:
            cause = f"{sample.instance} aborted it" + (f": {cause}" if cause else "")
            sample.aborts = sample.aborts + 1 if sample.length == sample.placed_length else 0
            if sample.aborts < MAX_ABORTS:
                self._requeue(sample, cause, applied, strike=False, lost=False)
                return
            cause = f"handed back {sample.aborts} times without a new token; the last time: {cause}"
            finish = _FAILED
        sample.batch.placed -= 1
        if finish == _FAILED:
            self._fail(sample, f"{sample.instance}: {cause or 'the engine gave no cause'}", applied.finished)
        else:
            self._finish(sample, Finish(finish), applied.finished)

    def _take_away(self, sample: TrackedSample, cause: str, strike: bool, lost: bool, told: Applied | Evicted) -> bool:
        """Back to its batch; True where it waits again, False where it is finished or failed.

        Without a new token it is `lost` once more, with a `strike` where it may be why.
        """
        sample.batch.placed -= 1
        complete = sample.complete
        if complete is not None:
            self._finish(sample, complete, told.finished)
            return False
        if sample.length > sample.placed_length:
            sample.strikes = sample.losses = 0
        else:
            sample.losses += lost
            if strike:
                self._strike(sample)
                told.struck.append(sample)
        if sample.strikes >= self.strikes_needed or sample.losses >= LOSSES_A_STRIKE * self._max_strikes:
            times = sample.strikes if sample.strikes >= self.strikes_needed else sample.losses
            self._fail(sample, f"taken back {times} times without a new token; the last time: {cause}", told.finished)
            return False
        sample.lease = 0
        sample.instance = ""
        (sample.batch.suspects if sample.strikes else sample.batch.moved).appendleft(sample)
        self._open.may_wait(sample.batch)
        return True

    def _strike(self, sample: TrackedSample) -> None:
        sample.strikes += 1
        sample.batch.struck = True
        self._strikes_of.setdefault(sample.instance, []).append(sample)
        while len(self._strikes_of) > STRIKES_KNOWN:
            del self._strikes_of[next(iter(self._strikes_of))]

    def _finish(self, sample: TrackedSample, finish: Finish, finished: list[TrackedSample]) -> None:
        sample.finish = finish
        sample.lease = 0
        sample.batch.held[sample.index] = sample
        sample.batch.finished += 1
        self.samples_finished += 1
        finished.append(sample)

    def _fail(self, sample: TrackedSample, cause: str, finished: list[TrackedSample]) -> None:
        sample.finish = Finish.FAILED
        sample.cause = cause
        sample.lease = 0
        sample.batch.held[sample.index] = sample
        sample.batch.failed += 1
        self.samples_failed += 1
        finished.append(sample)
