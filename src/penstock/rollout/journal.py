"""The manager's journal: what is recorded, and what state a row of records stands for. Pure; files are `journal_file`.

The manager is the only place that has a run's unfinished samples, so what it knows is written down before anybody
hears of it (`outbox.Decisions`). A record is a fact that was decided, not a request: taking records in again decides
nothing anew, so a journal is read without engines, trainer or clock.

States of a sample, and the records that move it:

    waiting --Placed--> placed --Tokens--> placed, longer --Ended--> held --Removed--> forgotten
                          '---- Placed again under another lease: it had moved

Invariants, which the tests hold up:

- Any prefix of the records is a state that the manager was in. A journal cut at any byte therefore stands for one.
- A sample's tokens only grow, in the order in which they were accepted.
- A lease has an epoch in its upper bits; each start of a manager begins a higher one (`Epoch`, the first record it
  writes). No frame of a machine that ran under an earlier manager can name a lease of this one.
- What is placed in the state that is read is with nobody: engines' connections died with the manager. It waits again,
  from its last token.
- Finished samples stay until their batch is removed. What a trainer has of them is its own to say when it comes back
  (`wire.SubmitBatch.taken_*`), so deliveries are not recorded: one that was sent and one that was taken in are told
  apart by its word alone.

Not recorded: which instances there were (they join anew), and how often a sample was taken back without a token
(`strikes` begin again at 0).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.errors import StorageError
from penstock.rollout.batch import Batch, TrackedSample
from penstock.sample import Finish
from penstock.wire import SubmitBatch, TokenFrame, column, column_bytes, offsets

__all__ = [
    "Ended",
    "Epoch",
    "Placed",
    "Published",
    "Record",
    "Recovered",
    "Removed",
    "Replay",
    "Samples",
    "SnapshotEnd",
    "Submitted",
    "Tokens",
    "Trainer",
    "decode_record",
    "encode_record",
    "placed_records",
    "tokens_record",
]

NO_LIMIT_BYTES = 1 << 62
"""A batch in the journal was admitted once; how large frames may be now is not its concern."""


class _Record(msgspec.Struct, array_like=True):
    pass


class Epoch(_Record, tag=0):
    """A manager has started; its leases are of this epoch."""

    epoch: int


class Trainer(_Record, tag=1):
    """Another trainer is there; what the one before published can't be pulled any more."""

    session: str


class Published(_Record, tag=2):
    version: int
    source: str
    digest: str


class Submitted(_Record, tag=3):
    frame: SubmitBatch


class Placed(_Record, tag=4):
    """Samples of one batch got leases."""

    batch: str
    leases: bytes  # Q[N]
    samples: bytes  # I[N], index in the batch


class Tokens(_Record, tag=5):
    """Accepted rows of one token frame, as they came."""

    version: int
    leases: bytes  # Q[N]
    counts: bytes  # I[N]
    token_ids: bytes  # i[sum of counts]
    logprobs: bytes  # f[sum of counts]


class Ended(_Record, tag=6):
    """Samples of one batch that are finished or failed, these with their causes by row."""

    batch: str
    samples: bytes  # I[N]
    finishes: bytes  # B[N]
    causes: dict[int, str]


class Removed(_Record, tag=7):
    """A batch was released, cancelled or given up."""

    batch: str


class Samples(_Record, tag=8):
    """Of a snapshot: samples of one batch that were placed at some time."""

    batch: str
    samples: bytes  # I[N]
    leases: bytes  # Q[N], 0 where it is with nobody
    finishes: bytes  # B[N]
    lengths: bytes  # I[N]
    span_counts: bytes  # I[N]
    span_versions: bytes  # i[S]
    span_ends: bytes  # I[S]
    causes: dict[int, str]
    token_ids: bytes  # i[sum of lengths]
    logprobs: bytes  # f[sum of lengths]


class SnapshotEnd(_Record, tag=9):
    """The last record of a snapshot: without it, it is none."""


Record = Epoch | Trainer | Published | Submitted | Placed | Tokens | Ended | Removed | Samples | SnapshotEnd

