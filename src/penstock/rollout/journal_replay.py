"""What state a row of the journal's records stands for. Pure; the records and what they promise are in `journal`.

Taking records in decides nothing anew: each is a fact that an earlier manager had decided. Refuses to know where they
come from.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from penstock.errors import StorageError
from penstock.rollout.batch import Batch, TrackedSample
from penstock.rollout.blame import DEATHS_KEPT
from penstock.rollout.journal import (
    Accepted,
    Died,
    Ended,
    Epoch,
    Placed,
    Published,
    Record,
    Removed,
    Samples,
    SnapshotEnd,
    Struck,
    Submitted,
    Tokens,
    Trainer,
    WindowFitted,
)
from penstock.sample import Finish
from penstock.wire import column

__all__ = ["Recovered", "Replay"]

GATHERED_BYTES = 64 << 20
"""Of token records that are not yet appended to their samples."""
NO_LIMIT_BYTES = 1 << 62
"""A batch in the journal was admitted once; how large frames may be now is not its concern."""


@dataclass(slots=True)
class Recovered:
    """What a manager begins with. Nothing of it is placed."""

    epoch: int = 0
    """Of the last manager; the next one is higher."""
    session: str = ""
    versions: list[Published] = field(default_factory=list)
    """That can be pulled as far as is known, the latest last."""
    earlier: dict[int, str] = field(default_factory=dict)
    """Digests of versions of trainers before that."""
    batches: list[Batch] = field(default_factory=list)
    """Oldest first; some may have ended and wait for their release."""
    accepted: Counter[str] = field(default_factory=Counter)
    """Output tokens taken so far, by the name of the instance that drew them."""
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=DEATHS_KEPT))
    """When machines were lost that no sample had killed, in seconds since 1970, the last ones."""
    windows: dict[int, WindowFitted] = field(default_factory=dict)
    """By number of remote instances."""
    cut_bytes: int = 0
    """That belong to no whole state: of a record that was not written whole, and of `set_aside`."""
    set_aside: list[str] = field(default_factory=list)
    """Names of files that could not be read, without the `.damaged` that they have since."""

    @property
    def samples(self) -> int:
        return sum(batch.samples for batch in self.batches)

    @property
    def finished(self) -> int:
        return sum(batch.finished + batch.failed for batch in self.batches)

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches)


@dataclass(slots=True)
class _Gathered:
    """Records of one instance in a row with the same leases, counts and version: rows of one shape.

    What is appended to a sample once for all of them costs a fraction of what it costs record by record, and a
    recovery does little else.
    """

    version: int
    leases: bytes
    counts: bytes
    samples: list[TrackedSample]
    lengths: list[int]
    token_ids: list[bytes] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    def fits(self, record: Tokens) -> bool:
        return record.leases == self.leases and record.counts == self.counts and record.version == self.version

    def append(self) -> None:
        """Gives the samples what was gathered."""
        ids_of, values_of, version, records = self.token_ids, self.logprobs, self.version, len(self.token_ids)
        begin = 0
        for sample, count in zip(self.samples, self.lengths, strict=True):
            end = begin + 4 * count
            if sample.version != version and count:
                sample.begin_span(version, sample.length)
            sample.tokens += b"".join([ids[begin:end] for ids in ids_of])
            sample.logprobs += b"".join([values[begin:end] for values in values_of])
            sample.length += count * records
            begin = end


class Replay:
    """Takes records in order. One that does not fit those before it changes nothing and raises StorageError."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._state = Recovered()
        self._versions: dict[int, Published] = {}
        self._batches: dict[str, Batch] = {}
        self._begun: dict[str, dict[int, TrackedSample]] = {}
        """Samples that were placed at some time, by batch and index."""
        self._leases: dict[int, TrackedSample] = {}
        self._gathered: dict[str, _Gathered] = {}
        """By instance. Before anything else becomes of a sample, what was gathered of its instance is appended."""
        self._gathered_bytes = 0
        self.whole = False
        """A snapshot has been taken in to its end."""

    def take(self, record: Record) -> None:
        try:
            self._take(record)
        except (LookupError, ValueError) as error:
            raise StorageError(f"a {type(record).__name__} record does not fit those before it: {error}") from error

    def finish(self) -> Recovered:
        """The state as it is, with nothing placed. No record may follow."""
        self._append_all()
        state = self._state
        state.versions = list(self._versions.values())
        for batch in self._batches.values():
            self._let_wait(batch)
        state.batches = list(self._batches.values())
        return state

    def _take(self, record: Record) -> None:
        match record:
            case Tokens():
                self._tokens(record)
            case Placed():
                self._placed(record)
            case Ended():
                self._ended(record)
            case Submitted(frame=frame):
                self._begun[frame.batch] = {}
                self._batches[frame.batch] = Batch.parse(frame, self._now, NO_LIMIT_BYTES)
            case Removed(batch=name):
                self._append_all()
                for sample in self._begun.pop(name).values():
                    self._leases.pop(sample.lease, None)
                del self._batches[name]
            case Epoch(epoch=epoch):
                self._new_epoch(epoch)
            case Trainer(session=session):
                self._state.session = session
                self._state.earlier |= {version: told.digest for version, told in self._versions.items()}
                self._versions.clear()
            case Published(version=version):
                self._versions.pop(version, None)
                self._versions[version] = record
            case Samples():
                self._samples(record)
            case Struck():
                self._struck(record)
            case Accepted(tokens=tokens):
                self._state.accepted.update(tokens)
            case Died(times=times):
                self._state.deaths.extend(times)
            case WindowFitted(fleet=fleet):
                self._state.windows[fleet] = record
            case SnapshotEnd():
                self.whole = True

    def _new_epoch(self, epoch: int) -> None:
        self._append_all()
        self._state.epoch = max(self._state.epoch, epoch)
        # What an earlier manager had placed is with nobody since it died.
        for sample in self._leases.values():
            sample.lease = 0
        self._leases.clear()

    def _placed(self, record: Placed) -> None:
        batch, begun = self._batches[record.batch], self._begun[record.batch]
        leases, indices = column(record.leases, "Q").tolist(), column(record.samples, "I").tolist()
        if indices and max(indices) >= batch.samples:
            raise IndexError(f"batch {batch.name!r} has no sample {max(indices)}")
        for lease, index in zip(leases, indices, strict=True):
            sample = begun.get(index)
            if sample is None:
                sample = begun[index] = batch.sample(index)
            else:
                self._append(sample.instance)
                self._leases.pop(sample.lease, None)
                _forgive(sample)
            sample.lease, sample.instance = lease, record.instance
            sample.placed_length = sample.length
            self._leases[lease] = sample

    def _struck(self, record: Struck) -> None:
        begun = self._begun[record.batch]
        samples = [begun[index] for index in column(record.samples, "I")]
        for sample, strikes in zip(samples, column(record.strikes, "B", len(samples)), strict=True):
            self._append(sample.instance)
            sample.strikes, sample.placed_length = strikes, sample.length

    def _tokens(self, record: Tokens) -> None:
        """The hot path of a recovery: a hundred million tokens come through here."""
        ids, values = record.token_ids, record.logprobs
        instance = self._leases[int.from_bytes(record.leases[:8], "little")].instance if record.leases else ""
        gathered = self._gathered.get(instance)
        if gathered is None or not gathered.fits(record):
            counts = column(record.counts, "I").tolist()
            samples = list(map(self._leases.__getitem__, column(record.leases, "Q").tolist()))
            if len(samples) != len(counts) or len(ids) != 4 * sum(counts):
                raise ValueError("its columns disagree")
            self._append(instance)
            gathered = _Gathered(record.version, record.leases, record.counts, samples, counts)
            self._gathered[instance] = gathered
        total = len(gathered.token_ids[0]) if gathered.token_ids else len(ids)
        if len(ids) != total or len(values) != total:
            raise ValueError("its columns disagree")
        if total:
            # A frame is of one instance.
            self._state.accepted[instance] += total // 4
        gathered.token_ids.append(ids)
        gathered.logprobs.append(values)
        self._gathered_bytes += 2 * total
        if self._gathered_bytes > GATHERED_BYTES:
            self._append_all()

    def _append(self, instance: str) -> None:
        gathered = self._gathered.pop(instance, None)
        if gathered is not None:
            self._gathered_bytes -= 2 * len(gathered.token_ids) * len(gathered.token_ids[0])
            gathered.append()

    def _append_all(self) -> None:
        for instance in list(self._gathered):
            self._append(instance)

    def _ended(self, record: Ended) -> None:
        begun, batch = self._begun[record.batch], self._batches[record.batch]
        samples = [begun[index] for index in column(record.samples, "I")]
        if len(record.finishes) != len(samples):
            raise ValueError("its columns disagree")
        for row, (sample, finish) in enumerate(zip(samples, record.finishes, strict=True)):
            self._append(sample.instance)
            self._leases.pop(sample.lease, None)
            _end(batch, sample, Finish(finish), record.causes.get(row, ""))

    def _samples(self, record: Samples) -> None:
        batch, begun = self._batches[record.batch], self._begun[record.batch]
        rows = len(record.finishes)
        lengths = column(record.lengths, "I", rows).tolist()
        span_counts = column(record.span_counts, "I", rows).tolist()
        versions, ends = column(record.span_versions, "i").tolist(), column(record.span_ends, "I").tolist()
        begin = span = 0
        for row, (index, finish, length) in enumerate(
            zip(column(record.samples, "I"), record.finishes, lengths, strict=True)
        ):
            sample = begun[index] = batch.sample(index)
            end, last = begin + 4 * length, span + span_counts[row]
            sample.tokens += record.token_ids[begin:end]
            sample.logprobs += record.logprobs[begin:end]
            sample.length = sample.placed_length = length
            if record.strikes:
                sample.strikes = record.strikes[row]
            if last > span:
                sample.closed_spans = tuple(zip(versions[span : last - 1], ends[span : last - 1], strict=True))
                sample.version = versions[last - 1]
            if finish:
                _end(batch, sample, Finish(finish), record.causes.get(row, ""))
            begin, span = end, last

    def _let_wait(self, batch: Batch) -> None:
        begun = self._begun[batch.name]
        batch.next_fresh = max(begun, default=-1) + 1
        for index in range(batch.next_fresh):
            # One that was passed over was the trainer's already; what it has, it says again.
            sample = begun.get(index) or batch.sample(index)
            batch.tokens += sample.length
            _forgive(sample)
            sample.lease, sample.instance = 0, ""
            if sample.finish is Finish.RUNNING and (finish := sample.complete) is not None:
                # Its last tokens were recorded and its end was not.
                _end(batch, sample, finish, "")
            if sample.finish is Finish.RUNNING:
                (batch.suspects if sample.strikes else batch.moved).append(sample)


def _end(batch: Batch, sample: TrackedSample, finish: Finish, cause: str) -> None:
    sample.finish, sample.cause, sample.lease = finish, cause, 0
    batch.held[sample.index] = sample
    if finish is Finish.FAILED:
        batch.failed += 1
    else:
        batch.finished += 1


def _forgive(sample: TrackedSample) -> None:
    """A sample that got a token where it was has broken nothing."""
    if sample.length > sample.placed_length:
        sample.strikes = 0