encode_record = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def decode_record(data: bytes) -> Record:
    """Raises StorageError."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise StorageError(f"{len(data)} bytes are no record of a journal: {error}") from error


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
        self.whole = False
        """A snapshot has been taken in to its end."""

    def take(self, record: Record) -> None:
        try:
            self._take(record)
        except (LookupError, ValueError) as error:
            raise StorageError(f"a {type(record).__name__} record does not fit those before it: {error}") from error

    def finish(self) -> Recovered:
        """The state as it is, with nothing placed. No record may follow."""
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
            case SnapshotEnd():
                self.whole = True

    def _new_epoch(self, epoch: int) -> None:
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
                self._leases.pop(sample.lease, None)
            sample.lease = lease
            self._leases[lease] = sample

    def _tokens(self, record: Tokens) -> None:
        """The hot loop of a recovery: a hundred million tokens come through here."""
        counts = column(record.counts, "I").tolist()
        samples = list(map(self._leases.__getitem__, column(record.leases, "Q").tolist()))
        total = sum(counts)
        ids, values, version = record.token_ids, record.logprobs, record.version
        if len(samples) != len(counts) or len(ids) != 4 * total or len(values) != 4 * total:
            raise ValueError("its columns disagree")
        begin = 0
        for sample, count in zip(samples, counts, strict=True):
            end = begin + 4 * count
            if sample.version != version and count:
                sample.begin_span(version, sample.length)
            sample.tokens += ids[begin:end]
            sample.logprobs += values[begin:end]
            sample.length += count
            begin = end

    def _ended(self, record: Ended) -> None:
        begun, batch = self._begun[record.batch], self._batches[record.batch]
        samples = [begun[index] for index in column(record.samples, "I")]
        if len(record.finishes) != len(samples):
            raise ValueError("its columns disagree")
        for row, (sample, finish) in enumerate(zip(samples, record.finishes, strict=True)):
            self._leases.pop(sample.lease, None)
            _end(batch, sample, Finish(finish), record.causes.get(row, ""))

    def _samples(self, record: Samples) -> None:
        batch, begun = self._batches[record.batch], self._begun[record.batch]
        rows = len(record.finishes)
        lengths = column(record.lengths, "I", rows).tolist()
        span_counts = column(record.span_counts, "I", rows).tolist()
        versions, ends = column(record.span_versions, "i").tolist(), column(record.span_ends, "I").tolist()
        begin = span = 0
        for row, (index, lease, finish, length) in enumerate(
            zip(column(record.samples, "I"), column(record.leases, "Q"), record.finishes, lengths, strict=True)
        ):
            sample = begun[index] = batch.sample(index)
            end, last = begin + 4 * length, span + span_counts[row]
            sample.tokens += record.token_ids[begin:end]
            sample.logprobs += record.logprobs[begin:end]
            sample.length = length
            if last > span:
                sample.closed_spans = tuple(zip(versions[span : last - 1], ends[span : last - 1], strict=True))
                sample.version = versions[last - 1]
            if lease:
                sample.lease = lease
                self._leases[lease] = sample
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
            sample.lease = 0
            if sample.finish is Finish.RUNNING and (finish := sample.complete) is not None:
                # Its last tokens were recorded and its end was not.
                _end(batch, sample, finish, "")
            if sample.finish is Finish.RUNNING:
                batch.moved.append(sample)


def _end(batch: Batch, sample: TrackedSample, finish: Finish, cause: str) -> None:
    sample.finish, sample.cause, sample.lease = finish, cause, 0
    batch.held[sample.index] = sample
    if finish is Finish.FAILED:
        batch.failed += 1
    else:
        batch.finished += 1


def placed_records(samples: Iterable[TrackedSample]) -> Iterator[Placed]:
    """Of samples that have just got their leases."""
    by_batch: dict[str, tuple[array[int], array[int]]] = {}
    for sample in samples:
        leases, indices = by_batch.setdefault(sample.batch.name, (array("Q"), array("I")))
        leases.append(sample.lease)
        indices.append(sample.index)
    for batch, (leases, indices) in by_batch.items():
        yield Placed(batch, leases.tobytes(), indices.tobytes())


def tokens_record(frame: TokenFrame, refused_rows: Sequence[int]) -> Tokens:
    """Of a token frame whose other rows were accepted; its columns as they came where all of them were."""
    if not refused_rows:
        return Tokens(frame.version, frame.leases, frame.counts, frame.token_ids, frame.logprobs)
    refused = set(refused_rows)
    leases, counts = column(frame.leases, "Q").tolist(), column(frame.counts, "I").tolist()
    ends = offsets(counts)
    kept = [row for row in range(len(leases)) if row not in refused]
    return Tokens(
        frame.version,
        column_bytes([leases[row] for row in kept], "Q"),
        column_bytes([counts[row] for row in kept], "I"),
        b"".join(frame.token_ids[4 * ends[row] : 4 * ends[row + 1]] for row in kept),
        b"".join(frame.logprobs[4 * ends[row] : 4 * ends[row + 1]] for row in kept),
    )
